# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint is of: models, optimizers, schedulers, and their engines."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from preamp.casting.state_hooks import without_copies
from preamp.checkpoint.staging import value_of
from preamp.core.errors import bad_state, bad_type, with_article
from preamp.core.tensors import is_sharded
from preamp.engine import Engine, find_engine
from preamp.engine.lookup import bare
from preamp.optim import MasterParameter, Twin, leaf_of
from preamp.optim.master_parameter import is_master


@dataclass(frozen=True, slots=True, eq=False)
class Subjects:
    """What is saved or loaded."""

    models: list[nn.Module]  # without wrappers, so that files do not depend on these
    optimizers: list[torch.optim.Optimizer]  # without `LARC`
    schedulers: list[Any]  # anything with ``state_dict`` and ``load_state_dict``
    engines: list[Engine]  # of the optimizers, each once

    @classmethod
    def of(cls, models: Any, optimizers: Any, schedulers: Any) -> Subjects:
        """Take single objects, sequences, or ``None`` for none."""
        found = cls(
            models=[_bare_model(model) for model in _listed(models, nn.Module, "models")],
            optimizers=[
                _checked(bare(optimizer), torch.optim.Optimizer, "optimizers")
                for optimizer in _listed(optimizers, object, "optimizers")
            ],
            schedulers=_listed(schedulers, object, "schedulers"),
            engines=[],
        )
        for scheduler in found.schedulers:
            if not callable(getattr(scheduler, "load_state_dict", None)):
                raise _wrong_kind(scheduler, "schedulers")
        for optimizer in found.optimizers:
            engine = find_engine(optimizer)
            if engine is not None and engine not in found.engines:
                _check_complete(engine, found.optimizers)
                found.engines.append(engine)
        return found

    def named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter once, by a name that is the same in every process.

        Those of models are called ``models/0/first.weight``. What only an optimizer has is called
        ``optimizers/0/3``. Half ones with a master come as they are in the model.
        """
        seen: set[int] = set()
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                if id(param) not in seen:
                    seen.add(id(param))
                    yield f"models/{index}/{name}", param
        for index, optimizer in enumerate(self.optimizers):
            for place, param in enumerate(params_of(optimizer)):
                own = leaf_of(param)
                if id(own) not in seen:
                    seen.add(id(own))
                    yield f"optimizers/{index}/{place}", own

    def masters(self) -> dict[int, MasterParameter]:
        """The masters of all optimizers, by the ``id`` of their half parameter."""
        return {
            id(param.twin.half): param
            for optimizer in self.optimizers
            for param in params_of(optimizer)
            if isinstance(param, MasterParameter) and param.twin is not None
        }

    def check_whole(self, what: str) -> None:
        """Raise `PreampStateError` if a rank has only parts of some tensor."""
        buffers = (pair for model in self.models for pair in model.named_buffers())
        for name, tensor in itertools.chain(self.named_params(), buffers):
            if is_sharded(tensor):
                raise bad_state(
                    f"{what} got {name!r}, of which each rank has a part",
                    "One file has whole tensors; parts are saved and loaded by "
                    "torch.distributed.checkpoint",
                    "Give it a preamp.RunState(model, optimizer), as in "
                    'dcp.save({"run": run}, checkpoint_id=folder)',
                )


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def twins_of(model: nn.Module) -> list[Twin]:
    """The half weights with masters of a model's engine, whichever models they are of."""
    engine = find_engine(model)
    sessions = () if engine is None else engine.sessions.values()
    return [twin for session in sessions for twin in session.table.twins]


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer updates, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def numbers_of(state: Mapping[str, Any]) -> list[Any]:
    """What an optimizer's state dict calls its parameters, in the order of its groups."""
    return [number for group in state["param_groups"] for number in group["params"]]


def class_name(thing: object) -> str:
    """The full name of an object's class."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def _listed(given: Any, kind: type[Any], what: str) -> list[Any]:
    if given is None:
        return []
    is_several = isinstance(given, (list, tuple))
    items = list(cast("Sequence[Any]", given)) if is_several else [given]
    return [_checked(item, kind, what) for item in items]


def _checked(item: Any, kind: type[Any], what: str) -> Any:
    if not isinstance(item, kind) or item is None:
        raise _wrong_kind(item, what)
    return item


def _wrong_kind(item: object, what: str) -> TypeError:
    return bad_type(
        f"{what} got {with_article(type(item).__name__)}",
        f"{what} are one object or a list of them: torch.nn.Module as models, "
        "torch.optim.Optimizer as optimizers, objects with state_dict and load_state_dict as "
        "schedulers",
        "Pass the objects by name: models=…, optimizers=…, schedulers=…; plain data go to extra",
    )


def _bare_model(model: nn.Module) -> nn.Module:
    """The model inside torch's wrappers."""
    inner: object = getattr(model, "_orig_mod", None)  # of torch.compile
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        inner = cast("Any", model).module
    return _bare_model(inner) if isinstance(inner, nn.Module) else cast("nn.Module", model)


def _check_complete(engine: Engine, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    given = set(map(id, optimizers))
    missing = [type(o).__name__ for o in engine.optimizers if id(bare(o)) not in given]
    if missing:
        raise bad_state(
            f"Of {len(engine.optimizers)} optimizers that were initialized together "
            f"{len(missing)} are missing: {', '.join(missing)}",
            "They share loss scales and masters, so a checkpoint has all of them",
            "Pass all optimizers of the preamp.initialize call",
        )


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, where split masters are a `SplitTensor` each."""
    state = model_forms(model)
    for name, value in state.items():
        if is_master(value):
            state[name] = value_of(value)
    return state


def model_forms(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, which may have split masters themselves."""
    with _masters_given(model), without_copies():
        return model.state_dict()


@contextmanager
def _masters_given(model: nn.Module) -> Generator[None]:
    tables = [twin.table for twin in twins_of(model)]
    for table in tables:
        table.gives_masters = True
    try:
        yield
    finally:
        for table in tables:
            table.gives_masters = False
