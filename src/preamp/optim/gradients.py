# SPDX-License-Identifier: BSD-3-Clause
"""The gradients of half parameters as columns: what scales them, and what the script did to them.

A master's gradient is lazy. After a backward the half gradient stays where autograd put it, on the
half parameter, and it is noted what unscales it. Reading the ``grad`` of one master makes those of
all, since whoever reads one reads all; a script that reads none never pays for them.

What the script does to half gradients in between counts: setting one to ``None`` drops it, zeroing
it zeroes it, earlier gradients that were accumulated included. Any other change is refused while a
loss scale is on them, since clipping a scaled gradient would be wrong without anyone noticing.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch

from preamp.core.away import is_away
from preamp.core.dtypes import dtype_name
from preamp.core.errors import PreampStateError, bad_state, message
from preamp.core.ranks import has_process_group
from preamp.core.tensors import (
    are_same,
    devices_of,
    grad_of,
    is_capturing,
    kinds_of,
    layout_of,
    local_of,
    plain_versions,
    store_grad,
    stored_grad,
    version_of,
    versions_of,
)
from preamp.core.undo import run_to_end
from preamp.optim.direct import Placeholders, is_zeroed, negative_zeros
from preamp.optim.pairs import WeightPairs
from preamp.optim.rewritten import Agree, common_factors, likely_factor, rewritten_in_half


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
    is_shown: bool = False  # whether the script sees it unscaled; see `HalfGradients.show`
    unclipped: torch.Tensor | None = None  # the factor that it had before it was clipped, if it was

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from it and clips nothing."""
        return self.factor if self.unclipped is None else self.unclipped


_STEPS_WATCHED = 10  # a script that writes to gradients does so from its first steps on
_GUESSED_BY = 32  # values of a gradient that suggest a factor
_SPENT = {is_plain: Record(None, is_plain=is_plain, is_spent=True) for is_plain in (False, True)}


@dataclass(slots=True, eq=False)
class Rewriting:
    """What comes of writing to scaled half gradients, for all tables of an engine.

    It is refused, or, as in Apex, has no effect. What was written over is lost, so for that the
    gradients of masters are made as soon as a backward has ended: while it is not known whether the
    script writes, and from then on if it does.
    """

    is_ignored: bool = False
    was_seen: bool = False  # and warned of


