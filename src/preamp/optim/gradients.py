# SPDX-License-Identifier: BSD-3-Clause
"""The gradients that one optimizer uses, from a backward to its step.

`DirectGradients` are those of parameters that it updates itself. `HalfGradients` are those of half
parameters with masters: all rows of a table are in one state, which doors change.

``NONE``: there is nothing to apply. What lies in ``p.grad`` was used up by a step.
``OPEN``: a backward is under way; ``p.grad`` is scaled and incomplete.
``HALF``: what one backward has left, half, in ``p.grad`` of the model; one factor unscales it. If
masters have gradients of earlier ones, the next `take_in` adds it to these: then it is MADE.
``MADE``: float32, in ``grad`` of the masters. Half ones stay beside them: ``None`` or zeros there
drop or zero the float32 ones.

The straight road goes ``NONE``, ``OPEN``, ``HALF``, ``NONE``: one backward, preamp's own clip, a
step of a fused optimizer. Whatever else comes makes the table ``MADE`` by one op: a second
backward, a read of ``master.grad``, `HalfGradients.show`, another optimizer, another norm.

What the script does to half gradients in between counts: setting one to ``None`` drops it, zeroing
it zeroes it, earlier gradients that were accumulated included. Any other change is refused while a
loss scale is on them, since clipping a scaled gradient would be wrong without anyone noticing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from preamp.core.away import is_away
from preamp.core.dtypes import dtype_name
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.ranks import has_process_group
from preamp.core.splits import Splits
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
    with_gradients,
)
from preamp.core.undo import run_to_end
from preamp.kernels import Ops
from preamp.optim.rewritten import has_nonzero, is_zeroed, negative_zeros, read_back

Parameters = Iterable[torch.Tensor]
Factor = torch.Tensor | float
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def _beside(factor: Factor, grad: torch.Tensor) -> Factor:
    return factor.to(grad.device) if isinstance(factor, torch.Tensor) else factor


class DirectGradients:
    """Keeps unscaled gradients apart while a backward adds scaled ones.

    One backward goes `begin`, `merge`, `commit`. Until `commit` everything can be taken back
    with `put_back`, so an exception in the body or while unscaling loses nothing. An interrupted
    `commit` or `put_back` may run again, and whole ones may too.

    Set aside, an earlier gradient is away during the backward and added afterwards: losses with
    any scales can be summed, exactly. Carried, it stays in place, multiplied by this backward's
    scale; exact for powers of two. That is for gradients which a hook reduces over ranks, and that
    this rank alone has accumulated: it must find the whole sum, or they would never be reduced. And
    for a block that a `GradScaler` holds open: what a script zeroes or drops in it must be all
    there is.
    """

    def __init__(self, ops: Ops) -> None:
        """Start with nothing set aside."""
        self._ops = ops
        self.params: Sequence[torch.Tensor] = ()  # whose gradients the backward makes
        # Earlier gradients, or copies of them if they ``_are_carried`` along in place, with their
        # parameters, by the ``id`` of these; ``None`` where no backward is under way
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._are_carried = False
        # Of the gradients as the last merge left them, -1 where there was none
        self._versions: dict[int, int] = {}

    @property
    def has_earlier(self) -> bool:
        """Whether an earlier gradient will be part of the result, away or not."""
        return bool(self._aside)

    def begin(
        self,
        params: Sequence[torch.Tensor],
        carry: Factor | None = None,
        *,
        may_be_overwritten: bool = False,
    ) -> None:
        """Begin a backward. Mutates ``grad`` of ``params``: ``None``, or multiplied in place.

        ``carry`` is the scale of the coming backward if earlier gradients stay where they are.
        ``may_be_overwritten`` says that a hook may write to the memory that gradients lie in.
        """
        self.params = params
        some, grads = with_gradients(params)
        kept = grads
        if may_be_overwritten or carry is not None:
            kept = [grad.clone() for grad in grads]
        self._are_carried = carry is not None
        # All that `put_back` needs, before anything changes
        self._aside = dict(zip(map(id, some), zip(some, kept, strict=True), strict=True))
        try:
            if carry is None:
                for param in some:
                    param.grad = None
            elif isinstance(carry, torch.Tensor):  # else it is 1
                with torch.no_grad():
                    self._ops.scale_add_(grads, carry, [None] * len(grads))
        except BaseException:
            self.put_back()
            raise

    def set_aside_reached(self, param: torch.Tensor) -> None:
        """Set one aside as a backward reaches its parameter, if it has one. Mutates ``grad``.

        Where there is none any more, the script has dropped all, and what is away with it.
        """
        aside = self._aside = {} if self._aside is None else self._aside
        aside.pop(id(param), None)
        if param.grad is not None:
            aside[id(param)] = param, param.grad
            param.grad = None

    def put_back(self) -> None:
        """Restore what was there before `begin`, but for carried gradients since dropped."""
        aside = self._aside
        if aside is None:
            return
        for param in self.params:
            _, earlier = aside.get(id(param), (param, None))
            if earlier is None or not (self._are_carried and param.grad is None):
                param.grad = earlier
                self._versions.pop(id(param), None)  # a copy's version says nothing
        self._aside = None

    def merge(self, factor: Factor | None) -> None:
        """Unscale new gradients and add old ones, in place: ``grad = grad * factor + aside``."""
        aside = {} if self._are_carried or self._aside is None else self._aside
        if factor is None and not aside:
            return
        news: list[torch.Tensor] = []
        olds: list[torch.Tensor | None] = []
        some, grads = with_gradients(self.params)
        if not aside and not any(map(_requires_grad, grads)):  # as in most steps
            news, some = grads, []
            olds += [None] * len(grads)
        for param in some:
            _, old = aside.get(id(param), (param, None))
            if old is None and factor is None:
                continue
            grad = param.grad
            if grad.requires_grad:  # of create_graph: a penalty on it may follow
                wide = grad if factor is None else grad * _beside(factor, grad)
                param.grad = wide if old is None else wide + old
            else:
                news.append(grad)
                olds.append(old)
        if not news:
            return
        with torch.no_grad():
            self._ops.scale_add_(news, 1.0 if factor is None else factor, olds)

    def commit(self) -> None:
        """End the backward; what got nothing new comes back. Cannot fail."""
        if not self._are_carried:
            for param, earlier in (self._aside or {}).values():
                if param.grad is None:
                    param.grad = earlier
        versions = versions_of(list(map(grad_of, self.params)))
        self._versions.update(zip(map(id, self.params), versions, strict=True))
        self._aside = None

    def holds_gradient(self, params: Parameters, *, of_blocks: bool = True) -> bool:
        """Whether any of ``params`` has a gradient that was not zeroed since the last `commit`.

        Unless ``of_blocks`` those do not count that are as the last `commit` has left them.
        Values are looked at, and the device synchronised with, only where somebody wrote to a
        gradient in the meantime.
        """
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if version_of(grad) == self._versions.get(id(param)):
                if of_blocks:
                    return True
            elif has_nonzero(grad):
                return True
        return False

    def forget(self) -> None:
        """Drop what was set aside."""
        if self._aside is not None:
            self._aside.clear()


class State(Enum):
    """Where all gradients of a table are."""

    NONE = "none"
    OPEN = "open"
    HALF = "half"
    MADE = "made"


class HalfGradients:
    """The gradients of the rows of a `WeightTable`.

    What happens in a step happens to all rows alike, so each method makes a few passes over whole
    columns, at the speed of the interpreter's own loops, and Python looks only at rows that differ
    from what was seen.

    One backward goes `begin`, then `put_back` if it failed, else `read_new`, `show_missing` and
    `commit`. Whoever wants to know anything between backwards calls `take_in` first.
    """

    def __init__(self, ops: Ops, halves: list[Any], masters: list[Any]) -> None:
        """Start without rows; ``halves`` and ``masters`` are columns of the table's."""
        self._ops = ops
        self._halves = halves
        self._masters = masters
        self._has_sharded = False
        self._versions_of: Callable[[Sequence[Any]], list[int]] = plain_versions
        self._names: list[str] = []  # by row, as messages call the weights
        self.state = State.NONE
        # Half gradients as they were last seen, and their versions then
        self.seen: list[torch.Tensor | None] = []
        self.versions: list[int] = []
        # What takes the loss scale from half gradients, a float32 scalar, and clips nothing;
        # ``None`` where nothing was scaled, so that what is done to them means what it says
        self.unscales: torch.Tensor | None = None
        # The factor of half gradients, which clips them as well, by device; one elsewhere would
        # make an update wait for a copy
        self._factors: dict[torch.device, torch.Tensor] = {}
        self._is_clipped = False
        self._is_whole = True  # whether they are all that the masters' were made of
        self.is_shown = False  # whether the script sees them unscaled; see `show`
        self._zeroed = set[int]()  # rows whose gradient the script has zeroed
        self._carried = set[int]()  # rows whose half gradient holds the earlier one too
        # Rows that a backward of a block held open has reached, and their versions then
        self._reached: dict[int, int] = {}
        self.may_have_bases = False  # whether any master may have a float32 gradient
        self.wait_on_host = False  # whether values lie there from a backward to its step
        self.changes = 0  # differs once gradients may be others than before
        self._new: list[torch.Tensor | None] | None = None
        self._ones: dict[torch.device, torch.Tensor] = {}
        self._base_versions: list[int] = []  # of masters' gradients, when they were shown

    def add_row(self, name: str, *, is_sharded: bool) -> None:
        """Add a row without a gradient."""
        if is_sharded:
            self._has_sharded, self._versions_of = True, versions_of
        self._names.append(name)
        self.seen.append(None)
        self.versions.append(-1)

    def clear(self) -> None:
        """Hold nothing any more."""
        self._names.clear()
        self.seen.clear()
        self.versions.clear()

    # -- what there is -----------------------------------------------------------------------------

    def factor_on(self, device: torch.device) -> torch.Tensor:
        """What unscales and clips half gradients on a device."""
        found = self._factors.get(device)
        if found is None:
            other = next(iter(self._factors.values()), self.unscales)
            found = self.one(device) if other is None else other.to(device)
            self._factors[device] = found
        return found

    def _factors_for(self, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        devices = devices_of(grads)
        if len(devices) == 1:
            return [self.factor_on(*devices)] * len(grads)
        return [self.factor_on(grad.device) for grad in grads]

    def one(self, device: torch.device) -> torch.Tensor:
        """The factor of a gradient that has no loss scale on it."""
        found = self._ones.get(device)
        if found is None:
            found = torch.ones((), dtype=torch.float32, device=device)
            if not is_capturing(device):  # then it is one only when the graph has run
                self._ones[device] = found
        return found

    def base(self, row: int) -> torch.Tensor | None:
        """The float32 gradient of one master, as far as it is made."""
        return stored_grad(self._masters[row])

    def bases(self) -> list[torch.Tensor | None]:
        """All of these."""
        if not self.may_have_bases:
            return [None] * len(self._halves)
        return list(map(stored_grad, self._masters))

    @property
    def has_earlier(self) -> bool:
        """Whether any master has a float32 gradient already."""
        return self.may_have_bases and not all(map(is_, self.bases(), repeat(None)))

    @property
    def holds_gradient(self) -> bool:
        """Whether either side has a gradient that the script has not dropped or zeroed."""
        self.take_in()
        if self.state is State.NONE:
            return False
        held = self.seen if self.state is State.HALF else self.bases()
        return any([g is not None and row not in self._zeroed for row, g in enumerate(held)])

    def pending(self) -> tuple[list[Any], list[Any], list[Any]]:
        """The half weights whose gradients are half, these, and what unscales and clips them."""
        if self.state is not State.HALF:
            return [], [], []
        halves, grads = [*self._halves], list[Any](self.seen)
        if any(map(is_, grads, repeat(None))):
            halves = [half for half, grad in zip(halves, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        return halves, grads, self._factors_for(grads)

    def clip(self, by: torch.Tensor) -> None:
        """Multiply what unscales half gradients; touches no memory."""
        self.changes += 1
        self.factor_on(by.device)  # of which `factor_on` makes those of other devices
        self._factors = {device: own * by.to(device) for device, own in self._factors.items()}
        self._is_clipped = True

    # -- what the script does ----------------------------------------------------------------------

    def take_in(self, splits: Splits | None = None, *, looks: bool = False) -> None:
        """Take in what the script did to half gradients since they were last looked at.

        Where the masters have earlier ones, these are added then: HALF is without any afterwards.
        Raises `PreampStateError` if it rewrote one that has a loss scale on it, or that is only a
        part of what was accumulated. With ``looks`` the values of all that are shown are looked at:
        writes through ``grad.data``, a collective, and torch's foreach functions on a ``DTensor``
        leave no trace. ``splits`` is for gradients that ranks have parts of, all of which call this
        then.
        """
        if self.state is State.OPEN:
            return
        now = list(map(grad_of, self._halves))
        is_same = are_same(now, self.seen)
        looks = looks and self.is_shown
        if not (is_same and all(map(is_, now, repeat(None)))):
            versions = self._versions_of(now)
            if not is_same or versions != self.versions or looks:
                seen = zip(now, self.seen, versions, self.versions, strict=True)
                rows = [row for row, (a, b, v, w) in enumerate(seen) if a is not b or v != w]
                self._take_in(rows, now, splits, looks=looks)
        if self.may_have_bases:
            self.make_all()  # not by the block, whose end cannot fail, nor add anything twice

    def _take_in(
        self, rows: list[int], now: list[Any], splits: Splits | None, *, looks: bool
    ) -> None:
        if self.state is State.NONE:
            self._take_in_spent(rows, now)
            return
        if self.is_shown:
            shown = range(len(now)) if looks else rows
            shown = [r for r in shown if now[r] is not None and self.base(r) is not None]
            self._read_back({row: now[row] for row in shown}, rows, splits)
            rows = [row for row in rows if row not in shown]
        for row in rows:
            grad, base = now[row], self.base(row)
            if grad is None:  # dropped, and all that was accumulated with it
                self._keep(row, None)
                self._zeroed.discard(row)
            elif self.seen[row] is None:  # a backward outside scale_loss
                self._add_plain(row, grad)
            elif self._is_moved(row, grad):
                pass
            elif self.unscales is None and (
                self._is_whole
                if self.state is State.MADE
                else base is None and not self._is_clipped
            ):
                if row in self._zeroed and not is_zeroed(grad):
                    self._zeroed.discard(row)
                if self.state is State.MADE:
                    self._keep(row, self._wide(grad))
            elif grad is self.seen[row] and is_zeroed(grad):
                if base is not None:  # zeros are a gradient: momentum and weight decay go on
                    base.detach().zero_()
                self._zeroed.add(row)
            else:
                raise _changed_in_place(grad, self._names[row], is_plain=self.unscales is None)
            self._note(row, grad)

    def _take_in_spent(self, rows: Sequence[int], now: Sequence[Any]) -> None:
        """Take in what has come to half gradients that a step has used up."""
        fresh, zeros = [row for row in rows if now[row] is not None], set[int]()
        for row in fresh:
            if now[row] is not self.seen[row]:
                continue
            if is_zeroed(now[row]):
                zeros.add(row)
            elif self.unscales is not None:
                raise _changed_in_place(now[row], self._names[row], is_plain=False)
        if fresh:
            self._start_from(None)
            self._zeroed = zeros
            are_all = len(fresh) == sum(grad is not None for grad in now)
            for row in () if are_all else fresh:
                self._keep(row, self._wide(now[row]))
            self.state = State.HALF if are_all else State.MADE
        for row in rows:  # last: what is seen is not taken in again after an interrupt
            self._note(row, now[row])

    def _start_from(self, factor: torch.Tensor | None) -> None:
        """New half gradients are there, which nobody has clipped; ``factor`` unscales them."""
        self.unscales, self._is_clipped, self._is_whole = factor, False, True
        self._factors.clear()

    def _add_plain(self, row: int, grad: torch.Tensor) -> None:
        """A gradient without any loss scale has come to a row that had none."""
        if self._is_clipped or self.unscales is not None:
            self.make_all()
        if self.state is State.MADE:
            earlier, wide = self.base(row), self._wide(grad)
            self._is_whole &= earlier is None
            self._keep(row, wide if earlier is None else earlier + wide)
        self._zeroed.discard(row)

    def _note(self, row: int, grad: torch.Tensor | None) -> None:
        self.changes += 1
        self.seen[row] = grad
        self.versions[row] = -1 if grad is None else version_of(grad)

    def note_all(self) -> None:
        """Take half gradients as they are for seen, whatever the script did to them."""
        self.changes += 1
        self.seen = list(map(grad_of, self._halves))
        self.versions = self._versions_of(self.seen)

    def _is_moved(self, row: int, now: torch.Tensor) -> bool:
        """Whether ``now`` is a bitwise copy of the gradient that was seen.

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

    # -- shown unscaled ----------------------------------------------------------------------------

    def show(self) -> None:
        """Let the half gradients be what masters get, rounded, for a script to read and change.

        But for those whose values are away: no script can read these. Called again after a clip, it
        shows the clipped ones. What the script does counts; see `_read_back`.
        """
        if not self._halves:
            return
        self.take_in()
        if self.state is State.HALF and self.unscales is None and not self._is_clipped:
            return  # they mean what they say
        self.make_all()
        if self.state is not State.MADE:
            return
        pairs = [
            (base, grad)
            for base, grad in zip(self.bases(), self.seen, strict=True)
            if base is not None and grad is not None and not is_away(grad)
        ]

        @torch.no_grad()
        def write() -> None:
            self._ops.cast_copy_([base for base, _ in pairs], [grad for _, grad in pairs])

        def note() -> None:
            self.is_shown = True
            self.note_all()
            self._base_versions = versions_of(self.bases())

        run_to_end(write, note)  # half of it would look like written by the script

    @torch.no_grad()
    def _read_back(
        self, now: Mapping[int, Any], written: Iterable[int], splits: Splits | None
    ) -> None:
        """Take in what the script has made of gradients that it was shown unscaled, by row.

        One factor on all of a gradient, as clipping has, is applied to the float32 one, so that
        nothing is lost that the half gradient cannot hold. Zeros are zeros. Anything else is taken
        as written where the half gradient can hold it, and refused where not. A master's gradient
        that was written to counts itself.
        """
        versions = versions_of(self.bases())
        theirs = {row for row in now if versions[row] != self._base_versions[row]}
        for row in theirs.intersection(written):
            raise _changed_in_place(now[row], self._names[row], is_plain=True)
        now = {row: g for row, g in now.items() if row not in theirs and not is_away(g)}
        asked = now if splits is None else range(len(self._halves))
        bases: dict[int, Any] = {row: self.base(row) for row in now}
        params = {row: self._halves[row] for row in asked}
        names, is_plain = self._names, self.unscales is None
        for row, factor in read_back(bases, now, params, names, splits, is_plain=is_plain).items():
            if factor is None:
                self._keep(row, self._wide(now[row]))
            elif factor == 0.0:
                bases[row].zero_()
                self._zeroed.add(row)
            elif factor != 1.0:
                bases[row].mul_(factor)
            self._note(row, now[row])
        self._base_versions = versions_of(self.bases())

    # -- the masters' side -------------------------------------------------------------------------

    def _keep(self, row: int, grad: torch.Tensor | None) -> None:
        """Let ``grad`` be the float32 gradient of a master."""
        self.may_have_bases |= grad is not None
        store_grad(self._masters[row], grad)

    def _wide(self, grad: Any) -> torch.Tensor:
        """A half gradient without a loss scale as a master has it."""
        return self._ops.widen_add([grad], [self.one(grad.device)], [None])[0]

    def gradient(self, row: int) -> torch.Tensor | None:
        """The unscaled float32 gradient of a master; makes those of all."""
        is_sharded = self._has_sharded
        self.take_in(looks=is_sharded)
        self.make_all()
        if is_sharded:  # a write to the masters' may leave no trace
            self.is_shown = False
        return self.base(row)

    def assign(self, row: int, grad: torch.Tensor | None) -> None:
        """The script sets a master's gradient: what the half one held no longer counts."""
        if grad is not None and self.state is not State.OPEN:
            self.take_in()
            self.make_all()
            if self.state is State.NONE:
                self.state = State.MADE
        self._halves[row].grad = None
        self._zeroed.discard(row)
        self._reached.pop(row, None)  # the half one is not dropped by a script
        self._note(row, None)
        self._keep(row, grad)

    def note_accumulated(self) -> None:
        """A backward has reached masters themselves, as of a penalty on them."""
        self.may_have_bases, self._is_whole = True, False
        self.changes += 1
        if self.state is State.NONE:
            self.state = State.MADE

    def make_all(self) -> None:
        """HALF becomes MADE by one op, after `take_in`: ``float32(half) * factor + earlier``."""
        if self.state is not State.HALF:
            return
        rows = [row for row, grad in enumerate(self.seen) if grad is not None]
        bases = self.bases()
        grads: list[Any] = [self.seen[row] for row in rows]
        wides: list[torch.Tensor] = []

        def add() -> None:  # to earlier ones in place, once
            if not wides and rows:
                addends = [bases[row] for row in rows]
                wides.extend(self._ops.widen_add(grads, self._factors_for(grads), addends))

        def note() -> None:
            self.changes += 1
            self.may_have_bases = True
            for row, wide in zip(rows, wides, strict=True):
                if bases[row] is None:
                    store_grad(self._masters[row], wide)
            self._is_whole = not any([base is not None for base in bases])
            self.state = State.MADE

        run_to_end(add, note)  # half of it would drop gradients, or count them twice

    # -- a backward --------------------------------------------------------------------------------

    def begin(self, carry: torch.Tensor | float | None = None) -> None:
        """Begin a backward: earlier gradients go to the masters, and the half ones are cleared.

        Call `take_in` first, which may refuse. Zeros stay where they are, and new ones join them.
        Where earlier gradients must be in the half ones too, ``carry`` is the scale of the coming
        backward; see `DirectGradients`.
        """
        are_zeros = False
        if self.state is State.HALF:
            rows = [row for row, grad in enumerate(self.seen) if grad is not None]
            are_zeros = self._zeroed.issuperset(rows)
            if not are_zeros:
                self.make_all()
        self.state = State.OPEN  # before any is cleared, or an interrupt would drop them
        self.is_shown = False
        self._new = None
        self.changes += 1
        if not (are_zeros or all(map(is_, self.seen, repeat(None)))):
            self._clear_halves()
        if carry is None:
            return
        for row, base in enumerate(self.bases()):
            if base is not None:
                self._carried.add(row)
                half = self._halves[row]
                half.grad = (base.to(half.device) * carry).to(half.dtype)

    def _clear_halves(self) -> None:
        for half in self._halves:
            half.grad = None
        self.seen = [None] * len(self._halves)
        self.versions = [-1] * len(self._halves)

    def note_reached(self) -> None:
        """A backward of an open block is over: what is dropped or zeroed now goes as a whole."""
        if self.state is State.OPEN and self.may_have_bases:
            self.show_missing()
            grads = enumerate(map(grad_of, self._halves))
            self._reached.update((row, version_of(g)) for row, g in grads if g is not None)

    def _dropped(self) -> list[int]:
        """Rows that a backward of the block has reached, and whose sum the script dropped since.

        By ``None``, or by zeroing what shows it. A reduction over ranks may leave zeros as well.
        """
        rows: list[int] = []
        for row, version in self._reached.items():
            grad = grad_of(self._halves[row])
            is_written = grad is not None and version_of(grad) != version
            if grad is None or (is_written and not has_process_group() and is_zeroed(grad)):
                rows.append(row)
        return rows

    def read_new(self) -> None:
        """Read the half gradients that a backward has left, for `commit`; refuse a sparse one."""
        self._new = grads = list(map(grad_of, self._halves))
        if kinds_of(layout_of, grads) <= {torch.strided}:
            return
        for name, grad in zip(self._names, grads, strict=True):
            if grad is not None and grad.is_sparse:
                raise bad_state(
                    f"The gradient of {name!r} is sparse and the parameter has a float32 master",
                    "Masters take dense gradients; sparse ones work at O0, O1 and O4",
                    "Build the embedding with sparse=False, or choose O1 (O4 for bfloat16)",
                )

    def new_of(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
        """What `read_new` has read, if ``leaves`` are the half weights; not to be changed."""
        is_all = self._new is not None and are_same(leaves, self._halves)
        return self._new if is_all and not self._has_sharded else None

    def put_back(self) -> None:
        """The backward failed: drop what it left; the masters' gradients have the earlier value."""
        if self.state is not State.OPEN:
            return
        self._reached.clear()
        for row, half in enumerate(self._halves):
            is_zero = row in self._zeroed and self.base(row) is None
            half.grad = torch.zeros_like(half) if is_zero else None
        if self.may_have_bases:
            self.show_missing()
        self.note_all()
        self._carried.clear()
        self._new = None
        if self.has_earlier:
            self._is_whole = False
            self.state = State.MADE
        else:
            self._start_from(None)
            self.state = State.HALF if self._zeroed else State.NONE

    def show_missing(self) -> None:
        """Give rows that got no new gradient zeros for one, if they have an earlier one.

        The earlier one is in the master; without anything on the model's side, a script that
        drops the model's gradients could not reach it. The zeros are negative: zeroed by a script
        they are not, while a clip that saw no more of the gradient leaves them so, and is refused.
        """
        self._new = None
        dropped = self._dropped() if self._reached else ()
        for row, (half, base) in enumerate(zip(self._halves, self.bases(), strict=True)):
            if base is not None and stored_grad(half) is None and row not in dropped:
                half.grad = negative_zeros(half, waits=self.wait_on_host)

    def commit(self, factor: torch.Tensor | None) -> None:
        """The backward has ended: note the half gradients, and add nothing yet.

        ``factor`` is the float32 scalar that unscales them, ``None`` where nothing was scaled. It
        is called again if it was interrupted.
        """
        if self.state is not State.OPEN:
            return
        # Of the carried rows the half gradient holds the earlier one too.
        for row in (*self._carried, *(self._dropped() if self._reached else ())):
            self._keep(row, None)
        self._reached.clear()
        # Sharded ones may have been placed anew since they were read.
        grads = None if self._has_sharded else self._new
        grads = list(map(grad_of, self._halves)) if grads is None else grads
        versions = self._versions_of(grads)
        if self._zeroed:  # those that nothing was added to
            same = zip(grads, self.seen, versions, self.versions, strict=True)
            kept = {row for row, (a, b, v, w) in enumerate(same) if a is b and v == w}
            self._zeroed &= {row for row in kept if grads[row] is not None}
        self.seen, self.versions, self._new = grads, versions, None
        self._start_from(factor)
        self._carried.clear()
        self.state = State.HALF

    # -- after a step, and zeroing -----------------------------------------------------------------

    def spend(self) -> None:
        """After a step: masters' gradients go, half gradients stay but are used up."""
        if self.is_shown:
            self.note_all()
        if self.may_have_bases:
            for master in self._masters:
                store_grad(master, None)
            self.may_have_bases = False
        self._zeroed.clear()
        self.is_shown = False
        if self.state is not State.OPEN:
            self.state = State.NONE

    def drop(self) -> None:
        """Clear the gradients on both sides. A backward that is under way stays so."""
        self.changes += 1
        self._new = None
        self._clear_halves()
        self._carried.clear()
        self._reached.clear()
        self.spend()

    def zero(self) -> None:
        """Zero the half gradients, and drop the masters', but in a backward; see `be_zeros`."""
        now = list(map(grad_of, self._halves))
        for grad in now:
            if grad is not None:
                if grad.grad_fn is not None:  # of create_graph; a view in DDP's buckets has none
                    grad.detach_()
                grad.requires_grad_(False).zero_()
        if self.state is State.OPEN:
            return
        if self.has_earlier:
            # What was dropped on the model's side goes; what was assigned here is zeroed.
            for row, grad in enumerate(now):
                if grad is not None or self.seen[row] is not None:
                    self._keep(row, None)
        self.note_all()
        self.state, self.is_shown = State.NONE, False
        self._zeroed.clear()

    def be_zeros(self) -> None:
        """The zeros that `zero` has left are the gradients now."""
        if self.state is State.OPEN:
            return
        self._start_from(None)
        self._zeroed = {row for row, grad in enumerate(self.seen) if grad is not None}
        self.state = State.MADE if self.has_earlier else State.HALF
        if self.state is State.MADE:  # of masters that were given one, and zeroed by now
            for row in self._zeroed:
                self._keep(row, self._wide(self.seen[row]))
            self._zeroed.update(range(len(self._halves)))


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
