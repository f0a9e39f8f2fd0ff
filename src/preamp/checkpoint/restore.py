# SPDX-License-Identifier: BSD-3-Clause
"""Loading a checkpoint's content where it fits: all of it, or nothing."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from preamp.checkpoint.capture import describe_params
from preamp.checkpoint.placing import unfit
from preamp.checkpoint.random_states import prepare_random_states
from preamp.checkpoint.ranks import together
from preamp.checkpoint.staging import StagedUploads, download, has_form_of
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
from preamp.core.away import made_away
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_value, with_article
from preamp.core.pytree import map_plain
from preamp.core.tensors import is_sharded, local_of, store_grad, version_of
from preamp.core.undo import UndoStack
from preamp.engine.pending import drop_pending, is_idle, prepare_pending
from preamp.engine.state import read_scalers
from preamp.optim import pair_of
from preamp.policy.storage import FULL

_SHOWN = 3


def check_fits(
    content: Mapping[str, Any], subjects: Subjects, forms: Sequence[Mapping[str, Any]]
) -> None:
    """Raise `ValueError` unless what is there for ``subjects`` is of the same form.

    ``forms`` are state dicts of the models, in which the values do not matter.
    """
    for index, (model, saved) in enumerate(zip(subjects.models, content["models"], strict=True)):
        _check_model(index, forms[index], saved["state"])
        _check_tied(index, model, saved["state"])
        _check_mappings(saved["metadata"], *saved["metadata"].values())
        _check_versions(model, saved["metadata"])
    names = {id(param): name for name, param in subjects.named_params()}
    pairs = zip(subjects.optimizers, content["optimizers"], strict=True)
    for index, (optimizer, saved) in enumerate(pairs):
        _check_class(f"optimizers[{index}]", optimizer, saved["class"])
        _check_optimizer(index, optimizer, names, saved)
    pairs = zip(subjects.schedulers, content["schedulers"], strict=True)
    for index, (scheduler, saved) in enumerate(pairs):
        _check_class(f"schedulers[{index}]", scheduler, saved["class"])
        if isinstance(scheduler.state_dict(), Mapping):  # as torch's are
            _check_mappings(saved["state"])
    if subjects.optimizers:
        _check_engines(content["engines"], subjects)


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
        raise unfit(
            f"of models[{index}] lacks {_shown(missing)} and has {_shown(extra)} beyond it",
            "exactly the entries of model.state_dict()",
        )
    wrong = [name for name, value in own.items() if not _same_form(value, saved[name])]
    if wrong:
        raise unfit(
            f"of models[{index}] has {_shown(wrong)} in another form, such as "
            f"{_form(saved[wrong[0]])} for {_form(own[wrong[0]])}",
            "entries of the same shape",
        )


def _check_tied(index: int, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Of values for one tensor under several names the last would silently be the one."""
    first: dict[int, str] = {}
    for name, tensor in named_tensors(model).items():
        known = first.setdefault(id(tensor), name)
        if known == name or is_sharded(tensor) or not {name, known} <= saved.keys():
            continue
        if not _same_bits(saved[known], saved[name]):
            raise unfit(
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
        raise unfit(
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
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in groups]
    if sizes != theirs:
        raise unfit(
            f"of optimizers[{index}] has parameter groups of {theirs} parameters, not {sizes}",
            "the same groups",
        )
    described = describe_params(optimizer, names)
    if len(saved["params"]) != len(described):
        raise IndexError("the parameters described are not those of the groups")
    for own, given in zip(described, saved["params"], strict=True):
        other = {key: given[key] for key in own}
        if (own["name"], own["shape"]) != (other["name"], other["shape"]):
            raise unfit(
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
        raise unfit(
            f"is of preamp.initialize calls with the optimizers {theirs}, not {own}",
            "optimizers that were initialized in the same way",
        )


def check_own_params(saved: Mapping[str, torch.Tensor], subjects: Subjects) -> None:
    """Raise `ValueError` unless what only optimizers have is what they had."""
    own = {n for n, _ in subjects.named_params() if n.startswith("optimizers/")}
    if own != set(saved):
        raise unfit(
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


def restore(
    content: Mapping[str, Any], subjects: Subjects, *, gradients: bool, states: Any
) -> None:
    """Set ``subjects`` to copies of what ``content`` has, or leave them as they are.

    Pending gradients are dropped unless ``gradients``; ``states`` are of the random generators, or
    ``None``. Raises `ValueError` if the content does not fit, `PreampStateError` inside a
    ``scale_loss`` block, and what a ``load_state_dict`` raised.
    """
    for engine in subjects.engines:
        engine.check_outside_blocks("load_checkpoint")
        engine.ledger.settle(wait=True, gives_up=False)
        for session in engine.sessions.values():
            session.adopt()
    finals: list[Apply] = []
    undo = UndoStack()
    try:
        with together():
            forms = list(map(model_forms, subjects.models))
            with taken_apart():
                check_fits(content, subjects, forms)
                if subjects.optimizers:
                    with _uploads(subjects):
                        finals = _prepare(content, subjects, gradients=gradients)
                if states is not None:
                    finals.append(prepare_random_states(states))
            _load_parts(content, subjects, undo)
    except BaseException:
        undo.unwind()
        raise
    for apply in finals:
        apply()


def _prepare(content: Mapping[str, Any], subjects: Subjects, *, gradients: bool) -> list[Apply]:
    check_own_params(content["own_params"], subjects)
    return [
        *(lambda engine=engine: drop_pending(engine) for engine in subjects.engines),
        _prepare_gradients(content["gradients"] if gradients else {}, subjects),
        *_prepare_engines(content["engines"], subjects, gradients=gradients),
    ]


def _load_parts(content: Mapping[str, Any], subjects: Subjects, undo: UndoStack) -> None:
    pairs = list(zip(subjects.optimizers, content["optimizers"], strict=True))
    homes = _homes([(optimizer, saved["state"]) for optimizer, saved in pairs])
    # Loading writes into tensors that are there, so that a device needs no room for others.
    _keep(subjects, homes.values(), undo)
    with _uploads(subjects):
        for model, saved in zip(subjects.models, content["models"], strict=True):
            _load_model(model, saved, undo)
        if subjects.optimizers:
            _load_own_params(content["own_params"], subjects)
        for optimizer, saved in pairs:
            _load_optimizer(optimizer, saved, homes, undo)
        for scheduler, saved in zip(subjects.schedulers, content["schedulers"], strict=True):
            _load_scheduler(scheduler, owned(saved["state"]), undo)


def _uploads(subjects: Subjects) -> AbstractContextManager[Any]:
    """What sends to CUDA devices; nothing where there are none."""
    tensors = [param for _, param in subjects.named_params()]
    tensors += [buffer for model in subjects.models for buffer in model.buffers()]
    is_away = any(tensor.is_cuda for tensor in tensors)
    return StagedUploads() if is_away else contextlib.nullcontext()


def _keep(subjects: Subjects, state: Iterable[torch.Tensor], undo: UndoStack) -> None:
    """Copy to the host what will be written to; ``undo`` gets what puts each of it back.

    Split masters become float32 ones, as loading makes them in any case: a device that has no room
    for these says so before anything is written.
    """
    masters = [twin.master for model in subjects.models for twin in twins_of(model)]
    masters += subjects.masters().values()
    tables = [master.twin.table for master in masters if master.twin is not None]
    for table in {id(table): table for table in tables}.values():
        table.make()
    tensors: list[torch.Tensor] = [*{id(master): master for master in masters}.values()]
    tensors += [param for _, param in subjects.named_params()]
    tensors += [buffer for model in subjects.models for buffer in model.buffers()]
    tensors += state
    here = [local_of(tensor.detach()) for tensor in tensors]
    copies = download(here, waits=True)()
    for tensor, value, copied in zip(tensors, here, copies, strict=True):
        kept = copied.clone() if copied is value else copied
        undo.push(partial(_put_back, tensor, kept, _marks(tensor)))


def _marks(tensor: torch.Tensor) -> object:
    """What differs once a tensor was written to, or has other memory."""
    own = local_of(tensor.detach())
    if own.is_inference():  # its writes are not counted
        return object()
    has_memory = own.layout is torch.strided and not hasattr(own, "__tensor_flatten__")
    return version_of(tensor), own.data_ptr() if has_memory else 0


@torch.no_grad()
def _put_back(tensor: torch.Tensor, value: torch.Tensor, marks: object) -> None:
    if _marks(tensor) != marks:
        local_of(tensor.detach()).copy_(value)


def owned(tree: Any, instead: Mapping[int, torch.Tensor] | None = None) -> Any:
    """Copy a tree of plain data, so that nothing in it is mapped from the file any more.

    Of a tensor that is there twice there is one copy. ``instead`` has by ``id`` what others become.
    """
    copies: dict[int, Any] = dict(instead or {})

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.clone()
        return copies[id(leaf)]

    return map_plain(own, tree)


def _state_of(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The tensors of a loaded state that go to a device, with their keys and parameters.

    torch and the fused optimizers put state beside its parameter, but for step counts.
    """
    if getattr(optimizer, "storage", FULL).place == "host":
        return
    for number, param in zip(numbers_of(state), params_of(optimizer), strict=True):
        own: Any = state["state"].get(number)
        for key, value in cast("dict[str, Any]", own if isinstance(own, dict) else {}).items():
            if isinstance(value, torch.Tensor) and key != "step" and param.is_cuda:
                yield key, value, param


def _homes(
    pairs: Iterable[tuple[torch.optim.Optimizer, Mapping[str, Any]]],
) -> dict[int, torch.Tensor]:
    """By ``id`` of loaded tensors of state, those of the same form that optimizers have now."""
    found: dict[int, torch.Tensor] = {}
    taken: set[int] = set()
    for optimizer, state in pairs:
        for key, value, param in _state_of(optimizer, state):
            now: Any = optimizer.state.get(param, {}).get(key)
            if isinstance(now, torch.Tensor) and has_form_of(now, value):
                memory = local_of(now).data_ptr()
                if memory not in taken:  # what lies in one place would have one value
                    taken.add(memory)
                    found.setdefault(id(value), now)
    return found


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
            table, row = master.twin.table, master.twin.row
            half = table.rounded(row, saved[name])
            master.copy_(table.own_part(row, saved[name]))
            param.copy_(half)


# -- optimizers and schedulers -------------------------------------------------------------------


def _load_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    homes: Mapping[int, torch.Tensor],
    undo: UndoStack,
) -> None:
    sent: dict[int, torch.Tensor] = {}
    for _, value, _ in _state_of(optimizer, saved["state"]):
        home = homes.get(id(value))
        # torch and the optimizer take over what is on its device; the rest they bring there.
        sent[id(value)] = value if home is None else home.copy_(value)
    state = owned(saved["state"], sent)
    old_state, old_groups = optimizer.state, optimizer.param_groups

    def restore_optimizer() -> None:
        optimizer.state, optimizer.param_groups = old_state, old_groups

    undo.push(restore_optimizer)
    optimizer.load_state_dict(state)
    left = {id(value) for value in sent.values() if not value.is_cuda}
    for entry in cast("Mapping[Any, Any]", optimizer.state).values():
        own = cast("dict[str, Any]", entry if isinstance(entry, dict) else {})
        for key in [key for key, value in own.items() if id(value) in left]:
            own[key] = own[key].clone()  # the optimizer keeps it on the host
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


# -- gradients and engines -----------------------------------------------------------------------


def _prepare_gradients(saved: Mapping[str, Any], subjects: Subjects) -> Apply:
    """Bring the gradients to their devices; return what puts them in place of those there."""
    masters = subjects.masters()
    places: list[tuple[torch.Tensor, Any]] = []
    known: set[str] = set()
    for name, param in subjects.named_params():
        sides = saved.get(name, {})
        known.add(name)
        for side, tensor in (("model", param), ("master", masters.get(id(param)))):
            grad: Any = sides.get(side)
            if tensor is not None:
                places.append((tensor, grad))
            if grad is None:
                continue
            if tensor is None:
                raise _other_gradients(f"{name!r} has no master")
            if (grad.dtype, grad.shape) != (tensor.dtype, param.shape):
                raise _other_gradients(f"that of {name!r} is {dtype_name(grad.dtype)}")
    unknown = sorted(saved.keys() - known)
    if unknown:
        raise _other_gradients(f"there is no parameter {unknown[0]!r}")
    # Each place has a copy of its own, also where two gradients were one tensor.
    waiting = subjects.waiting_on_host()
    grads = [
        None if grad is None else _copied(grad, like.device, waits=id(like) in waiting)
        for like, grad in places
    ]

    def apply() -> None:
        for (tensor, _), grad in zip(places, grads, strict=True):
            _keep_gradient(tensor, grad)

    return apply


def _copied(grad: torch.Tensor, device: torch.device, *, waits: bool) -> torch.Tensor:
    return made_away(grad.clone(), device) if waits else grad.to(device, copy=True)


def _keep_gradient(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Store a whole gradient, also where the master has a part of the weight."""
    twin = pair_of(tensor)
    if twin is None:
        store_grad(tensor, grad)
    else:
        twin.table.gradients.keep(twin.row, grad)


def _prepare_engines(
    saved: Sequence[Mapping[str, Any]], subjects: Subjects, *, gradients: bool
) -> list[Apply]:
    applies: list[Apply] = []
    for engine, entry in zip(subjects.engines, saved, strict=False):
        read_scalers(engine, entry["scalers"])
        applies.append(lambda engine=engine, entry=entry: engine.load_state_dict(entry["scalers"]))
        if gradients:
            try:
                applies.append(prepare_pending(engine, owned(entry["pending"])))
            except (KeyError, TypeError, ValueError, IndexError) as error:
                if not is_idle(entry["pending"]):
                    raise _other_gradients(str(error)) from error
    return applies


def _other_gradients(got: str) -> ValueError:
    return bad_value(
        f"The checkpoint has gradients that are not those of these models: {got}",
        "Gradients are taken over at the opt level they were made at; nothing was loaded",
        "Initialize at that level, or leave them out with gradients=False",
    )
