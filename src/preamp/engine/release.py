# SPDX-License-Identifier: BSD-3-Clause
"""Gradients applied as soon as they are made: ``storage`` with ``release_gradients=True``.

So it is where masters and moments lie on the device. With ``place="host"`` gradients wait there for
their step, see `engine.waiting`.

A hook on each leaf runs when autograd has the whole gradient of it: what a model uses twice gets
its gradient once, after both uses. By then every node that the gradient comes from has run. (One
that read the weight detached may run later: torch raises where it finds the weight written to. A
checkpoint that reads it so, or a read through ``.data``, computes with the new one.) So the hook
updates that one parameter as the coming step would (`FusedOptimizer.update_alone`) and drops the
gradient; small ones wait for each other, up to `TOGETHER` bytes, since an update costs as much for
many. The block then ends without gradients, and ``optimizer.step()`` finds none to apply: it
counts, and runs hooks and schedulers as ever. Updates have the number of the step that follows.
Between a backward and its step weights are new already.

Numbers are those of training without it: a gradient without a master is unscaled in place, a half
one by the factor that the update of its master gets, as its session has it. A parameter that gets
no gradient stays as it is, where ``zero_grad(set_to_none=False)`` would have left zeros.

An update cannot be taken back. So whatever needs gradients of a whole step, or of several
backwards, is refused, as early as it is known: by `check_updates`, or when a block begins. If the
body raises, what was updated by then stays so, and what waits is dropped. Every half weight is its
rounded master still, and the counters are those of the latest step: the next block's updates take
the same number.

Hooks are on leaves, and know this weakly: copies and pickles of models have none, and a dropped
engine leaves plain parameters. What is left of a step is told by `Events`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.casting import disable_casts, thread_has_casts
from preamp.core.torch_private.modules import add_hook
from preamp.engine import refusals
from preamp.engine.engine import Engine
from preamp.engine.events import Backward
from preamp.engine.session import OptimizerSession
from preamp.engine.storage import check_no_ranks, check_releases
from preamp.optim import leaves_of, pair_of
from preamp.optim.fused.base import FusedOptimizer, Group
from preamp.optim.fused.checks import check_gradients
from preamp.optim.fused.entries import Entries, Row

TOGETHER = 1 << 20
"""Bytes of gradients that are applied together at least, but for the last ones of a backward."""


@dataclass(slots=True, eq=False)
class _Updates:
    """What a block has updated for one optimizer."""

    session: OptimizerSession
    reached: set[str]  # of the block; the block itself would keep the loss and its graph
    inverse: torch.Tensor | None  # takes the loss scale off gradients, if there is one
    done: set[int] = field(default_factory=set[int])  # ids of leaves, which their hooks hold
    # Gradients yet to be applied, and their bytes
    waiting: list[tuple[_Place, torch.Tensor]] = field(
        default_factory=list["tuple[_Place, torch.Tensor]"]
    )
    waiting_bytes: int = 0
    is_over: bool = False  # whether the block has ended well, so that a step must come next


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where a leaf is updated."""

    updates: _Updates
    group: Group
    param: Any  # the leaf, or its master


