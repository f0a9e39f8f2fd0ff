# SPDX-License-Identifier: BSD-3-Clause
"""Watching the modules until an overflow: hooks that look, and change nothing.

A forward is seen by hooks of the module; its arguments are read before it runs, since it may
write to them. Functions that it calls are heard of while the outermost forward runs, on its thread.
A backward is seen by hooks on the nodes of autograd's graph that a module's forward
has made. Hooks on tensors would show a gradient only after those of all its uses were added up,
and torch's module backward hooks forbid operations in place on what goes in and out.
"""

from __future__ import annotations

import inspect
import re
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
from preamp.core.program import Line, line_of_program
from preamp.core.pytree import map_leaves
from preamp.core.tensors import host_reaches
from preamp.core.undo import UndoStack
from preamp.engine.events import Backward, Events
from preamp.engine.observation import OUTSIDE, Finding, Observation, Operation, Pass, Place, Reading
from preamp.engine.overflow import GradientNote, OverflowCause
from preamp.engine.session import OptimizerSession
from preamp.kernels.modules import add_hook
from preamp.kernels.operations import OperationMode, is_view_of, may_be_compiled

_TAG = "preamp.operation"  # in the notes of a node: the function that has made it
_COMPILED = "CompiledFunctionBackward"  # autograd's node of a graph that torch.compile has made


_Tag = tuple[str, Line | None]
"""A function of torch, and the line of the program that has called it."""


@dataclass(slots=True, eq=False)
class _Call:
    """A module's forward that has begun."""

    tracer: Tracer
    step: Observation
    seen: Pass
    arguments: tuple[int, ...] = ()  # ``id`` of each tensor
    nodes: frozenset[Node] = frozenset()  # that the arguments come from
    before_casts: frozenset[Node] = frozenset()  # that the results come from, but for their casts


