# SPDX-License-Identifier: BSD-3-Clause
"""The weight table: half parameters, their float32 masters, and what is known of both, as columns.

A row is one weight in two precisions. What happens in a step happens to all rows alike, so each
method makes a few passes over whole columns, at the speed of the interpreter's own loops, and
Python looks only at rows that differ from what was noted.

A master's gradient is lazy. After a backward the half gradient stays where autograd put it, on the
half parameter, and the table notes what unscales it. Reading the ``grad`` of one master makes
those of all, since whoever reads one reads all; a script that reads none never pays for them.

What the script does to half gradients in between counts: setting one to ``None`` drops it, zeroing
it zeroes it, earlier gradients that were accumulated included. Any other change is refused while a
loss scale is on them, since clipping a scaled gradient would be wrong without anyone noticing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_, sub
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.errors import PreampStateError, bad_state, message
from preamp.core.ranks import has_process_group
from preamp.core.tensors import (
    WeightMarks,
    are_same,
    devices_of,
    find_again,
    grad_of,
    is_capturing,
    is_sharded,
    kinds_of,
    layout_of,
    local_of,
    plain_versions,
    storage_key,
    store_grad,
    stored_grad,
    version_of,
    versions_of,
)
from preamp.core.undo import run_to_end
from preamp.kernels import Ops
from preamp.kernels.shards import set_data, sharded_as
from preamp.kernels.stored import are_beyond_float16
from preamp.optim.direct import Placeholders, is_zeroed
from preamp.optim.master_parameter import (
    PACKED_KINDS,
    MasterParameter,
    master_parameter,
    packed_kind,
)
from preamp.optim.part import Holding, Part
from preamp.optim.rewritten import Agree, common_factors, likely_factor, rewritten_in_half

if TYPE_CHECKING:
    from torch.nn import Parameter


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What is known of a half gradient besides its content; the rows of one backward share one."""

    # What unscales it, a float32 scalar; ``None`` once the master's gradient has it
    factor: torch.Tensor | None
    # Whether no loss scale is on it, so that what the script does to it means what it says
    is_plain: bool = False
    is_alone: bool = True  # whether the master's gradient, if there is one, was made of it alone
    is_spent: bool = False  # whether a step has used it up
    is_zeroed: bool = False  # whether the script zeroed it
    is_shown: bool = False  # whether the script sees it unscaled; see `WeightTable.show`
    unclipped: torch.Tensor | None = None  # the factor that it had before it was clipped, if it was

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from it and clips nothing."""
        return self.factor if self.unclipped is None else self.unclipped


_STEPS_WATCHED = 10  # a script that writes to gradients does so from its first steps on
_BOTH_FORMS = 1 << 22  # elements whose masters are split, or made, before the old ones go
_GUESSED_BY = 32  # values of a gradient that suggest a factor
_SPENT = {is_plain: Record(None, is_plain=is_plain, is_spent=True) for is_plain in (False, True)}


@dataclass(frozen=True, slots=True, eq=False)
class RowMemo:
    """What the table knows of one row's gradients besides these, to resume in another process."""

    record: Record | None  # of the half gradient as it is now, or ``None``
    is_raw: bool | None  # whether it still is what a block left scaled; ``None`` if none did
    is_open: bool  # whether a backward is under way
    is_carried: bool  # whether the half gradient holds the earlier one too
    zeros_aside: bool  # whether zeros are away meanwhile


@dataclass(slots=True, eq=False)
class Rewriting:
    """What comes of writing to scaled half gradients, for all tables of an engine.

    It is refused, or, as in Apex, has no effect. What was written over is lost, so for that the
    gradients of masters are made as soon as a backward has ended: while it is not known whether the
    script writes, and from then on if it does.
    """

    is_ignored: bool = False
    was_seen: bool = False  # and warned of


class Twin:
    """One row: a half parameter and its master."""

    __slots__ = ("dtype", "half", "held", "master", "name", "row", "stays_wide", "table")

    table: WeightTable  # where the row is
    row: int  # its number there

    def __init__(self, half: Parameter, data: torch.Tensor, name: str) -> None:
        """Make the master of ``half`` from ``data``, not copied; the row has no table yet."""
        self.half = half  # the model's parameter, float16 or bfloat16
        self.dtype = half.dtype
        self.name = name
        self.stays_wide = False  # whether the master is float32 whatever the storage
        # The optimizer's parameter, float32
        self.master = master_parameter(data, requires_grad=half.requires_grad)
        self.master.twin = self
        cast("Any", self.master).register_post_accumulate_grad_hook(_note_accumulated)
        # How much of the weight the master has, and the gradient
        self.held = Holding(self.master, half, name)

    @property
    def is_shared(self) -> bool:
        """Whether several optimizers update the master."""
        return len(self.table.owners) > 1

    def gradient(self) -> torch.Tensor | None:
        """The whole unscaled float32 gradient, made if need be."""
        self.table.bring_up_to_date()
        return self.held.gradient

    def own_gradient(self) -> torch.Tensor | None:
        """What the optimizer reads as the master's gradient; see `Holding.own_gradient`."""
        if self.held.part is None:
            return self.gradient()
        return self.held.own_gradient(self.pending, self.gradient, self.table.ops)

    def value(self) -> torch.Tensor:
        """All of the master, which stays packed if it is; see `Holding.value`."""
        if self.table.lows[self.row] is None or self.held.part is not None:
            return self.held.value()
        return self.table.joined(self.row)

    @property
    def kept(self) -> torch.Tensor:
        """What the master takes memory for: itself, or what is beside the half weight."""
        low = self.table.lows[self.row]
        return self.master if low is None else low

    @property
    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The half gradient and its factor, if it is not in the master's gradient yet."""
        if self.table.is_open:
            return None
        self.table.reconcile()
        grad, record = self.table.grads[self.row], self.table.records[self.row]
        if grad is None or record is None or record.factor is None:
            return None
        return grad, record.factor

    @property
    def is_shown(self) -> bool:
        """Whether the half gradient is shown unscaled; see `WeightTable.show`."""
        return _is_shown(self.table.records[self.row])

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from a pending gradient, without what clips it."""
        record = self.table.records[self.row]
        return None if record is None else record.unscales

    def keep_part(self, part: Part | None, value: torch.Tensor) -> None:
        """Let the master have ``part`` of the weight from now on; see `Holding.keep_part`."""
        self.table.has_parts = self.table.may_have_bases = True
        self.held.keep_part(part, value)

    def forget_half_gradient(self) -> None:
        """The master's gradient was assigned: what the half gradient held no longer counts.

        Assigning ``None`` this way is how ``optimizer.zero_grad`` reaches the model's side.
        """
        self.half.grad = None
        self.table.note(self.row, None)
        self.table.zeros_aside.discard(self.row)

    def settle(self) -> None:
        """Take over what was written to the half weight; see `WeightTable.settle`."""
        self.table.settle(self.row)

    def note_written(self) -> None:
        """Remember that the half weight equals the rounded master as of now."""
        self.table.note_written((self.row,))

    def memo(self) -> RowMemo:
        """What to keep beside the gradients, to resume in another process."""
        table, row = self.table, self.row
        if not table.is_open:
            table.reconcile()
            if _is_shown(table.records[row]) and not _is_made(table.records[row]):
                table.materialize([row])  # what the script sees is less than there is
        raw = None if table.raw is None else table.raw[row]
        now = self.half.grad
        is_raw = None if raw is None else now is not None and version_of(now) == raw
        is_carried, zeros_aside = row in table.carried, row in table.zeros_aside
        return RowMemo(table.records[row], is_raw, table.is_open, is_carried, zeros_aside)

    def recall(self, memo: RowMemo) -> None:
        """Resume from there; the gradients are in place again."""
        table, row, now = self.table, self.row, self.half.grad
        table.note(row, now, None if now is None else memo.record)
        table.is_open = memo.is_open
        for is_one, rows in (
            (memo.is_carried, table.carried),
            (memo.zeros_aside, table.zeros_aside),
        ):
            rows.discard(row)
            if is_one:
                rows.add(row)
        if memo.is_raw is not None:
            if table.raw is None:
                table.raw = [None for _ in table.halves]
            table.raw[row] = -1 if now is None or not memo.is_raw else version_of(now)


def _note_accumulated(master: Any) -> None:
    """A backward has reached the master itself, as of a penalty on masters."""
    if master.twin is not None:
        master.twin.table.may_have_bases = True
        master.twin.table.changes += 1


def take_over(half: torch.Tensor, wide: torch.Tensor, rounded: torch.Tensor | None = None) -> None:
    """Take the values of ``half`` into ``wide`` where they are not those of ``wide``, rounded.

    Elements that still equal their rounded copy keep its precision. ``rounded`` is that copy where
    it is rounded otherwise than torch rounds.
    """
    if rounded is None:
        rounded = wide.to(half.dtype)
    wide.copy_(torch.where(rounded == half, wide, half.float()))


class WeightPairs:
    """Half weights and their float32 masters as columns, and who wrote to which since when.

    The invariant: wherever somebody can see it, a half weight is its rounded master.
    """

    def __init__(self, ops: Ops) -> None:
        """Start without rows."""
        self.ops = ops
        self.packs = False  # whether masters are packed between steps, and round ties away
        self.has_parts = False  # whether ranks share masters
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

    def take_over(self, row: int) -> None:
        """Let the master have what was written to the half weight; see `take_over`.

        A model moved to another device takes the masters along. One made wide is refused.
        """
        half, master = self.halves[row].detach(), self.masters[row]
        if not is_half(half):
            raise self.became_wide(row)
        with torch.no_grad():
            if master.device != half.device:
                self._are_alike = None
                set_data(master, master.detach().to(half.device))
            rounded = self._ties_away(master.detach(), half) if self.packs else None
            # Through `.data`: a penalty on the master may wait for its backward.
            take_over(self.own_part(row, half), master.detach().data, rounded)

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

    def own_part(self, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a weight that the master has."""
        del row
        return tensor

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
        if self.has_parts:
            halves = [self.own_part(row, half) for row, half in zip(rows, halves, strict=True)]
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


