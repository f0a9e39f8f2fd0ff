# SPDX-License-Identifier: BSD-3-Clause
"""Where the gradients at hand come from: a scaled backward, a plain one, or one not understood."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from preamp.core.tensors import stored_grad, version_of


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
        """Start without any."""
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
