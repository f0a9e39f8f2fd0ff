# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint is of: models, optimizers, schedulers, their engines, and ranks' shares."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from preamp.casting.state_hooks import without_copies
from preamp.checkpoint.staging import value_of
from preamp.core.away import values_of
from preamp.core.errors import bad_state, bad_type, with_article
from preamp.core.tensors import stored_grad
from preamp.engine import Engine, find_engine
from preamp.engine.lookup import bare
from preamp.kernels import fsdp
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

    def buffer_names(self) -> frozenset[str]:
        """The names that buffers of models have among the tensors of a content."""
        return frozenset(
            f"models/{index}/state/{name}"
            for index, model in enumerate(self.models)
            for name, _ in model.named_buffers()
        )

    def waiting_on_host(self) -> set[int]:
        """The parameters whose gradients wait on the host for their step, by ``id``."""
        waiting = (e for e in self.engines if e.policy.storage.waits_on_host)
        sessions = (session for engine in waiting for session in engine.sessions.values())
        return {id(p) for session in sessions for p in session.model_params() if p.is_cuda}

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every gradient, by the parameter's name: of the model's side, and the master's."""
        masters = self.masters()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, param in self.named_params():
            master = masters.get(id(param))
            sides = {"model": values_of(stored_grad(param))}
            if master is not None and master.twin is not None:
                sides["master"] = master.twin.table.gradients.base(master.twin.row)
            held = {side: grad for side, grad in sides.items() if grad is not None}
            if held:
                found[name] = held
        return found


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return found | dict(model.named_buffers(remove_duplicate=False))


def twins_of(model: nn.Module) -> list[Twin]:
    """The half weights with masters of a model's engine, whichever models they are of."""
    engine = find_engine(model)
    sessions = () if engine is None else engine.sessions.values()
    return [twin for session in sessions for twin in session.masters or ()]


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
    """Return ``model.state_dict()``, where packed masters are a `SplitTensor` each."""
    return {
        name: value_of(value) if is_master(value) else value
        for name, value in model_forms(model).items()
    }


def model_forms(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()``, which may have packed masters themselves.

    They become float32 when a hook of the script reads them.
    """
    with _packed_given(model), without_copies():
        return model.state_dict()


@contextmanager
def _packed_given(model: nn.Module) -> Generator[None]:
    tables = [twin.table for twin in twins_of(model)]
    for table in tables:
        table.gives_packed = True
    try:
        yield
    finally:
        for table in tables:
            table.gives_packed = False


def check_reduced(models: Sequence[nn.Module]) -> None:
    """Raise `PreampStateError` if ``fully_shard`` keeps gradients that were not reduced yet."""
    if any(map(fsdp.holds_unreduced, models)):
        raise bad_state(
            "save_checkpoint was called while gradients lie unreduced inside of fully_shard, "
            "after set_requires_gradient_sync(False)",
            "Gradients are saved that were reduced, sharded as their parameters are",
            "Save after the backward that reduces them, or before the accumulation",
        )
