# SPDX-License-Identifier: BSD-3-Clause
"""What ``initialize`` and ``add_param_group`` accept, asked before anything is changed.

But `check_half_once`, which ``initialize`` asks once it is known what is half.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from preamp.casting import Conversion, changed_by_cast, find_kept
from preamp.casting.kept import Kept, find_norms, floating_tensors
from preamp.casting.state_hooks import SaveFloat32
from preamp.core.dtypes import HALF_DTYPES, dtype_name, is_half
from preamp.core.errors import (
    PreampStateError,
    bad_state,
    bad_type,
    bad_value,
    message,
    with_article,
)
from preamp.core.torch_private.data_parallel import uses_reducer
from preamp.core.torch_private.modules import has_hook
from preamp.engine import refusals
from preamp.engine.core import EngineCore
from preamp.engine.engine import Engine, engines_in_use
from preamp.engine.lookup import bare, find_engine
from preamp.engine.session import OptimizerSession
from preamp.optim import in_two_optimizers
from preamp.policy import Policy

_SHOWN = 6  # buffers in a warning


def members_of(given: Any, kind: type[Any]) -> list[Any]:
    """Return what is of ``kind`` in ``given``, one or several; never raises."""
    items = cast("Sequence[Any]", given if isinstance(given, (list, tuple)) else [given])
    return [item for item in map(bare, items) if isinstance(item, kind)]


def as_list(given: Any, kind: type[Any], name: str) -> list[Any]:
    """Return what is ``given`` as a list, wrapped optimizers taken out.

    Raises `TypeError` if it is neither of ``kind``, a ``name`` in words, nor a list of such.
    """
    items = cast("list[Any]", given) if isinstance(given, list) else [given]
    found = [item for item in map(bare, items) if isinstance(item, kind)]
    if len(found) == len(items):
        return found
    room = ".".join(kind.__module__.split(".")[:2])  # torch.nn, torch.optim
    raise bad_type(
        f"{name}s is {_describe(given)}",
        f"Allowed is a {room}.{kind.__name__} or a list of them",
        f"Pass the {name} itself, or [{name}_a, {name}_b]",
    )


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        kinds = sorted({type(item).__name__ for item in items})
        return f"{with_article(kind)} of {', '.join(kinds) or 'nothing'}"
    return with_article(kind)


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse an optimizer that is listed twice or has an engine already."""
    for index, optimizer in enumerate(optimizers):
        kind = type(optimizer).__name__
        if any(optimizer is other for other in optimizers[:index]):
            raise bad_state(
                f"The same {kind} is listed twice in optimizers",
                "Each optimizer may be given once",
                "Remove the second mention",
            )
        owner = find_engine(optimizer)
        if owner is not None and owner.policy.enabled:
            raise bad_state(
                f"This {kind} went through initialize already (opt_level="
                f"{owner.policy.opt_level!r})",
                "An optimizer belongs to one engine at a time",
                "Call preamp.engine_of(optimizer).close() first, or build a new optimizer",
            )


def check_keeps_params(optimizers: Sequence[torch.optim.Optimizer], *, has_masters: bool) -> None:
    """Refuse an optimizer that hands the work to one inside, which would not see any master."""
    for optimizer in optimizers:  # by name: its module is not there in every torch
        if has_masters and "ZeroRedundancyOptimizer" in {k.__name__ for k in type(optimizer).mro()}:
            raise bad_state(
                "A ZeroRedundancyOptimizer was given at a level with master weights",
                "Its inner optimizer would update the half weights themselves, by scaled gradients",
                "Shard the model with torch's fully_shard, or keep masters and moments in fewer "
                "bytes with storage='compact'",
            )


