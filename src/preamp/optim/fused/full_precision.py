# SPDX-License-Identifier: BSD-3-Clause
"""float32 copies of half parameters that an optimizer keeps by itself, outside of any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from preamp.kernels import backend
from preamp.optim.fused.checks import check_has_state
from preamp.optim.pairs import WeightPairs

MASTER = "master_param"
"""State key of the copy; in the state, so that it is in checkpoints too."""


class FullPrecision:
    """Makes the copies on first use and follows what is written to the parameters.

    Made at the first step rather than at construction, so that weights loaded or broadcast in
    between count. Later writes (a loaded checkpoint, weight clipping, ``p.data = ...``) are taken
    over. Writes through ``p.data`` (but not assignments to it) leave no trace and stay unseen.
    """

    def __init__(self, wants: Callable[[torch.Tensor], bool]) -> None:
        """Keep copies of the parameters for which ``wants``, a question of dtype, is true."""
        self._wants = wants
        self._pairs = WeightPairs(backend())
        self._rows: dict[int, int] = {}  # by id of the parameter

    def of(self, param: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        """The copy of ``param``, up to date, in its ``state``; without one it stands for itself."""
        if not self._wants(param):
            return param
        is_made = MASTER not in state
        if is_made:
            check_has_state(param)
            state[MASTER] = param.detach().float()
        pairs, row = self._pairs, self._rows.get(id(param))
        is_new = row is None
        if row is None:
            row = self._rows[id(param)] = len(pairs)
            pairs.add_row(param, state[MASTER])
        pairs.masters[row] = state[MASTER]  # another one where state was loaded
        if not is_made and (is_new or pairs.is_written(row)):
            pairs.take_over(row)
        pairs.note_written((row,))
        return state[MASTER]

    def of_all(
        self, params: Sequence[torch.Tensor], state: Mapping[Any, dict[str, Any]]
    ) -> list[torch.Tensor]:
        """`of` each of several parameters that have copies; ``state`` is the optimizer's."""
        if len(self._pairs) > len(state) or any([id(p) not in self._rows for p in params]):
            self._forget_all_but(state)
        return [self.of(param, state[param]) for param in params]

    def _forget_all_but(self, state: Mapping[Any, dict[str, Any]]) -> None:
        """Let go of parameters that the optimizer has no state of any more."""
        for row in reversed(range(len(self._pairs))):
            if self._pairs.halves[row] not in state:
                self._pairs.remove_row(row)
        self._rows = {id(half): row for row, half in enumerate(self._pairs.halves)}

    def note_written(self, params: Sequence[torch.Tensor]) -> None:
        """Remember that each of several parameters equals its rounded copy as of now."""
        self._pairs.note_written([self._rows[id(param)] for param in params])
