# SPDX-License-Identifier: BSD-3-Clause
"""Ops on tensors of which some lie on the host and others on a device: the host computes them.

Where masters and moments lie on the host (`Storage.place`), gradients and half weights do not. An
op on both walks its lists in runs of bounded bytes. The next run's tensors come from the device to
pinned memory while the host computes this one, and what it has written goes back meanwhile, on
streams of their own. The training's stream waits for the last of these copies; the host does not.

Which lists are read and written follows from the op, so no op has a case of its own. Results are
those of the back end for CPUs. Of tensors whose values are away (`core.away`) ops take these.
Tensors are never cut, so norms of whole ones are what they were.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from preamp.core.away import values_in
from preamp.core.errors import bad_state
from preamp.core.pinned import laid_as, pinned
from preamp.core.tensors import devices_of, host_reaches, is_capturing, locals_of
from preamp.core.torch_private.shards import sharded_as
from preamp.kernels.by_device import ByDevice, pick
from preamp.kernels.ops import Census, Column, Tensors
from preamp.kernels.rules import Rule
from preamp.kernels.stored import Stored
from preamp.kernels.update import Update

RUN: Final = 32 << 20
"""Bytes that a run's tensors of the device take in pinned memory; a larger tensor is one alone."""
AT_ONCE: Final = 3
"""Runs that have pinned memory: one comes, one is computed, one goes."""
_ALIGNMENT: Final = 64  # bytes, for the host's vector instructions

_READ, _WRITTEN, _BOTH = "r", "w", "rw"
_NUMBER = ""  # no list

Lists = Sequence[Column]
Compute = Callable[[Sequence[int], list[Any]], None]
"""Computes the places that it is told, of lists that all lie on the host."""
ComputeUpdate = Callable[[Sequence[int], list[Any], Any, Update], None]
"""Does so by a rule and what the update is told."""


def _staged(op: str, *access: str) -> Any:
    """An op that returns nothing; ``access`` says what it does to each of its arguments."""
    inner = getattr(ByDevice, op)

    def run(self: Staged, *given: Any) -> None:
        def compute(places: Sequence[int], lists: list[Any]) -> None:
            del places
            columns = iter(lists)
            pairs = zip(given, access, strict=True)
            inner(self, *[next(columns) if how else at_hand(arg) for arg, how in pairs])

        pairs = [*zip(given, access, strict=True)]
        values = [values_in(arg) if how else arg for arg, how in pairs]
        columns = [arg for arg, how in zip(values, access, strict=True) if how]
        rest = _stage(columns, [how for how in access if how], compute)
        if any([now is not arg for now, arg in zip(values, given, strict=True)]):
            # ``compute`` takes numbers to the host, which rows of a device must not get.
            near = [place for place in rest if columns[0][place].is_cpu]
            rest = [place for place in rest if not columns[0][place].is_cpu]
            compute(near, [*pick(near, *columns)])
        if rest:
            inner(self, *pick(rest, *values))

    run.__name__ = op
    return run