class HalfGradients:
    """The books on the gradients of the rows of a `WeightTable`.

    What happens in a step happens to all rows alike, so each method makes a few passes over whole
    columns, at the speed of the interpreter's own loops, and Python looks only at rows that differ
    from what was noted.

    One backward goes `begin`, then `put_back`, or `merge` and `commit` (`note_raw` where it leaves
    its gradients scaled). Between backwards `reconcile` takes in what the script has done.
    """

    def __init__(self, weights: WeightPairs, rewriting: Rewriting) -> None:
        """Start without rows; ``weights`` are those whose gradients these are."""
        self._weights = weights
        self._ops = weights.ops
        self._names: list[str] = []  # by row, as messages call the weights
        self._rewriting = rewriting
        self._steps = 0  # with them watched
        self._is_rewriting = False  # whether the script wrote other things than zeros
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
        self.may_have_bases = False  # whether any master may have a float32 gradient
        self.wait_on_host = False  # whether values lie there from a backward to its step
        self.changes = 0  # differs once gradients may be others than before
        self._arrived: list[torch.Tensor | None] | None = None
        self._placeholders = Placeholders()
        self._plain: dict[torch.device, Record] = {}
        self._base_versions: dict[int, int] = {}  # of masters' gradients, of rows that are shown
        self._has_warned = False  # of gradients taken as a script has written them

    def add_row(self, name: str) -> None:
        """Add a row without a gradient."""
        self._names.append(name)
        if self.is_showing:
            self.grads.append(None)
        self.seen.append(None)
        self.versions.append(-1)
        self.records.append(None)
        if self.raw is not None:
            self.raw.append(None)

    def clear(self) -> None:
        """Hold nothing any more, the weights' table neither."""
        self._weights = WeightPairs(self._ops)
        self._names.clear()
        self.grads.clear()
        self.seen.clear()
        self.records.clear()

    # -- what the script sees and does -----------------------------------------------------------

    def note(self, row: int, grad: torch.Tensor | None, record: Record | None = None) -> None:
        """Note the half gradient of one row."""
        self.changes += 1
        self.seen[row] = self.grads[row] = grad
        self.records[row] = record
        self.versions[row] = -1 if grad is None else version_of(grad)

    def forget(self, row: int) -> None:
        """The master's gradient was assigned: what the half gradient held no longer counts."""
        self._weights.halves[row].grad = None
        self.note(row, None)
        self.zeros_aside.discard(row)

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

    def reconcile(
        self, agree: Agree | None = None, *, looks: bool = False, lost: torch.Tensor | None = None
    ) -> None:
        """Take in what the script did to half gradients since they were last looked at.

        Raises `PreampStateError` if it rewrote one that has a loss scale on it, or that is only a
        part of what was accumulated. Nothing of that row was taken in then. With ``looks`` the
        values of all that are shown are looked at: writes through ``grad.data``, a collective, and
        torch's foreach functions on a ``DTensor`` leave no trace. ``agree`` is for gradients that
        ranks have parts of, all of which call this then; see `common_factors`. Where the scalar
        ``lost`` is not zero, no step will use what is shown; without ``agree`` it is read together
        with all else that has to be.
        """
        now = list(map(grad_of, self._weights.halves))
        are_same = all(map(is_, now, self.seen))
        if are_same and all(map(is_, now, repeat(None))):
            return
        versions = self._versions_of(now)
        looks = looks and self.is_showing
        if are_same and versions == self.versions and not looks:
            return
        seen = zip(now, self.seen, versions, self.versions, strict=True)
        changed = [row for row, (a, b, v, w) in enumerate(seen) if a is not b or v != w]
        shown = range(len(self._weights)) if looks else changed
        shown = [row for row in shown if _is_shown(self.records[row]) and now[row] is not None]
        if shown or (looks and agree is not None):
            changed = [row for row in changed if row not in shown]
            if not self._read_back_shown({row: now[row] for row in shown}, agree, lost):
                return
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
        if record.is_plain and is_all:  # as of one that a step has used up
            if record.factor is None:
                self.keep(row, None)
            stays_zero = record.is_zeroed and is_zeroed(now)
            self.note(row, now, self.zeroed(now) if stays_zero else self.plain(now.device))
            return
        is_other = now is not self.seen[row] or not is_zeroed(now)
        if (is_other or self._is_rewriting) and self._is_without_effect(record):
            if not self._rewriting.was_seen:
                self._rewriting.was_seen = True
                warnings.warn(_without_effect(now, self._names[row]), stacklevel=2)
            self.note(row, now, record)
            return
        if is_other:
            raise _changed_in_place(now, self._names[row], is_plain=record.is_plain)
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
        return versions_of(grads) if self._weights.has_sharded else plain_versions(grads)

    # -- shown unscaled --------------------------------------------------------------------------

    @property
    def is_showing(self) -> bool:
        """Whether half gradients are shown unscaled, those that have been scaled being kept."""
        return self.grads is not self.seen

    def show(self) -> None:
        """Let the half gradients be what masters get, rounded, for a script to read and change.

        But for those whose values are away: no script can read these.
        Called again after a clip, it shows the clipped ones. Scaled half gradients are kept apart
        meanwhile: unscaled, what is small becomes zero in float16. What the script does counts; see
        `_read_back_shown`.
        """
        self.make_accumulated()
        bases = self.bases()
        if not self.is_showing:
            self.grads = [
                grad.clone()
                if _has_scale(record) and grad is not None and not is_away(grad)
                else grad
                for grad, record in zip(self.seen, self.records, strict=True)
            ]
        targets: dict[int, Any] = {}
        shown: dict[Record, Record] = {}
        try:
            for row, record in enumerate(self.records):
                grad = self.seen[row]
                if grad is None or record is None or is_away(grad):
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
            self._ops.axpby_(to, factor, grads, 0.0, [None] * len(rows))
        wide: list[Any] = [bases[row] for row in made]
        self._ops.cast_copy_(wide, [targets[row] for row in made])

    @torch.no_grad()
    def _read_back_shown(
        self, now: Mapping[int, Any], agree: Agree | None, lost: torch.Tensor | None
    ) -> bool:
        """Take in what the script has made of gradients that it was shown unscaled, by row.

        One factor on all of a gradient, as clipping has, is applied to what masters get, so that
        nothing is lost that the half gradient cannot hold. Anything else is taken as written.
        Whether any of it counts: not if the flag ``lost`` is set.
        """
        written = {row: now[row] for row in now if self._is_master_written(row)}
        now = {row: grad for row, grad in now.items() if row not in written}
        factors = self._multiplied(now, lost) if agree is None else {}
        if factors is None:
            self.ignore_writes()
            return False
        for row, grad in written.items():  # to the master's gradient since `show`: that one counts
            if grad is not self.seen[row] or version_of(grad) != self.versions[row]:
                raise _changed_in_place(grad, self._names[row], is_plain=True)
            self.records[row] = replace(cast("Record", self.records[row]), is_shown=False)
        rest = [row for row in now if row not in factors]
        if rest or agree is not None:
            before = {row: torch.empty_like(now[row]) for row in rest}
            self._round_into(before)
            # Ranks tell each other of the same rows, whichever have a gradient.
            asked = rest if agree is None else range(len(self._weights))
            old, new = [before.get(row) for row in asked], [now.get(row) for row in asked]
            found = common_factors(old, new, [self._weights.halves[row] for row in asked], agree)
            factors |= zip(asked, found, strict=True)
        together: dict[float, list[int]] = {}
        common = next(filter(None, factors.values()), None)
        for row, grad in now.items():
            factor = factors[row]
            if factor == 0.0 and not is_zeroed(grad):  # by a clip
                if common is None:
                    raise _clipped_to_zero(grad, self._names[row])
                factor = common  # which left nothing of what was small
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
        return True

    def _is_master_written(self, row: int) -> bool:
        """Whether a script has written to the master's gradient since `show`."""
        base = self.base(row)
        return base is not None and self._base_versions.get(row) not in (None, version_of(base))

    def _note_bases(self, rows: Iterable[int]) -> None:
        """Remember the masters' gradients of shown rows as they are."""
        for row in rows:
            base = self.base(row)
            if base is not None:
                self._base_versions[row] = version_of(base)

    def ignore_writes(self) -> None:
        """Take for nothing what the script did to shown gradients that no step will use."""
        now = list(map(grad_of, self._weights.halves))
        for row, (grad, version) in enumerate(zip(now, self._versions_of(now), strict=True)):
            if _is_shown(self.records[row]):
                self.seen[row], self.versions[row] = grad, version

    def _multiplied(
        self, now: Mapping[int, Any], lost: torch.Tensor | None
    ) -> dict[int, float | None] | None:
        """The rows that were multiplied by a half number, as a clip by torch does, and that.

        A few values suggest which it might be; all are compared, in a few operations on all rows.
        Rows that the script has zeroed have the factor 0. ``None`` if the flag ``lost`` is set.
        Synchronises once, and for each row that became zero.
        """
        after = list(now.values())
        if len({(grad.dtype, grad.device) for grad in after}) != 1:
            return None if lost is not None and bool(lost != 0) else {}
        given = {row: torch.empty_like(grad) for row, grad in now.items()}
        self._round_into(given)
        before, none = list(given.values()), [None] * len(now)
        some = slice(0, None, max(1, len(now) // 4))
        factor = likely_factor(*([*map(_few_of, grads[some])] for grads in (before, after)))
        columns = [self._largest_of(grads) for grads in (before, after)]
        self._ops.scale_add_(before, factor, none)
        self._ops.axpby_(before, 1.0, before, -1.0, after)
        columns.append(self._largest_of(before))
        told = [factor, torch.zeros_like(factor) if lost is None else lost.to(factor)]
        found: Any = torch.cat([torch.stack(told), *columns])  # so that one read tells all
        known, is_lost, *by_row = cast("list[float]", found.tolist())
        if is_lost:
            return None
        factors: dict[int, float | None] = {}
        each = (by_row[start : start + len(now)] for start in range(0, len(by_row), len(now)))
        for row, was, is_now, differs_by in zip(now, *each, strict=True):
            # A factor that left nothing of what was small has left zeros with its sign.
            if was and not is_now and is_zeroed(now[row]):
                factors[row] = 0.0
            elif differs_by == 0.0:
                factors[row] = known
        return factors

    def _largest_of(self, grads: list[Any]) -> torch.Tensor:
        """The largest magnitude in each of ``grads``, on their device."""
        census = self._ops.census(grads, grads[0].device, with_norm=False)
        return cast("torch.Tensor", census.max_abs).float()

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
        self._ops.scale_add_(wide, by, [None] * len(wide))
        self._note_bases(made)

    def _warn_rewritten(self, row: int, *, is_zero: bool) -> None:
        if is_zero or self._has_warned or self._weights.halves[row].dtype is not torch.float16:
            return
        self._has_warned = True
        warnings.warn(rewritten_in_half(self._names[row]), stacklevel=2)

    # -- the masters' side -----------------------------------------------------------------------

    def base(self, row: int) -> torch.Tensor | None:
        """The float32 gradient of one master, as far as it is made."""
        return stored_grad(self._weights.masters[row])

    def bases(self) -> list[torch.Tensor | None]:
        """All of these."""
        if not self.may_have_bases:
            return [None] * len(self._weights)
        return list(map(stored_grad, self._weights.masters))

    def keep(self, row: int, grad: torch.Tensor | None) -> None:
        """Let ``grad`` be the float32 gradient of a master."""
        self.may_have_bases |= grad is not None
        store_grad(self._weights.masters[row], grad)

    @property
    def has_earlier(self) -> bool:
        """Whether any master has a float32 gradient already."""
        return self.may_have_bases and _has_any(self.bases())

    def pending_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One row's half gradient and its factor, if its master's gradient does not have it yet."""
        if self.is_open:
            return None
        self.reconcile()
        grad, record = self.grads[row], self.records[row]
        if grad is None or record is None or record.factor is None:
            return None
        return grad, record.factor

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
            rows = list(range(len(self._weights)))
            return rows, self._weights.halves, self.grads, [record.factor] * len(rows)
        rows = self.pending_rows()
        records: list[Any] = [self.records[row] for row in rows]
        return (
            rows,
            [self._weights.halves[row] for row in rows],
            [self.grads[row] for row in rows],
            [record.factor for record in records],
        )

    def make_all(self) -> None:
        """Make the masters' gradients: ``grad += float32(half.grad) * factor``, all in one op."""
        if not self.is_open:
            self.reconcile(looks=self._weights.has_sharded)
            self.make(self.pending_rows())
            # A write to the masters' may leave no trace.
            if self._weights.has_sharded and self.is_showing:
                self._hide()

    def make_accumulated(self) -> None:
        """Do so for rows whose master has an earlier gradient; the others stay half."""
        self.reconcile()
        if self.may_have_bases:
            bases = self.bases()
            self.make([row for row in self.pending_rows() if bases[row] is not None])

    def make(self, rows: Sequence[int]) -> None:
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
                wides.extend(self._ops.widen_add(grads, factors, [bases[row] for row in rows]))

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
                if is_alone:
                    store_grad(self._weights.masters[row], wide)

        run_to_end(add, note_made)  # half of it would drop gradients, or count them twice
        if self.is_showing:
            self._note_bases([row for row in rows if _is_shown(self.records[row])])

    def replace_factors(self, rows: Sequence[int], clip: torch.Tensor) -> None:
        """Multiply what unscales some pending rows by ``clip``; touches no memory."""
        self.changes += 1
        made: dict[Record, Record] = {}
        factors: dict[int, torch.Tensor] = {}
        shared = self.shared_record if len(rows) == len(self._weights) else None
        for old in {shared} if shared else set(map(self.records.__getitem__, rows)):
            if old is not None and old.factor is not None:
                by = factors.get(id(old.factor))
                if by is None:
                    by = factors[id(old.factor)] = old.factor * clip.to(old.factor.device)
                made[old] = replace(old, factor=by, unclipped=old.unscales)
        if shared is not None and made:
            self.records = [made[shared]] * len(self._weights)
            return
        for row in rows:
            old = self.records[row]
            self.records[row] = old if old is None else made.get(old, old)

    @property
    def holds_gradient(self) -> bool:
        """Whether either side has a gradient that the script has not dropped or zeroed."""
        self.reconcile()
        return self.has_earlier or any([r is not None and not r.is_zeroed for r in self.records])

    # -- a backward ------------------------------------------------------------------------------

    def begin(self, carry: torch.Tensor | float | None = None) -> None:
        """Begin a backward: move what is known to the masters' gradients, clear the half ones.

        Call `reconcile` first, which may refuse.
        Where earlier gradients must be in the half ones too, ``carry`` is the scale of the coming
        backward; see `DirectGradients`.
        """
        self.changes += 1
        bases = self.bases()
        self.zeros_aside.clear()
        if self.may_have_bases or _has_any(self.records):
            zeroed = {row for row, record in enumerate(self.records) if record and record.is_zeroed}
            alone = {row for row in zeroed if bases[row] is None}  # nothing is added to zeros
            self.make([row for row in self.pending_rows() if row not in alone])
            self._forget_half_gradients(alone)  # zeros stay where they are: the new ones join them
            self.zeros_aside = alone
        self.is_open = True
        if not self.may_have_bases:
            return
        if carry is None:
            for row in [row for row, base in enumerate(self.bases()) if base is not None]:
                half = self._weights.halves[row]
                self._placeholders.put(half, half, waits=self.wait_on_host)
        else:
            for row, base in enumerate(self.bases()):
                if base is not None:
                    self.carried.add(row)
                    half = self._weights.halves[row]
                    half.grad = (base.to(half.device) * carry).to(half.dtype)

    def _forget_half_gradients(self, but: Collection[int] = ()) -> None:
        kept = [(self._weights.halves[row], stored_grad(self._weights.halves[row])) for row in but]
        for half in self._weights.halves:
            half.grad = None
        for half, grad in kept:
            half.grad = grad
        self._arrived = None
        self.changes += 1
        self.records = [None] * len(self._weights)
        self.grads = self.seen = [None] * len(self._weights)
        self.versions = [-1] * len(self._weights)

    def arrive(self) -> None:
        """Read the half gradients that a backward has left, for `commit`; refuse a sparse one."""
        self._arrived = grads = list(map(grad_of, self._weights.halves))
        if kinds_of(layout_of, grads) <= {torch.strided}:
            return
        for name, grad in zip(self._names, grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise _sparse(name)

    def arrived_of(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """What `arrive` has read, if ``leaves`` are the half weights; not to be changed."""
        is_all = self._arrived is not None and are_same(leaves, self._weights.halves)
        return self._arrived if is_all and not self._weights.has_sharded else None

    def end_body(self) -> None:
        """The body of the block has ended; see `Placeholders.take_away`."""
        self._placeholders.take_away()

    def _forget_dropped(self) -> None:
        if self._placeholders.dropped:
            for row, half in enumerate(self._weights.halves):
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
        self._show_zeros_for_missing()

    def merge(self, factor: torch.Tensor | None) -> None:
        """Keep new gradients apart from earlier ones, which the masters have: add nothing yet."""
        del factor
        self._show_zeros_for_missing()

    def _show_zeros_for_missing(self) -> None:
        """Give rows that got no new gradient zeros for one, if they have an earlier one.

        The earlier one is in the master; without anything on the model's side, a script that
        drops the model's gradients could not reach it. The zeros are negative: zeroed by a script
        they are not, while a clip that saw no more of the gradient leaves them so, and is refused.
        """
        if not self.may_have_bases and not self.zeros_aside:
            return
        self._arrived = None
        without = [
            row for row, g in enumerate(list(map(grad_of, self._weights.halves))) if g is None
        ]
        for row in without:
            if id(self._weights.halves[row]) in self._placeholders.dropped:
                continue
            is_stored = self.base(row) is not None
            if is_stored or (row in self.zeros_aside and not self.is_open):
                half = self._weights.halves[row]
                half.grad = zeros = negative_zeros(half, waits=self.wait_on_host)
                if not self.is_open:
                    record = Record(None) if is_stored else self.zeroed(zeros)
                    self.note(row, zeros, record)

    def commit(self, factor: torch.Tensor | None) -> None:
        """The backward has ended: note the half gradients, and make those that must be made now.

        ``factor`` is the float32 scalar that unscales them, ``None`` where nothing was scaled. It
        is called again if it was interrupted.
        """
        if self.is_open:
            self._collect(factor)
        watch = self._rewriting  # the script may write over what masters' gradients are made of
        if watch.is_ignored and (watch.was_seen or self._steps < _STEPS_WATCHED):
            self.make([row for row in self.pending_rows() if _has_scale(self.records[row])])

    def _collect(self, factor: torch.Tensor | None) -> None:
        """Note what the backward has left; add nothing yet. Cannot fail."""
        self._forget_dropped()
        for row in self.carried:  # the half gradient holds the earlier one too
            self.keep(row, None)
        # Sharded ones may have been placed anew since they arrived.
        arrived, self._arrived = None if self._weights.has_sharded else self._arrived, None
        grads = list(map(grad_of, self._weights.halves)) if arrived is None else arrived
        self.grads = self.seen = grads
        self.versions = self._versions_of(grads)
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
        self._show_zeros_for_missing()
        self._forget_dropped()
        now = list(map(grad_of, self._weights.halves))
        versions = self._versions_of(now)
        self.raw = [None if g is None else v for g, v in zip(now, versions, strict=True)]

    def reconcile_raw(self) -> None:
        """Take in that the script dropped or zeroed gradients left scaled, and so all of them."""
        if self.raw is None:
            return
        now = list(map(grad_of, self._weights.halves))
        versions = self._versions_of(now)
        for row, (raw, grad) in enumerate(zip(self.raw, now, strict=True)):
            if raw is None or (grad is not None and versions[row] == raw):
                continue
            if grad is None or is_zeroed(grad):
                self.keep(row, None)
                self.zeros_aside.discard(row)
                self.raw[row] = None if grad is None else versions[row]

    # -- after a step, and zeroing ---------------------------------------------------------------

    def spend(self) -> None:
        """After a step: masters' gradients go, half gradients stay but are used up."""
        self._steps = min(self._steps + 1, _STEPS_WATCHED)
        self._drop_bases()
        if self.is_showing:
            self.ignore_writes()
            self.grads = self.seen
        if (record := self.shared_record) is not None:
            self.records = [_SPENT[record.is_plain]] * len(self._weights)
            return
        self.records = [record and _SPENT[record.is_plain] for record in self.records]

    def _drop_bases(self) -> None:
        if not self.may_have_bases:
            return
        self.may_have_bases = False
        for master, base in zip(
            self._weights.masters, list(map(stored_grad, self._weights.masters)), strict=True
        ):
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
        now = list(map(grad_of, self._weights.halves))
        for grad in now:
            if grad is not None:
                if grad.grad_fn is not None:  # of create_graph; a view in DDP's buckets has none
                    grad.detach_()
                grad.requires_grad_(False).zero_()
        if in_backward:
            return [None] * len(self._weights)
        self.end()
        if self.has_earlier:
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
                self._weights.halves[row].grad = grad
                if grad.device not in made:
                    made[grad.device] = self.zeroed(grad)
                self.seen[row], self.records[row] = grad, made[grad.device]
        self.grads, self.versions = self.seen, self._versions_of(self.seen)


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
