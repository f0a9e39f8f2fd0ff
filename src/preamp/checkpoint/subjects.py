# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint is of: models, optimizers and schedulers, and the engines behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from preamp.core.errors import bad_state, bad_type
from preamp.core.tensors import stored_grad
from preamp.engine import Engine, find_engine
from preamp.engine.lookup import bare
from preamp.optim import MasterParameter, leaf_of


@dataclass(frozen=True, slots=True, eq=False)
class Subjects:
    """What is saved or loaded."""

    models: list[nn.Module]  # without wrappers, so that files do not depend on these
    optimizers: list[torch.optim.Optimizer]  # without `LARC`
    schedulers: list[Any]  # anything with ``state_dict`` and ``load_state_dict``
    engines: list[Engine]  # of the optimizers, each once

    @classmethod
    def of(cls, models: Any, optimizers: Any, schedulers: Any) -> Subjects:
        """Take single objects, sequences, or ``None`` for none.

        Raises `TypeError` for one of another kind, `PreampStateError` if an engine's optimizer is
        missing.
        """
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

    def gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every gradient, by the parameter's name: of the model's side, and the master's."""
        masters = self.masters()
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, param in self.named_params():
            master = masters.get(id(param))
            sides = {"model": stored_grad(param)}
            if master is not None and master.twin is not None:
                sides["master"] = master.twin.held.gradient
            held = {side: grad for side, grad in sides.items() if grad is not None}
            if held:
                found[name] = held
        return found


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What an optimizer updates, in the order of its groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


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
        f"{what} got a {type(item).__name__}",
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