class Staged(ByDevice):
    """`ByDevice` for a run whose masters and moments lie on the host."""

    take_over_ = _staged("take_over_", _BOTH, _READ)
    split_ = _staged("split_", _READ, _WRITTEN, _WRITTEN)
    join_ = _staged("join_", _READ, _READ, _WRITTEN)
    axpby_ = _staged("axpby_", _WRITTEN, _NUMBER, _READ, _NUMBER, _READ)

    def census(self, grads: Tensors, device: torch.device, **options: bool) -> Census:
        return super().census(values_in(grads), device, **options)

    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        here = values_in(tensors)
        return super().l2norms(here, factor if here is tensors else at_hand(factor), device)

    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        here = values_in(tensors)
        return super().l2norm(here, factors if here is tensors else _all_at_hand(factors), device)

    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        """As `Ops.widen_add`; all results lie on the host, where masters are."""
        here = values_in(halves)
        if here is not halves:
            halves, factors = here, _all_at_hand(factors)
        found: dict[int, torch.Tensor] = {}

        def compute(places: Sequence[int], lists: list[Any]) -> None:
            by = _all_at_hand([factors[place] for place in places])
            wide = super(Staged, self).widen_add(lists[0], by, lists[1])
            shaped = [sharded_as(w, halves[p]) for w, p in zip(wide, places, strict=True)]
            found.update(zip(places, shaped, strict=True))

        rest = _stage((halves, addends), (_READ, _READ), compute, brings_all=True)
        if rest:
            wide = super().widen_add(*pick(rest, halves, factors, addends))
            found.update(zip(rest, wide, strict=True))
        return [found[place] for place in range(len(found))]

    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        def compute(places: Sequence[int], lists: list[Any], rule: Rule, update: Update) -> None:
            del places
            super(Staged, self).update_(*lists, rule=rule, update=update)

        grads = values_in(grads)
        lists = [params, grads, *state]
        rest = _stage_update(lists, rule, update, compute)
        if len(rest) == len(params):  # as they are: what is known of lists goes by identity
            compute(rest, lists, rule, update)
        elif rest:
            compute(rest, [*pick(rest, *lists)], rule, update.at(rest))


def _stage_update(
    lists: Sequence[Tensors], rule: Rule, update: Update, compute: ComputeUpdate
) -> Sequence[int]:
    """Stage an update; ``compute`` is told places, lists, the rule and the update, all at hand."""
    beside = _beside(update)
    halves = _BOTH if update.halves_lead else _WRITTEN
    access = [_BOTH, _READ, *[_BOTH] * (len(lists) - 2), halves, *[_BOTH] * (len(beside) - 1)]

    def compute_here(places: Sequence[int], columns: list[Any]) -> None:
        own, others = columns[: len(lists)], columns[len(lists) :]
        pairs = zip(beside, others, strict=True)
        halves, lows, *scales = [None if given is None else here for given, here in pairs]
        told = update.at(places)
        told = replace(
            told,
            step=at_hand(told.step),
            inv_scale=at_hand(told.inv_scale),
            found_inf=at_hand(told.found_inf),
            norms=at_hand(told.norms),
            halves=halves,
            stored=told.stored and replace(told.stored, lows=lows, scales=tuple(scales)),
        )
        compute(places, own, replace(rule, lr=at_hand(rule.lr)), told)

    return _stage(_columns(lists, update), access, compute_here)


def _beside(update: Update) -> list[Column | None]:
    """The lists that an update has beside those of its rule."""
    stored = update.stored or Stored()
    return [update.halves, stored.lows, *stored.scales]


def _columns(lists: Sequence[Tensors], update: Update) -> list[Column]:
    none = [None] * len(lists[0])
    beside = [none if column is None else column for column in _beside(update)]
    return [*lists, *beside]


def at_hand(value: Any) -> Any:
    """A number that the host may read; waits for one of a device.

    Raises `PreampStateError` where a CUDA graph is captured.
    """
    if not isinstance(value, torch.Tensor):
        return value
    check_not_captured(value.device)
    return value.cpu()


def _all_at_hand(numbers: Sequence[Any]) -> list[Any]:
    """Of each as `at_hand`; waits once for what is there several times."""
    known = {key: at_hand(number) for key, number in {id(n): n for n in numbers}.items()}
    return [known[id(number)] for number in numbers]


# -- runs -----------------------------------------------------------------------------------------


def _stage(
    columns: Lists, access: Sequence[str], compute: Compute, *, brings_all: bool = False
) -> Sequence[int]:
    """Compute places whose tensors lie on the host and a device; return the other places.

    With ``brings_all`` also those that lie on a device alone. Of sharded tensors this rank's parts
    are computed.
    """
    columns = list(map(locals_of, columns))
    going, rest = _sorted(columns, brings_all=brings_all)
    for device, some in going.items():
        _walk(device, some, [[column[p] for p in some] for column in columns], access, compute)
    return rest


