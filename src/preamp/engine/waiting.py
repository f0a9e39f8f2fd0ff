# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that wait on the host: ``storage`` with ``release_gradients`` and ``place="host"``.

A hook on each leaf runs when autograd has the whole gradient of it, and sends the values to the
host, where masters and moments lie. What stays is a gradient without values (`core.away`): books
are kept of it, and scripts drop or zero it. Ops find the values, so looking for overflow, norms,
sums and updates are the host's. What another backward of the block adds is sent again.

Values go through two pinned buffers on a stream of their own, beside the backward. The host waits
for a copy when its buffer is needed again: it is never further ahead than that. The host's memory
of each gradient is kept from step to step, since taking it anew costs more than the copy.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.core.away import is_away, is_sent, on_device, send_away, values_of
from preamp.core.pinned import laid_as, pinned
from preamp.engine.engine import Engine
from preamp.engine.events import Backward
from preamp.engine.storage import check_no_ranks
from preamp.kernels import check_not_captured

AT_ONCE: Final = 2
"""Gradients that may be on their way: one comes while the next is made."""


class Waiting:
    """The hooks of one engine."""

    def __init__(self, engine: Engine) -> None:
        """Hook nothing yet."""
        self._engine = engine
        self._hooked: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        self._roads: dict[torch.device, _Road] = {}  # while a block is open
        self._users: dict[int, weakref.ref[torch.Tensor]] = {}  # of memory kept, by id of the leaf

    def attach(self) -> None:
        """Hook the parameters, until the engine is closed or hands a model over."""
        engine = self._engine
        for undo in (engine.undo, *map(engine.undo_of, engine.models)):
            undo.push(self._remove)
        engine.events.block_begins.append(self._hook)
        engine.events.gradients_made.append(self._send_rest)

    def _hook(self, block: Backward) -> None:
        """Hook what the block's optimizers update on a device, once."""
        check_no_ranks()
        check_not_captured(self._engine.device)
        every = [leaf for session in block.sessions for leaf in session.model_params()]
        leaves = [leaf for leaf in every if leaf.requires_grad and leaf.is_cuda]
        self._end_roads()
        for device in {leaf.device for leaf in leaves}:
            sizes = [leaf.nbytes for leaf in leaves if leaf.device == device]
            self._roads[device] = _Road(device, max(sizes))
        for leaf in leaves:
            if id(leaf) not in self._hooked:
                call = partial(_send, weakref.ref(self))
                handle = cast("Any", leaf).register_post_accumulate_grad_hook(call)
                self._hooked[id(leaf)] = leaf, handle

    def _send_rest(self, block: Backward) -> None:
        """Wait for all; send what came back for a backward that added nothing."""
        del block
        for leaf, _ in self._hooked.values():
            self.send(leaf)
            values_of(leaf.grad)
        self._end_roads()

    def _end_roads(self) -> None:
        for road in self._roads.values():
            road.arrive()
        self._roads.clear()

    def send(self, leaf: torch.Tensor) -> None:
        """Send the gradient to the host, if it is not there and takes room."""
        grad = leaf.grad
        if grad is None or is_sent(grad) or grad.requires_grad or grad.layout is not torch.strided:
            return
        here, road = on_device(grad), self._roads.get(grad.device)
        values = self._room_for(leaf, here)
        if road is not None and 0 < here.nbytes <= road.size:
            road.send(here, values)
            leaf.grad = send_away(grad, values, road.arrive)
        else:
            leaf.grad = send_away(grad, values.copy_(here), None)

    def _room_for(self, leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Memory for the values of ``grad``: that of the latest one, unless somebody holds it."""
        kept, user = self._engine.kept_on_host, self._users.get(id(leaf))
        room = kept.get(id(leaf))
        is_free = user is not None and user() is None
        if room is None or not is_free or (room.numel(), room.dtype) != (grad.numel(), grad.dtype):
            room = kept[id(leaf)] = torch.empty(grad.numel(), dtype=grad.dtype, device="cpu")
        values = laid_as(grad, room)
        self._users[id(leaf)] = weakref.ref(values)
        return values

    def _remove(self) -> None:
        self._end_roads()
        for leaf, handle in self._hooked.values():
            handle.remove()
            if leaf.grad is not None and is_away(leaf.grad):
                leaf.grad = on_device(leaf.grad)
        self._hooked.clear()
        self._engine.kept_on_host.clear()


def _send(own: weakref.ref[Waiting], leaf: torch.Tensor) -> None:
    waiting = own()
    if waiting is not None:
        waiting.send(leaf)


@dataclass(slots=True)
class _Slot:
    """Pinned memory of one gradient."""

    buffer: torch.Tensor
    # On its way: behind what event it has come, where, where it goes from there, and what is read
    # until then, whose memory the training's stream must not have yet
    coming: tuple[torch.cuda.Event, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def arrive(self) -> None:
        """Wait for what is on its way."""
        if self.coming is not None:
            event, here, values, _ = self.coming
            event.synchronize()
            values.copy_(here)
            self.coming = None


class _Road:
    """The way of one device's gradients to the host."""

    def __init__(self, device: torch.device, size: int) -> None:
        """Take pinned memory for gradients of at most ``size`` bytes."""
        self.size = size
        allowed = f"gradients on their way need {AT_ONCE} times {size} bytes of it"
        do = "Give the process more memory that it may lock (ulimit -l), or keep gradients on the "
        do += "device: pass a storage without release_gradients"
        buffers = [pinned(size, f"copies of {device}", allowed, do) for _ in range(AT_ONCE)]
        self._slots = [_Slot(buffer) for buffer in buffers]
        self._next = itertools.cycle(self._slots)
        self._stream = torch.cuda.Stream(device)

    def send(self, grad: torch.Tensor, values: torch.Tensor) -> None:
        """Queue a copy to ``values``; wait for that which the memory had before."""
        slot = next(self._next)
        slot.arrive()
        here = laid_as(grad, slot.buffer[: grad.nbytes].view(grad.dtype))
        event = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(grad.device))
        with torch.cuda.stream(self._stream):
            here.copy_(grad, non_blocking=True)
            event.record(self._stream)
        slot.coming = event, here, values, grad.detach()

    def arrive(self) -> None:
        """Wait for all that is on its way."""
        for slot in self._slots:
            slot.arrive()
