# SPDX-License-Identifier: BSD-3-Clause
"""Where the gradients at hand come from: a scaled backward, a plain one, or one not understood."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from preamp.core.tensors import WeightMark, stored_grad, version_of


class Origin(Enum):
    """The backward that made a gradient."""

    PLAIN = "plain"
    GRAD_SCALER = "grad scaler"
    OTHER = "other"


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    origin: Origin
    gradient: WeightMark
    scaler: weakref.ref[Any] | None


class Gradients:
    """The gradients of parameters, as the latest backward left them.

    A gradient counts as coming from a backward only as long as nobody has written to it since, so
    a script that unscales by hand is never mistaken.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._marks: Any = WeakIdKeyDictionary()
        self._before: dict[int, tuple[int, int]] = {}

    def backward_begins(self, params: Iterable[torch.Tensor]) -> None:
        """Remember the gradients of ``params``, to see which ones the backward writes."""
        self._before = {id(p): state for p in params if (state := _state(p)) is not None}

    def backward_ends(
        self, params: Iterable[torch.Tensor], origin: Origin, scaler: object = None
    ) -> None:
        """Mark what the backward has written.

        Args:
            params: Those given to `backward_begins`.
            origin: What kind of backward it was.
            scaler: The ``GradScaler`` of its loss, if one was used.
        """
        reference = None if scaler is None else weakref.ref(scaler)
        for param in params:
            grad = stored_grad(param)
            if grad is None or grad.layout is not torch.strided:
                continue
            before = self._before.get(id(param))
            if before == _state(param):
                continue
            known = self._marks.get(param)
            if before is not None and known is not None and known.origin is not origin:
                # Added to gradients of another kind: the sum is neither.
                self._marks[param] = _Mark(Origin.OTHER, WeightMark(grad), None)
            else:
                self._marks[param] = _Mark(origin, WeightMark(grad), reference)
        self._before = {}

    def forget(self, params: Iterable[torch.Tensor]) -> None:
        """Know nothing of the gradients of ``params`` any more."""
        for param in params:
            self._marks.pop(param, None)

    def of(self, params: Iterable[torch.Tensor], origin: Origin) -> list[torch.Tensor]:
        """Those of ``params`` whose gradient comes from such a backward and is as it left it."""
        return [param for param in params if self._origin(param) is origin]

    def scaler_of(self, param: torch.Tensor) -> Any:
        """The ``GradScaler`` whose scale the gradient of ``param`` carries, or ``None``."""
        mark = self._marks.get(param)
        return None if mark is None or mark.scaler is None else mark.scaler()

    def _origin(self, param: torch.Tensor) -> Origin | None:
        mark, grad = self._marks.get(param), stored_grad(param)
        if mark is None or grad is None or not mark.gradient.is_of(grad):
            return None
        return mark.origin


def _state(param: torch.Tensor) -> tuple[int, int] | None:
    grad = stored_grad(param)
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), version_of(grad)
