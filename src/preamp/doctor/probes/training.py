# SPDX-License-Identifier: BSD-3-Clause
"""Probes on optimizers, schedulers, loss scalers, clipping, and the backward."""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from preamp.core.pytree import tensors_in
from preamp.core.torch_private.autograd import is_mean, leaves_through, shared_factors
from preamp.core.undo import UndoStack
from preamp.doctor.probes.around import Function, around, telling
from preamp.doctor.rule import current_place, current_places, frames
from preamp.doctor.seen import LEAST_SCALE, Origin, Source
from preamp.doctor.watch import Watch
from preamp.engine.block import Block
from preamp.engine.grad_scaler import GradScaler
from preamp.scaling import LossScaler

_CLIPPING = {
    "clip_grad_norm_": "max_norm",
    "clip_grad_value_": "clip_value",
    "clip_grads_with_norm_": "max_norm",
}
"""Functions that clip, with the name of the limit that is their second argument."""

_OPTIMIZER = torch.optim.Optimizer.__module__
_READ = 64  # backwards whose graph is read; it takes milliseconds for a thousand layers


class TrainingProbes:
    """Everything around an optimizer's step."""

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        self._watch = watch
        self._read = 0
        undo.hold(
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        around(watch, torch.optim.Optimizer, "__init__", self._make_optimizer, undo)
        added = telling(watch, "group_added", late=True)
        around(watch, torch.optim.Optimizer, "add_param_group", added, undo)
        around(watch, torch.optim.Optimizer, "zero_grad", self._zero, undo)
        restored = telling(watch, "state_restored", late=True)
        for kind in (torch.optim.Optimizer, torch.amp.GradScaler, GradScaler):
            around(watch, kind, "load_state_dict", restored, undo)
        around(watch, torch.autograd, "backward", self._backward, undo)
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.CosineAnnealingWarmRestarts):
            around(watch, kind, "step", telling(watch, "schedule_stepped"), undo)
        for name in _CLIPPING:
            for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
                around(watch, owner, name, self._clip, undo)

    # -- optimizers --------------------------------------------------------------------------

    def _make_optimizer(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        facts = self._watch.seen.facts(args[0])
        facts.made = self._watch.attempt(current_place)
        facts.lines = self._watch.attempt(current_places) or ()
        self._watch.seen.has_optimizers = True
        return result

    def _zero(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        self._watch.seen.zeroed += 1
        return function(*args, **kwargs)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._watch.is_active:
            return
        facts = self._watch.seen.facts(optimizer)
        if facts.is_inside:
            if _is_in_its_step(optimizer):  # a subclass has called its parent's step
                return
            self._watch.tell("script_failed")
        facts.is_inside = True
        facts.begun += 1
        self._watch.tell("step_begins", optimizer)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._watch.is_active:
            return
        facts = self._watch.seen.facts(optimizer)
        if not facts.is_inside:
            return
        facts.is_inside = facts.unscaled = False
        seen = self._watch.seen
        is_skipped = bool(self._watch.attempt(_skipped_by_itself, optimizer))
        facts.skipped += is_skipped
        facts.applied += not is_skipped
        seen.skipped += is_skipped
        facts.by_scaler = facts.in_scaler
        self._watch.tell("step_ended", optimizer)
        self._watch.attempt(seen.use, optimizer)
        self._watch.step_taken()

    # -- gradients ---------------------------------------------------------------------------

    def _clip(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("parameters")
        if given is None:
            return function(*args, **kwargs)
        given, params = _read_twice(given)
        marked = self._watch.attempt(self._before_clipping, function.__name__, params, args, kwargs)
        reads = self._watch.seen.reads_gradients
        if args:
            result = function(given, *args[1:], **kwargs)
        else:
            result = function(**{**kwargs, "parameters": given})
        self._watch.attempt(self._watch.seen.gradients.become, marked or ())
        self._watch.seen.reads_gradients = reads
        return result

    def _before_clipping(
        self, name: str, params: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Tell of it unless the limit is infinite, which only asks for the norm."""
        limit = args[1] if len(args) > 1 else kwargs.get(_CLIPPING[name])
        if limit is None or not math.isinf(limit):
            self._watch.tell("gradients_clipped", params, name)
        return self._watch.seen.gradients.marked(params)

    def _backward(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        known = self._watch.attempt(self._before_backward, args, kwargs)
        with self._watch.noting_errors():
            result = function(*args, **kwargs)
        if known is not None:
            seen = self._watch.seen
            ends = seen.gradients.backward_ends
            reached = self._watch.attempt(ends, seen.all_params(), *known)
            self._watch.tell("backward_ended", known[0], reached or ())
        return result

    def _before_backward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Source, set[int]]:
        """The kind of backward, and what is reached through float16."""
        seen = self._watch.seen
        given = args[0] if args else kwargs.get("tensors")
        seed = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        roots = list(tensors_in(given))
        self._watch.tell("backward_is_near", False)
        seen.gradients.backward_begins(seen.all_params())
        half: set[int] = set()
        self._read += 1
        if self._read <= _READ:
            half = leaves_through(roots, torch.float16)
        factors: Sequence[float] | None = ()
        scaler, mean, is_mixed = seen.take_scaler(roots)
        origin, lines = Origin.ENGINE, current_places()
        if scaler is None:
            for root in roots:
                self._watch.tell("loss_made", root)
            waits = self._read <= _READ
            factors = shared_factors(roots, tensors_in(seed), waits=waits)
            mean = seed is None and all(map(is_mean, roots))
            scaler = seen.scaler_by_hand(factors or (), lines, waits=waits)
            origin = _origin(factors) if scaler is None else Origin.GRAD_SCALER
        elif isinstance(scaler, torch.amp.GradScaler):
            origin = Origin.MIXED if is_mixed else Origin.GRAD_SCALER
            self._watch.tell("scaled_backward_begins", scaler, roots)
        return Source(
            origin=origin,
            scaler=None if scaler is None else weakref.ref(scaler),
            updates=0 if scaler is None else seen.updates.get(scaler, 0),
            factor=math.prod(factors or ()),
            is_mean=mean,
            lines=lines,
            forwards=seen.forwards,
        ), half


def _is_in_its_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step of ``optimizer`` stands on the stack, around the one that begins."""
    wrappers = (
        frame.f_locals.get("args")
        for frame in frames()
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == _OPTIMIZER
    )
    return sum(bool(args) and args[0] is optimizer for args in wrappers) > 1


def _origin(factors: Sequence[float] | None) -> Origin:
    """A loss scale by hand is large; other factors are weights."""
    factor = math.nan if factors is None else math.prod(factors)
    if factors is None or math.isinf(factor):
        return Origin.OTHER
    return Origin.BY_HAND if abs(factor) >= LEAST_SCALE else Origin.PLAIN


def _skipped_by_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer was handed an overflow flag, and the flag was set."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.sum() != 0)


def _read_twice(given: Any) -> tuple[Any, list[torch.Tensor]]:
    """What to pass on, and the tensors in it; an iterator can be read only once."""
    is_kept = isinstance(given, (torch.Tensor, list, tuple))
    items = cast("Any", given) if is_kept else list(given)
    # torch tells an exhausted generator from an empty list.
    is_generator = isinstance(given, types.GeneratorType)
    return (item for item in items) if is_generator else items, list(tensors_in(items))


class ScalerProbes:
    """Everything that multiplies a loss."""

    def __init__(self, watch: Watch, undo: UndoStack) -> None:
        self._watch = watch
        around(watch, torch.amp.GradScaler, "scale", self._scale, undo)
        around(watch, torch.amp.GradScaler, "unscale_", self._unscale, undo)
        around(watch, torch.amp.GradScaler, "step", self._step, undo)
        around(watch, torch.amp.GradScaler, "update", self._update, undo)
        around(watch, torch.amp.GradScaler, "__init__", self._make, undo)
        around(watch, Block, "begin", self._begin_block, undo)
        around(watch, Block, "finish", self._finish_block, undo)
        around(watch, LossScaler, "scale_loss", self._scale, undo)

    def _scale(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(scaler, *args, **kwargs)
        losses = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(scaler, LossScaler) or scaler.is_enabled():
            for loss in tensors_in(losses):
                self._watch.tell("loss_made", loss)
            self._watch.attempt(self._note_scaled, scaler, losses, result)
        return result

    def _note_scaled(self, scaler: Any, losses: Any, scaled: Any) -> None:
        mean = all(map(is_mean, tensors_in(losses)))
        for loss in tensors_in(scaled):
            self._watch.seen.note_scaled(loss, scaler, mean=mean)

    def _make(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(scaler, *args, **kwargs)
        self._watch.seen.updates[scaler] = 0
        self._watch.seen.scalers_made[scaler] = self._watch.attempt(current_place)
        return result

    def _update(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        result, updates = function(scaler, *args, **kwargs), self._watch.seen.updates
        updates[scaler] = updates.get(scaler, 0) + 1
        self._watch.seen.scaled.clear()  # a backward that has not run yet never will
        return result

    def _begin_block(self, function: Function, block: Any, *args: Any, **kwargs: Any) -> Any:
        self._watch.tell("backward_is_near", True)
        params = self._watch.attempt(_params_of, block) or []
        self._watch.attempt(self._watch.seen.gradients.block_begins, params)
        return function(block, *args, **kwargs)

    def _finish_block(self, function: Function, block: Any, *args: Any, **kwargs: Any) -> Any:
        params, scaler = self._watch.attempt(_params_of, block) or [], block.scaler
        if not scaler.is_identity:
            self._watch.tell("gradients_unscaled", params, scaler, scaler.value)
        result = function(block, *args, **kwargs)
        self._watch.attempt(self._watch.seen.gradients.block_ends, params)
        return result

    def _unscale(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = _optimizer_in(scaler, args, kwargs)
        if optimizer is None:
            return function(scaler, *args, **kwargs)
        seen = self._watch.seen
        facts = seen.facts(optimizer)
        if not facts.in_scaler:
            self._tell_unscaled(optimizer, scaler)
        marked = self._watch.attempt(seen.gradients.marked, seen.params(optimizer))
        result = function(scaler, *args, **kwargs)
        self._watch.attempt(seen.gradients.become, marked or (), Origin.UNSCALED)
        facts.unscaled = True
        return result

    def _tell_unscaled(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        params = self._watch.attempt(list[torch.Tensor], self._watch.seen.params(optimizer)) or []
        self._watch.tell("gradients_unscaled", params, scaler, scaler.get_scale)

    def _step(self, function: Function, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer = _optimizer_in(scaler, args, kwargs)
        if optimizer is None:
            return function(scaler, *args, **kwargs)
        seen = self._watch.seen
        facts = seen.facts(optimizer)
        begun = facts.begun
        self._tell_unscaled(optimizer, scaler)
        self._watch.tell("scaler_steps", optimizer, scaler)
        facts.in_scaler = True
        try:
            with self._watch.noting_errors():
                result = function(scaler, *args, **kwargs)
        finally:
            facts.in_scaler = facts.unscaled = facts.is_inside = False
        if facts.begun == begun:
            # A compiled step is not seen to begin, and was perhaps taken.
            is_skipped = bool(begun or not seen.compiles)
            facts.skipped += is_skipped
            seen.skipped += is_skipped
            facts.by_scaler = True
            self._watch.attempt(seen.use, optimizer)
            self._watch.step_taken()
        return result


def _optimizer_in(scaler: Any, args: Any, kwargs: Any) -> torch.optim.Optimizer | None:
    """The optimizer of a call that is to be looked at."""
    optimizer = args[0] if args else kwargs.get("optimizer")
    is_seen = isinstance(optimizer, torch.optim.Optimizer) and scaler.is_enabled()
    return optimizer if is_seen else None


def _params_of(block: Block) -> list[torch.Tensor]:
    return [param for session in block.sessions for param in session.model_params()]
