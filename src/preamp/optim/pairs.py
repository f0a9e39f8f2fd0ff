# SPDX-License-Identifier: BSD-3-Clause
"""Half weights and their float32 masters as columns.

**The half weight is the truth; the master refines it.** Wherever a master's value is used, an
element is the master's where that rounds to the half weight bit for bit, and the half weight's
where it does not. So every write to a half weight counts, however it was made, and nobody has to
hear of it. What is written to a master is rounded into its half weight before either is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.tensors import WeightMarks, is_sharded, locals_of
from preamp.core.torch_private.shards import set_data
from preamp.kernels import Ops

_HOST = torch.device("cpu")


class WeightPairs:
    """Half weights and their float32 masters as columns, and which masters were written to."""

    def __init__(self, ops: Ops) -> None:
        """Start without rows."""
        self.ops = ops
        self.are_on_host = False  # whether masters lie on the host, wherever their weights do
        self.has_sharded = False  # whether any weight is a ``DTensor``
        self.halves: list[Any] = []
        self.masters: list[Any] = []
        self._marked = self.masters  # those that somebody may write to
        self._master_marks = WeightMarks()

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.halves)

    def add_row(self, half: torch.Tensor, master: torch.Tensor) -> None:
        """Add a half weight and its master."""
        self.has_sharded |= is_sharded(half)
        self.halves.append(half)
        self.masters.append(master)
        if self._marked is self.masters:
            self._master_marks.add(master)

    def home_of(self, half: torch.Tensor) -> torch.device:
        """Where the master of a half weight lies."""
        return _HOST if self.are_on_host else half.device

    def take_over(self, rows: Sequence[int]) -> None:
        """Let the masters of ``rows`` have what was written to their half weights.

        Through ``.data``: a penalty on a master may wait for its backward.
        """
        masters = locals_of([self.masters[row].detach() for row in rows])
        halves = locals_of([self.halves[row].detach() for row in rows])
        self.ops.take_over_([master.data for master in masters], halves)

    def come_along(self, row: int) -> None:
        """Let the master lie where the half weight has moved, or on the host.

        Raises `PreampStateError` for a half weight that was made wide.
        """
        half, master = self.halves[row], self.masters[row]
        if not is_half(half):
            raise self.became_wide(row)
        if master.device != self.home_of(half):
            set_data(master, master.detach().to(self.home_of(half)))
            self.note_written((row,))

    def became_wide(self, row: int) -> PreampStateError:
        """The error for a half weight that was given another dtype."""
        half = self.halves[row]
        return bad_state(
            f"A half parameter of shape {tuple(half.shape)} became {half.dtype} after "
            "FP16_Optimizer was made",
            "Parameters with a master keep their dtype",
            "Convert a copy of the model, or make the optimizer after converting it",
        )

    def follow(self) -> None:
        """Round masters that somebody wrote to into their half weights."""
        self.round(self._master_marks.changed(self._marked))

    def absorb(self) -> None:
        """Let all masters agree with their half weights before they are used."""
        for row in range(len(self)):
            self.come_along(row)
        self.follow()
        self.take_over(range(len(self)))

    def write_halves(self) -> None:
        """Round every master into its half weight, after a step."""
        self.round(range(len(self)))

    def round(self, rows: Sequence[int], *, quietly: bool = False) -> None:
        """Round the masters of ``rows`` into their half weights.

        ``quietly`` is as through ``.data``: nothing that a forward saved counts as written to.
        """
        if not rows:
            return
        halves = [self.halves[row].detach() for row in rows]
        if quietly:
            halves = [half.data for half in halves]
        with torch.no_grad():
            self.ops.cast_copy_([self.masters[row].detach() for row in rows], halves)
        self.note_written(rows)

    def note_written(self, rows: Iterable[int]) -> None:
        """Remember that the half weights of ``rows`` follow from their masters as of now."""
        self._master_marks.renew(self._marked, [*rows])
