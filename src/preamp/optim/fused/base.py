# SPDX-License-Identifier: BSD-3-Clause
"""What all fused optimizers share: what a step has to do, sorted for the op table.

They follow Apex where scripts can tell: the step counter lies in the group, ``zero_grad`` obeys
``set_grad_none``, and sparse gradients are refused. Everything is collected and checked before
anything is changed, so a refused step leaves no group half-updated.

``torch.amp.GradScaler.step`` looks for ``_step_supports_amp_scaling`` on the optimizer. If it is
there, gradients are handed over scaled, and the scale and the overflow flag lie on the optimizer
as ``grad_scale`` and ``found_inf`` for the time of the step (`Signals`). Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_, itemgetter
from typing import Any, ClassVar, cast

import torch
from torch.optim.optimizer import required

from preamp.core.dtypes import math_dtype
from preamp.core.errors import bad_type
from preamp.core.splits import Splits
from preamp.core.tensors import device_of, dtype_of, has_sharded, host_reaches, stored_grad
from preamp.kernels import Ops, Rule, Update, backend
from preamp.kernels.shards import place_gradients
from preamp.kernels.stored import Stored
from preamp.optim.fused.checks import check_gradients, check_group
from preamp.optim.fused.keeping import Column, KeepsMoments
from preamp.optim.fused.moments import Entry
from preamp.optim.master_parameter import (
    MASTER_KINDS,
    form_of,
    leaves_of,
    make_masters,
    without_masters,
)
from preamp.optim.table import Twin

Group = dict[str, Any]
Closure = Callable[[], Any]
REQUIRED: Any = required
"""Default of a hyper-parameter that a group has to say if the constructor does not."""


@dataclass(slots=True, eq=False)
class Entries:
    """Parameters of a step that have a gradient, as columns."""

    params: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # what is updated
    # Their gradients; of a master the model's half one, where that is all there is
    grads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    # What gets the new value rounded as well, or ``None``
    halves: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    # Float32 scalars that unscale gradients, or ``None``
    factors: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    # Of those that are masters
    twins: list[Twin | None] = field(default_factory=list["Twin | None"])
    # Of packed masters what is beside their half weights, or ``None``
    lows: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    are_alike: bool = False  # whether all go into one batch, as far as is known already

    def __len__(self) -> int:
        """How many there are."""
        return len(self.params)

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return leaves_of(self.params)

    @property
    def targets(self) -> list[torch.Tensor]:
        """What ops update: parameters; in place of packed masters their half weights."""
        return _targets(self.params, self.halves, self.lows)

    def at(self, places: Sequence[int]) -> Entries:
        """The rows at ``places``."""
        columns: Any = self.params, self.grads, self.halves, self.factors, self.twins, self.lows
        return Entries(*cast("Any", [[column[i] for i in places] for column in columns]))

    def add(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        half: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        twin: Twin | None = None,
        low: torch.Tensor | None = None,
    ) -> None:
        """Add a row."""
        self.params.append(param)
        self.grads.append(grad)
        self.halves.append(half)
        self.factors.append(factor)
        self.twins.append(twin)
        self.lows.append(low)


def _targets(
    params: list[torch.Tensor],
    halves: Sequence[torch.Tensor | None] | None,
    lows: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    if halves is None or all([low is None for low in lows]):
        return params
    rows = zip(params, halves, lows, strict=True)
    return [param if half is None or low is None else half for param, half, low in rows]


def joined(every: Iterable[Entries]) -> Entries:
    """The rows of all."""
    whole = Entries()
    for one in every:
        whole.params += one.params
        whole.grads += one.grads
        whole.halves += one.halves
        whole.factors += one.factors
        whole.twins += one.twins
        whole.lows += one.lows
    return whole


def entries_of(params: Sequence[Any]) -> Entries:
    """The entries of those ``params`` that have a gradient.

    A master's float32 gradient is not made for it: the update unscales the half one on the way,
    and rounds the new master into the half weight while it is at hand.
    """
    return _consecutive_rows(params) or _one_by_one(params)


def _consecutive_rows(params: Sequence[Any]) -> Entries | None:
    """The entries of masters that are neighbours in a table and alike, as in most steps."""
    twin: Twin | None = params[0].twin if params and type(params[0]) in MASTER_KINDS else None
    if twin is None:
        return None
    table, start, stop = twin.table, twin.row, twin.row + len(params)
    masters = table.masters[start:stop]
    if len(masters) != len(params) or table.has_parts or not all(map(is_, params, masters)):
        return None
    table.complete()
    records, n = table.records[start:stop], stop - start
    record = records[0]
    if record is None or record.factor is None or table.is_open or records.count(record) != n:
        return None
    # None is missing, since every row has a record
    grads = cast("list[torch.Tensor]", table.grads[start:stop])
    factors: list[torch.Tensor | None] = [record.factor] * n
    twins: list[Twin | None] = [*table.twins[start:stop]]
    lows = table.lows[start:stop]
    are_alike = table.are_alike and len(set(map(dtype_of, grads))) == 1
    are_alike = are_alike and len({low is None for low in lows}) == 1
    halves = [*table.halves[start:stop]]
    return Entries([*masters], grads, halves, factors, twins, lows, are_alike)


def _one_by_one(params: Sequence[Any]) -> Entries:
    found = Entries()
    latest = None
    for param in params:
        twin: Twin | None = param.twin if type(param) in MASTER_KINDS else None
        if twin is None:
            grad = param.grad
            if grad is not None:
                found.add(param, grad)
            continue
        table = twin.table
        if table is not latest:
            table.complete()
            latest = table
        half, record, made = twin.half, table.records[twin.row], stored_grad(param)
        factor = None if record is None or made is not None or table.is_open else record.factor
        grad = made if factor is None else table.grads[twin.row]
        if table.has_parts:
            half = twin.held.own(half)
            if factor is None:
                grad = param.grad
            elif grad is not None:
                grad = twin.held.own(grad)
        if grad is not None:
            found.add(param, grad, half, factor, twin, table.lows[twin.row])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Lists for one call of an op: parameters of one dtype on one device, and what goes along."""

    params: list[torch.Tensor]  # what is updated
    grads: list[torch.Tensor]  # of one dtype
    halves: list[torch.Tensor | None] | None  # of one dtype, or ``None`` if nothing is rounded
    factor: torch.Tensor | None  # what unscales all of the gradients, or ``None``
    twins: list[Twin | None]  # of those that are masters
    lows: list[torch.Tensor] | None = None  # of packed masters what is beside their half weights

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return leaves_of(self.params)

    @property
    def targets(self) -> list[torch.Tensor]:
        """What the op updates; see `Entries.targets`."""
        return self.params if self.lows is None else _targets(self.params, self.halves, self.lows)

    def update(
        self,
        *,
        step: int | torch.Tensor = 1,
        inv_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        norms: torch.Tensor | None = None,
    ) -> Update:
        """What the op is told; ``inv_scale`` multiplies the gradients in addition to `factor`."""
        both = inv_scale if self.factor is None else self.factor
        if inv_scale is not None and self.factor is not None:
            both = self.factor * inv_scale.to(self.factor.device)
        is_packed = self.lows is not None
        return Update(
            step=step,
            inv_scale=both,
            found_inf=found_inf,
            halves=None if is_packed else self.halves,
            norms=norms,
            stored=Stored(lows=self.lows) if is_packed else None,
        )

    def note_written(self) -> None:
        """The op has rounded the masters into their half weights."""
        first, last = self.twins[0], self.twins[-1]
        if first is None or last is None:
            return  # all or none of a batch are masters
        n, table = len(self.twins), first.table
        if last.row - first.row == n - 1 and all(map(is_, self.twins, table.twins[first.row :])):
            table.note_rounded(first.row, first.row + n)
            return
        for twin in self.twins:
            if twin is not None:
                twin.table.note_rounded(twin.row, twin.row + 1)


