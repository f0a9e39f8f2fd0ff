# SPDX-License-Identifier: BSD-3-Clause
"""The weight table: half parameters, their float32 masters, and what is known of both, as columns.

A row is one weight in two precisions. The columns of weights are `WeightPairs`, those of gradients
`HalfGradients`. A `SplitTable` keeps in a master's place what its half weight lacks, 16 bits for
each element. What every row does is here, whichever way its master is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.tensors import devices_of, dtype_of, kinds_of, local_of
from preamp.core.torch_private.shards import sharded_as
from preamp.kernels import Ops
from preamp.kernels.stored import are_beyond_float16
from preamp.optim.gradients import HalfGradients, Rewriting
from preamp.optim.master_parameter import (
    MasterParameter,
    is_master,
    master_parameter,
    move_split_master,
    split_master,
)
from preamp.optim.pairs import WeightPairs
from preamp.policy.storage import Storage

if TYPE_CHECKING:
    from torch.nn import Parameter


class Twin:
    """One row: a half parameter and its master."""

    __slots__ = ("dtype", "half", "master", "name", "row", "table")

    def __init__(
        self, half: Parameter, master: MasterParameter, table: WeightTable, name: str
    ) -> None:
        """Be the next row of ``table``."""
        self.half = half  # the model's parameter, float16 or bfloat16
        self.dtype = half.dtype
        self.name = name
        self.master = master  # the optimizer's parameter, float32
        self.table = table  # where the row is
        self.row = len(table)  # its number there
        master.twin = self

    def gradient(self) -> torch.Tensor | None:
        """The unscaled float32 gradient, made if need be."""
        return self.table.gradients.gradient(self.row)

    def value(self) -> torch.Tensor:
        """The exact value, with what was written to either; see `WeightTable.value`."""
        return self.table.value(self.row)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What a split master is kept as, of a sharded one this rank's part; else ``None``."""
        return self.table.parts(self.row)

    @property
    def kept(self) -> torch.Tensor:
        """What the master takes memory for: itself, or what is beside the half weight."""
        low = self.table.lows[self.row]
        return self.master if low is None else low

    @property
    def is_shown(self) -> bool:
        """Whether the half gradient is shown unscaled; see `HalfGradients.show`."""
        return self.table.gradients.is_shown

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from the half gradient, without what clips it."""
        return self.table.gradients.unscales

    def assign_gradient(self, grad: torch.Tensor | None) -> None:
        """The script sets the master's gradient; see `HalfGradients.assign`."""
        self.table.gradients.assign(self.row, grad)


def _note_accumulated(master: Any) -> None:
    """A backward has reached the master itself, as of a penalty on masters."""
    if master.twin is not None:
        master.twin.table.gradients.note_accumulated()


def pair_of(param: torch.Tensor) -> Twin | None:
    """The pair of a master and its half weight; ``None`` for any other parameter."""
    return cast("Twin | None", param.twin) if is_master(param) else None