class WeightTable(WeightPairs):
    """The rows that the same optimizers update, and the books on their gradients and weights.

    One backward goes `begin`, then `put_back`, or `stand_in` and `collect` (`note_raw` where it
    leaves its gradients scaled). Between backwards `reconcile` takes in what the script has done.
    """

    def __init__(
        self,
        ops: Ops,
        owners: frozenset[int] = frozenset(),
        rewriting: Rewriting | None = None,
        *,
        packs: bool = False,
    ) -> None:
        """Start without rows."""
        super().__init__(ops)
        self.owners = owners  # of which optimizers
        self.packs = packs
        # Of each row what is beside its half weight, int16, where the master is packed. Of a
        # sharded tensor this rank's part.
        self.lows: list[torch.Tensor | None] = []
        self._rewriting = rewriting or Rewriting()
        self._steps = 0  # with them watched
        self._is_rewriting = False  # whether the script wrote other things than zeros
        self.twins: list[Twin] = []  # the rows as objects
        # Half gradients as they were last seen, and their versions then
        self.seen: list[torch.Tensor | None] = []
        self.versions: list[int] = []
        self.grads = self.seen  # what masters take: these, but for those that are shown unscaled
        # What is known of these; ``None`` where there was none
        self.records: list[Record | None] = []
        # Whether a backward is under way. Its half gradients are scaled and incomplete.
        self.is_open = False
        # Rows whose half gradient holds the earlier one too, and those whose new gradient is added
        # to a zeroed one meanwhile
        self.carried, self.zeros_aside = set[int](), set[int]()
        # Versions of gradients left scaled, or ``None`` if none were
        self.raw: list[int | None] | None = None
        # Whether the next backward compares every half weight with its master, and is the first
        self.compares = self.is_fresh = True
        self.may_have_bases = False  # whether any master may have a float32 gradient
        self.changes = 0  # differs once gradients may be others than before
        self._arrived: list[torch.Tensor | None] | None = None
        self.loaded: set[int] = set()  # rows whose master was loaded
        self._written: set[Twin] = set()  # whose master a script wrote to, not packed since
        self._placeholders = Placeholders()
        self._plain: dict[torch.device, Record] = {}
        self._base_versions: dict[int, int] = {}  # of masters' gradients, of rows that are shown
        # Of gradients taken as a script has written them, and of masters that keep float32
        self._has_warned = self._has_warned_of_lows = False
        self.is_stepping = False  # whether an optimizer may be writing to masters
        # By row, what masters were, rounded, when somebody was given their memory
        self._handed_out: dict[int, torch.Tensor] = {}
        self._replacing: set[int] = set()  # rows whose half weight counts, and no digit beyond it
        self._replaced: set[int] | None = set()  # those so far; ``None`` once that was warned of
        self._shares_versions = False  # whether a write to one half weight counts for others too
        self._nothing: dict[torch.device, torch.Tensor] = {}  # nan, of which packed masters are

    def add(self, twin: Twin) -> None:
        """Add a row whose half weight is its rounded master."""
        twin.table, twin.row = self, len(self)
        self.may_have_bases |= twin.held.gradient is not None
        self.add_row(twin.half, twin.master)
        self.twins.append(twin)
        self.lows.append(None)
        for column in self._gradient_columns():
            column.append(None)
        self.versions.append(-1)
        self.records.append(None)
        if self.raw is not None:
            self.raw.append(None)

    def hand_over(self, twin: Twin, other: WeightTable) -> None:
        """Let another table have the row, with all that is known of its weight and gradient.

        Not while a backward is under way, or gradients are left scaled, in either of them.
        """
        self.settle(twin.row)
        memo = twin.memo()
        is_set = not self.is_fresh or twin.row in self.loaded or twin in self._written
        self._remove(twin)
        other.add(twin)
        other._shares_versions |= self._shares_versions
        if is_set:
            other.loaded.add(twin.row)
        twin.recall(memo)
        if _is_shown(memo.record):
            other.show()

    def _remove(self, twin: Twin) -> None:
        gone = twin.row
        self.make()
        self.absorb()
        self.remove_row(gone)
        columns = (self.twins, self.lows, *self._gradient_columns(), self.versions, self.records)
        for column in columns:
            del column[gone]
        self._arrived = None
        self.changes += 1
        self._written.discard(twin)
        for rows in (self.loaded, self.carried, self.zeros_aside):
            kept = {row - (row > gone) for row in rows if row != gone}
            rows.clear()
            rows.update(kept)
        versions = self._base_versions.items()
        self._base_versions = {row - (row > gone): v for row, v in versions if row != gone}
        for row, other in enumerate(self.twins):
            other.row = row

    # -- gradients: what the script sees and does -----------------------------------------------

    def _gradient_columns(self) -> list[list[torch.Tensor | None]]:
        return [self.seen, self.grads] if self.is_showing else [self.seen]

    def note(self, row: int, grad: torch.Tensor | None, record: Record | None = None) -> None:
        """Note the half gradient of one row."""
        self.changes += 1
        self.seen[row] = self.grads[row] = grad
        self.records[row] = record
        self.versions[row] = -1 if grad is None else version_of(grad)

    @property
    def shared_record(self) -> Record | None:
        """The record of all rows, as after most backwards; ``None`` if they differ."""
        records = self.records
        first = records[0] if records else None
        return first if first is not None and records.count(first) == len(records) else None

    def plain(self, device: torch.device) -> Record:
        """The record of a gradient there that has no loss scale on it."""
        record = self._plain.get(device)
        if record is None:
            record = Record(torch.ones((), dtype=torch.float32, device=device), is_plain=True)
            if not is_capturing(device):  # then it is one only when the graph has run
                self._plain[device] = record
        return record

    def zeroed(self, grad: torch.Tensor) -> Record:
        """The record of zeros that are the gradient."""
        return replace(self.plain(grad.device), is_zeroed=True)

    def reconcile(self, agree: Agree | None = None, *, looks: bool = False) -> None:
        """Take in what the script did to half gradients since they were last looked at.

        Raises `PreampStateError` if it rewrote one that has a loss scale on it, or that is only a
        part of what was accumulated. Nothing of that row was taken in then. With ``looks`` the
        values of all that are shown are looked at: writes through ``grad.data``, a collective, and
        torch's foreach functions on a ``DTensor`` leave no trace. ``agree`` is for gradients that
        ranks have parts of, all of which call this then; see `common_factors`.
        """
        now = list(map(grad_of, self.halves))
        are_same = all(map(is_, now, self.seen))
        if are_same and all(map(is_, now, repeat(None))):
            return
        versions = self._versions_of(now)
        looks = looks and self.is_showing
        if are_same and versions == self.versions and not looks:
            return
        seen = zip(now, self.seen, versions, self.versions, strict=True)
        changed = [row for row, (a, b, v, w) in enumerate(seen) if a is not b or v != w]
        shown = range(len(self)) if looks else changed
        shown = [row for row in shown if _is_shown(self.records[row]) and now[row] is not None]
        if shown or (looks and agree is not None):
            changed = [row for row in changed if row not in shown]
            self._take_in_shown({row: now[row] for row in shown}, agree)
        # Zeros are a clip's if it left other rows something, else a script's.
        self._is_rewriting = self._rewriting.is_ignored and any(
            self._is_without_effect(self.records[row])
            and (grad := now[row]) is not None
            and not is_zeroed(grad)
            for row in changed
        )
        for row in changed:
            self._take_in(row, now[row])

    def _take_in(self, row: int, now: torch.Tensor | None) -> None:
        record = self.records[row]
        if now is None:  # dropped, and all that was accumulated with it
            self.keep(row, None)
            self.note(row, None)
        elif record is None:  # a backward outside scale_loss
            self.note(row, now, self.plain(now.device))
        elif now is not self.seen[row] and record.is_spent:  # the same, after a step
            self.note(row, now, self.plain(now.device))
        elif self._is_moved(row, now):
            self.note(row, now, record)
        else:
            self._take_in_rewritten(row, now, record)

    def _is_without_effect(self, record: Record | None) -> bool:
        """Whether writing to a half gradient changes nothing, as its master's is made."""
        return self._rewriting.is_ignored and record is not None and record.factor is None

    def _take_in_rewritten(self, row: int, now: torch.Tensor, record: Record) -> None:
        is_all = self.base(row) is None or (record.factor is None and record.is_alone)
        if record.is_plain and (is_all or record.is_spent):
            if record.factor is None:
                self.keep(row, None)
            stays_zero = record.is_zeroed and is_zeroed(now)
            self.note(row, now, self.zeroed(now) if stays_zero else self.plain(now.device))
            return
        is_other = now is not self.seen[row] or not is_zeroed(now)
        if (is_other or self._is_rewriting) and self._is_without_effect(record):
            if not self._rewriting.was_seen:
                self._rewriting.was_seen = True
                warnings.warn(_without_effect(now, self.twins[row].name), stacklevel=2)
            self.note(row, now, record)
            return
        if is_other:
            raise _changed_in_place(now, self.twins[row].name, is_plain=record.is_plain)
        # Zeros are a gradient, as in plain torch: momentum and weight decay stay in effect.
        self.keep(row, None)
        self.note(row, now, self.zeroed(now))

    def _is_moved(self, row: int, now: torch.Tensor) -> bool:
        """Whether ``now`` is a bitwise copy of the gradient that was noted.

        DistributedDataParallel with ``gradient_as_bucket_view`` moves gradients into new memory
        when it rebuilds its buckets, and nobody else replaces them by copies. Synchronises, but
        only where there is a process group and the tensor is another one.
        """
        seen = self.seen[row]
        if seen is None or now is seen or now.dtype is not seen.dtype or not has_process_group():
            return False
        if version_of(seen) != self.versions[row]:
            return False
        return torch.equal(local_of(now).view(torch.int16), local_of(seen).view(torch.int16))

    def _versions_of(self, grads: Sequence[torch.Tensor | None]) -> list[int]:
        return versions_of(grads) if self.has_sharded else plain_versions(grads)

    # -- gradients: shown unscaled ---------------------------------------------------------------

    @property
    def is_showing(self) -> bool:
        """Whether half gradients are shown unscaled, those that have been scaled being kept."""
        return self.grads is not self.seen

    def show(self) -> None:
        """Let the half gradients be what masters get, rounded, for a script to read and change.

        Called again after a clip, it shows the clipped ones. Scaled half gradients are kept apart
        meanwhile: unscaled, what is small becomes zero in float16. What the script does counts; see
        `_take_in_shown`.
        """
        self.complete()
        bases = self.bases()
        if not self.is_showing:
            self.grads = [
                grad.clone() if grad is not None and _has_scale(record) else grad
                for grad, record in zip(self.seen, self.records, strict=True)
            ]
        targets: dict[int, Any] = {}
        shown: dict[Record, Record] = {}
        try:
            for row, record in enumerate(self.records):
                grad = self.seen[row]
                if grad is None or record is None:
                    continue
                if _has_scale(record) or (_is_made(record) and bases[row] is not None):
                    targets[row] = grad
                    if record not in shown:
                        shown[record] = replace(record, is_shown=True)
                    self.records[row] = shown[record]
            self._round_into(targets)
            self.versions = self._versions_of(self.seen)
            self._base_versions.clear()
            self._note_bases(targets)
        except BaseException:  # what is shown in part would look like written by the script
            self._stop_showing()
            raise

    @torch.no_grad()
    def _stop_showing(self) -> None:
        """Let half gradients be the scaled ones again."""
        for grad, kept in zip(self.seen, self.grads, strict=True):
            if grad is not None and kept is not None and kept is not grad:
                grad.copy_(kept)
        self._hide()
        self.grads = self.seen
        self.versions = self._versions_of(self.seen)

    def _hide(self) -> None:
        """Note that no gradient is shown any more."""
        hidden = {r: replace(r, is_shown=False) for r in self.records if r is not None}
        self.records = [r and hidden[r] for r in self.records]

    @torch.no_grad()
    def _round_into(self, targets: Mapping[int, Any]) -> None:
        """Write what masters get, rounded, to half ``targets`` by row."""
        bases = self.bases()
        scaled: dict[Record, list[int]] = {}
        made: list[int] = []
        for row in targets:
            record = cast("Record", self.records[row])
            (made if _is_made(record) else scaled.setdefault(record, [])).append(row)
        for record, rows in scaled.items():
            grads: list[Any] = [self.grads[row] for row in rows]
            to, factor = [targets[row] for row in rows], cast("torch.Tensor", record.factor)
            self.ops.axpby_(to, factor, grads, 0.0, [None] * len(rows))
        wide: list[Any] = [bases[row] for row in made]
        self.ops.cast_copy_(wide, [targets[row] for row in made])

    @torch.no_grad()
    def _take_in_shown(self, now: Mapping[int, Any], agree: Agree | None) -> None:
        """Take in what the script has made of gradients that it was shown unscaled, by row.

        One factor on all of a gradient, as clipping has, is applied to what masters get, so that
        nothing is lost that the half gradient cannot hold. Anything else is taken as written.
        """
        now = {row: grad for row, grad in now.items() if not self._trusts_master(row, grad)}
        factors = self._multiplied(now) if agree is None else {}
        rest = [row for row in now if row not in factors]
        if rest or agree is not None:
            before = {row: torch.empty_like(now[row]) for row in rest}
            self._round_into(before)
            # Ranks tell each other of the same rows, whichever have a gradient.
            asked = rest if agree is None else range(len(self))
            old, new = [before.get(row) for row in asked], [now.get(row) for row in asked]
            found = common_factors(old, new, [self.halves[row] for row in asked], agree)
            factors |= zip(asked, found, strict=True)
        together: dict[float, list[int]] = {}
        for row, grad in now.items():
            factor = factors[row]
            if factor == 0.0 and not is_zeroed(grad):
                raise _clipped_to_zero(grad, self.twins[row].name)
            if factor is None or factor == 0.0:
                self.keep(row, None)
                is_zero = factor is not None
                self.note(row, grad, self.zeroed(grad) if is_zero else self.plain(grad.device))
                self._warn_rewritten(row, is_zero=is_zero)
                continue
            self.seen[row], self.versions[row] = grad, version_of(grad)
            together.setdefault(factor, []).append(row)
        for factor, same in together.items():
            self._multiply(same, factor)

    def _trusts_master(self, row: int, now: torch.Tensor) -> bool:
        """Whether a script has written to the master's gradient since `show`: that one counts."""
        base = self.base(row)
        if base is None or self._base_versions.get(row) in (None, version_of(base)):
            return False
        record = cast("Record", self.records[row])
        if now is not self.seen[row] or version_of(now) != self.versions[row]:
            raise _changed_in_place(now, self.twins[row].name, is_plain=True)
        self.records[row] = replace(record, is_shown=False)
        return True

    def _note_bases(self, rows: Iterable[int]) -> None:
        """Remember the masters' gradients of shown rows as they are."""
        for row in rows:
            base = self.base(row)
            if base is not None:
                self._base_versions[row] = version_of(base)

    def overlook(self) -> None:
        """Take for nothing what the script did to shown gradients that no step will use."""
        now = list(map(grad_of, self.halves))
        for row, (grad, version) in enumerate(zip(now, self._versions_of(now), strict=True)):
            if _is_shown(self.records[row]):
                self.seen[row], self.versions[row] = grad, version

    def _multiplied(self, now: Mapping[int, Any]) -> dict[int, float | None]:
        """The rows that were multiplied by a half number, as a clip by torch does, and that.

        A few values suggest which it might be; all are compared, in a few operations on all rows.
        """
        after = list(now.values())
        if len({(grad.dtype, grad.device) for grad in after}) != 1:
            return {}
        given = {row: torch.empty_like(grad) for row, grad in now.items()}
        self._round_into(given)
        before, none = list(given.values()), [None] * len(now)
        some = slice(0, None, max(1, len(now) // 4))
        factor = likely_factor(*([*map(_few_of, grads[some])] for grads in (before, after)))
        if not factor:
            return {}
        self.ops.scale_add_(before, factor, none)
        self.ops.axpby_(before, 1.0, before, -1.0, after)
        census = self.ops.census(before, before[0].device, with_norm=False)
        if census.max_abs is None:
            return {}
        differ = cast("list[float]", cast("Any", census.max_abs).tolist())
        return {row: factor for row, by in zip(now, differ, strict=True) if by == 0.0}

    def _multiply(self, rows: Sequence[int], factor: float) -> None:
        """Multiply what masters get."""
        if factor == 1.0:
            return
        self.changes += 1
        made = [row for row in rows if _is_made(self.records[row])]
        one: Any = self.seen[rows[0]]
        by, bases = torch.tensor(factor, device=one.device), self.bases()
        self.replace_factors([row for row in rows if row not in made], by)
        wide: list[Any] = [bases[row] for row in made]
        self.ops.scale_add_(wide, by, [None] * len(wide))
        self._note_bases(made)

    def _warn_rewritten(self, row: int, *, is_zero: bool) -> None:
        if is_zero or self._has_warned or self.halves[row].dtype is not torch.float16:
            return
        self._has_warned = True
        warnings.warn(rewritten_in_half(self.twins[row].name), stacklevel=2)

    # -- gradients: the masters' side -----------------------------------------------------------

    def base(self, row: int) -> torch.Tensor | None:
        """The whole float32 gradient of one master, as far as it is made."""
        return self.twins[row].held.gradient if self.has_parts else stored_grad(self.masters[row])

    def bases(self) -> list[torch.Tensor | None]:
        """All of these."""
        if not self.may_have_bases:
            return [None] * len(self)
        if self.has_parts:
            return [twin.held.gradient for twin in self.twins]
        return list(map(stored_grad, self.masters))

    def keep(self, row: int, grad: torch.Tensor | None) -> None:
        """Let ``grad`` be the whole float32 gradient of a master."""
        self.may_have_bases |= grad is not None
        if self.has_parts:
            self.twins[row].held.keep(grad)
        else:
            store_grad(self.masters[row], grad)

    @property
    def has_bases(self) -> bool:
        """Whether any master has a float32 gradient already."""
        return self.may_have_bases and _has_any(self.bases())

    def pending_rows(self) -> list[int]:
        """Rows whose half gradient is not in the master's gradient yet, as last reconciled."""
        if self.is_open:
            return []
        return [
            row
            for row, record in enumerate(self.records)
            if record is not None and record.factor is not None
        ]

    def pending(self) -> tuple[list[int], list[Any], list[Any], list[Any]]:
        """Pending rows, and their half weights, half gradients and factors."""
        record = None if self.is_open else self.shared_record
        if record is not None:
            if record.factor is None:
                return [], [], [], []
            rows = list(range(len(self)))
            return rows, self.halves, self.grads, [record.factor] * len(rows)
        rows = self.pending_rows()
        records: list[Any] = [self.records[row] for row in rows]
        return (
            rows,
            [self.halves[row] for row in rows],
            [self.grads[row] for row in rows],
            [record.factor for record in records],
        )

    def bring_up_to_date(self) -> None:
        """Make the masters' gradients: ``grad += float32(half.grad) * factor``, all in one op."""
        if not self.is_open:
            self.reconcile(looks=self.has_sharded)
            self.materialize(self.pending_rows())
            if self.has_sharded and self.is_showing:  # a write to masters' may leave no trace
                self._hide()

    def complete(self) -> None:
        """Do so for rows whose master has an earlier gradient; the others stay half."""
        self.reconcile()
        if self.may_have_bases:
            bases = self.bases()
            self.materialize([row for row in self.pending_rows() if bases[row] is not None])

    def make_at_once(self) -> None:
        """Make the masters' gradients where the script may write over what they are made of."""
        watch = self._rewriting
        if watch.is_ignored and (watch.was_seen or self._steps < _STEPS_WATCHED):
            self.materialize([row for row in self.pending_rows() if _has_scale(self.records[row])])

    def materialize(self, rows: Sequence[int]) -> None:
        """Bring the masters' gradients of some pending rows up to date."""
        if not rows:
            return
        bases = self.bases()
        grads: list[torch.Tensor] = []
        factors: list[torch.Tensor] = []
        for row in rows:
            grad, record = self.grads[row], self.records[row]
            if grad is None or record is None or record.factor is None:
                raise AssertionError("not a pending row")
            grads.append(grad)
            factors.append(record.factor)
        wides: list[torch.Tensor] = []
        made: dict[tuple[int, bool], Record] = {}
        olds = [self.records[row] for row in rows]

        def add() -> None:  # to earlier ones in place, once
            if not wides:
                wides.extend(self.ops.widen_add(grads, factors, [bases[row] for row in rows]))

        def note_made() -> None:
            self.changes += 1
            self.may_have_bases = True
            for row, old, wide in zip(rows, olds, wides, strict=True):
                is_alone = bases[row] is None
                if old is None:
                    continue
                key = (id(old), is_alone)
                if key not in made:
                    made[key] = replace(old, factor=None, unclipped=None, is_alone=is_alone)
                self.records[row] = made[key]
                if is_alone and self.has_parts:
                    self.keep(row, wide)
                elif is_alone:
                    store_grad(self.masters[row], wide)

        run_to_end(add, note_made)  # half of it would drop gradients, or count them twice
        if self.is_showing:
            self._note_bases([row for row in rows if _is_shown(self.records[row])])

    def replace_factors(self, rows: Sequence[int], clip: torch.Tensor) -> None:
        """Multiply what unscales some pending rows by ``clip``; touches no memory."""
        self.changes += 1
        made: dict[Record, Record] = {}
        factors: dict[int, torch.Tensor] = {}
        shared = self.shared_record if len(rows) == len(self) else None
        for old in {shared} if shared else set(map(self.records.__getitem__, rows)):
            if old is not None and old.factor is not None:
                by = factors.get(id(old.factor))
                if by is None:
                    by = factors[id(old.factor)] = old.factor * clip.to(old.factor.device)
                made[old] = replace(old, factor=by, unclipped=old.unscales)
        if shared is not None and made:
            self.records = [made[shared]] * len(self)
            return
        for row in rows:
            old = self.records[row]
            self.records[row] = old if old is None else made.get(old, old)

    @property
    def holds_gradient(self) -> bool:
        """Whether either side has a gradient that the script has not dropped or zeroed."""
        self.reconcile()
        return self.has_bases or any([r is not None and not r.is_zeroed for r in self.records])

    # -- a backward -----------------------------------------------------------------------------

    def begin(self, carry: torch.Tensor | float | None = None) -> None:
        """Begin a backward: move what is known to the masters' gradients, clear the half ones.

        Call `reconcile` first, which may refuse, of all tables before any of them begins.
        Where earlier gradients must be in the half ones too, ``carry`` is the scale of the coming
        backward; see `DirectGradients`.
        """
        if self.is_open:
            return  # for another optimizer of the block, which shares the rows
        self.changes += 1
        bases = self.bases()
        self.zeros_aside.clear()
        if self.may_have_bases or _has_any(self.records):
            zeroed = {row for row, record in enumerate(self.records) if record and record.is_zeroed}
            alone = {row for row in zeroed if bases[row] is None}  # nothing is added to zeros
            self.materialize([row for row in self.pending_rows() if row not in alone])
            self._forget_half_gradients(alone)  # zeros stay where they are: the new ones join them
            self.zeros_aside = alone
        self.is_open = True
        if not self.may_have_bases:
            return
        if carry is None:
            for row in [row for row, base in enumerate(self.bases()) if base is not None]:
                self._placeholders.put(self.halves[row], self.halves[row])
        else:
            for row, base in enumerate(self.bases()):
                if base is not None:
                    self.carried.add(row)
                    self.halves[row].grad = (base * carry).to(self.halves[row].dtype)

    def _forget_half_gradients(self, but: Collection[int] = ()) -> None:
        kept = [(self.halves[row], stored_grad(self.halves[row])) for row in but]
        for half in self.halves:
            half.grad = None
        for half, grad in kept:
            half.grad = grad
        self._arrived = None
        self.changes += 1
        self.records = [None] * len(self)
        self.grads = self.seen = [None] * len(self)
        self.versions = [-1] * len(self)

    def arrive(self) -> None:
        """Read the half gradients that a backward has left, for `collect`; refuse a sparse one."""
        self._arrived = grads = list(map(grad_of, self.halves))
        if kinds_of(layout_of, grads) <= {torch.strided}:
            return
        for twin, grad in zip(self.twins, grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise _sparse(twin.name)

    def arrived_of(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """What `arrive` has read, if ``leaves`` are the half weights; not to be changed."""
        is_all = self._arrived is not None and are_same(leaves, self.halves)
        return self._arrived if is_all and not self.has_sharded else None

    def end_body(self) -> None:
        """The body of the block has ended; see `Placeholders.take_away`."""
        self._placeholders.take_away()

    def _forget_dropped(self) -> None:
        if self._placeholders.dropped:
            for row, half in enumerate(self.halves):
                if id(half) in self._placeholders.dropped:
                    self.keep(row, None)
                    self.zeros_aside.discard(row)
        self._placeholders.forget()

    def put_back(self) -> None:
        """The backward failed: drop what it left; the masters' gradients have the earlier value."""
        self._placeholders.forget()
        if self.is_open:
            self._forget_half_gradients()
            self.end()
        self.stand_in()

    def stand_in(self) -> None:
        """Give rows that got no new gradient zeros for one, if they have an earlier one.

        The earlier one is in the master; without anything on the model's side, a script that
        drops the model's gradients could not reach it. The zeros are negative: zeroed by a script
        they are not, while a clip that saw no more of the gradient leaves them so, and is refused.
        """
        if not self.may_have_bases and not self.zeros_aside:
            return
        self._arrived = None
        without = [row for row, g in enumerate(list(map(grad_of, self.halves))) if g is None]
        for row in without:
            if id(self.halves[row]) in self._placeholders.dropped:
                continue
            is_stored = self.base(row) is not None
            if is_stored or (row in self.zeros_aside and not self.is_open):
                half = self.halves[row]
                half.grad = zeros = torch.full_like(half, -0.0)
                if not self.is_open:
                    record = Record(None) if is_stored else self.zeroed(zeros)
                    self.note(row, zeros, record)

    def collect(self, factor: torch.Tensor | None) -> None:
        """The backward has ended: note the half gradients; add nothing yet. Cannot fail.

        ``factor`` is the float32 scalar that unscales them, ``None`` where nothing was scaled. It
        is called for each optimizer that shares the rows, and again if it was interrupted.
        """
        if not self.is_open:
            return
        self._forget_dropped()
        for row in self.carried:  # the half gradient holds the earlier one too
            self.keep(row, None)
        # Sharded ones may have been placed anew since they arrived.
        arrived, self._arrived = None if self.has_sharded else self._arrived, None
        self._see(list(map(grad_of, self.halves)) if arrived is None else arrived)
        made = {  # a factor elsewhere would make clipping wait for a copy
            device: self.plain(device) if factor is None else Record(factor.to(device))
            for device in devices_of(self.grads)
        }
        if len(made) == 1:
            (record,) = made.values()
            self.records = [None if grad is None else record for grad in self.grads]
        else:
            self.records = [None if grad is None else made[grad.device] for grad in self.grads]
        self.end()

    def _see(self, grads: list[torch.Tensor | None]) -> None:
        self.grads = self.seen = grads
        self.versions = self._versions_of(grads)

    def end(self) -> None:
        """No backward is under way any more."""
        self.is_open = False
        self.carried.clear()
        self.raw = None

    @property
    def has_aside(self) -> bool:
        """Whether a backward is under way and an earlier gradient is away meanwhile."""
        if not self.is_open:
            return False
        return bool(
            {row for row, base in enumerate(self.bases()) if base is not None} - self.carried
        )

    def note_raw(self) -> None:
        """A block ends that leaves its gradients scaled: remember them as they are."""
        self._forget_dropped()
        now = list(map(grad_of, self.halves))
        versions = self._versions_of(now)
        self.raw = [None if g is None else v for g, v in zip(now, versions, strict=True)]

    def reconcile_raw(self) -> None:
        """Take in that the script dropped or zeroed gradients left scaled, and so all of them."""
        if self.raw is None:
            return
        now = list(map(grad_of, self.halves))
        versions = self._versions_of(now)
        for row, (raw, grad) in enumerate(zip(self.raw, now, strict=True)):
            if raw is None or (grad is not None and versions[row] == raw):
                continue
            if grad is None or is_zeroed(grad):
                self.keep(row, None)
                self.zeros_aside.discard(row)
                self.raw[row] = None if grad is None else versions[row]

    # -- after a step, and zeroing ----------------------------------------------------------------

    def spend(self) -> None:
        """After a step: masters' gradients go, half gradients stay but are used up.

        Not where another optimizer has yet to use them; there they stay until zeroed, as in torch.
        """
        self._steps = min(self._steps + 1, _STEPS_WATCHED)
        self.is_stepping = False
        if len(self.owners) > 1:
            return
        self._drop_bases()
        if self.is_showing:
            self.overlook()
            self.grads = self.seen
        if (record := self.shared_record) is not None:
            self.records = [_SPENT[record.is_plain]] * len(self)
            return
        self.records = [record and _SPENT[record.is_plain] for record in self.records]

    def _drop_bases(self) -> None:
        if not self.may_have_bases:
            return
        self.may_have_bases = self.has_parts  # there masters have gradients of parts
        if self.has_parts:
            for twin in self.twins:
                twin.held.keep(None)
            return
        for master, base in zip(self.masters, list(map(stored_grad, self.masters)), strict=True):
            if base is not None:
                store_grad(master, None)

    def drop(self, *, in_backward: bool) -> None:
        """Clear the gradients on both sides."""
        self._placeholders.forget()
        self._forget_half_gradients()
        self.zeros_aside.clear()
        self._drop_bases()
        if not in_backward:
            self.end()

    def take_away_zeroed(self, *, in_backward: bool) -> list[torch.Tensor | None]:
        """Zero the half gradients and hide them, and drop the masters'; see `give_zeros`.

        In a backward what came before it stays noted, and nothing is hidden.
        """
        self.reconcile_raw()  # what was dropped is not zeros
        now = list(map(grad_of, self.halves))
        for grad in now:
            if grad is not None:
                if grad.grad_fn is not None:  # of create_graph; a view in DDP's buckets has none
                    grad.detach_()
                grad.requires_grad_(False).zero_()
        if in_backward:
            return [None] * len(self)
        self.end()
        if self.has_bases:
            for row, grad in enumerate(now):
                if grad is not None or self.grads[row] is not None:  # or dropped since
                    self.keep(row, None)
        self._forget_half_gradients()
        return now

    def give_zeros(self, away: Sequence[torch.Tensor | None]) -> None:
        """Show the zeros of `take_away_zeroed` again; they are the gradients now."""
        made: dict[torch.device, Record] = {}
        for row, grad in enumerate(away):
            if grad is not None:
                self.halves[row].grad = grad
                if grad.device not in made:
                    made[grad.device] = self.zeroed(grad)
                self.seen[row], self.records[row] = grad, made[grad.device]
        self._see(self.seen)

    # -- weights ----------------------------------------------------------------------------------

    def own_part(self, row: int, tensor: torch.Tensor) -> torch.Tensor:
        """The elements of a weight that the master has."""
        return self.twins[row].held.own(tensor)

    def became_wide(self, row: int) -> PreampStateError:
        """The error for a half weight that was given another dtype."""
        return bad_state(
            f"The half parameter {self.twins[row].name!r} became "
            f"{dtype_name(self.halves[row].dtype)} after initialize",
            "A model with master weights keeps the dtypes that initialize gave it",
            "Call preamp.engine_of(model).close() before model.float()",
        )

    def expect_load(self, row: int) -> None:
        """The master was loaded; its half weight is about to be written to, rounded, once."""
        self.loaded.add(row)
        self.compares = True  # whoever loads may broadcast what one rank has read
        self.note_written((row,))  # the load replaces whatever a script wrote to either
        self._half_marks.expect_write(row)

    def settle(self, row: int) -> None:
        """Make a half weight and its master agree, whichever of them was written to."""
        self._take_in_data()
        self._settle(row)

    def _settle(self, row: int) -> None:
        if self._half_marks.is_changed(row, self.halves[row]):
            self.take_over(row)
            self.note_written((row,))
        elif self.lows[row] is not None:
            return
        elif self._master_marks.is_changed(row, self.masters[row]):
            self._written.add(self.twins[row])
            if not self.has_parts:
                self.round((row,))
        elif self.compares:
            self.take_over(row)
            self.note_written((row,))

    def compare(self, *, rounds: bool = False) -> None:
        """Let masters take over what their half weights differ in from them, rounded.

        Once after weights were made or loaded: scripts broadcast and initialize weights in ways
        that leave no trace. Later such a write to either side looks like one to the other. Does not
        synchronise.

        With ``rounds`` masters that come from ``initialize`` start from the half weights, as in
        Apex. Where a script itself gives all ranks the weights of one, that one cannot know, and
        would alone keep more precise masters.
        """
        if not self.compares:
            return
        self._take_in_data()
        rounds = rounds and self.is_fresh and not self.is_sharded
        for row in range(len(self)):
            if rounds and row not in self.loaded:
                with torch.no_grad():
                    self.masters[row].copy_(self.halves[row])
                self.note_written((row,))
            else:
                self.settle(row)
        self.compares = self.is_fresh = False

    @property
    def is_sharded(self) -> bool:
        """Whether ranks have parts of the weights."""
        return self.has_parts or self.has_sharded

    def absorb(self) -> None:
        """Let masters take over what was written to their half weights, before a step too."""
        self._take_in_data()
        super().absorb()
        if self.packs and any([low is None for low in self.lows]):
            changed = self._master_marks.changed(self.kept)
            self._written.update([self.twins[row] for row in changed])

    def follow_masters(self) -> None:
        """Round masters that somebody wrote to between steps into their half weights.

        An optimizer's own step is not meant: `write_halves` follows it. Where ranks share masters
        nothing is done.
        """
        self._take_in_data()
        rows = self._master_marks.changed(self.kept)
        if rows and not self.has_parts:
            self.absorb()
            self.round(rows)

    def hand_out(self, row: int) -> None:
        """Somebody gets a master's memory, and may write to it without a trace.

        What an optimizer's step does with it is rounded afterwards in any case. Before the first
        backward half weights may have been written to without a trace as well; so far they count.
        """
        half = self.halves[row]
        if self.is_stepping or self.has_parts or row in self._handed_out or not is_half(half):
            return
        if self.compares:
            self._settle(row)
        self._handed_out[row] = self._rounded_here(row)

    def hand_out_all(self) -> None:
        """Somebody may write to masters as they please, such as to a buffer that they lie in."""
        if self.is_stepping or self.has_parts:  # a step may call this for each parameter
            return
        for row, low in enumerate(self.lows):
            if low is None:
                self.hand_out(row)

    def _rounded_here(self, row: int) -> torch.Tensor:
        """This rank's part of a master that is there, as it goes into the half weight."""
        master = self.masters[row].detach()
        return local_of(self.rounded(row, master)).to(self.halves[row].dtype)

    def _take_in_data(self) -> None:
        """Round elements of masters that were written to without a trace into half weights.

        Quietly too: whoever saved such a weight for a backward hears nothing of it in torch
        either. Other elements stay, as a script may have written to half weights in the same way.
        """
        if not self._handed_out:
            return
        handed_out, self._handed_out = self._handed_out, {}
        with torch.no_grad():
            for row, before in handed_out.items():
                now, half = self._rounded_here(row), self._own_half(row).data
                is_same = now.view(torch.int16) == before.view(torch.int16)
                half.copy_(torch.where(is_same, half, now))
        if self.packs:
            self._written.update(map(self.twins.__getitem__, handed_out))

    def expect_collective(self, tensors: Iterable[torch.Tensor]) -> None:
        """A collective is about to write to ``tensors``, of which torch counts nothing.

        Ranks whose half weights it makes equal get equal masters; see `replace`.
        """
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            key = storage_key(local_of(tensor).untyped_storage())
            rows = self._half_marks.rows_in(key)
            self._expect_change(rows)
            if self._replaced is not None and not self._replaced.isdisjoint(rows):
                self._replaced = None
                warnings.warn(_written_by_ranks(self.twins[rows[0]].name), stacklevel=2)
            for row in self._master_marks.rows_in(key):
                self.hand_out(row)

    def _expect_change(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._half_marks.expect_change(row)
            self._replacing.add(row)

    def replace(self) -> None:
        """Let all masters be their half weights, without the digits that they have beyond these."""
        rows = [row for row, half in enumerate(self.halves) if is_half(half)]
        self._expect_change(rows)
        for row in rows:
            self.settle(row)
        if self._replaced:  # it was asked for
            self._replaced.clear()

    def take_over(self, row: int) -> None:
        """Let the master have what was written to the half weight.

        Which elements were written to a packed one does not tell: it is the half weight then, and
        stays float32, so that a script that writes in each step loses nothing further.
        """
        if row in self._replacing:
            self._replacing.discard(row)
            self._take_all(row)
            if self._replaced is not None:
                self._replaced.add(row)
            return
        if self.lows[row] is None:
            super().take_over(row)
            return
        half, twin = self._own_half(row), self.twins[row]
        if not is_half(half):
            raise self.became_wide(row)
        twin.stays_wide = True
        with torch.inference_mode(mode=False):
            self._make_row(row, half.float())
        if not self._has_warned_of_lows:
            self._has_warned_of_lows = True
            warnings.warn(_written_while_packed(twin.name, half.dtype), stacklevel=2)

    def _take_all(self, row: int) -> None:
        if self.lows[row] is not None:  # packed again by the next step
            with torch.inference_mode(mode=False):
                self._make_row(row, self._own_half(row).float())
            return
        super().take_over(row)
        with torch.no_grad():
            self.masters[row].copy_(self.own_part(row, self.halves[row].detach()))

    def round(self, rows: Sequence[int], *, quietly: bool = False) -> None:
        """Round the masters of ``rows`` into their half weights; packed ones are all in these.

        Those that will be packed are rounded as then, so that it does not matter when they are.
        """
        rows = [row for row in rows if self.lows[row] is None]
        if not self.packs:
            super().round(rows, quietly=quietly)
            return
        values = [local_of(self.masters[row].detach()) for row in rows]
        halves = list(map(self._own_half, rows))
        if quietly:
            halves = [half.data for half in halves]
        self.ops.split_(values, halves, [None] * len(rows))
        self.note_written(rows)

    def note_written(self, rows: Sequence[int]) -> None:
        """Remember that the half weights of ``rows`` equal their rounded masters as of now."""
        super().note_written(rows)
        if self._replacing:
            self._replacing.difference_update(rows)

    def note_rounded(self, start: int, stop: int) -> None:
        """An update itself has rounded new masters into half weights, of consecutive rows."""
        super().note_rounded(start, stop)
        if self.packs:  # ties of those that are not packed now are rounded otherwise
            self._is_rounded[start:stop] = [low is not None for low in self.lows[start:stop]]

    def rounded(self, row: int, value: torch.Tensor) -> torch.Tensor:
        """``value``, which the master of a row was given, as it goes into the half weight."""
        return self._ties_away(value, self.halves[row]) if self.packs else value

    # -- packed masters ---------------------------------------------------------------------------

    def pack(self) -> None:
        """Keep masters as half weights and what is beside them, where the storage says so.

        Not while weights may have been written to without a trace, see `compare`, nor where
        something else holds the memory of a master, such as a view of it in the script.
        """
        if self.packs and not self.compares:
            self._pack_rows()

    @torch.no_grad()
    def _pack_rows(self) -> None:
        rows = [row for row, low in enumerate(self.lows) if low is None]
        rows = [row for row in rows if not self.twins[row].stays_wide]
        given = [row for row in rows if row in self.loaded or self.twins[row] in self._written]
        self._keep_wide_beyond_range(given)
        rows = [row for row in rows if not self.twins[row].stays_wide]
        if not rows:
            return
        before = self._versions_of(self.halves)
        finds: list[Callable[[], torch.Tensor | None]] = []
        try:
            for few in self._runs(rows):
                finds += self._pack_few(few)
        finally:  # a run that failed has packed nothing; those before it are whole
            # Only now, since masters may be parts of one tensor.
            for row, find in zip(rows, finds, strict=False):
                held = find()
                if held is not None:
                    self._make_row(row, held)
            writes = map(sub, self._versions_of(self.halves), before)
            self._shares_versions |= max(writes, default=0) > 1
            self.note_written(rows)
            if self._shares_versions:
                self.note_written(range(len(self)))

    def _keep_wide_beyond_range(self, rows: Sequence[int]) -> None:
        """Leave masters float32 that float16 weights beside 16 bits cannot hold.

        ``rows`` are those that something else than a step has set. Synchronises once, where a
        float16 weight is among them.
        """
        self.loaded.difference_update(rows)
        self._written.clear()
        rows = [row for row in rows if self.halves[row].dtype is torch.float16]
        values = [local_of(self.masters[row].detach()) for row in rows]
        for row, is_beyond in zip(rows, are_beyond_float16(values), strict=True):
            if is_beyond:
                self.twins[row].stays_wide = True
                warnings.warn(_beyond_float16(self.twins[row].name), stacklevel=2)

    def write_halves(self) -> None:
        """Round every master into its half weight; the invariant after every step."""
        super().write_halves()
        self.is_stepping = False
        self._handed_out.clear()
        if self._shares_versions:
            self.note_written(range(len(self)))

    def _runs(self, rows: Sequence[int]) -> Iterator[list[int]]:
        """Rows of so few elements that both forms of these together are little memory."""
        few: list[int] = []
        elements = 0
        for row in rows:
            elements += self.halves[row].numel()
            if few and elements > _BOTH_FORMS:
                yield few
                few, elements = [], self.halves[row].numel()
            few.append(row)
        if few:
            yield few

    def make(self) -> None:
        """Let all masters be float32 tensors until they are packed again; the values are kept."""
        rows = [row for row, low in enumerate(self.lows) if low is not None]
        if rows:
            self._make_rows(rows)

    @torch.inference_mode(mode=False)  # whatever asks for them, what is made will be written to
    @torch.no_grad()
    def _make_rows(self, rows: Sequence[int]) -> None:
        written = set(self._half_marks.changed(self.halves))
        # One that was made wide since, as by model.float(), counts as it was before.
        taken = [row for row in rows if row in written and is_half(self.halves[row])]
        for row in taken:
            self.take_over(row)
        for few in self._runs([row for row in rows if self.lows[row] is not None]):
            for row, value in zip(few, self._joined_here(few), strict=True):
                self._make_row(row, value)
        self.note_written(rows)

    def joined(self, row: int) -> torch.Tensor:
        """The value of a packed master; of a sharded one a sharded tensor."""
        return sharded_as(self._joined_here([row])[0], self.halves[row])

    def _joined_here(self, rows: Sequence[int]) -> list[torch.Tensor]:
        halves = [self._own_half(row).to(self.twins[row].dtype) for row in rows]
        wides = [torch.empty_like(half, dtype=torch.float32) for half in halves]
        self.ops.join_(halves, cast("Any", [self.lows[row] for row in rows]), wides)
        return wides

    def _own_half(self, row: int) -> torch.Tensor:
        """This rank's part of what the master has of a half weight."""
        return local_of(self.own_part(row, self.halves[row].detach()))

    def _pack_few(self, rows: Sequence[int]) -> list[Callable[[], torch.Tensor | None]]:
        """Pack masters; return what finds the memory of each if somebody else keeps that alive."""
        values = [local_of(self.masters[row].detach()) for row in rows]
        halves = list(map(self._own_half, rows))
        lows = [torch.empty_like(half, dtype=torch.int16) for half in halves]
        for device in {half.device for half in halves} - self._nothing.keys():
            self._nothing[device] = torch.full((), math.nan, device=device)
        self.ops.split_(values, halves, lows)
        finds = list(map(find_again, values))
        values.clear()
        for row, half, low in zip(rows, halves, lows, strict=True):
            self._pack_row(row, half, low)
        return finds

    def _pack_row(self, row: int, half: torch.Tensor, low: torch.Tensor) -> None:
        master = self.masters[row]
        nothing = self._nothing[half.device].expand(half.shape)
        increment_version(master)  # who saved it for a backward is to hear of it
        set_data(master, sharded_as(nothing, self.halves[row]))
        master.__class__ = packed_kind(cast("type[MasterParameter]", type(master)))
        self.twins[row].dtype = half.dtype  # another one than at first after model.bfloat16()
        self.lows[row] = low
        if self.kept is self.masters:
            self.kept = [*self.masters]
        self.kept[row] = low

    def _make_row(self, row: int, value: torch.Tensor) -> None:
        master = self.masters[row]
        master.__class__ = PACKED_KINDS[type(master)]
        set_data(master, sharded_as(value, self.halves[row]))
        self.lows[row], self.kept[row] = None, master


def _is_shown(record: Record | None) -> bool:
    return record is not None and record.is_shown


def _is_made(record: Record | None) -> bool:
    """Whether the master's gradient has all that the half one had."""
    return record is not None and record.factor is None


def _has_scale(record: Record | None) -> bool:
    """Whether masters have yet to take a half gradient, which has a loss scale on it."""
    return record is not None and record.factor is not None and not record.is_plain


def _has_any(column: Sequence[object]) -> bool:
    # A list, since a generator costs a call for each element.
    return any([value is not None for value in column])


def _few_of(grad: torch.Tensor) -> torch.Tensor:
    return local_of(grad).detach().reshape(-1)[:_GUESSED_BY]


def _sparse(name: str) -> PreampStateError:
    """Return the error for a sparse gradient of a half parameter."""
    return bad_state(
        f"The gradient of {name!r} is sparse and the parameter has a float32 master",
        "Masters take dense gradients; sparse ones work at O0, O1 and O4",
        "Build the embedding with sparse=False, or choose O1 (O4 for bfloat16)",
    )


def _without_effect(tensor: torch.Tensor, name: str) -> str:
    """Warning: a script writes to half gradients from which the masters' are made already."""
    return message(
        f"The {dtype_name(tensor.dtype)} gradient of {name!r} was changed after scale_loss, while "
        "it was still multiplied by the loss scale; as with Apex that has no effect, here and in "
        "later steps",
        "The step takes the unscaled float32 gradients, those of amp.master_params(optimizer)",
        "Clip with torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm)",
    )


def _written_while_packed(name: str, dtype: torch.dtype) -> str:
    """Warning: a script writes to half weights that are parts of masters."""
    return message(
        f"The {dtype_name(dtype)} weight {name!r} was written to between two steps, while its "
        'master was split (storage="split")',
        "What the master had beyond the half weight is lost, and from now on this tensor has a "
        "float32 master, so that later writes keep the elements that they leave alone",
        "Write to preamp.master_params(optimizer), or within engine.exact_weights(), which loses "
        'nothing; scripts that write in each step are served as well by storage="full"',
    )


def _written_by_ranks(name: str) -> str:
    """Warning: a script lets ranks write to half weights again and again."""
    return message(
        f"A collective has written to the half weight {name!r} between two steps, and not for the "
        "first time",
        "Masters are their half weights then, so that ranks have equal ones, and each time lose "
        "the digits that these lack",
        "Run it on preamp.master_params(optimizer) instead, which loses nothing",
    )


def _beyond_float16(name: str) -> str:
    """Warning: a loaded master is too large to be split."""
    return message(
        f"The master of the float16 weight {name!r} was given values beyond 65504, where its half "
        "weight is infinite",
        'Masters that large are not split (storage="split"); this one stays float32',
        f"Use opt_level='O5' (bfloat16), or keep the weight in float32 with keep_fp32=[{name!r}]",
    )


def _clipped_to_zero(grad: torch.Tensor, name: str) -> PreampStateError:
    """Return the error for a clip whose norm had overflowed: it multiplies by zero."""
    return bad_state(
        f"The {dtype_name(grad.dtype)} gradient of {name!r} was multiplied by zero, as a clip does "
        "whose norm is infinite",
        "The norm of half gradients is a half number in torch, and 65504 the largest in float16",
        "Clip with preamp.clip_grad_norm_(optimizer, max_norm), which needs no unscale_",
    )


def _changed_in_place(tensor: torch.Tensor, name: str, *, is_plain: bool) -> PreampStateError:
    """Return the error for a half gradient that was rewritten where that would go wrong."""
    why = "while earlier gradients that it adds to were kept in float32 beside it"
    if not is_plain:
        why = "while it was still multiplied by the loss scale"
    return bad_state(
        f"The {dtype_name(tensor.dtype)} gradient of {name!r} was changed in place or "
        f"replaced after scale_loss, {why}",
        "After scale_loss the unscaled gradients are those of "
        "preamp.master_params(optimizer); on the model's parameters they may be read, "
        "zeroed or set to None",
        "Clip with preamp.clip_grad_norm_(optimizer, max_norm) or with "
        "torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), max_norm), and call "
        "every backward inside scale_loss",
    )