def batches(entries: Entries, apart: Column | None = None) -> list[Batch]:
    """Sort entries into lists for ops, by dtype, device and the column that ``apart`` returns."""
    if not entries:
        return []
    if entries.are_alike and apart is None:
        return [_batch(entries)]
    targets = entries.targets
    keys: list[list[Hashable]] = [
        list(map(device_of, targets)),
        list(map(dtype_of, targets)),
        list(map(dtype_of, entries.grads)),
        [None if half is None else half.dtype for half in entries.halves],
        list(map(id, entries.factors)),
        [low is None for low in entries.lows],
    ]
    if apart is not None:
        keys.append(list(apart(entries.params)))
    if all([len(set(column)) == 1 for column in keys]):
        return [_batch(entries)]
    found: dict[Hashable, list[int]] = {}
    for place, key in enumerate(zip(*keys, strict=True)):
        found.setdefault(key, []).append(place)
    return [_batch(entries.at(places)) for places in found.values()]


def _batch(alike: Entries) -> Batch:
    halves = None if alike.halves[0] is None else alike.halves
    lows = [low for low in alike.lows if low is not None] or None
    return Batch(alike.params, alike.grads, halves, alike.factors[0], alike.twins, lows)


@dataclass(frozen=True, slots=True)
class Signals:
    """What a ``GradScaler`` says about the gradients at hand."""

    # Float32 scalar that unscales them; ``None`` if they are not scaled
    inv_scale: torch.Tensor | None
    # Float32 scalar, not zero if one is infinite or nan; ``None`` if nobody looked
    found_inf: torch.Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Signals:
        """Read what lies on the optimizer now."""
        scale: Any = getattr(optimizer, "grad_scale", None)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        return cls(
            scale.reciprocal() if isinstance(scale, torch.Tensor) else None,
            # Without any gradient the scaler leaves the number 0 here.
            found_inf if isinstance(found_inf, torch.Tensor) else None,
        )

    @property
    def is_skip(self) -> bool:
        """Whether the step must do nothing, as far as that can be known without waiting."""
        found_inf = self.found_inf
        return found_inf is not None and host_reaches(found_inf) and bool(found_inf != 0)

    def unscale_(self, grads: Sequence[torch.Tensor], ops: Ops) -> None:
        """Leave the gradients unscaled after the step, as torch's fused optimizers do.

        After it, not before: a half gradient would lose its small values. Gradients of a
        skipped step stay as they are.
        """
        if self.inv_scale is None:
            return
        factor = self.inv_scale
        if self.found_inf is not None:
            factor = torch.where(self.found_inf != 0, torch.ones_like(factor), factor)
        ops.scale_add_(grads, factor, [None] * len(grads))