def _sorted(
    columns: Lists, *, brings_all: bool = False
) -> tuple[dict[torch.device, list[int]], Sequence[int]]:
    """The places that the host computes, by the device they come from, and the others."""
    places = range(len(columns[0]))
    going: dict[torch.device, list[int]] = {}
    if len({where for column in columns for where in devices_of(column)}) < 2 and not brings_all:
        return going, places
    rest: list[int] = []
    for place, row in enumerate(zip(*columns, strict=True)):
        devices = {tensor.device for tensor in row if tensor is not None}
        away = [device for device in devices if device.type != "cpu"]
        is_staged = bool(away) and (brings_all or len(devices) > 1)
        (going.setdefault(away[0], []) if is_staged else rest).append(place)
    return going, rest


@torch.no_grad()
def _walk(
    device: torch.device,
    places: Sequence[int],
    columns: Lists,
    access: Sequence[str],
    compute: Compute,
) -> None:
    """Compute places of which each has tensors on ``device``."""
    check_not_captured(device)
    runs, largest = _runs_of(columns)
    road = _Road(device, access, _slots(device, largest, min(AT_ONCE, len(runs))))

    def fetch(run: slice) -> _Fetched:
        return road.fetch([column[run] for column in columns])

    here: _Fetched | None = None
    try:
        coming = fetch(runs[0])
        for number, run in enumerate(runs):
            here = coming
            if number + 1 < len(runs):
                coming = fetch(runs[number + 1])
            here.come.synchronize()
            compute(places[run], here.columns)
            road.send(here)
    except BaseException:  # what the host has changed of this run and the device go together
        if here is not None:
            here.come.synchronize()
            road.send(here, only_read=True)
        raise
    finally:
        road.join()


def _bytes_of(tensor: torch.Tensor | None) -> int:
    """What it takes of a run."""
    if tensor is None or host_reaches(tensor):
        return 0
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _runs_of(columns: Lists) -> tuple[list[slice], int]:
    """Cut places into runs; return these, and the bytes of the largest."""
    sizes = [sum(map(_bytes_of, row)) for row in zip(*columns, strict=True)]
    runs = _cut(sizes)
    return runs, max(sum(sizes[run]) for run in runs)


def _cut(sizes: Sequence[int]) -> list[slice]:
    """Cut places whose tensors take so many bytes into runs."""
    runs: list[slice] = []
    start, total = 0, 0
    for place, size in enumerate(sizes):
        if place > start and total + size > RUN:
            runs.append(slice(start, place))
            start, total = place, 0
        total += size
    runs.append(slice(start, len(sizes)))
    return runs


def buffers_for(sizes: Sequence[int]) -> tuple[int, int]:
    """Bytes and number of the pinned buffers that updates of some tensors need.

    ``sizes`` are the bytes of each that travel: its gradient and the weight.
    """
    return max(min(sum(sizes), RUN), *sizes), min(AT_ONCE, len(_cut(sizes)))


def reserve(device: torch.device, sizes: Sequence[int]) -> None:
    """Let torch reserve pinned memory for updates on ``device``; ``sizes`` as of `buffers_for`.

    Raises `PreampUnavailableError` if the host has none to give.
    """
    _buffers(device, *buffers_for(sizes))


@contextmanager
def holding(updates: Iterable[tuple[Sequence[Tensors], Update]]) -> Generator[None]:
    """Have the pinned memory of several updates from before the first until after the last.

    So `PreampUnavailableError` is raised before anything is changed, or not at all.
    """
    needs: dict[torch.device, tuple[int, int]] = {}
    for (params, grads, *state), update in updates:
        lists = _columns([params, values_in(grads), *state], update)
        columns = list(map(locals_of, lists))
        for device, places in _sorted(columns)[0].items():
            runs, largest = _runs_of([[column[place] for place in places] for column in columns])
            size, slots = needs.get(device, (0, 0))
            needs[device] = max(size, largest), max(slots, min(AT_ONCE, len(runs)))
    before = _held.by_device
    _held.by_device = {device: _slots(device, *need) for device, need in needs.items()}
    try:
        yield
    finally:
        _held.by_device = before


