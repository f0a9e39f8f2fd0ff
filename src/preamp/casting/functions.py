# SPDX-License-Identifier: BSD-3-Clause
"""Install the op table over torch's functions, and take it off again.

O1 is ``torch.autocast`` plus what it lacks. Where a device type casts a row of rule ``half``
natively, the wrapper leaves that to it: casting the weight itself, it would come before autocast
can cache it. All other rows are cast on every device, without probing what autocast does there:
casting to float32 what autocast would cast to float32 changes nothing, and probing would have to
run every function once on a device that the program may not even use.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch.backends.mha import get_fastpath_enabled, set_fastpath_enabled

from preamp.casting.op_lists import OP_TABLE, OpRow
from preamp.casting.patches import PATCHES, Builder, Rank, SharedInstall, Wrapper
from preamp.casting.reports import listen, say_cast
from preamp.casting.thread_casts import autocast_off, call_in_thread_casts
from preamp.casting.wrappers import AnyFunction, wrap_banned, wrap_cast, wrap_in_place
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.torch_private.autograd import CHECKPOINT_STATE
from preamp.core.torch_private.modules import recurrent_functions
from preamp.core.undo import UndoStack
from preamp.kernels.wide_half import WIDE_CONVOLUTIONS, WIDE_FUNCTIONS, cpu_lacks_matmul, wide


def namespace_owner(namespace: str) -> Any:
    """The module or class whose attributes a row's namespace means."""
    owners: dict[str, Any] = {
        "torch": torch,
        "torch.Tensor": torch.Tensor,
        "torch.nn.functional": torch.nn.functional,
        "torch.linalg": torch.linalg,
        "torch.fft": torch.fft,
        "recurrent layers": recurrent_functions(),
    }
    return owners[namespace]


def row_wrapper(row: OpRow) -> Wrapper:
    """What has to be put over the function of ``row``."""
    match row.rule:
        case "half" | "float" | "promote" | "sequence_promote":
            return wrap_cast(row.rule, native=row.native, is_closed=row.is_closed)
        case "banned":
            return wrap_banned
        case "no_half_in_place" | "match_self":
            return wrap_in_place(refuse_half=row.rule == "no_half_in_place")


def _without_casts(fn: AnyFunction) -> AnyFunction:
    @functools.wraps(fn)
    def backward_without_casts(*args: Any, **kwargs: Any) -> Any:
        # The compiler takes backward passes apart itself, and state set while it traces is lost.
        if torch.compiler.is_compiling():
            return fn(*args, **kwargs)
        with autocast_off():
            return fn(*args, **kwargs)

    return backward_without_casts


def _in_thread_casts(fn: AnyFunction) -> AnyFunction:
    return lambda *args, **kwargs: call_in_thread_casts(fn, fn, args, kwargs)


def _install_table(undo: UndoStack) -> None:
    for row in OP_TABLE:
        owner = namespace_owner(row.namespace)
        if hasattr(owner, row.name):
            PATCHES.add(owner, row.name, Rank.TABLE, row_wrapper(row), undo)
    # The backward pass differentiates casts that were made; making new ones there would be wrong,
    # and with thread-wide casts ``loss.backward()`` is called while they are on.
    for name in ("backward", "grad"):
        PATCHES.add(torch.autograd, name, Rank.TABLE, _without_casts, undo)
    # What a checkpoint outside of models notes of casts, for its second forward
    PATCHES.add(*CHECKPOINT_STATE, Rank.TABLE, _in_thread_casts, undo)
    # The fused inference kernels of nn.TransformerEncoder mix what CPU autocast casts with what it
    # does not, and fail. torch leaves them out under CUDA autocast, but does not look at the CPU's.
    undo.push(partial(set_fastpath_enabled, get_fastpath_enabled()))
    set_fastpath_enabled(False)


def patch_all(rows: Iterable[tuple[str, str]], rank: Rank, wrap: Wrapper) -> Builder:
    """What puts ``wrap`` over the functions that this version of torch has."""

    def build(undo: UndoStack) -> None:
        for namespace, name in rows:
            if hasattr(namespace_owner(namespace), name):
                PATCHES.add(namespace_owner(namespace), name, rank, wrap, undo)

    return build


FUNCTION_CASTS: Final = SharedInstall(_install_table)
"""The op table's installation, and what ``register_*`` adds to it."""

WIDE_HALF: Final = {
    half: SharedInstall(patch_all(WIDE_FUNCTIONS, Rank.WIDE, wide(half))) for half in HALF_DTYPES
}
"""The installations of wide products on the CPU."""

WIDE_FLOAT16_CONVOLUTIONS: Final = SharedInstall(
    patch_all(WIDE_CONVOLUTIONS, Rank.WIDE, wide(torch.float16))
)
"""The installation of wide float16 convolutions alone, where the other products are fast."""


def install_function_casts(undo: UndoStack, *, verbose: bool = False) -> None:
    """Wrap the functions of the op table, process-wide, until ``undo``.

    The wrappers act only where torch's autocast is enabled on the calling thread for the device
    of the tensors, or thread-wide casts act (`push_thread_casts`), so threads and devices without
    casts are not affected. After the last ``undo`` every attribute is exactly what it was before.

    Until ``undo``, ``verbose`` prints every cast; see `say_cast`.

    Mutates ``torch``, ``torch.Tensor``, ``torch.nn.functional``, ``torch.linalg``, ``torch.fft``,
    ``torch.autograd`` and the namespace of the recurrent layers.
    """
    FUNCTION_CASTS.acquire(undo)
    if verbose:
        listen(say_cast, undo)


def install_wide_where_slow(half: torch.dtype, undo: UndoStack) -> None:
    """Run products of ``half`` that torch is slow at on this CPU in float32, until ``undo``.

    Those are all where it has no units for ``half``, and else the convolutions in float16. Results
    keep the contract stated in ``preamp.kernels.wide_half``. Composes with
    ``install_function_casts`` in any order, and mutates the same.
    """
    if cpu_lacks_matmul(half):
        WIDE_HALF[half].acquire(undo)
    elif half is torch.float16:
        WIDE_FLOAT16_CONVOLUTIONS.acquire(undo)
