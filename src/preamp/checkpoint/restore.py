# SPDX-License-Identifier: BSD-3-Clause
"""Loading a checkpoint's content where it fits: all of it, or nothing."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from preamp.checkpoint.capture import describe_params
from preamp.checkpoint.random_states import prepare_random_states
from preamp.checkpoint.staging import download
from preamp.checkpoint.storage import taken_apart
from preamp.checkpoint.subjects import (
    Subjects,
    class_name,
    model_forms,
    named_tensors,
    numbers_of,
    params_of,
    twins_of,
)
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_value, with_article
from preamp.core.pytree import map_plain
from preamp.core.tensors import version_of
from preamp.core.undo import UndoStack
from preamp.engine.resume import drop_gradients, prepare_engine

_SHOWN = 3


def check_fits(
    content: Mapping[str, Any], subjects: Subjects, forms: Sequence[Mapping[str, Any]]
) -> None:
    """Raise `ValueError` unless what is there for ``subjects`` is of the same form.

    ``forms`` are state dicts of the models, in which the values do not matter.
    """
    for kind in ("models", "optimizers", "schedulers"):
        asked, saved = len(getattr(subjects, kind)), len(content[kind])
        if asked and asked != saved:
            raise _unfit(f"has {saved} {kind}, not {asked}", f"as many {kind}")
    for index, (model, saved) in enumerate(zip(subjects.models, content["models"], strict=False)):
        _check_model(index, forms[index], saved["state"])
        _check_tied(index, model, saved["state"])
        _check_mappings(saved["metadata"], *saved["metadata"].values())
        _check_versions(model, saved["metadata"])
    names = {id(param): name for name, param in subjects.named_params()}
    pairs = zip(subjects.optimizers, content["optimizers"], strict=False)
    for index, (optimizer, saved) in enumerate(pairs):
        _check_class(f"optimizers[{index}]", optimizer, saved["class"])
        _check_optimizer(index, optimizer, names, saved)
    pairs = zip(subjects.schedulers, content["schedulers"], strict=False)
    for index, (scheduler, saved) in enumerate(pairs):
        _check_class(f"schedulers[{index}]", scheduler, saved["class"])
        if isinstance(scheduler.state_dict(), Mapping):  # as torch's are
            _check_mappings(saved["state"])
    if subjects.optimizers:
        _check_engines(content["engines"], subjects)
        _check_own_params(content["own_params"], subjects)


def _unfit(got: str, allowed: str) -> ValueError:
    """Say that a checkpoint does not fit what it is loaded into."""
    return bad_value(
        f"The checkpoint {got}",
        f"It loads into {allowed}; nothing was loaded",
        "Make the objects as the run that saved it did, or take parts of it by hand with "
        "preamp.checkpoint.read_checkpoint",
    )


def _check_versions(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Modules compare the version of their state with a number, if they have one."""
    for name, module in cast("Iterable[tuple[str, Any]]", model.named_modules()):
        version = saved.get(name, {}).get("version", 0)
        if isinstance(getattr(module, "_version", None), int) and not isinstance(version, int):
            raise TypeError(f"the version of {name!r} is {version!r}")


def _check_mappings(*values: object) -> None:
    for value in values:
        if not isinstance(value, Mapping):
            raise TypeError(f"{value!r} is no dict")


