# SPDX-License-Identifier: BSD-3-Clause
"""What an engine is made of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from preamp.casting import PATCH_LOCK
from preamp.casting.modules import Conversion
from preamp.core.link import Link
from preamp.core.splits import Splits
from preamp.core.undo import UndoStack
from preamp.engine import refusals
from preamp.engine.events import Events
from preamp.engine.ledger import Ledger
from preamp.engine.recording import Recording
from preamp.engine.reductions import Reductions
from preamp.engine.session import OptimizerSession, make_sessions
from preamp.engine.sharding import Unreduced
from preamp.kernels import Ops
from preamp.optim import Twin
from preamp.policy import Policy
from preamp.scaling import DynamicScale, LossScaler, StaticScale


class ParameterNames:
    """The models' names of parameters, as ``"1.decoder.weight"``, or places in optimizers."""

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> None:
        """Read the names once; parameters that come later are looked up by place."""
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        for index, model in enumerate(models):
            prefix = f"{index}." if len(models) > 1 else ""
            for name, param in model.named_parameters():
                self._names.setdefault(id(param), prefix + name)

    def of(self, param: torch.Tensor) -> str:
        """Return the name of ``param``."""
        known = self._names.get(id(param))
        if known is not None:
            return known
        for index, optimizer in enumerate(self._optimizers):
            for group_index, group in enumerate(optimizer.param_groups):
                for place, own in enumerate(group["params"]):
                    if own is param:
                        return f"optimizers[{index}].param_groups[{group_index}][{place}]"
        return f"a parameter of shape {tuple(param.shape)}"

    def is_owned(self, param: torch.Tensor) -> bool:
        """Whether a model has ``param``."""
        return id(param) in self._names


def _first_device(
    models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> torch.device:
    """The device of the first parameter."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    every = chain(*(m.parameters() for m in models), *(g["params"] for g in groups))
    first = next(every, None)
    return torch.device("cpu") if first is None else first.device


@dataclass(frozen=True, slots=True)
class Late:
    """Gradients that a scaler has not heard of; their steps tell it at the latest."""

    sessions: frozenset[OptimizerSession]  # that have them
    is_due: bool  # whether it has to react when all of these have stepped


class EngineCore:
    """The parts of an `Engine`."""

    closed = False  # whether `Engine.close` was called
    has_scaled = False  # whether there was a ``scale_loss`` block
    is_exact = False  # whether the models' parameters are the masters, for a block

    def __init__(
        self,
        policy: Policy,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        kernels: tuple[Ops, Splits],
        num_losses: int,
        recording: Recording,
    ) -> None:
        """Collect the parts; ``initialize`` does the converting and hooking."""
        self.policy = policy  # the frozen decisions
        self.models = tuple(models)
        self.optimizers = tuple(optimizers)
        self.names = ParameterNames(self.models, self.optimizers)
        # Whether functions are cast one by one (O1, O4)
        self.casts_functions = policy.enabled and policy.patch_torch_functions
        self.undo = UndoStack()  # takes back what was done to models and optimizers
        self.process_undo = UndoStack()  # takes back what was done to torch
        self.cast_undo = UndoStack()  # the part of it that ends casts of functions; scaling goes on
        self.process_undo.push(self.cast_undo.unwind)
        self.conversion = Conversion()  # what was cast in the models
        self.ops, splits = kernels
        self.device = _first_device(self.models, self.optimizers)  # of loss scales and flags
        self.scalers = [_make_scaler(policy, self.device) for _ in range(num_losses)]
        limit, told, names = policy.max_consecutive_skips, recording.verbosity, self.names.of
        self.ledger = Ledger(self.scalers, names, limit=limit, verbosity=told)
        self.events = Events()  # whom to tell what happens
        self.reductions = Reductions(self.models, splits)  # which gradients ranks have exchanged
        # Of each optimizer, by its ``id``
        masters, storage = policy.master_weights, policy.storage
        self.sessions = make_sessions(
            self.optimizers, self.ops, names, self.reductions, has_masters=masters, storage=storage
        )
        self.unreduced = Unreduced(self.models, self.optimizers, self.reductions)
        # Scalers that have not heard of gradients that ranks have yet to reduce
        self.late_scalers: dict[LossScaler, Late] = {}
        # Memory for gradients that wait there, which stays from step to step, by ``id`` of the leaf
        self.kept_on_host: dict[int, torch.Tensor] = {}
        self._model_undo = {id(model): UndoStack() for model in self.models}
        # Taken away last, so that an engine whose end was interrupted can still be found
        self._links = {id(thing): UndoStack() for thing in (*self.models, *self.optimizers)}
        self._end: UndoStack | None = None  # what is left to do in `close`, once it has begun
        self._on_close: list[Callable[[], None]] = []
        self.link: Link[Any] = Link(self)  # leads here until the engine is closed
        # Casts of torch's functions outlive nobody: an engine that is dropped without close()
        # takes them back when it is collected. The stack must not refer to the engine.
        unwind = self.process_undo.unwind
        self._when_dropped = weakref.finalize(self, PATCH_LOCK.run_or_leave, unwind)
        self._when_dropped.atexit = False

    def scaler(self, loss_id: int) -> LossScaler:
        """Return the scaler of loss ``loss_id``."""
        if 0 <= loss_id < len(self.scalers):
            return self.scalers[loss_id]
        raise refusals.no_such_loss(loss_id, len(self.scalers))

    def twin_of(self, half: torch.Tensor) -> Twin | None:
        """Return the pair of a model parameter and its master, or ``None``."""
        found = (session.table.of_half(half) for session in self.sessions.values())
        return next((twin for twin in found if twin is not None), None)

    @property
    def scales_losses(self) -> bool:
        """Whether any loss has a scale other than the static 1."""
        return not all(scaler.is_identity for scaler in self.scalers)

    def updated_params(self) -> frozenset[int]:
        """``id`` of every parameter of the models that an optimizer of the engine updates."""
        return frozenset(
            id(param) for session in self.sessions.values() for param in session.model_params()
        )

    @property
    def has_masters(self) -> bool:
        """Whether any parameter has a float32 master."""
        return any(session.table.twins for session in self.sessions.values())

    def check_outside_blocks(self, what: str) -> None:
        """Raise `PreampStateError` inside of a ``scale_loss`` block: gradients are incomplete.

        A backward that a `GradScaler` has left open ends.
        """
        for session in self.sessions.values():
            session.check_outside_block(what)

    def check_between_steps(self, what: str) -> None:
        """Raise `PreampStateError` inside of a block, and until a step has used its gradients.

        Gradients that were dropped or zeroed since count no more.
        """
        self.check_outside_blocks(what)
        for session in self.sessions.values():
            if session.is_within_step():
                raise refusals.within_step(what)


def _make_scaler(policy: Policy, device: torch.device) -> LossScaler:
    """Return a new scaler as the policy wants it, on ``device``."""
    if policy.loss_scale == "dynamic":
        rule = DynamicScale(
            min_scale=policy.min_loss_scale, max_scale=policy.max_loss_scale or 2.0**24
        )
        return LossScaler(rule, device)
    return LossScaler(StaticScale(init_scale=policy.loss_scale), device)
