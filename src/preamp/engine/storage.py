# SPDX-License-Identifier: BSD-3-Clause
"""What a storage of masters and moments needs of models and optimizers, and how it is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from preamp.casting.kept import Kept
from preamp.core.dtypes import math_dtype
from preamp.core.errors import PreampStateError, bad_state, bad_type, bad_value, with_article
from preamp.core.ranks import has_process_group
from preamp.core.splits import Splits
from preamp.core.tensors import local_of
from preamp.kernels import Ops, reserve
from preamp.kernels.stored import are_beyond_float16
from preamp.optim import LARC
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.fused.kinds import KEEP_FEWER_BITS, ON_HOST, closest_first
from preamp.optim.fused.moments import KeepsMoments, is_in_codes
from preamp.optim.larc import check_storage as check_larc
from preamp.policy import Policy

if TYPE_CHECKING:
    from preamp.engine.core import EngineCore


def check_storage(
    models: Sequence[nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    policy: Policy,
    kept: Kept,
) -> None:
    """Refuse optimizers and weights that a policy's storage cannot keep. Changes nothing.

    ``kept`` stays float32. Synchronises where float16 weights are to have split masters.
    """
    storage, optimizers = policy.storage, list(optimizers)
    for optimizer in optimizers:
        if isinstance(optimizer, KeepsMoments) and optimizer.moments:
            continue
        kind = with_article(type(optimizer).__name__)
        if storage.moments != "float32":
            raise bad_type(
                f"storage has moments={storage.moments!r}, and an optimizer is {kind}",
                f"Moments are kept in fewer bits by {', '.join(KEEP_FEWER_BITS)}",
                'Choose one of these, or pass storage="full", where moments are float32',
            )
        if storage.masters == "split":
            raise bad_type(
                f'storage has masters="split", and an optimizer is {kind}',
                f"Split masters are updated as they are by {', '.join(KEEP_FEWER_BITS)}",
                'Choose one of these, or pass storage="full"',
            )
    if storage.masters == "split" and policy.cast_model_type is torch.float16:
        updated = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        norms = kept.norms if policy.keep_batchnorm_fp32 else ()
        for model in models:
            for name, param in model.named_parameters():
                if id(param) in updated and not kept.is_wide(param) and id(param) not in norms:
                    _check_range(name, param)


def check_updates(
    given: object,
    optimizers: Sequence[torch.optim.Optimizer],
    policy: Policy,
    kernels: tuple[Ops, Splits],
) -> None:
    """Refuse what cannot be updated where, or when, a policy's storage says. Changes nothing.

    ``given`` are the optimizers as they were given, which may be wrapped.
    """
    every = cast("list[object]", given) if isinstance(given, list) else [given]
    ops, splits = kernels
    if policy.storage.place == "host":
        _check_host(every, optimizers, ops.name)
        _reserve_for_host(optimizers, has_masters=policy.master_weights)
    if any(isinstance(one, LARC) for one in every):
        check_larc(policy.storage)
    if policy.storage.release_gradients:
        if splits.given:
            raise _refused("process_groups")
        check_no_ranks()


def _check_host(
    every: Sequence[object], optimizers: Sequence[torch.optim.Optimizer], back_end: str
) -> None:
    """Refuse what the host cannot update."""
    for one in (*every, *optimizers):
        is_fused = isinstance(one, FusedOptimizer) and not one.keeps_copies
        if one is None or (is_fused and not getattr(one, "master_weights", False)):
            continue
        kinds = ", ".join(closest_first(type(one).__name__, ON_HOST))
        kind = with_article(type(one).__name__) + (" with master_weights=True" if is_fused else "")
        raise bad_type(
            f'storage has place="host", and an optimizer is {kind}',
            f"Masters and moments lie on the host with {kinds}, which take gradients and "
            "half weights there in one pass",
            'Choose one of these, or a storage with place="device"',
        )
    if back_end == "triton":
        raise _not_on_host("backend='triton'", "its kernels do not run on the host")
    for param in [p for o in optimizers for group in o.param_groups for p in group["params"]]:
        if param.device.type not in ("cpu", "cuda"):
            raise _not_on_host(
                f"weights on {param.device}", "copies go through pinned memory, which CUDA has"
            )


def _reserve_for_host(optimizers: Sequence[torch.optim.Optimizer], *, has_masters: bool) -> None:
    """Take the pinned memory that steps will need, or raise `PreampUnavailableError`."""
    sizes: dict[torch.device, list[int]] = {}
    for param in [p for o in optimizers for group in o.param_groups for p in group["params"]]:
        if param.is_cuda and param.requires_grad:
            # Halves of a float32 weight and its gradient are as large as the weight
            size = local_of(param).numel() * (4 if has_masters else 2 * param.element_size())
            sizes.setdefault(param.device, []).append(size)
    for device, own in sizes.items():
        reserve(device, own)


def _not_on_host(what: str, why: str) -> PreampStateError:
    return bad_state(
        f'storage has place="host" beside {what}',
        f"The host updates whole weights of CUDA devices and its own; {why}",
        'Leave it out, or pass a storage with place="device"',
    )


def check_no_ranks() -> None:
    """Refuse ranks beside released gradients."""
    if has_process_group():
        raise _refused("a process group")


def _refused(what: str) -> PreampStateError:
    return bad_state(
        f"storage has release_gradients=True beside {what}",
        "Gradients do not stay on the device once they are made, and ranks exchange them later",
        "Leave one of the two out",
    )


def _check_range(name: str, param: torch.Tensor) -> None:
    """Refuse a weight that is infinite in float16: no master could be told from that."""
    value = local_of(param.detach())
    value = value.to(math_dtype(value.dtype))
    if are_beyond_float16([value])[0]:
        largest = float(value[value.isfinite()].abs().amax())
        raise bad_state(
            f"The weight {name!r} has a value of magnitude {largest:g}, and storage splits masters "
            "of float16 weights",
            "float16 ends at 65504: beyond it the half weight is infinite, and nothing tells its "
            "master from that",
            f"Pass opt_level='O5' (bfloat16), storage='full', or keep_fp32=[{name!r}]",
        )


def refuse_codes(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Refuse to load moments in 8 bits into an optimizer that would take codes for values.

    As torch's optimizers do. Changes nothing.
    """
    entries: object = state.get("state")
    if isinstance(optimizer, KeepsMoments) or not isinstance(entries, Mapping):
        return
    for entry in cast("Mapping[Any, object]", entries).values():
        own = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        for key in own:
            if is_in_codes(own, key):
                raise bad_value(
                    f"The state has {key} in 8 bits, and is for "
                    f"{with_article(type(optimizer).__name__)}",
                    "It holds codes and their scales, which preamp's optimizers read; nothing was "
                    "loaded",
                    "Load it into the fused optimizer that saved it, outside of any engine, and "
                    "take its state_dict(), which is float32",
                )


def describe_storage(engine: EngineCore) -> list[str]:
    """Where masters, moments and gradients of an engine are, if the storage puts them elsewhere."""
    found: list[str] = []
    if engine.policy.storage.place == "host":
        found.append(f"storage: {describe_place(engine)}")
    if engine.policy.storage.release_gradients and uses_host(engine):
        found.append("storage: each gradient goes to the host as soon as it is made")
    return found


def uses_host(engine: EngineCore) -> bool:
    """Whether masters and moments lie on the host, and weights on a device."""
    params = [leaf for session in engine.sessions.values() for leaf in session.model_params()]
    is_away = any(param.device.type != "cpu" for param in params)
    return engine.policy.storage.place == "host" and is_away


MOVED_NOTHING = 'place="host" moved nothing, all is on the CPU'


def describe_place(engine: EngineCore) -> str:
    """Where masters and moments lie, of an engine whose storage has ``place="host"``."""
    if uses_host(engine):
        return "masters and moments lie on the host, which makes the update"
    return MOVED_NOTHING