def _zeros(param: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)


Work = Sequence[tuple[Group, Entries]]
"""All groups that have parameters, with the entries of those that have gradients."""


class FusedOptimizer(KeepsMoments):
    """Base of the optimizers in `preamp.optimizers`; implements everything but the update."""

    set_grad_none: bool
    backend: str = "auto"
    """Name of the kernels that compute the update; see ``preamp.kernels.backend``."""

    splits: Splits = Splits()
    """Over which ranks parameters are split; ``DTensor`` parameters say so themselves."""

    _step_supports_amp_scaling = True
    """Tells torch's ``GradScaler`` to hand over what it knows instead of reading it."""

    is_elementwise: ClassVar[bool] = False
    """Whether an element is updated from its own gradient, value and state alone."""

    may_update_alone: ClassVar[bool] = False
    """Whether the update of a parameter follows from its own gradient, by the usual formula."""

    _counts: ClassVar[bool] = True
    """Whether ``group["step"]`` counts updates; rounding by chance counts them in any case."""

    _starts_apart: ClassVar[bool] = False
    """Whether the first update of a parameter is another one, whenever it comes."""

    _settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)
    """Attributes that copies and pickles keep; torch's optimizers carry their groups only."""

    def __init__(self, params: Any, defaults: Group, **settings: Any) -> None:
        """Check ``defaults``, the options of groups, and keep ``settings`` as attributes."""
        check_group(type(self).__name__, defaults)
        vars(self).update(settings)
        super().__init__(params, defaults)

    def step(self, closure: Closure | None = None) -> Any:
        """Update the parameters that have gradients.

        Args:
            closure: Re-evaluates the model with gradients enabled and returns the loss.

        Returns:
            The closure's loss, or ``None``.

        Raises:
            RuntimeError: A gradient is sparse or of a dtype that is not updated.
        """
        loss = evaluate(closure)
        with torch.no_grad():
            self._run()
        return loss

    def _run(self) -> None:
        work, signals = self._collect(), Signals.of(self)
        self._take_step(work, signals)
        if signals.inv_scale is not None:
            grads = [grad for _, entries in work for grad in entries.grads]
            signals.unscale_(grads, backend(self.backend))

    @property
    def updates_alone(self) -> bool:
        """Whether the update of a parameter follows from its own gradient; see `update_alone`."""
        return self.may_update_alone

    def update_alone(self, group: Group, entries: Entries) -> None:
        """Update parameters of a group ahead of the `step` that will count and reset all else."""
        before = {name: getattr(self, name) for name in self._settings}
        counter = group.get("step")
        if isinstance(counter, torch.Tensor):
            group["step"] = counter.clone()
        try:
            self._check(entries)
            self._take_step([(group, entries)], Signals(None, None))
        finally:
            vars(self).update(before)
            group["step"] = counter
            if counter is None:
                del group["step"]

    def _take_step(self, work: Work, signals: Signals) -> None:
        """Update what has been collected, by `_rule`; gradients stay as they are."""
        apart = self._apart(self._have_started if self._starts_apart else None)
        for group, entries in () if signals.is_skip else work:
            step = count_step(group, signals) if self._counts or self._has_fewer_bits else 1
            for batch in batches(entries, apart):
                is_first = self._starts_apart and not self._have_started(batch.params[:1])[0]
                update = batch.update(
                    step=1 if is_first else step,
                    inv_scale=signals.inv_scale,
                    found_inf=signals.found_inf,
                )
                state = self._state(batch.params, *self.moments)
                self._apply(batch, state, self._rule(group), self._told(batch.params, update))

    def _have_started(self, params: Sequence[torch.Tensor]) -> list[bool]:
        """Which of ``params`` have state."""
        key = next(iter(self.moments))
        return [state.get(key) is not None for state in self._states_of(params)]

    def _rule(self, group: Group) -> Rule:
        """The rule of a group; of optimizers that measure or clip, see their `_take_step`."""
        raise NotImplementedError

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; refuses what the constructor refuses."""
        if isinstance(param_group, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            check_group(type(self).__name__, param_group)
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear the gradients.

        Args:
            set_to_none: Drop them rather than fill them with zeros; by default as the
                constructor's ``set_grad_none`` says.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data.

        A counter that moved to the device, where only that knows of skipped steps, is a number
        again, unless the optimizer is ``capturable``. Synchronises in this case.
        """
        state = super().state_dict()
        if not self._counts_on_device:
            for group in state["param_groups"]:
                if isinstance(group.get("step"), torch.Tensor):
                    group["step"] = int(group["step"])
        return state

    @property
    def _counts_on_device(self) -> bool:
        """Whether ``group["step"]`` is a tensor by the user's choice."""
        return False

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned.

        torch casts loaded state to the parameter's dtype on the way. State that is kept in
        float32 or in fewer bits here is taken from ``state_dict`` itself. Moments of another
        `storage` are converted; a line says what that rounds.

        Raises:
            ValueError: Its groups do not match those of this optimizer, or its moments in fewer
                bits have other shapes than the parameters.
        """
        own: dict[torch.Tensor, Entry] = {}
        rounded: set[str] = set()

        def take_out(_: torch.optim.Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            # ``final`` is what the user's own hooks have made of it.
            found, rest, sources = self._own_state(final)
            own.update(found)
            rounded.update(sources)
            return {**final, "state": rest}

        def put_back(_: torch.optim.Optimizer) -> None:
            for param, entry in own.items():
                self.state[param].update(entry)

        handles = (
            self.register_load_state_dict_pre_hook(take_out),
            self.register_load_state_dict_post_hook(put_back, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()
        self._tell_rounded(rounded)

    def __getstate__(self) -> dict[str, Any]:
        names = (*self._settings, "backend", "storage")
        return super().__getstate__() | {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # from a file that did not know an option yet
            for name, default in self.defaults.items():
                if default is not REQUIRED and name != "differentiable":  # which torch puts there
                    group.setdefault(name, default)

    def _collect(self) -> Work:
        self.check_storage()
        work: list[tuple[Group, Entries]] = []
        for group in self.param_groups:
            if not self.takes_stored:
                make_masters(group["params"])
            if has_sharded(group["params"]):
                place_gradients(without_masters(group["params"]))
            entries = entries_of(group["params"])
            self._check(entries)
            if group["params"]:
                work.append((group, entries))
        return work

    def _check(self, entries: Entries) -> None:
        """Refuse gradients or parameters that no rule can take."""
        if entries.are_alike:  # masters, whose gradients were looked at when they came
            return
        check_gradients(type(self).__name__, entries.targets, entries.grads)

    def _apply(
        self, batch: Batch, state: Sequence[Sequence[torch.Tensor]], rule: Rule, update: Update
    ) -> None:
        """Update one batch."""
        ops = backend(self.backend)
        lists, update = self._by_rows([batch.targets, batch.grads, *state], update)
        ops.update_(*lists, rule=rule, update=update)
        batch.note_written()

    def _state(
        self,
        params: Sequence[torch.Tensor],
        *keys: str,
        make: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = _zeros,
    ) -> list[list[torch.Tensor]]:
        """For each key the state tensors of parameters of one dtype, made where there is none."""
        if not params:
            return [[] for _ in keys]
        states = self._states_of(params)
        return [self._state_column(params, states, key, make) for key in keys]

    def _state_column(
        self,
        params: Sequence[torch.Tensor],
        states: Sequence[dict[str, Any]],
        key: str,
        make: Callable[[torch.Tensor, torch.dtype], torch.Tensor],
    ) -> list[torch.Tensor]:
        dtype = self._kept_dtype(key, params[0])
        try:
            kept: list[Any] = list(map(itemgetter(key), states))
            if set(map(dtype_of, kept)) == {dtype}:
                return kept
        except (KeyError, AttributeError):  # one has none, or None
            pass
        if key in self.moments:
            self._as_kept(params, states, key)
            return [state[key] for state in states]
        found: list[Any] = [state.get(key) for state in states]
        for place, (param, state, value) in enumerate(zip(params, states, found, strict=True)):
            if value is None:
                found[place] = state[key] = make(form_of(param), dtype)
            elif value.dtype is not dtype:  # the model was cast, and the state with it
                found[place] = state[key] = value.to(dtype)
        return found


def evaluate(closure: Closure | None) -> Any:
    """Call the closure with gradients enabled, and return its loss."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def scalar_on(
    value: float | torch.Tensor, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """``value`` as a 0-dim tensor; a number is filled in, since copying it would synchronise."""
    if isinstance(value, torch.Tensor):
        return value.detach().to(device, dtype).reshape(())
    return torch.full((), value, dtype=dtype, device=device)