class _Stack(threading.local):
    """The forwards under way on each thread."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.mode: OperationMode | None = None


class Tracer:
    """Watches the modules of an engine's models while it is armed."""

    def __init__(self, models: Iterable[nn.Module], events: Events, *, looks: bool) -> None:
        """Watch nothing yet; ``events`` tell of backwards and steps while it is armed.

        Where no loss scale does, it ``looks`` for overflows itself.
        """
        self._looks = looks
        self._subscriptions: tuple[tuple[list[Any], Any], ...] = (
            (events.block_begins, self._note_watching),
            (events.loss_scaled, self._watch_loss),
            (events.block_over, self._end_backward),
            (events.update_begins, self._look_before_update),
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
        for model in self._models:
            for place, module in places_of(self._models, model):
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
                ready = _Ready(link, place)
                add_hook(module, "register_forward_pre_hook", ready, undo, with_kwargs=True)
                if module is model:
                    early = _BeforeCasts(link, place)
                    add_hook(module, "register_forward_hook", early, undo, prepend=True)
                # Also after an exception, when the forward has no result.
                after = _After(link, place)
                add_hook(module, "register_forward_hook", after, undo, always_call=True)

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
        _watch_nodes([loss], _Call(self, self.observation, Pass(OUTSIDE, "forward")))

    def saw_backward(
        self, seen: Pass, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any]
    ) -> None:
        """Read what a node of the graph has got and what it returned, and add that to ``seen``."""
        if self.is_armed:
            seen.inputs, seen.outputs = (
                self.observation.read(grad for grad in grads if isinstance(grad, torch.Tensor))
                for grads in (grad_outputs, grad_inputs)
            )
            seen.backward = self._backward
            self.observation.add(seen)

    def begin_call(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """A module's forward begins with ``tensors`` among its arguments."""
        stack, step = self.stack, self.observation
        if stack.calls and stack.calls[0].step is not step:
            stack.calls.clear()  # forwards that went on when the step was over
        outer = stack.calls[-1].seen if stack.calls else None
        # Inside of a forward with gradients one without is a checkpoint's.
        has_grad = torch.is_grad_enabled() if outer is None else outer.has_grad
        if outer is None and has_grad:
            self._hear_operations()
        seen = Pass(place, "forward", step.read(tensors), call=outer, has_grad=has_grad)
        seen.began, seen.backward = step.tick(), self._backward
        nodes = frozenset(t.grad_fn for t in tensors if t.grad_fn is not None)
        stack.calls.append(_Call(self, step, seen, tuple(map(id, tensors)), nodes))

    def end_call(self, place: Place, tensors: Sequence[torch.Tensor]) -> None:
        """A module's forward has returned ``tensors`` among its results."""
        calls = self.stack.calls
        while calls and calls[-1].seen.place != place:
            calls.pop()  # its end was not told
        if not calls:
            return
        call = calls.pop()
        if not calls and self.stack.mode is not None:
            self.stack.mode.leave()
            self.stack.mode = None
        if call.step is self.observation:
            call.seen.outputs = call.step.read(tensors)
            call.step.add(call.seen)
            if call.seen.has_grad:
                _watch_nodes(tensors, call)

    def see(self, tensor: torch.Tensor, name: str) -> None:
        """A program wants one of its tensors to be watched; see `detect_overflow`."""
        outer = self.stack.calls[-1].seen if self.stack.calls else None
        inside = "" if outer is None or not outer.place.module else f"{outer.place.module}."
        has_grad = torch.is_grad_enabled() if outer is None else outer.has_grad
        seen = Pass(Place(inside + name, "a tensor"), "forward", call=outer, has_grad=has_grad)
        seen.began, seen.backward = self.observation.tick(), self._backward
        seen.outputs = self.observation.read([tensor])
        if outer is not None:
            seen.operations = outer.operations  # one of these has made it
        self.observation.add(seen)
        if tensor.grad_fn is not None:
            _watch_node(tensor.grad_fn, _Call(self, self.observation, seen), None)

    def _hear_operations(self) -> None:
        if self.stack.mode is not None:
            self.stack.mode.leave()
            self.stack.mode = None
        if not may_be_compiled():
            self.stack.mode = OperationMode(self._heard)
            self.stack.mode.enter()

    def _heard(self, name: str, args: Sequence[Any], result: Any) -> None:
        """A function has been called in a forward."""
        if not self.stack.calls:
            return
        tensors = tensors_of(result)
        if not tensors:
            return
        tag = name, line_of_program(inspect.currentframe())
        for tensor in tensors:
            if tensor.grad_fn is not None:
                cast("Any", tensor.grad_fn).metadata.setdefault(_TAG, tag)
        if not is_view_of(tensors[0], args):
            call = self.stack.calls[-1]
            # A function that takes the shape of its argument has not made its values finite.
            inputs = [] if "like" in name or "new" in name else call.step.known(tensors_of(args))
            outputs = call.step.read(tensors)
            call.seen.operations.append(Operation(*tag, inputs, outputs, call.step.tick()))

    # -- what the engine reports ---------------------------------------------------------------

    def _note_watching(self, backward: Backward) -> None:
        """The note of the coming backward keeps what is seen."""
        backward.note.watched = partial(
            self.observation.find, self._backward, weights_of=self._weights_of
        )

    def _weights_of(self, place: Place) -> list[Reading]:
        """Read a module's own parameters, without those of modules inside."""
        step = Observation()
        for model in self._models:
            for name, module in places_of(self._models, model):
                if name == place:
                    found = step.read(module.parameters(recurse=False))
                    step.keep(found)
                    step.collect()
                    return found
        return []

    def _end_backward(self, backward: Backward) -> None:
        """A backward has ended, and gradients left scaled with it."""
        del backward
        self.observation.collect()
        self._backward += 1

    def _look_before_update(self, session: OptimizerSession, has_closure: bool) -> None:
        """No loss scale has looked for an overflow: do so while the weights are as they were."""
        if has_closure or not self._looks:
            return
        if not session.watched and not session.notes and self.observation.has_calls:
            self._look_at_gradients(session)
        for note in session.watched:
            if note.watched is not None and host_reaches(note.scale):
                if any(bool(flag != 0) for flag in note.found_inf):
                    finding = note.watched(bool(note.loss_finite))
                    note.watched = partial(_found, finding)

    def _look_at_gradients(self, session: OptimizerSession) -> None:
        """There was no `scale_loss`: all that is known are gradients, and what modules returned."""
        leaves = session.model_params()
        device = leaves[0].device if leaves else torch.device("cpu")
        if not host_reaches(leaves[0] if leaves else torch.zeros(())):
            return
        note = GradientNote(0, torch.tensor(True), torch.ones((), device=device))
        session.gradients.look(leaves, device, note, is_joint=False)
        if any(bool(flag != 0) for flag in note.found_inf):
            note.loss_finite = torch.tensor(self.observation.ends_finite())
            note.watched = partial(self.observation.find, 1, weights_of=self._weights_of)
            note.graphs = [None]
            session.remember_watched(note)

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
    """Reads the arguments of a forward, before they are cast."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if (tracer := self._tracer()) is not None:
            tracer.begin_call(self._place, tensors_of((args, kwargs)))


class _Ready(_Hook):
    """Reads the arguments again where other hooks have replaced them."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        tracer = self._tracer()
        if tracer is None or not tracer.stack.calls:
            return
        call, tensors = tracer.stack.calls[-1], tensors_of((args, kwargs))
        if call.seen.place == self._place and call.arguments != tuple(map(id, tensors)):
            call.seen.given, call.seen.inputs = call.seen.inputs, call.step.read(tensors)


class _BeforeCasts(_Hook):
    """Reads the results of a model, before they are cast."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        tracer = self._tracer()
        if tracer is None or not tracer.stack.calls:
            return
        call, tensors = tracer.stack.calls[-1], tensors_of(output)
        if call.seen.place == self._place:
            call.seen.made = call.step.read(tensors)
            call.before_casts = frozenset(t.grad_fn for t in tensors if t.grad_fn is not None)


class _After(_Hook):
    """Reads the results of a forward, and puts hooks on the nodes it has made."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if (tracer := self._tracer()) is not None:
            tracer.end_call(self._place, tensors_of(output))


def _found(finding: Finding, loss_was_finite: bool) -> Finding:
    del loss_was_finite
    return finding


def places_of(models: Sequence[nn.Module], model: nn.Module) -> Iterable[tuple[Place, nn.Module]]:
    """The modules of ``model`` that can be watched, by what they are called among ``models``."""
    prefix = f"{models.index(model)}." if len(models) > 1 else ""
    for name, module in _watchable(model):
        yield Place((prefix + name).rstrip("."), type(module).__name__), module


def tensors_of(value: Any) -> list[torch.Tensor]:
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
    pending: list[tuple[Node, _Tag | None, bool]] = [
        (tensor.grad_fn, None, bool(call.before_casts)) for tensor in outputs if tensor.grad_fn
    ]
    is_outside = call.seen.place is OUTSIDE
    seen: set[Node] = set()
    while pending:
        node, tag, is_cast = pending.pop()
        if node in seen or node in call.nodes:
            continue
        seen.add(node)
        notes: dict[str, Any] = cast("Any", node).metadata  # torch's stubs have a method there
        tag = notes.get(_TAG, tag)  # nodes that a function has made on its way have none
        is_cast = is_cast and node not in call.before_casts
        following = [after for after, _ in node.next_functions if after is not None]
        pending += [(after, tag, is_cast) for after in following]
        is_compiled = node.name() == _COMPILED
        call.step.has_compiled |= is_compiled
        if is_compiled and is_outside:
            continue  # nobody knows which modules are in it
        # Nodes without successors collect the gradients of parameters.
        if following:
            _watch_node(node, call, tag, is_cast=is_cast)


def _watch_node(node: Node, call: _Call, tag: _Tag | None, *, is_cast: bool = False) -> None:
    """Hook a node, unless a module inside of the one that is called has done so."""
    notes: dict[str, Any] = cast("Any", node).metadata
    mark = f"preamp.trace.{id(call.tracer)}"
    if mark not in notes:
        notes[mark] = True
        own = notes.get(_TAG, tag) or (_named(node), None)
        node.register_hook(_NodeHook(weakref.ref(call.tracer), call.seen, own, is_cast))


class _NodeHook:
    """Reads the gradients that go in and out of a node of the graph."""

    __slots__ = ("_call", "_is_cast", "_tag", "_tracer")

    def __init__(self, tracer: weakref.ref[Tracer], call: Pass, tag: _Tag, is_cast: bool) -> None:
        self._tracer = tracer
        self._call = call
        self._tag = tag
        self._is_cast = is_cast

    def __call__(self, grad_inputs: Sequence[Any], grad_outputs: Sequence[Any]) -> None:
        tracer = self._tracer()
        if tracer is not None:
            call = None if self._call.place is OUTSIDE else self._call
            seen = Pass(self._call.place, "backward", call=call, is_cast=self._is_cast)
            seen.operation, seen.line = self._tag
            tracer.saw_backward(seen, grad_outputs, grad_inputs)


def _named(node: Node) -> str:
    """``"nll_loss"`` for ``NllLossBackward0``."""
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
