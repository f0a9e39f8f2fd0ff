# SPDX-License-Identifier: BSD-3-Clause
"""What has been seen of a run so far; all detectors look at it, only the examination writes it.

Nothing here keeps a model, an optimizer or a gradient alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from preamp.doctor.gradients import Gradients
from preamp.doctor.rule import Place
from preamp.engine import Engine, find_engine


@dataclass(slots=True)
class OptimizerFacts:
    """What became of one optimizer.

    Attributes:
        made: The line that built it.
        begun: Calls of ``step`` that reached it.
        applied: Those of them that updated weights.
        skipped: Calls that a ``GradScaler`` kept from it, or that it skipped by itself.
        is_inside: Whether a step is under way.
        has_schedule: Whether a scheduler has its learning rate.
        unscaled: Whether a ``GradScaler`` has unscaled its gradients and not stepped yet.
    """

    made: Place | None = None
    begun: int = 0
    applied: int = 0
    skipped: int = 0
    is_inside: bool = False
    has_schedule: bool = False
    unscaled: bool = False


class Seen:
    """The objects of a run.

    Attributes:
        optimizers: Every optimizer, with what became of it.
        roots: Modules that were called by the script, not by another module, with gradients on.
        through_half: The ``id`` of each leaf whose gradient was float16 on its way in one of the
            first backwards.
        gradients: Where gradients come from.
        scaled: Scaled losses, with the scaler, whose backward has not run.
        stepping: Optimizers inside ``GradScaler.step``.
        steps: Optimizer steps so far; those that an engine skips are not among them.
        compiles: Whether the script has called ``torch.compile``.
        notes: What could not be looked at, in sentences.
    """

    def __init__(self) -> None:
        """Nothing has been seen."""
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerFacts] = (
            weakref.WeakKeyDictionary()
        )
        self.roots: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.through_half: set[int] = set()
        self.gradients = Gradients()
        self.scaled: Any = WeakIdKeyDictionary()
        self.stepping: list[torch.optim.Optimizer] = []
        self.steps = 0
        self.compiles = False
        self.notes: list[str] = []

    def facts(self, optimizer: torch.optim.Optimizer) -> OptimizerFacts:
        """What is known of ``optimizer``; it may have been unpickled, and never built."""
        return self.optimizers.setdefault(optimizer, OptimizerFacts())

    def params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The model's parameters that ``optimizer`` updates: halves in place of their masters."""
        engine = find_engine(optimizer)
        session = None if engine is None else engine.sessions.get(id(optimizer))
        masters = None if session is None else session.masters
        if session is not None and masters is not None:
            yield from session.direct_params()
            yield from (twin.half for twin in masters)
            return
        for group in optimizer.param_groups:
            yield from group["params"]

    def all_params(self) -> list[torch.Tensor]:
        """The parameters of all optimizers, each once."""
        found = {
            id(param): param
            for optimizer in tuple(self.optimizers)
            if hasattr(optimizer, "param_groups")
            for param in self.params(optimizer)
        }
        return list(found.values())

    def take_scaler(self, roots: Sequence[torch.Tensor]) -> object:
        """The scaler of the loss that a backward from ``roots`` starts from; asked for once.

        A script may add up scaled losses or divide one. So if none of ``roots`` is a scaled loss,
        one that was scaled since the last backward is taken to be part of them.
        """
        known = [root for root in roots if root in self.scaled]
        scalers = [self.scaled[root] for root in known] or list(self.scaled.values())
        if known:
            for root in known:
                del self.scaled[root]
        else:
            self.scaled.clear()
        return scalers[0] if scalers else None

    def engines(self) -> list[Engine]:
        """The open engines of all optimizers."""
        found = {id(e): e for o in tuple(self.optimizers) if (e := find_engine(o)) is not None}
        return list(found.values())

    def name(self, thing: torch.Tensor | nn.Module) -> str:
        """The qualified name of a parameter or module below the roots."""
        for root in tuple(self.roots):
            named: list[tuple[str, object]] = [*root.named_parameters()]
            named += cast("list[tuple[str, object]]", [*root.named_modules()])
            for name, own in named:
                if own is thing:
                    return name or type(root).__name__
        if isinstance(thing, nn.Module):
            return type(thing).__name__
        return f"a parameter of shape {tuple(thing.shape)}"
