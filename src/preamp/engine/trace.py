# SPDX-License-Identifier: BSD-3-Clause
"""Watching the modules until an overflow: hooks that look, and change nothing.

A forward is seen by hooks of the module; its arguments are read before it runs, since it may
write to them. A backward is seen by hooks on the nodes of autograd's graph that a module's forward
has made. Hooks on tensors would show a gradient only after those of all its uses were added up,
and torch's module backward hooks forbid operations in place on what goes in and out.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from preamp.core.link import Link
from preamp.core.pytree import map_leaves
from preamp.core.undo import UndoStack
from preamp.engine.events import Backward, Events
from preamp.engine.observation import OUTSIDE, Observation, Pass, Place, Reading, read
from preamp.engine.overflow import OverflowCause
from preamp.kernels.modules import add_hook

_COMPILED = "CompiledFunctionBackward"  # autograd's node of a graph that torch.compile has made


@dataclass(slots=True, eq=False)
class _Call:
    """A module's forward that has begun."""

    tracer: Tracer
    place: Place
    step: Observation
    is_ignored: bool
    inputs: Sequence[Reading] = ()
    nodes: frozenset[Node] = frozenset()


class _Stack(threading.local):
    """The forwards under way on each thread."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


class Tracer:
    """Watches the modules of an engine's models while it is armed."""

    def __init__(self, models: Iterable[nn.Module], events: Events) -> None:
        """Watch nothing yet; ``events`` tell of backwards and steps while it is armed."""
        self._subscriptions: tuple[tuple[list[Any], Any], ...] = (
            (events.block_begins, self._note_watching),
            (events.loss_scaled, self._watch_loss),
            (events.block_over, self._end_backward),
            (events.step_over, self._end_step),
        )
        self._models = list(models)
        self._hooks: dict[int, UndoStack] = {}
        self._stays = False
        self._backward = 1
        self.observation = Observation()
        self.stack = _Stack()  # forwards under way

    @property
    def is_armed(self) -> bool:
        """Whether anything is watched."""
        return bool(self._hooks)

    def arm(self, *, stays: bool = False) -> None:
        """Put hooks on all modules, if there are none; they may stay after an overflow too."""
        self._stays = self._stays or stays
        if self.is_armed:
            return
        self.observation = Observation()
        self._hooks = {id(model): UndoStack() for model in self._models}
        for listeners, listener in self._subscriptions if self._models else ():
            listeners.append(listener)
        own: weakref.ref[Tracer] = weakref.ref(self)
        link = Link(own)
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, module in _watchable(model):
                place = Place((prefix + name).rstrip("."), type(module).__name__)
                # First, so that casts of the arguments belong to the module.
                undo, before = self._hooks[id(model)], _Before(link, place)
                add_hook(
                    module,
                    "register_forward_pre_hook",
                    before,
                    undo,
                    prepend=True,
                    with_kwargs=True,
                )
                after = _After(link, place)
                add_hook(module, "register_forward_hook", after, undo, with_kwargs=True)

    def disarm(self) -> None:
        """Take all hooks off and forget what was seen."""
        for undo in self._hooks.values():
            undo.unwind()
        self._unsubscribe()
        self._hooks = {}
        self._stays = False
        self.observation = Observation()

    def release(self, model: nn.Module) -> None:
        """Watch ``model`` no longer, now or later."""
        self._models = [own for own in self._models if own is not model]
        if id(model) in self._hooks:
            self._hooks[id(model)].unwind()
            self._hooks.pop(id(model))
        if not self._hooks:
            self._unsubscribe()

    def _unsubscribe(self) -> None:
        for listeners, listener in self._subscriptions:
            if listener in listeners:
                listeners.remove(listener)

    def _watch_loss(self, loss: torch.Tensor) -> None:
        """Watch the backward of what lies between the modules and ``loss``."""
        _watch_nodes([loss], _Call(self, OUTSIDE, self.observation, is_ignored=False))

    def saw_backward(
        self, place: Place, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any]
    ) -> None:
        """Read what a node of the graph has got and what it returned."""
        if self.is_armed:
            got, returned = (
                read(grad for grad in grads if isinstance(grad, torch.Tensor))
                for grads in (grad_outputs, grad_inputs)
            )
            self.observation.add(Pass(place, "backward", got, returned, self._backward))

    # -- what the engine reports ---------------------------------------------------------------

    def _note_watching(self, backward: Backward) -> None:
        """The note of the coming backward keeps what is seen."""
        backward.note.watched = partial(self.observation.find, self._backward)

    def _end_backward(self, backward: Backward) -> None:
        """A backward has ended, and gradients left scaled with it."""
        del backward
        self.observation.collect()
        self._backward += 1

    def _end_step(self, session: object) -> None:
        """A step has been taken or not; what was seen so far belongs to it."""
        del session
        self.observation = Observation(is_whole=True)

    def told(self, session: object, cause: OverflowCause) -> None:
        """An overflow was told: if its step was watched, that was it. A listener of the ledger."""
        del session
        if cause.was_watched and not self._stays:
            self.disarm()