def check_models(models: Sequence[nn.Module], policy: Policy, *, allow_half_model: bool) -> None:
    """Refuse models that are wrapped, lazy, out of reach of casts, or half unless allowed."""
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for model in models:
        kind = type(model).__name__
        if isinstance(model, wrappers):
            raise bad_state(
                f"A model is wrapped in {kind} already",
                "initialize changes dtypes, which the wrapper must see afterwards",
                f"Call preamp.initialize on the bare model first, then {kind}(model)",
            )
        for name, part in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
            if policy.cast_model_type in HALF_DTYPES:
                _check_part(model, name, part, policy.opt_level)
        for name, param in model.named_parameters():
            _check_has_memory(model, name, param)
            if policy.patch_torch_functions:
                _check_has_autocast(model, name, param.device.type, policy.opt_level)
            if is_half(param) and not allow_half_model:
                raise _is_half(model, f"parameter {name!r}", param.dtype)
        for name, buffer in model.named_buffers():
            _check_has_memory(model, name, buffer)
            if is_half(buffer) and not allow_half_model:
                raise _is_half(model, f"buffer {name!r}", buffer.dtype)


def _check_part(model: nn.Module, name: str, part: nn.Module, opt_level: str) -> None:
    """Refuse wrappers inside of a model whose hooks a cast would take off, and compiled parts."""
    if isinstance(part, nn.parallel.DistributedDataParallel) and uses_reducer(part):
        raise refusals.wrapped_before_cast()
    if isinstance(part, torch.jit.ScriptModule):  # no layer is known by its class
        what = f"{name!r} of {type(model).__name__}" if name else "The model"
        raise bad_state(
            f"{what} is a ScriptModule of {part.original_name}, at opt_level={opt_level!r}",
            "Where weights are cast to half, so is what each layer gets, and compiled code "
            "has no layers that could be told apart",
            'Pass the model from before torch.jit, or opt_level="O1", or "O4" for bfloat16',
        )


