# SPDX-License-Identifier: BSD-3-Clause
"""Half weights and their float32 masters as columns, and what an optimizer has of them.

**The half weight is the truth; the master refines it.** Wherever a master's value is used, an
element is the master's where that rounds to the half weight bit for bit, and the half weight's
where it does not. So every write to a half weight counts, however it was made, and nobody has to
hear of it. What is written to a master is rounded into its half weight before either is used.

`WeightPairs` keeps that rule. A `WeightTable` has the rows of one optimizer, whose ``param_groups``
have masters in the places of half weights, and their gradients (`HalfGradients`). Masters that are
split are in `preamp.optim.split`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.errors import PreampStateError, bad_state, with_article
from preamp.core.tensors import (
    WeightMarks,
    devices_of,
    dtype_of,
    is_sharded,
    kinds_of,
    local_of,
    locals_of,
)
from preamp.core.torch_private.shards import set_data
from preamp.kernels import Ops
from preamp.optim.gradients import HalfGradients
from preamp.optim.master_parameter import MasterParameter, is_master, master_parameter
from preamp.policy.storage import Storage

if TYPE_CHECKING:
    from torch.nn import Parameter

NameOf = Callable[[torch.Tensor], str]
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
        if not rows:
            return
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
            was_written = self._master_marks.is_changed(row, master)
            set_data(master, master.detach().to(self.home_of(half)))
            self.note_written((row,))
            if was_written:  # and not rounded into the half weight yet
                self.note_master_changed(row)

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
        """Follow moved half weights, and round masters that somebody wrote to into theirs."""
        for row in range(len(self)):
            self.come_along(row)
        self.round(self._master_marks.changed(self._marked))

    def absorb(self) -> None:
        """Let all masters agree with their half weights before they are used."""
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

    def note_master_changed(self, row: int) -> None:
        """The master of a row may have other values, though torch has not counted a write."""
        if self._marked:
            self._master_marks.expect_change(row)


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

    def value(self) -> torch.Tensor:
        """The exact value, with what was written to either; see `WeightTable.value`."""
        return self.table.value(self.row)

    @property
    def kept(self) -> torch.Tensor:
        """What the master takes memory for: itself, or what is beside the half weight."""
        low = self.table.lows[self.row]
        return self.master if low is None else low


def _note_accumulated(master: Any) -> None:
    """A backward has reached the master itself, as of a penalty on masters."""
    if master.twin is not None:
        master.twin.table.gradients.note_accumulated()


def pair_of(param: torch.Tensor) -> Twin | None:
    """The pair of a master and its half weight; ``None`` for any other parameter."""
    return cast("Twin | None", param.twin) if is_master(param) else None


class WeightTable(WeightPairs):
    """The half weights that one optimizer updates, with masters and gradients; perhaps no rows.

    The optimizer's group dicts, their ``params`` lists and its ``state`` keep their identity:
    schedulers and optimizers hold references to them. Only list entries are exchanged.
    """

    is_split = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ops: Ops,
        storage: Storage,
        *,
        name_of: NameOf = repr,
        others: list[WeightTable] | None = None,
        has_masters: bool = False,
    ) -> None:
        """Start without rows; `adopt` makes them, if half weights are to have masters.

        ``others`` are the tables of the engine: no weight may be in two.
        """
        super().__init__(ops)
        self.optimizer = optimizer
        self.has_masters = has_masters
        self.are_on_host = storage.place == "host"
        self._casts_state = storage.moments == "float32"  # else bfloat16 stays that
        # Whether kernels take half weights for the truth, and round masters into them
        self.updates_halves = False
        self.twins: list[Twin] = []  # the rows as objects
        # Of each row what is beside its half weight, int16, where masters are split. Of a sharded
        # tensor this rank's part.
        self.lows: list[torch.Tensor | None] = []
        self.gradients = HalfGradients(ops, self.halves, self.masters)
        self.gradients.wait_on_host = storage.release_gradients
        self.is_fresh = True  # whether no backward has begun yet
        self.trusted: set[int] = set()  # rows whose masters were set since `initialize`
        self.is_stepping = False  # whether an optimizer may be writing to masters
        self.is_exact = False  # whether half weights are float32, and the masters, for a block
        self.gives_masters = False  # whether a state dict may have split masters themselves
        self._name_of = name_of
        self._others = [] if others is None else others
        self._by_half: dict[int, Twin] = {}
        self._known: list[list[Any]] = []  # the parameters of each group, as last adopted
        # By row, what half weights were when somebody was given their master's memory
        self._handed_out: dict[int, torch.Tensor] = {}
        # Dtypes and devices of the half weights, as `follow` has last seen them, and whether all
        # rows have the same
        self._forms: tuple[set[torch.dtype], set[torch.device]] = set(), set()
        self.are_alike = False

    # -- rows, and the optimizer's groups ---------------------------------------------------------

    def of_half(self, half: torch.Tensor) -> Twin | None:
        """Return the row of a model parameter, or ``None``."""
        return self._by_half.get(id(half))

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Give every trainable half parameter in the optimizer a master, if it has none.

        Called again before each backward and step: a parameter that was frozen at first gets its
        master when it is unfrozen. ``originals`` are float32 values from before the cast, by
        ``id(parameter)``, whose storage becomes the master's; without, the half value is widened.
        """
        if not self.has_masters:
            return
        for place, group in enumerate(self.optimizer.param_groups):
            params: list[Any] = group["params"]
            if place == len(self._known):
                self._known.append([])
            known = self._known[place]
            if known and len(params) == len(known) and all(map(is_, params, known)):
                continue
            for index, param in enumerate(params):
                if not is_master(param) and is_half(param) and param.requires_grad:
                    params[index] = self._adopt_one(param, (originals or {}).get(id(param)))
            # A frozen half parameter may be unfrozen, so its group is looked through each time.
            self._known[place] = [] if any(map(is_half, params)) else params.copy()

    def _adopt_one(self, half: Any, original: torch.Tensor | None) -> MasterParameter:
        twin = self._by_half.get(id(half))
        if twin is None:
            name = self._name_of(half)
            for other in self._others:
                if other.of_half(half) is not None:
                    raise in_two_optimizers(name, other.optimizer, self.optimizer)
            data = half.detach() if original is None else original
            twin = self.add(half, data.to(self.home_of(half), torch.float32), name)
            self._by_half[id(half)] = twin
        state: dict[Any, Any] = self.optimizer.state
        _move_state(state, half, twin.master)
        if twin.master in state and self._casts_state:
            cast_state(state[twin.master], twin.master)
        return twin.master

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
        self.gradients.add_row(name, is_sharded=is_sharded(half))
        return twin

    def release(self) -> None:
        """Put the model parameters back into the groups, and the state under them.

        May be called again if it was interrupted. Rows and table hold each other no longer.
        """
        state: dict[Any, Any] = self.optimizer.state
        by_master = {id(twin.master): twin for twin in self.twins}
        for twin in self.twins:
            _move_state(state, twin.master, twin.half)
        for group in self.optimizer.param_groups:
            params: list[Any] = group["params"]
            for index, param in enumerate(params):
                twin = by_master.get(id(param))
                if twin is not None:
                    params[index] = twin.half
        for twin in self.twins:
            twin.master.twin = None
        for column in (self.twins, self.halves, self.masters, self.lows, self._known, self._others):
            column.clear()
        self._by_half.clear()
        self.gradients.clear()

    def became_wide(self, row: int) -> PreampStateError:
        """The error for a half weight that was given another dtype."""
        return bad_state(
            f"The half parameter {self.twins[row].name!r} became "
            f"{dtype_name(self.halves[row].dtype)} after initialize",
            "A model with master weights keeps the dtypes that initialize gave it",
            "Call preamp.engine_of(model).close() before model.float()",
        )

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
            self._agree(row)
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

    def _agree(self, row: int) -> None:
        self.come_along(row)
        if self._master_marks.is_changed(row, self.masters[row]):
            self.round((row,))
        else:
            self.take_over((row,))

    def follow(self) -> None:
        """As of pairs; does nothing while half weights are exact."""
        if self.is_exact:
            return
        forms = kinds_of(dtype_of, self.halves), devices_of(self.halves)
        if forms != self._forms or not self.are_alike:  # of several devices one row may change
            for row in range(len(self)):
                self.come_along(row)
            self._forms, self.are_alike = forms, len(forms[0]) == len(forms[1]) == 1
        if self._handed_out:
            self._take_in_data()
        written = self._master_marks.changed(self._marked)
        if written:
            self.round(written)

    def write_halves(self) -> None:
        """Round new masters into half weights, after a step that has not done so itself."""
        if self._handed_out:
            self._take_in_data()
        if not self.updates_halves:
            super().write_halves()
        elif written := self._master_marks.changed(self._marked):
            self.round(written)
        self.is_stepping = False

    def note_rounded(self, start: int, stop: int) -> None:
        """An update itself has rounded new masters into half weights, of consecutive rows."""
        if self._marked:
            self._master_marks.advance(self._marked, start, stop)

    def hand_out(self, row: int) -> None:
        """Somebody gets a master's memory, and may write to it without a trace."""
        half = self.halves[row]
        if self.is_stepping:
            self.note_master_changed(row)
        elif row not in self._handed_out and is_half(half):
            self._agree(row)
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


def in_two_optimizers(name: str, first: object, second: object) -> PreampStateError:
    """Return the error for a half weight that a second optimizer is to update as well."""
    kinds = [with_article(type(optimizer).__name__) for optimizer in (first, second)]
    return bad_state(
        f"The half weight {name!r} is in two optimizers, {kinds[0]} and {kinds[1]}",
        "Where weights are half, each is updated by one optimizer",
        "Give it to one of the two, or choose O1 (O4 for bfloat16), where weights stay float32 and "
        "may be in both",
    )


def _move_state(state: dict[Any, Any], source: Any, target: Any) -> None:
    if source in state:
        state[target] = state[source]  # there for a moment twice, so that no interrupt loses it
        del state[source]


def cast_state(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Cast floating state of a parameter's shape to its dtype; step counters and others stay."""
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and key != "step"
            and value.dtype != param.dtype
        ):
            state[key] = value.to(param.dtype)
    return state
