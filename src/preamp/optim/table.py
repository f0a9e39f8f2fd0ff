# SPDX-License-Identifier: BSD-3-Clause
"""The weight table: half parameters, their float32 masters, and what is known of both, as columns.

A row is one weight in two precisions. The columns of weights are `WeightPairs`, those of gradients
`HalfGradients`. Here is what scripts do to weights between steps, by ways of which torch notes some
and others not, and how masters are split between steps.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import sub
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import increment_version

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.errors import PreampStateError, bad_state, message
from preamp.core.tensors import find_again, local_of, runs_of, storage_key, versions_of
from preamp.core.torch_private.shards import set_data, sharded_as
from preamp.kernels import Ops
from preamp.kernels.stored import are_beyond_float16
from preamp.optim.gradients import HalfGradients, Rewriting
from preamp.optim.master_parameter import (
    PACKED_KINDS,
    MasterParameter,
    is_master,
    master_parameter,
    packed_kind,
)
from preamp.optim.pairs import WeightPairs
from preamp.policy.storage import Storage

if TYPE_CHECKING:
    from torch.nn import Parameter

_BOTH_FORMS = 1 << 22  # elements whose masters are split, or made, before the old ones go


class Twin:
    """One row: a half parameter and its master."""

    __slots__ = ("dtype", "half", "master", "name", "row", "stays_wide", "table")

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

    def gradient(self) -> torch.Tensor | None:
        """The unscaled float32 gradient, made if need be."""
        self.table.gradients.make_all()
        return self.table.gradients.base(self.row)

    def value(self) -> torch.Tensor:
        """The master's value; one that is packed stays so, and may be given packed."""
        is_there = self.table.lows[self.row] is None or self.table.gives_packed
        return self.master if is_there else self.table.joined(self.row)

    def packed(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a packed master is kept as, of a sharded one this rank's part; else ``None``."""
        return self.table.halves_of(self.row)

    @property
    def kept(self) -> torch.Tensor:
        """What the master takes memory for: itself, or what is beside the half weight."""
        low = self.table.lows[self.row]
        return self.master if low is None else low

    @property
    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The half gradient and its factor, if it is not in the master's gradient yet."""
        return self.table.gradients.pending_of(self.row)

    @property
    def is_shown(self) -> bool:
        """Whether the half gradient is shown unscaled; see `HalfGradients.show`."""
        record = self.table.gradients.records[self.row]
        return record is not None and record.is_shown

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from a pending gradient, without what clips it."""
        record = self.table.gradients.records[self.row]
        return None if record is None else record.unscales

    def forget_half_gradient(self) -> None:
        """The master's gradient was assigned: what the half gradient held no longer counts.

        Assigning ``None`` this way is how ``optimizer.zero_grad`` reaches the model's side.
        """
        self.table.gradients.forget(self.row)

    def settle(self) -> None:
        """Take over what was written to the half weight; see `WeightTable.settle`."""
        self.table.settle(self.row)


def _note_accumulated(master: Any) -> None:
    """A backward has reached the master itself, as of a penalty on masters."""
    if master.twin is not None:
        gradients = master.twin.table.gradients
        gradients.may_have_bases = True
        gradients.changes += 1


def pair_of(param: torch.Tensor) -> Twin | None:
    """The pair of a master and its half weight; ``None`` for any other parameter."""
    return cast("Twin | None", param.twin) if is_master(param) else None


class WeightTable(WeightPairs):
    """The rows that an optimizer updates, and the books on their weights and gradients."""

    def __init__(self, ops: Ops, rewriting: Rewriting, storage: Storage) -> None:
        """Start without rows."""
        super().__init__(ops)
        self.packs = storage.masters == "split"
        self.are_on_host = storage.place == "host"
        self.twins: list[Twin] = []  # the rows as objects
        # Of each row what is beside its half weight, int16, where the master is packed. Of a
        # sharded tensor this rank's part.
        self.lows: list[torch.Tensor | None] = []
        self.gradients = HalfGradients(self, rewriting)
        self.gradients.wait_on_host = storage.waits_on_host
        # Whether the next backward compares every half weight with its master, and is the first
        self.compares = self.is_fresh = True
        self.is_stepping = False  # whether an optimizer may be writing to masters
        self.gives_packed = False  # whether a state dict may have packed masters themselves
        # By row, what masters were, rounded, when somebody was given their memory
        self._handed_out: dict[int, torch.Tensor] = {}
        self._replacing: set[int] = set()  # rows whose half weight counts, and no digit beyond it
        self._replaced: set[int] | None = set()  # those so far; ``None`` once that was warned of
        self.loaded: set[int] = set()  # rows whose master was loaded
        self._written: set[Twin] = set()  # whose master a script wrote to, not packed since
        self._shares_versions = False  # whether a write to one half weight counts for others too
        self._nothing: dict[torch.device, torch.Tensor] = {}  # nan, of which packed masters are
        self._has_warned_of_lows = False  # of masters that keep float32

    def add(self, twin: Twin) -> None:
        """Add a row whose half weight is its rounded master."""
        twin.table, twin.row = self, len(self)
        self.add_row(twin.half, twin.master)
        self.twins.append(twin)
        self.lows.append(None)
        self.gradients.add_row(twin.name)

    def clear(self) -> None:
        """Hold nothing any more, rows and table not each other."""
        for column in (self.twins, self.halves, self.masters, self.kept, self.lows):
            column.clear()
        self.gradients.clear()

    def became_wide(self, row: int) -> PreampStateError:
        """The error for a half weight that was given another dtype."""
        return bad_state(
            f"The half parameter {self.twins[row].name!r} became "
            f"{dtype_name(self.halves[row].dtype)} after initialize",
            "A model with master weights keeps the dtypes that initialize gave it",
            "Call preamp.engine_of(model).close() before model.float()",
        )

    # -- what scripts and steps do to weights -----------------------------------------------------

    def absorb(self) -> None:
        """Let masters take over what was written to their half weights, before a step too."""
        self._take_in_data()
        super().absorb()
        if self.packs and any([low is None for low in self.lows]):
            changed = self._master_marks.changed(self.kept)
            self._written.update([self.twins[row] for row in changed])

    def write_halves(self) -> None:
        """Round every master into its half weight; the invariant after every step."""
        super().write_halves()
        self.is_stepping = False
        self._handed_out.clear()
        if self._shares_versions:
            self.note_written(range(len(self)))

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
        rounds = rounds and self.is_fresh and not self.has_sharded
        for row in range(len(self)):
            if rounds and row not in self.loaded:
                with torch.no_grad():
                    self.masters[row].copy_(self.halves[row])
                self.note_written((row,))
            else:
                self.settle(row)
        self.compares = self.is_fresh = False

    def follow_masters(self) -> None:
        """Round masters that somebody wrote to between steps into their half weights.

        An optimizer's own step is not meant: `write_halves` follows it.
        """
        self._take_in_data()
        rows = self._master_marks.changed(self.kept)
        if rows:
            self.absorb()
            self.round(rows)

    def hand_out(self, row: int) -> None:
        """Somebody gets a master's memory, and may write to it without a trace.

        What an optimizer's step does with it is rounded afterwards in any case. Before the first
        backward half weights may have been written to without a trace as well; so far they count.
        """
        half = self.halves[row]
        if self.is_stepping or row in self._handed_out or not is_half(half):
            return
        if self.compares:
            self._settle(row)
        self._handed_out[row] = self._rounded_here(row)

    def hand_out_all(self) -> None:
        """Somebody may write to masters as they please, such as to a buffer that they lie in."""
        if self.is_stepping:  # a step may call this for each parameter
            return
        for row, low in enumerate(self.lows):
            if low is None:
                self.hand_out(row)

    def _rounded_here(self, row: int) -> torch.Tensor:
        """This rank's part of a master that is there, as it goes into the half weight."""
        half = self.halves[row]
        value = self.rounded(row, self.masters[row].detach())
        return local_of(value).to(half.device, half.dtype)

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
            self.masters[row].copy_(self.halves[row].detach())

    def note_written(self, rows: Sequence[int]) -> None:
        """Remember that the half weights of ``rows`` equal their rounded masters as of now."""
        super().note_written(rows)
        if self._replacing:
            self._replacing.difference_update(rows)

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

    def note_rounded(self, start: int, stop: int) -> None:
        """An update itself has rounded new masters into half weights, of consecutive rows."""
        super().note_rounded(start, stop)
        if self.packs:  # ties of those that are not packed now are rounded otherwise
            self._is_rounded[start:stop] = [low is not None for low in self.lows[start:stop]]

    def rounded(self, row: int, value: torch.Tensor) -> torch.Tensor:
        """``value``, which the master of a row was given, as it goes into the half weight."""
        return self._ties_away(value, self.halves[row]) if self.packs else value

    # -- packed masters ---------------------------------------------------------------------------

    @torch.no_grad()
    def pack(self) -> None:
        """Keep masters as half weights and what is beside them, where the storage says so.

        Not while weights may have been written to without a trace, see `compare`, nor where
        something else holds the memory of a master, such as a view of it in the script.
        """
        if not self.packs or self.compares:
            return
        rows = [row for row, low in enumerate(self.lows) if low is None]
        rows = [row for row in rows if not self.twins[row].stays_wide]
        given = [row for row in rows if row in self.loaded or self.twins[row] in self._written]
        self._keep_wide_beyond_range(given)
        rows = [row for row in rows if not self.twins[row].stays_wide]
        if not rows:
            return
        before = versions_of(self.halves)
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
            writes = map(sub, versions_of(self.halves), before)
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

    def _runs(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """Rows of so few elements that both forms of these together are little memory."""
        for run in runs_of([self.halves[row] for row in rows], _BOTH_FORMS):
            yield rows[run]

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

    def halves_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's part of the half weight and what is beside it, where the master is packed."""
        low = self.lows[row]
        return None if low is None else (self._own_half(row).to(self.twins[row].dtype), low)

    def joined(self, row: int) -> torch.Tensor:
        """The value of a packed master; of a sharded one a sharded tensor."""
        return sharded_as(self._joined_here([row])[0], self.halves[row])

    def _joined_here(self, rows: Sequence[int]) -> list[torch.Tensor]:
        halves, lows = zip(*map(self.halves_of, rows), strict=True)
        wides = self._made_at_home(halves, torch.float32)
        self.ops.join_(halves, lows, wides)
        return wides

    def _own_half(self, row: int) -> torch.Tensor:
        """This rank's part of a half weight."""
        return local_of(self.halves[row].detach())

    def _pack_few(self, rows: Sequence[int]) -> list[Callable[[], torch.Tensor | None]]:
        """Pack masters; return what finds the memory of each if somebody else keeps that alive."""
        values = [local_of(self.masters[row].detach()) for row in rows]
        halves = list(map(self._own_half, rows))
        lows = self._made_at_home(halves, torch.int16)
        for device in set(map(self.home_of, halves)) - self._nothing.keys():
            self._nothing[device] = torch.full((), math.nan, device=device)
        self.ops.split_(values, halves, lows)
        finds = list(map(find_again, values))
        values.clear()
        for row, half, low in zip(rows, halves, lows, strict=True):
            self._pack_row(row, half, low)
        return finds

    def _pack_row(self, row: int, half: torch.Tensor, low: torch.Tensor) -> None:
        master = self.masters[row]
        nothing = self._nothing[self.home_of(half)].expand(half.shape)
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
        half = self.halves[row]
        set_data(master, sharded_as(value.to(self.home_of(half)), half))
        self.lows[row], self.kept[row] = None, master

    def _made_at_home(
        self, halves: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Of each half weight an empty tensor of its form, where its master lies."""
        return [torch.empty_like(half, dtype=dtype, device=self.home_of(half)) for half in halves]


def _written_by_ranks(name: str) -> str:
    """Warning: a script lets ranks write to half weights again and again."""
    return message(
        f"A collective has written to the half weight {name!r} between two steps, and not for the "
        "first time",
        "Masters are their half weights then, so that ranks have equal ones, and each time lose "
        "the digits that these lack",
        "Run it on preamp.master_params(optimizer) instead, which loses nothing",
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


def _beyond_float16(name: str) -> str:
    """Warning: a loaded master is too large to be split."""
    return message(
        f"The master of the float16 weight {name!r} was given values beyond 65504, where its half "
        "weight is infinite",
        'Masters that large are not split (storage="split"); this one stays float32',
        f"Use opt_level='O5' (bfloat16), or keep the weight in float32 with keep_fp32=[{name!r}]",
    )