def _check_has_memory(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Refuse a parameter or buffer whose shape the first forward will tell."""
    if is_lazy(tensor):
        raise bad_state(
            f"{name!r} of {type(model).__name__} is not initialized: a lazy module "
            "gets its shapes in its first forward",
            "initialize takes models whose parameters and buffers have their memory",
            "Run one forward on a batch first, then build the optimizer and call preamp.initialize",
        )


def _check_has_autocast(model: nn.Module, name: str, device: str, opt_level: str) -> None:
    """Refuse a parameter on a kind of device that torch has no autocast for, such as meta."""
    if not torch.amp.is_autocast_available(device):
        raise bad_state(
            f"{name!r} of {type(model).__name__} is on the device {device!r}, for which "
            f"torch has no autocast, at opt_level={opt_level!r}",
            "Functions are cast on the kinds of device that the parameters are on when "
            "initialize is called",
            "Move the model where it will run first (model.to_empty(device=...) if it is "
            "on 'meta', and load its weights), then build the optimizer and call "
            "preamp.initialize",
        )


def _is_half(model: nn.Module, what: str, dtype: torch.dtype) -> PreampStateError:
    if find_engine(model) is not None:
        do = "The model has an engine already: call preamp.engine_of(model).close() first"
    else:
        do = (
            "Call model.float() first, or do not make the model half (checkpoints may load as they "
            "were stored): initialize casts what the level needs. Or pass allow_half_model=True, "
            "and masters start from the rounded values"
        )
    return bad_state(
        f"The {what} of {type(model).__name__} is {dtype_name(dtype)} before initialize",
        "Models must come with float32 (or float64) parameters, so that masters can keep them "
        "exactly",
        do,
    )


def check_half_once(engine: EngineCore, joining: OptimizerSession, params: Iterable[Any]) -> None:
    """Refuse half weights among ``params`` of one optimizer that another one has as well."""
    ids = {*map(id, params)}
    for other in engine.sessions.values():
        for param in other.model_params() if other is not joining else ():
            if id(param) in ids and is_half(param):
                name = engine.names.of(param)
                raise in_two_optimizers(name, other.optimizer, joining.optimizer)


def check_joins(engine: Engine, session: OptimizerSession, params: Sequence[torch.Tensor]) -> None:
    """Refuse ``params`` that may not join the optimizer of ``session``.

    Those that it has, which torch cannot see of masters, half weights that another one has, and
    what came into a half model after ``initialize``. Parameters outside of the models may join.
    """
    for param in params:
        if session.table.of_half(param) is not None:
            raise bad_value(
                f"Parameter {engine.names.of(param)!r} is in this optimizer already",
                "A parameter may appear in one parameter group only",
                "Leave it out of the new group",
            )
    if engine.policy.cast_model_type not in HALF_DTYPES:
        return
    ids = {*map(id, params)}
    for model in engine.own_models:
        for layer in model.modules():
            is_new = not has_hook(layer, SaveFloat32)
            for param in layer.parameters(recurse=False):
                was_there = not is_new and id(param) in engine.conversion.members
                if param.is_floating_point() and id(param) in ids and not was_there:
                    raise _joins_late(engine, model, param)
    check_half_once(engine, session, params)


def _joins_late(engine: Engine, model: nn.Module, param: torch.Tensor) -> PreampStateError:
    name = next(name for name, own in model.named_parameters() if own is param)
    return bad_state(
        f"add_param_group was given {name!r}, which {type(model).__name__} did not have at "
        f"initialize (opt_level={engine.policy.opt_level!r})",
        "Layers get half weights, masters and casts from initialize",
        "Call preamp.engine_of(optimizer).close(), which gives float32 weights back and keeps the "
        "optimizer's state, then add_param_group, then preamp.initialize again",
    )


def check_not_shared(models: Sequence[nn.Module], policy: Policy) -> None:
    """Refuse weights that models of another engine have too, where either engine has them half."""
    if _shared(models, policy) is None:
        return
    gc.collect()  # an engine that is gone may be in a reference cycle
    found = _shared(models, policy)
    if found is not None:
        name, engine, other = found
        raise bad_state(
            f"{name!r} belongs to {with_article(type(other).__name__)} too, which went through "
            f"initialize at {engine.policy.opt_level!r} in another call, and this one is for "
            f"{policy.opt_level!r}",
            "Engines may share weights only where both keep them in float32: at O0, O1 and O4",
            "Pass both models to one initialize, in a list, or call "
            "preamp.engine_of(model).close() for the other model first",
        )


def _shared(models: Sequence[nn.Module], policy: Policy) -> tuple[str, Engine, nn.Module] | None:
    """The first such weight, by its name, with the other engine and its model."""
    names = {
        id(tensor): name
        for model in models
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point()
    }
    for engine in engines_in_use():
        casts = policy.cast_model_type, engine.policy.cast_model_type
        if not engine.policy.enabled or not any(dtype in HALF_DTYPES for dtype in casts):
            continue
        leaving = [m for m in models if find_engine(m) is engine]  # or wrappers around such
        left = {id(part) for model in leaving for part in model.modules()}
        for other in engine.own_models:
            for tensor in floating_tensors(other):
                if id(other) not in left and id(tensor) in names:
                    return names[id(tensor)], engine, other
    return None


def planned_conversion(models: Sequence[nn.Module], policy: Policy) -> Conversion:
    """Find what the cast keeps in float32, and what it would change too much. Changes nothing."""
    dtype = policy.cast_model_type
    if dtype not in HALF_DTYPES:
        return Conversion(Kept(norms=find_norms(models)))
    kept = find_kept(models, policy.keep_fp32)
    found = changed_by_cast(
        models, kept, dtype, keep_batchnorm_fp32=bool(policy.keep_batchnorm_fp32)
    )
    return Conversion(kept, _warning(found, dtype_name(dtype)))


def _warning(changed: dict[str, str], dtype: str) -> str:
    if not changed:
        return ""
    shown = [f"{name!r} ({loss})" for name, loss in list(changed.items())[:_SHOWN]]
    more = f" and {len(changed) - len(shown)} more" if len(changed) > len(shown) else ""
    return message(
        f"The cast to {dtype} changes buffers by more than its rounding: {', '.join(shown)}{more}",
        "Buffers in the state_dict are cast as weights are, and have no masters",
        f"Pass keep_fp32={list(changed)[:_SHOWN]} to keep them in float32",
    )


def check_num_losses(num_losses: Any) -> int:
    """Return ``num_losses`` if it is a whole number from 0; raises `ValueError` otherwise."""
    if isinstance(num_losses, int) and not isinstance(num_losses, bool) and num_losses >= 0:
        return num_losses
    raise bad_value(
        f"num_losses={num_losses!r} cannot be used",
        "Allowed is a whole number from 0",
        "Pass how many losses have a loss scale of their own, usually 1",
    )
