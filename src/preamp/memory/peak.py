# SPDX-License-Identifier: BSD-3-Clause
"""What a forward and backward hold at their worst moment, from a run on tensors without memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_value
from preamp.core.pytree import map_leaves
from preamp.core.randomness import untouched_random
from preamp.core.torch_private.observe import ObservedOps, fake_tensors
from preamp.engine.initialize import create_engine
from preamp.kernels.wide_half import native_products
from preamp.memory.copies import LossFn, copies_of
from preamp.policy import Policy


class Held:
    """While entered, counts memory of new tensors, but not inside kernels."""

    def __init__(self) -> None:
        self.live = 0  # bytes of the storages that were made since the start and still exist
        self.peak = 0  # the largest value of ``live`` so far
        self._known: dict[int, weakref.ref[Any]] = {}
        self._ops = ObservedOps(self._see)

    def __enter__(self) -> Held:
        """Begin to count."""
        self._ops.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop; storages that go later are not missed."""
        cast("Any", self._ops).__exit__(*error)

    def _see(
        self, op: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        held = {id(tensor.untyped_storage()) for tensor in inputs if _has_storage(tensor)}
        for tensor in filter(_has_storage, outputs):
            if id(tensor.untyped_storage()) not in held:
                self._hold(tensor.untyped_storage())

    def _hold(self, storage: Any) -> None:
        key, size = id(storage), int(storage.nbytes())
        known = self._known.get(key)
        if known is not None and known() is storage:
            return

        def gone(_: weakref.ref[Any]) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def trace_pass(model: nn.Module, policy: Policy, loss_fn: LossFn, batch: Any) -> int:
    """Trace ``loss_fn`` and backward at a policy on copies without memory; meta counts as CPU.

    Returns the bytes of all tensors made in them at the worst moment, new gradients included.

    Products are those of a device with units for them, whatever this machine's CPU has: where it
    computes them in float32, it makes copies of weights that no GPU needs.
    """
    mode = fake_tensors()
    memo: dict[int, Any] = {}

    def note(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            memo[id(leaf)] = _fake(leaf)
        return leaf

    with mode:
        map_leaves(note, [*model.parameters(), *model.buffers(), batch])
    twin, loss_of, values = copies_of(model, loss_fn, batch, memo)
    with untouched_random(), native_products(), mode:
        engine = create_engine(twin, None, policy)
        for param in twin.parameters() if policy.storage.release_gradients else ():
            if param.requires_grad:
                cast("Any", param).register_post_accumulate_grad_hook(_drop)
        try:
            with Held() as held:
                cast("Any", loss_of(twin, values).float()).backward()
        except Exception as error:
            failed = f"A step cannot be traced without running it: {_first_line(error)}"
            if batch is None:
                raise bad_value(
                    failed,
                    "loss_fn(model, batch) needs a batch, and got None",
                    "Pass batch=, a tensor or containers of tensors",
                ) from error
            raise bad_value(
                failed,
                "loss_fn(model, batch) returns a scalar loss, and its computation does not "
                "look at values of tensors, as .item() and if do",
                "Leave loss_fn and batch out; what stays from step to step is known without",
            ) from error
        finally:
            engine.close()
    return held.peak


def _drop(param: torch.Tensor) -> None:
    param.grad = None


def _first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)