def _watchable(model: nn.Module) -> Iterable[tuple[str, nn.Module]]:
    """All modules with their names, but scripted ones, which take no hooks, and what is in them."""
    seen: set[int] = set()
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        name, module = pending.pop()
        if id(module) in seen or isinstance(module, torch.jit.ScriptModule):
            continue
        seen.add(id(module))
        yield name, module
        prefix = f"{name}." if name else ""
        pending += [(prefix + own, child) for own, child in module.named_children()][::-1]


class _Hook:
    """A hook that reports to a tracer while there is one; a copied model's does nothing."""

    def __init__(self, link: Link[weakref.ref[Tracer]], place: Place) -> None:
        self._link = link
        self._place = place

    def _tracer(self) -> Tracer | None:
        if torch.compiler.is_compiling():  # what is traced must not change by being watched
            return None
        tracer = None if self._link.target is None else self._link.target()
        return tracer if tracer is not None and tracer.is_armed else None


class _Before(_Hook):
    """Reads the arguments of a forward."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        tracer = self._tracer()
        if tracer is None:
            return
        calls = tracer.stack.calls
        if calls and calls[0].step is not tracer.observation:
            calls.clear()  # a forward that was left by an exception
        # An evaluation; but inside of a forward with gradients it is a checkpoint's.
        ignored = calls[-1].is_ignored if calls else not torch.is_grad_enabled()
        call = _Call(tracer, self._place, tracer.observation, ignored)
        calls.append(call)
        if not ignored:
            tensors = _tensors_of((args, kwargs))
            call.inputs = read(tensors)
            call.nodes = frozenset(t.grad_fn for t in tensors if t.grad_fn is not None)


class _After(_Hook):
    """Reads the results of a forward, and puts hooks on the nodes it has made."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del module, args, kwargs
        tracer = self._tracer()
        if tracer is None:
            return
        calls = tracer.stack.calls
        while calls and calls[-1].place != self._place:
            calls.pop()  # left by an exception, as at the end of a checkpoint's second forward
        if not calls:
            return
        call = calls.pop()
        if call.is_ignored or call.step is not tracer.observation:
            return
        tensors = _tensors_of(output)
        call.step.add(Pass(self._place, "forward", call.inputs, read(tensors)))
        _watch_nodes(tensors, call)


def _tensors_of(value: Any) -> list[torch.Tensor]:
    """What a module may be handed; `tensors_in` knows no dataclass, set or packed sequence."""
    found: list[torch.Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif isinstance(leaf, PackedSequence):
            found.append(leaf.data)
        return leaf

    map_leaves(collect, value)
    return found


def _watch_nodes(outputs: Sequence[torch.Tensor], call: _Call) -> None:
    """Hook the nodes between a forward's arguments and ``outputs`` that no inner module has."""
    pending = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    mark = f"preamp.trace.{id(call.tracer)}"
    seen: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in seen or node in call.nodes:
            continue
        seen.add(node)
        following = [after for after, _ in node.next_functions if after is not None]
        pending += following
        is_compiled = node.name() == _COMPILED
        call.step.has_compiled |= is_compiled
        if is_compiled and call.place is OUTSIDE:
            continue  # nobody knows which modules are in it
        # Nodes without successors collect the gradients of parameters.
        notes: dict[str, Any] = cast("Any", node).metadata  # torch's stubs have a method there
        if following and mark not in notes:
            notes[mark] = True
            node.register_hook(_NodeHook(weakref.ref(call.tracer), call.place))


class _NodeHook:
    """Reads the gradients that go in and out of a node of the graph."""

    __slots__ = ("_place", "_tracer")

    def __init__(self, tracer: weakref.ref[Tracer], place: Place) -> None:
        self._tracer = tracer
        self._place = place

    def __call__(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
        tracer = self._tracer()
        if tracer is not None:
            tracer.saw_backward(self._place, grad_outputs, grad_inputs)