def rate_of(group: Group) -> float | torch.Tensor:
    """The group's learning rate; of a tensor with one element, whatever its shape, a scalar."""
    lr: float | torch.Tensor = group["lr"]
    return lr.reshape(()) if isinstance(lr, torch.Tensor) else lr


def place_on_device(group: Group) -> None:
    """Make ``lr`` and ``step`` of a group 0-dim tensors of its own, where its parameters are."""
    if not group["params"]:
        return
    param: torch.Tensor = group["params"][0]
    for name, dtype in (("lr", math_dtype(param.dtype)), ("step", torch.int32)):
        group[name] = scalar_on(group.get(name, 0), dtype, param.device).clone()


def count_on_device(group: Group, found_inf: torch.Tensor | None) -> torch.Tensor:
    """Advance the group's counter unless the step is skipped, and return it."""
    if not isinstance(group.get("step"), torch.Tensor):  # a number that a script has put there
        place_on_device(group)
    step: torch.Tensor = group["step"]
    step += 1 if found_inf is None else (found_inf == 0).to(step.device, step.dtype)
    return step


def count_step(group: Group, signals: Signals) -> int | torch.Tensor:
    """Advance the group's counter unless skipped; a number while the host knows which."""
    knows = signals.found_inf is None or host_reaches(signals.found_inf)
    step = group.get("step", 0)
    if knows and not isinstance(step, torch.Tensor):
        group["step"] = int(step) + 1
        return group["step"]
    if not isinstance(step, torch.Tensor) and group["params"]:
        group["step"] = scalar_on(step, torch.int32, group["params"][0].device)
    return count_on_device(group, signals.found_inf)


def names_scaler(kind: str, given: dict[str, Any]) -> bool:
    """Whether the extra keyword arguments of a ``step`` name a ``GradScaler``; no other may."""
    unknown = sorted(given.keys() - {"grad_scaler"})
    if unknown:
        raise bad_type(
            f"{kind}.step() got {', '.join(map(repr, unknown))}",
            "Its only other keyword argument is 'grad_scaler'",
            "Check the spelling",
        )
    return given.get("grad_scaler") is not None