class WeightTable(WeightPairs):
    """The rows that an optimizer updates, and the books on their weights and gradients."""

    is_split = False

    def __init__(
        self, ops: Ops, rewriting: Rewriting, storage: Storage, *, updates_halves: bool
    ) -> None:
        """Start without rows.

        ``updates_halves`` says whether the optimizer's kernels take half weights for the truth and
        round new masters into them.
        """
        super().__init__(ops)
        self.are_on_host = storage.place == "host"
        self.updates_halves = updates_halves
        self.twins: list[Twin] = []  # the rows as objects
        # Of each row what is beside its half weight, int16, where masters are split. Of a sharded
        # tensor this rank's part.
        self.lows: list[torch.Tensor | None] = []
        self.gradients = HalfGradients(self, rewriting)
        self.gradients.wait_on_host = storage.waits_on_host
        self.is_fresh = True  # whether no backward has begun yet
        self.trusted: set[int] = set()  # rows whose masters were set since `initialize`
        self.is_stepping = False  # whether an optimizer may be writing to masters
        self.is_exact = False  # whether half weights are float32, and the masters, for a block
        self.gives_masters = False  # whether a state dict may have split masters themselves
        # By row, what half weights were when somebody was given their master's memory
        self._handed_out: dict[int, torch.Tensor] = {}
        # Dtypes and devices of the half weights, as last seen
        self._forms: tuple[set[torch.dtype], set[torch.device]] = set(), set()

    def add(self, half: Parameter, value: torch.Tensor, name: str) -> Twin:
        """Add a row with the float32 ``value``, which may become the master's memory."""
        master = master_parameter(value, requires_grad=half.requires_grad)
        cast("Any", master).register_post_accumulate_grad_hook(_note_accumulated)
        return self._add(half, master, None, name)

    def _add(
        self, half: Parameter, master: MasterParameter, low: torch.Tensor | None, name: str
    ) -> Twin:
        twin = Twin(half, master, self, name)
        self.twins.append(twin)
        self.lows.append(low)
        self.add_row(half, master)
        self.gradients.add_row(name)
        return twin

    def clear(self) -> None:
        """Hold nothing any more, rows and table not each other."""
        for column in (self.twins, self.halves, self.masters, self.lows):
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

    @property
    def are_alike(self) -> bool:
        """Whether all rows have the same dtypes and lie on one device, as `follow` has seen."""
        return all([len(kinds) == 1 for kinds in self._forms])

    # -- values -----------------------------------------------------------------------------------

    def value(self, row: int) -> torch.Tensor:
        """The exact float32 value of a row, with what was written to either side of it.

        It may share the master's memory.
        """
        half = self.halves[row]
        if self.is_exact:
            return half.detach()
        if is_half(half):  # not after model.float()
            self._take_in_data()
            self._settle(row)
        return self.masters[row].detach()

    @torch.no_grad()
    def set_value(self, row: int, value: torch.Tensor) -> None:
        """Let a row have another exact value, and its half weight that value rounded.

        As through ``.data``: a backward may come whose forward saved the half weight.
        """
        self.come_along(row)
        master = self.masters[row].detach()
        if local_of(master).data_ptr() != local_of(value).data_ptr():
            master.copy_(value)
        self.round((row,), quietly=True)

    def start(self, *, from_halves: bool) -> None:
        """The first backward begins.

        With ``from_halves`` masters that come from `initialize` start from the half weights, as in
        Apex: where a script itself gives all ranks the weights of one, that one cannot know, and
        would alone keep more precise masters. Does not synchronise.
        """
        if self.is_fresh and from_halves and not self.has_sharded:
            for row in set(range(len(self))) - self.trusted:
                self.set_value(row, self.halves[row].detach().float())
        self.is_fresh = False

    # -- what scripts and steps do to weights -----------------------------------------------------

    def _settle(self, row: int) -> None:
        self.come_along(row)
        if self._master_marks.is_changed(row, self.masters[row]):
            self.round((row,))
        else:
            self.take_over((row,))

    def follow(self) -> None:
        """Round masters that somebody wrote to into their half weights, and follow a move."""
        if self.is_exact:
            return
        forms = kinds_of(dtype_of, self.halves), devices_of(self.halves)
        if forms != self._forms:
            for row in range(len(self)):
                self.come_along(row)
            self._forms = forms
        self._take_in_data()
        super().follow()

    def absorb(self) -> None:
        """Let all masters agree with their half weights before they are used."""
        self.follow()
        self.take_over(range(len(self)))

    def write_halves(self) -> None:
        """Round new masters into half weights, after a step that has not done so itself."""
        self._take_in_data()
        if self.updates_halves:
            super().follow()
        else:
            super().write_halves()
        self.is_stepping = False

    def note_rounded(self, start: int, stop: int) -> None:
        """An update itself has rounded new masters into half weights, of consecutive rows."""
        self._master_marks.advance(self._marked, start, stop)

    def note_interrupted(self, row: int) -> None:
        """An update may have written to a master and not to its half weight yet."""
        self._master_marks.expect_change(row)

    def hand_out(self, row: int) -> None:
        """Somebody gets a master's memory, and may write to it without a trace."""
        half = self.halves[row]
        if self.is_stepping:
            self._master_marks.expect_change(row)
        elif row not in self._handed_out and is_half(half):
            self._settle(row)
            self._handed_out[row] = local_of(half.detach()).clone()

    def hand_out_all(self) -> None:
        """Somebody may write to masters as they please, such as to a buffer that they lie in."""
        if not self.is_stepping:  # a step may call this for each parameter
            for row in range(len(self._marked)):
                self.hand_out(row)

    def _take_in_data(self) -> None:
        """Round elements of masters that were written to without a trace into half weights.

        Quietly too: whoever saved such a weight for a backward hears nothing of it in torch
        either. Other elements stay, as a script may have written to half weights in the same way.
        """
        handed_out, self._handed_out = self._handed_out, {}
        with torch.no_grad():
            for row, before in handed_out.items():
                half = local_of(self.halves[row].detach()).data
                before = before.to(half.device)
                now = local_of(self.masters[row].detach()).to(half.device, half.dtype)
                is_same = now.view(torch.int16) == before.view(torch.int16)
                half.copy_(torch.where(is_same, half, now))

    # -- split masters ----------------------------------------------------------------------------

    def parts(self, row: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """This rank's part of the half weight and what is beside it, where masters are split."""
        del row


class SplitTable(WeightTable):
    """Rows whose masters are their half weights and 16 bits beside each element of these.

    So an element is its half weight, and no further than half a unit in the last place away from
    it. Only updates that take half weights and the rest as they are work on such rows.
    """

    is_split = True

    def __init__(self, *given: Any, **named: Any) -> None:
        """Start without rows; arguments as those of `WeightTable`."""
        super().__init__(*given, **named)
        self._marked = []  # nobody writes to masters that have no memory

    def add(self, half: Parameter, value: torch.Tensor, name: str) -> Twin:
        """Add a row with the float32 ``value``, of which nothing is kept."""
        home = self.home_of(half)
        low = torch.empty_like(local_of(half.detach()), dtype=torch.int16, device=home)
        twin = self._add(half, split_master(half, home), low, name)
        self.set_value(twin.row, value)
        return twin

    def come_along(self, row: int) -> None:
        """Let what is beside the half weight lie where that has moved, or on the host."""
        if self.halves[row].dtype is not self.twins[row].dtype:
            raise self.became_wide(row)
        self._move(row)

    def _move(self, row: int) -> None:
        half, low = self.halves[row], cast("torch.Tensor", self.lows[row])
        if low.device != self.home_of(half):
            self.lows[row] = low.to(self.home_of(half))
            move_split_master(self.masters[row], half, self.home_of(half))

    def parts(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the half weight and what is beside it."""
        self._move(row)
        # After model.float() the values are those of half weights still.
        half = local_of(self.halves[row].detach()).to(self.twins[row].dtype)
        return half, cast("torch.Tensor", self.lows[row])

    def value(self, row: int) -> torch.Tensor:
        """The exact float32 value of a row, in memory of its own."""
        if self.is_exact:
            return self.halves[row].detach()
        half, low = self.parts(row)
        wide = torch.empty_like(half, dtype=torch.float32, device=low.device)
        self.ops.join_([half], [low], [wide])
        return sharded_as(wide, self.halves[row])

    @torch.no_grad()
    def set_value(self, row: int, value: torch.Tensor) -> None:
        """Let a row have another exact value, rounded with ties away from zero.

        Raises `PreampStateError` for one that float16 weights and 16 bits cannot hold;
        synchronises for that at float16.
        """
        self.come_along(row)
        half, low = local_of(self.halves[row].detach()).data, cast("Any", self.lows[row])
        wide = local_of(value.detach()).to(low.device, torch.float32)
        if half.dtype is torch.float16 and True in are_beyond_float16([wide]):
            raise _beyond_float16(self.twins[row].name)
        self.ops.split_([wide], [half], [low])

    def absorb(self) -> None:
        """A split master is what its half weight is."""
        self.follow()


def _beyond_float16(name: str) -> PreampStateError:
    """The error for a value that is too large to be split."""
    return bad_state(
        f"The float16 weight {name!r} was given values beyond 65504, where it is infinite",
        'Masters that large cannot be told from infinite ones where they are split ("split")',
        f"Use opt_level='O5' (bfloat16), storage='full', or keep_fp32=[{name!r}]",
    )