class Release:
    """The hooks of one engine, and what they have updated."""

    def __init__(self, engine: Engine) -> None:
        """Hook nothing yet."""
        self._engine = engine
        self._updates: dict[int, _Updates] = {}  # since the latest step, by id of the session
        self._places: dict[int, _Place] = {}  # by id of the leaf
        self._hooked: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        self._entered = threading.local()  # the block that a thread begins, as ``block``
        self.lock = threading.Lock()  # autograd has a thread for each device

    def attach(self) -> None:
        """Hook the parameters, until the engine is closed or hands a model over."""
        engine, events = self._engine, self._engine.events
        for undo in (engine.undo, *map(engine.undo_of, engine.models)):
            undo.push(self._remove)
        for session in engine.sessions.values():
            self._hook(session)
            loaded = partial(self._loaded, session)
            name = "register_load_state_dict_post_hook"
            add_hook(session.optimizer, name, loaded, engine.undo)
        events.block_begins.append(self._block_begins)
        events.loss_scaled.append(self._make_ready)
        events.gradients_made.append(self._gradients_made)
        events.block_over.append(self._block_over)
        events.update_begins.append(self._update_begins)
        events.step_over.append(self._step_over)

    def _hook(self, session: OptimizerSession) -> None:
        for leaf in session.model_params():
            if leaf.requires_grad and id(leaf) not in self._hooked:
                call = partial(_arrived, weakref.ref(self))
                handle = cast("Any", leaf).register_post_accumulate_grad_hook(call)
                self._hooked[id(leaf)] = leaf, handle

    def _remove(self) -> None:
        for _, handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        self._places.clear()
        self._updates.clear()

    # -- a block, and its step ---------------------------------------------------------------------

    def _block_begins(self, block: Backward) -> None:
        check_no_ranks()
        for session in block.sessions:
            check_releases(session.optimizer)
            updates = self._updates.get(id(session))
            if updates is not None and updates.is_over and updates.done:
                raise refusals.second_backward()
            if session.holds_any():
                raise refusals.other_gradient()
        for session in block.sessions:
            session.begin_anew()  # without zeros, which new ones would be added to
        self._entered.block = block

    def _make_ready(self, scaled: torch.Tensor) -> None:
        """Let masters take in what was written to half weights, and note what is updated where."""
        del scaled
        block = cast("Backward | None", vars(self._entered).pop("block", None))
        if block is None:
            return
        is_scaled = not self._engine.scaler(block.note.loss_id).is_identity
        inverse = block.note.scale.reciprocal() if is_scaled else None
        for session in block.sessions:
            cast("FusedOptimizer", session.optimizer).check_storage()  # as it stays till the step
            updates = self._updates[id(session)] = _Updates(session, block.reached, inverse)
            session.table.follow()
            self._hook(session)
            for group in session.optimizer.param_groups:
                for param, leaf in zip(group["params"], leaves_of(group["params"]), strict=True):
                    self._places[id(leaf)] = _Place(updates, group, param)

    def _gradients_made(self, block: Backward) -> None:
        for session in block.sessions:
            if (updates := self._updates.get(id(session))) is not None:
                self._apply_waiting(updates)

    def _block_over(self, block: Backward) -> None:
        for session in block.sessions:
            if (updates := self._updates.get(id(session))) is not None:
                updates.is_over = True

    def _update_begins(self, session: OptimizerSession, has_closure: bool) -> None:
        if has_closure:
            raise refusals.needs_gradients("optimizer.step(closure)")
        if id(session) not in self._updates:
            return
        # One that was unfrozen within the block has no hook, and is updated by the step.
        hooked = [leaf for leaf in session.model_params() if id(leaf) in self._hooked]
        if session.halves.has_earlier or any([leaf.grad is not None for leaf in hooked]):
            raise refusals.other_gradient()

    def _step_over(self, session: OptimizerSession) -> None:
        self._updates.pop(id(session), None)

    def _loaded(self, session: OptimizerSession, optimizer: torch.optim.Optimizer) -> None:
        """What was updated counts no more: so does a script go back that takes no step."""
        del optimizer
        self._step_over(session)

    # -- a gradient --------------------------------------------------------------------------------

    def arrive(self, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        """Take the whole gradient of ``leaf``, and update what waits if that is enough by now."""
        place = self._places.get(id(leaf))
        if place is None or not place.updates.session.is_open:
            raise refusals.outside_block(self._engine.names.of(leaf))
        updates = place.updates
        if updates.reached == {"loss"}:
            raise refusals.backward_of_loss()
        if grad.requires_grad:
            raise refusals.needs_gradients("backward(create_graph=True)")
        check_gradients(type(updates.session.optimizer).__name__, [leaf], [grad])
        if id(leaf) in updates.done:
            raise refusals.second_gradient(self._engine.names.of(leaf))
        updates.done.add(id(leaf))
        updates.waiting.append((place, grad))
        updates.waiting_bytes += grad.nbytes
        if updates.waiting_bytes >= TOGETHER:
            self._apply_waiting(updates)

    @torch.no_grad()
    def _apply_waiting(self, updates: _Updates) -> None:
        waiting, updates.waiting, updates.waiting_bytes = updates.waiting, [], 0
        found: dict[int, list[tuple[_Place, torch.Tensor]]] = {}
        for place, grad in waiting:
            found.setdefault(id(place.group), []).append((place, grad))
        has_casts = self._engine.casts_functions or thread_has_casts()
        with disable_casts() if has_casts else nullcontext():
            for pairs in found.values():
                self._update(pairs)

    def _update(self, pairs: Sequence[tuple[_Place, torch.Tensor]]) -> None:
        """Update parameters of one group."""
        place, rows, direct = pairs[0][0], list[Row](), list[torch.Tensor]()
        inverse, optimizer = place.updates.inverse, place.updates.session.optimizer
        for param, grad in [(place.param, grad) for place, grad in pairs]:
            twin = pair_of(param)
            if twin is None:
                rows.append((param, grad, None, None, None))
                direct.append(grad)
                continue
            plain = twin.table.gradients.one(grad.device)
            factor = plain if inverse is None else inverse.to(grad.device)
            rows.append((param, grad, twin.half, factor, twin))
        if inverse is not None:
            self._engine.ops.scale_add_(direct, inverse, [None] * len(direct))
        cast("FusedOptimizer", optimizer).update_alone(place.group, Entries.of_rows(rows))


def _arrived(owner: weakref.ref[Release], leaf: torch.Tensor) -> None:
    release, grad = owner(), leaf.grad
    if release is not None and grad is not None:
        leaf.grad = None
        with release.lock:
            release.arrive(leaf, grad)
