# SPDX-License-Identifier: BSD-3-Clause
"""Half weights and their float32 masters as columns, and who wrote to which since when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.tensors import WeightMarks, is_sharded, local_of
from preamp.core.torch_private.shards import set_data, sharded_as
from preamp.kernels import Ops


def take_over(half: torch.Tensor, wide: torch.Tensor, rounded: torch.Tensor | None = None) -> None:
    """Take the values of ``half`` into ``wide`` where they are not those of ``wide``, rounded.

    Elements that still equal their rounded copy keep its precision. ``rounded`` is that copy where
    it is rounded otherwise than torch rounds.
    """
    if rounded is None:
        rounded = wide.to(half.dtype)
    wide.copy_(torch.where(rounded == half, wide, half.float()))


_HOST = torch.device("cpu")


class WeightPairs:
    """Half weights and their float32 masters as columns, and who wrote to which since when.

    The invariant: wherever somebody can see it, a half weight is its rounded master.
    """

    def __init__(self, ops: Ops) -> None:
        """Start without rows."""
        self.ops = ops
        self.packs = False  # whether masters are packed between steps, and round ties away
        self.are_on_host = False  # whether masters lie on the host, wherever their weights do
        self.has_sharded = False  # whether any weight is a ``DTensor``
        self.halves: list[Any] = []
        self.masters: list[Any] = []
        self._half_marks = WeightMarks()
        self._master_marks = WeightMarks()
        # What changes with a master: itself, or what is kept in its place
        self.kept: list[Any] = self.masters
        self._are_alike: bool | None = None  # unknown
        self._is_rounded: list[bool] = []  # by the update itself, since the last `write_halves`

    def __len__(self) -> int:
        """How many rows there are."""
        return len(self.halves)

    def add_row(self, half: torch.Tensor, master: torch.Tensor) -> None:
        """Add a half weight that is ``master``, rounded."""
        self.has_sharded |= is_sharded(half)
        self._are_alike = None
        self.halves.append(half)
        self.masters.append(master)
        if self.kept is not self.masters:
            self.kept.append(master)
        self._is_rounded.append(False)
        self._half_marks.add(half)
        self._master_marks.add(master)

    def remove_row(self, row: int) -> None:
        """Forget a row."""
        self._are_alike = None
        if self.kept is not self.masters:
            del self.kept[row]
        del self.halves[row], self.masters[row], self._is_rounded[row]
        self._half_marks.remove(row)
        self._master_marks.remove(row)

    def home_of(self, half: torch.Tensor) -> torch.device:
        """Where the master of a half weight lies, or what is kept in its place."""
        return _HOST if self.are_on_host else half.device

    def take_over(self, row: int) -> None:
        """Let the master have what was written to the half weight; see `take_over`.

        A model moved to another device takes the masters along, but for those on the host. One
        made wide is refused.
        """
        half, master = self.halves[row].detach(), self.masters[row]
        if not is_half(half):
            raise self.became_wide(row)
        with torch.no_grad():
            half = half.to(self.home_of(half))
            if master.device != half.device:
                self._are_alike = None
                set_data(master, master.detach().to(half.device))
            rounded = self._ties_away(master.detach(), half) if self.packs else None
            # Through `.data`: a penalty on the master may wait for its backward.
            take_over(half, master.detach().data, rounded)

    def _ties_away(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """``value`` rounded as packed masters are, where ``like`` is and of its dtype."""
        wide = local_of(value).to(local_of(like).device, torch.float32)
        half = torch.empty_like(wide, dtype=like.dtype)
        self.ops.split_([wide], [half], [None])
        return sharded_as(half, value) if is_sharded(value) else half

    @property
    def are_alike(self) -> bool:
        """Whether all rows have the same dtypes and lie on one device."""
        if self._are_alike is None:
            kinds = {(half.dtype, half.device) for half in self.halves}
            self._are_alike = len(kinds) == 1
        return self._are_alike

    def is_written(self, row: int) -> bool:
        """Whether the half weight was written to from outside, or given other memory."""
        return self._half_marks.is_changed(row, self.halves[row])

    def became_wide(self, row: int) -> PreampStateError:
        """The error for a half weight that was given another dtype."""
        half = self.halves[row]
        return bad_state(
            f"A half parameter of shape {tuple(half.shape)} became {half.dtype} after "
            "FP16_Optimizer was made",
            "Parameters with a master keep their dtype",
            "Convert a copy of the model, or make the optimizer after converting it",
        )

    def absorb(self) -> None:
        """Let masters take over what was written to their half weights from outside.

        Without this the next step would restore the old values. Writes through ``p.data`` (but
        not assignments to it) leave no trace in torch, and stay unseen.
        """
        rows = self._half_marks.changed(self.halves)
        for row in rows:
            self.take_over(row)
        if rows:
            self._half_marks.renew(self.halves, rows)

    def write_halves(self) -> None:
        """Round every master into its half weight; the invariant after every step.

        Fused optimizers have done so in their update.
        """
        rounded, self._is_rounded = self._is_rounded, [False] * len(self)
        changed = self._master_marks.written(self.kept) if True in rounded else ()
        if changed or False in rounded:
            again = set(changed)
            self.round([row for row, done in enumerate(rounded) if not done or row in again])

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

    def note_written(self, rows: Sequence[int]) -> None:
        """Remember that the half weights of ``rows`` equal their rounded masters as of now."""
        self._half_marks.renew(self.halves, rows)
        self._master_marks.renew(self.kept, rows)

    def note_rounded(self, start: int, stop: int) -> None:
        """An update itself has rounded new masters into half weights, of consecutive rows."""
        self._is_rounded[start:stop] = [True] * (stop - start)
        self._half_marks.advance(self.halves, start, stop)
        self._master_marks.advance(self.kept, start, stop)
