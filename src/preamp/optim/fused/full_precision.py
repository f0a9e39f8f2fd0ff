# SPDX-License-Identifier: BSD-3-Clause
"""float32 copies of half parameters that an optimizer keeps by itself, outside of any engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from preamp.core.tensors import WeightMark

MASTER = "master_param"
"""State key of the copy; in the state, so that it is in checkpoints too."""


class FullPrecision:
    """Makes the copies on first use and follows what is written to the parameters.

    Made at the first step rather than at construction, so that weights loaded or broadcast in
    between count. Later writes (a loaded checkpoint, weight clipping, ``p.data = ...``) are taken
    over; elements that still equal their rounded copy keep its precision. Writes through ``p.data``
    (but not assignments to it) leave no trace and stay unseen.
    """

    def __init__(self, wants: Callable[[torch.Tensor], bool]) -> None:
        """Keep copies of the parameters for which ``wants``, a question of dtype, is true."""
        self._wants = wants
        self._written: dict[int, WeightMark] = {}

    def of(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The copy of ``param``, up to date; a parameter without one stands for itself.

        Args:
            param: Parameter of the model.
            state: The optimizer's state of it; mutated.
        """
        if not self._wants(param):
            return param
        value = param.detach()
        if MASTER not in state:
            state[MASTER] = value.float()
        elif not self._is_unwritten(param):
            master: torch.Tensor = state[MASTER]
            same = master.to(value.dtype) == value
            master.copy_(torch.where(same, master, value.float()))
        self._mark(param)
        return state[MASTER]

    def halves(self, params: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The parameters that an update of their copies has to be rounded into."""
        return [param if self._wants(param) else None for param in params]

    def note_written(self, params: Sequence[torch.Tensor]) -> None:
        """Remember that each parameter equals its rounded copy as of now."""
        for param in params:
            if self._wants(param):
                self._mark(param)

    def _is_unwritten(self, param: torch.Tensor) -> bool:
        mark = self._written.get(id(param))
        return mark is not None and mark.is_of(param)

    def _mark(self, param: torch.Tensor) -> None:
        mark = self._written.get(id(param))
        if mark is None:
            self._written[id(param)] = WeightMark(param)
        else:
            mark.renew(param)