class _Slot:
    """The pinned memory of one run."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self.sent: torch.cuda.Event | None = None  # behind what reads it last


class _Held(threading.local):
    """What a thread holds for its updates."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, list[_Slot]] = {}


_held = _Held()


def _slots(device: torch.device, size: int, count: int) -> list[_Slot]:
    """Take pinned memory of several runs, or what is held for them."""
    held = _held.by_device.get(device, [])
    if len(held) >= count and held[0].buffer.numel() >= size:
        return held
    return [_Slot(buffer) for buffer in _buffers(device, size, count)]


def _buffers(device: torch.device, size: int, slots: int) -> list[torch.Tensor]:
    needed = f'place="host" needs {slots} times {size} bytes of it, for runs of tensors'
    do = 'Give the process more memory that it may lock (ulimit -l), or pass place="device"'
    return [pinned(size, f"copies of {device}", needed, do) for _ in range(slots)]


@dataclass(frozen=True, slots=True)
class _Fetched:
    """A run on its way, or at hand."""

    slot: _Slot
    columns: list[Any]  # on the host
    written: list[tuple[torch.Tensor, torch.Tensor, str]]  # of the device, what goes there, access
    come: torch.cuda.Event  # recorded behind the copies


class _Road:
    """Streams between a device and pinned memory, one each way."""

    def __init__(self, device: torch.device, access: Sequence[str], slots: Sequence[_Slot]) -> None:
        """Let copies wait for what the training's stream has to do."""
        self._device, self._access = device, access
        self._slots = itertools.cycle(slots)
        current = torch.cuda.current_stream(device)
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in (self._down, self._up):
            stream.wait_stream(current)

    def fetch(self, columns: Lists) -> _Fetched:
        """Queue copies of a run to the host; waits for the run that had the memory before."""
        slot = next(self._slots)
        if slot.sent is not None:
            slot.sent.synchronize()
        lists: list[Any] = []
        written: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        start = 0
        with torch.cuda.stream(self._down):
            for column, access in zip(columns, self._access, strict=True):
                lists.append([])
                for tensor in column:
                    if tensor is None or host_reaches(tensor):
                        lists[-1].append(tensor)
                        continue
                    chunk = slot.buffer[start : start + tensor.nbytes]
                    here = laid_as(tensor, chunk.view(tensor.dtype))
                    start += _bytes_of(tensor)
                    if _READ in access:
                        here.copy_(tensor, non_blocking=True)
                    if _WRITTEN in access:
                        written.append((tensor, here, access))
                    lists[-1].append(here)
            event = torch.cuda.Event()
            event.record(self._down)
        return _Fetched(slot, lists, written, event)

    def send(self, run: _Fetched, *, only_read: bool = False) -> None:
        """Queue copies of what was written to the device, or of that which was read as well.

        The rest may not be written yet.
        """
        with torch.cuda.stream(self._up):
            for tensor, here, access in run.written:
                if _READ in access or not only_read:
                    tensor.copy_(here, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._up)
        run.slot.sent = event

    def join(self) -> None:
        """Let the training's stream wait for all that was sent."""
        torch.cuda.current_stream(self._device).wait_stream(self._up)


def check_not_captured(device: torch.device) -> None:
    """Raise `PreampStateError` where work for ``device`` goes into a CUDA graph."""
    if is_capturing(device):
        raise bad_state(
            'A step was captured in a CUDA graph, and storage has place="host"',
            "The host makes the update, and a graph replays what a device does",
            'Take optimizer.step() outside of the graph, or pass place="device"',
        )