def _check_model(index: int, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing, extra = _beyond(own, saved), _beyond(saved, own)
    if missing or extra:
        raise _unfit(
            f"of models[{index}] lacks {_shown(missing)} and has {_shown(extra)} beyond it",
            "exactly the entries of model.state_dict()",
        )
    wrong = [name for name, value in own.items() if not _same_form(value, saved[name])]
    if wrong:
        raise _unfit(
            f"of models[{index}] has {_shown(wrong)} in another form, such as "
            f"{_form(saved[wrong[0]])} for {_form(own[wrong[0]])}",
            "entries of the same shape",
        )


def _check_tied(index: int, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Of values for one tensor under several names the last would silently be the one."""
    first: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        known = first.setdefault(id(tensor), name)
        if known == name or not {name, known} <= saved.keys():
            continue
        if not _same_bits(saved[known], saved[name]):
            raise _unfit(
                f"of models[{index}] has different values for {known!r} and {name!r}, which are "
                "one tensor here",
                "models that share the same tensors",
            )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    raw = (value.detach().contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(*raw)


def _same_form(own: Any, saved: Any) -> bool:
    if not isinstance(own, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return isinstance(own, torch.Tensor) == isinstance(saved, torch.Tensor)
    is_same_kind = own.is_floating_point() == saved.is_floating_point()
    return own.shape == saved.shape and is_same_kind


def _form(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)} {tuple(value.shape)}"
    return type(value).__name__


def _check_class(place: str, own: object, saved: str) -> None:
    if class_name(own) != saved:
        raise _unfit(
            f"has {with_article(saved)} as {place}, which is {with_article(class_name(own))}",
            "the same class",
        )


def _check_optimizer(
    index: int, optimizer: torch.optim.Optimizer, names: dict[int, str], saved: Mapping[str, Any]
) -> None:
    state, groups = saved["state"]["state"], saved["state"]["param_groups"]
    numbers = numbers_of(saved["state"])
    if len(set(numbers)) < len(numbers) or any(
        isinstance(key, torch.Tensor) for key in (*numbers, *state)
    ):
        raise TypeError("the numbers of the parameters are no numbers, or not different")
    _check_mappings(state, *(state[number] for number in numbers if number in state))
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if sizes != theirs:
        raise _unfit(
            f"of optimizers[{index}] has parameter groups of {theirs} parameters, not {sizes}",
            "the same groups",
        )
    described = describe_params(optimizer, names)
    if len(saved["params"]) != len(described):
        raise IndexError("the parameters described are not those of the groups")
    for own, given in zip(described, saved["params"], strict=True):
        other = {key: given[key] for key in own}
        if (own["name"], own["shape"]) != (other["name"], other["shape"]):
            raise _unfit(
                f"of optimizers[{index}] has {other['name']!r} {other['shape']} where it has "
                f"{own['name']!r} {own['shape']}",
                "the same parameters in the same order, with the models passed in the same order",
            )


def _check_engines(saved: Sequence[Mapping[str, Any]], subjects: Subjects) -> None:
    own = [
        [i for i, o in enumerate(subjects.optimizers) if id(o) in engine.sessions]
        for engine in subjects.engines
    ]
    theirs = [list(entry["optimizers"]) for entry in saved]
    if theirs and own != theirs:
        raise _unfit(
            f"is of preamp.initialize calls with the optimizers {theirs}, not {own}",
            "optimizers that were initialized in the same way",
        )


def _check_own_params(saved: Mapping[str, torch.Tensor], subjects: Subjects) -> None:
    """Raise `ValueError` unless what only optimizers have is what they had."""
    own = {n for n, _ in subjects.named_params() if n.startswith("optimizers/")}
    if own != set(saved):
        raise _unfit(
            f"lacks {_shown(sorted(own - set(saved)))} and has "
            f"{_shown(sorted(set(saved) - own))} beyond the optimizers' own parameters",
            "the same models beside the optimizers as when it was saved",
        )


def _beyond(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    return [name for name in mine if name not in theirs]


def _shown(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return (", ".join(map(repr, names[:_SHOWN])) or "nothing") + (
        f" and {more} more" if more > 0 else ""
    )


Apply = Callable[[], None]


def restore(content: Mapping[str, Any], subjects: Subjects, states: Any) -> None:
    """Set ``subjects`` to copies of what ``content`` has, or leave them as they are.

    Where there are optimizers, gradients are dropped. ``states`` are of the random generators, or
    ``None``. Raises `ValueError` if the content does not fit, `PreampStateError` inside a
    ``scale_loss`` block, and what a ``load_state_dict`` raised.
    """
    subjects.check_whole("load_checkpoint")
    for engine in subjects.engines:
        engine.check_outside_blocks("load_checkpoint")
        engine.ledger.settle(wait=True, gives_up=False)
        for session in engine.sessions.values():
            session.table.adopt()
    finals: list[Apply] = []
    undo = UndoStack()
    try:
        forms = list(map(model_forms, subjects.models))
        with taken_apart():
            check_fits(content, subjects, forms)
            if subjects.optimizers:
                finals = _prepare_engines(content["engines"], subjects)
            if states is not None:
                finals.append(prepare_random_states(states))
        _load_parts(content, subjects, undo)
    except BaseException:
        undo.unwind()
        raise
    for apply in finals:
        apply()


def _prepare_engines(saved: Sequence[Mapping[str, Any]], subjects: Subjects) -> list[Apply]:
    applies: list[Apply] = [partial(drop_gradients, engine) for engine in subjects.engines]
    applies.append(partial(_drop_gradients, subjects))
    for engine, entry in zip(subjects.engines, saved, strict=False):
        applies.append(prepare_engine(engine, entry))
    return applies


def _drop_gradients(subjects: Subjects) -> None:
    """Drop the gradients of all parameters, also of those that no engine knows of."""
    for _, param in subjects.named_params():
        param.grad = None


def _load_parts(content: Mapping[str, Any], subjects: Subjects, undo: UndoStack) -> None:
    # Loading writes into weights that are there, so that a device needs no room for others.
    _keep(subjects, undo)
    for model, saved in zip(subjects.models, content["models"], strict=False):
        _load_model(model, saved, undo)
    if subjects.optimizers:
        _load_own_params(content["own_params"], subjects)
    for optimizer, saved in zip(subjects.optimizers, content["optimizers"], strict=False):
        _load_optimizer(optimizer, saved, undo)
    for scheduler, saved in zip(subjects.schedulers, content["schedulers"], strict=False):
        _load_scheduler(scheduler, owned(saved["state"]), undo)


def _keep(subjects: Subjects, undo: UndoStack) -> None:
    """Copy to the host what will be written to; ``undo`` gets what puts each of it back."""
    masters = [twin.master for model in subjects.models for twin in twins_of(model)]
    masters += subjects.masters().values()
    tensors = [twin.kept for twin in {id(m): m.twin for m in masters}.values() if twin is not None]
    tensors += [param for _, param in subjects.named_params()]
    tensors += [buffer for model in subjects.models for buffer in model.buffers()]
    here = [tensor.detach() for tensor in tensors]
    copies = download(here, waits=True)()
    for tensor, value, copied in zip(tensors, here, copies, strict=True):
        kept = copied.clone() if copied is value else copied
        undo.push(partial(_put_back, tensor, kept, _marks(tensor)))


def _marks(tensor: torch.Tensor) -> object:
    """What differs once a tensor was written to, or has other memory."""
    if tensor.is_inference():  # its writes are not counted
        return object()
    has_memory = tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")
    return version_of(tensor), tensor.detach().data_ptr() if has_memory else 0


@torch.no_grad()
def _put_back(tensor: torch.Tensor, value: torch.Tensor, marks: object) -> None:
    if _marks(tensor) != marks:
        tensor.detach().copy_(value)


def owned(tree: Any) -> Any:
    """Copy a tree of plain data, so that nothing in it is mapped from the file any more.

    Of a tensor that is there twice there is one copy.
    """
    copies: dict[int, Any] = {}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return map_plain(own, tree)


# -- models --------------------------------------------------------------------------------------


def _load_model(model: nn.Module, saved: Mapping[str, Any], undo: UndoStack) -> None:
    extra = [
        (module, module.get_extra_state())
        for module in model.modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]

    def restore_extra() -> None:
        for module, state in extra:
            with contextlib.suppress(Exception):  # it has just raised for another state
                module.set_extra_state(state)

    undo.push(restore_extra)
    state: OrderedDict[str, Any] = OrderedDict(saved["state"])
    setattr(state, "_metadata", saved["metadata"])  # noqa: B010
    model.load_state_dict(state)


@torch.no_grad()
def _load_own_params(saved: Mapping[str, torch.Tensor], subjects: Subjects) -> None:
    masters = subjects.masters()
    for name, param in subjects.named_params():
        if name not in saved:
            continue
        master = masters.get(id(param))
        if master is None or master.twin is None:
            param.copy_(saved[name])
        else:
            master.twin.table.set_value(master.twin.row, saved[name])


# -- optimizers and schedulers -------------------------------------------------------------------


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], undo: UndoStack
) -> None:
    state = owned(saved["state"])
    old_state, old_groups = optimizer.state, optimizer.param_groups

    def restore_optimizer() -> None:
        optimizer.state, optimizer.param_groups = old_state, old_groups

    undo.push(restore_optimizer)
    optimizer.load_state_dict(state)
    _keep_dtypes(optimizer, saved["params"], state)


def _keep_dtypes(
    optimizer: torch.optim.Optimizer, params: Sequence[Mapping[str, Any]], state: Any
) -> None:
    """Give tensors that torch cast to an unchanged parameter's dtype their own back.

    Moments of a fused optimizer are as its storage says.
    """
    moments: Mapping[str, Any] = getattr(optimizer, "moments", {})
    for number, saved, param in zip(numbers_of(state), params, params_of(optimizer), strict=True):
        if saved["dtype"] != dtype_name(param.dtype):
            continue
        own: dict[str, Any] = optimizer.state.get(param, {})
        for key, value in state["state"].get(number, {}).items():
            now: Any = own.get(key)
            both = isinstance(now, torch.Tensor) and isinstance(value, torch.Tensor)
            is_same = key not in moments and both and now.shape == value.shape
            if is_same and now.dtype != value.dtype:
                own[key] = value.to(now.device)


def _load_scheduler(scheduler: Any, state: Any, undo: UndoStack) -> None:
    before = copy.deepcopy(scheduler.state_dict())
    undo.push(lambda: scheduler.load_state_dict(before))
    scheduler.load_state_dict(state)
