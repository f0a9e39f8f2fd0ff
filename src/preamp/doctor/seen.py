# SPDX-License-Identifier: BSD-3-Clause
"""What has been seen of a run so far; all detectors look at it, only the examination writes it.

Nothing here keeps a model, an optimizer or a gradient alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from preamp.core.tensors import stored_grad, version_of
from preamp.doctor.rule import Place
from preamp.engine import Engine, find_engine


class Origin(Enum):
    """The backward that made a gradient."""

    PLAIN = "plain"
    GRAD_SCALER = "grad scaler"
    OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    origin: Origin
    state: tuple[int, int]
    scaler: weakref.ref[Any] | None
    was_half: bool


class Gradients:
    """The gradients of parameters, as the latest backward left them.

    A gradient counts as coming from a backward only as long as nobody has written to it since, so
    a script that unscales by hand is never mistaken.
    """

    def __init__(self) -> None:
        # By id: a thousand parameters are looked up in every step. One that takes a dead one's id
        # has another gradient.
        self._marks: dict[int, _Mark] = {}
        self._before: dict[int, tuple[int, int]] = {}

    def backward_begins(self, params: Iterable[torch.Tensor]) -> None:
        """Remember the gradients of ``params``, to see which ones the backward writes."""
        self._before = {id(p): state for p in params if (state := _state(p)) is not None}

    def backward_ends(
        self,
        params: Iterable[torch.Tensor],
        origin: Origin,
        scaler: object = None,
        was_half: Container[int] = (),
    ) -> None:
        """Mark what the backward has written to the ``params`` given to `backward_begins`.

        ``scaler`` is the ``GradScaler`` of its loss, if one was used; ``was_half`` has the ``id``
        of each parameter whose gradient was float16 on its way.
        """
        reference = None if scaler is None else weakref.ref(scaler)
        for param in params:
            key, state = id(param), _state(param)
            before = self._before.get(key)
            if state is None or state == before:
                continue
            known = self._marks.get(key) if before is not None else None
            half = key in was_half or (known is not None and known.was_half)
            if known is not None and known.origin is not origin:
                # Added to gradients of another kind: the sum is neither.
                self._marks[key] = _Mark(Origin.OTHER, state, None, half)
            else:
                self._marks[key] = _Mark(origin, state, reference, half)
        self._before = {}

    def marked(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``params`` whose gradient is as a backward has left it."""
        return [param for param in params if self._origin(param) is not None]

    def clipped(self, params: Iterable[torch.Tensor]) -> None:
        """Take clipping of `marked` gradients for no change of where they come from."""
        for param in params:
            mark, state = self._marks.get(id(param)), _state(param)
            if mark is not None and state is not None:
                self._marks[id(param)] = replace(mark, state=state)

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Know nothing of the gradients of ``params`` any more."""
        for param in params:
            self._marks.pop(id(param), None)

    def of(self, params: Iterable[torch.Tensor], origin: Origin) -> list[torch.Tensor]:
        """Those of ``params`` whose gradient comes from such a backward and is as it left it."""
        return [param for param in params if self._origin(param) is origin]

    def was_half(self, param: torch.Tensor) -> bool:
        """Whether the gradient of ``param``, or a part of it, was float16 on its way."""
        mark = self._marks.get(id(param))
        return mark is not None and mark.was_half

    def scaler_of(self, param: torch.Tensor) -> Any:
        """The ``GradScaler`` whose scale the gradient of ``param`` carries, or ``None``."""
        mark = self._marks.get(id(param))
        return None if mark is None or mark.scaler is None else mark.scaler()

    def _origin(self, param: torch.Tensor) -> Origin | None:
        mark = self._marks.get(id(param))
        return mark.origin if mark is not None and mark.state == _state(param) else None


def _state(param: torch.Tensor) -> tuple[int, int] | None:
    """What changes when the gradient is replaced or written to; ``None`` without a dense one."""
    grad = stored_grad(param)
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), version_of(grad)


@dataclass(slots=True)
class OptimizerFacts:
    """What became of one optimizer."""

    made: Place | None = None  # the line that built it
    begun: int = 0  # calls of ``step`` that reached it
    applied: int = 0  # those of them that updated weights
    skipped: int = 0  # calls that a ``GradScaler`` kept from it, or that it skipped by itself
    is_inside: bool = False  # whether a step is under way
    has_schedule: bool = False  # whether a scheduler has its learning rate
    # Whether a ``GradScaler`` has unscaled its gradients and not stepped yet.
    unscaled: bool = False


class Seen:
    """The objects of a run."""

    def __init__(self) -> None:
        # Every optimizer, with what became of it.
        self.optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerFacts] = (
            weakref.WeakKeyDictionary()
        )
        # Modules that were called by the script, not by another module, with gradients on.
        self.roots: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        # The ``id`` of leaves whose gradient was float16 on its way in one of the first backwards.
        self.through_half: set[int] = set()
        self.gradients = Gradients()  # where gradients come from
        self.scaled: Any = WeakIdKeyDictionary()  # losses whose backward has not run, with scaler
        self.stepping: list[torch.optim.Optimizer] = []  # those inside ``GradScaler.step``
        self.steps = 0  # of optimizers so far; those that an engine skips are not among them
        self.compiles = False  # whether the script has called ``torch.compile``
        self.notes: list[str] = []  # what could not be looked at, in sentences

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
