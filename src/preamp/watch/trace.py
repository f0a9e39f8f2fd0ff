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
import math
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from preamp.core.errors import message
from preamp.core.link import Link
from preamp.core.program import calls_of_program
from preamp.core.tensors import host_reaches, is_capturing, node_of
from preamp.core.torch_private.autograd import is_made_since, nodes_made
from preamp.core.torch_private.modules import add_hook
from preamp.core.torch_private.operations import (
    OperationMode,
    asked_for,
    may_be_compiled,
    may_not_be_read,
    unheard,
)
from preamp.core.undo import UndoStack
from preamp.engine.core import EngineCore
from preamp.engine.events import Backward
from preamp.engine.overflow import Finding, OverflowCause
from preamp.engine.session import OptimizerSession
from preamp.engine.weights import master_of
from preamp.kernels.wide_half import leaves
from preamp.numerics import Float32Record
from preamp.watch.float32 import compute, note_random, own_tensors, uses_halves
from preamp.watch.observation import (
    OUTSIDE,
    Observation,
    Operation,
    Pass,
    Place,
    Reading,
    Values,
    counted_version,
    tensors_of,
)
from preamp.watch.origin import find

_TAG = "preamp.operation"  # in the notes of a node: the function that has made it
# Functions that leave values as they are, but for a change of dtype
_MOVES = frozenset(
    "__get__ __getitem__ chunk clone contiguous cpu cuda detach expand flatten pin_memory "
    "requires_grad_ reshape split squeeze stack t to transpose unbind unsqueeze view "
    "bfloat16 double float half type type_as".split()
)
_COMPILED = "CompiledFunctionBackward"  # autograd's node of a graph that torch.compile has made


@dataclass(slots=True, eq=False)
class _Call:
    """A module's forward that has begun."""

    tracer: Tracer
    step: Observation
    seen: Pass
    arguments: tuple[int, ...] = ()  # ``id`` of each tensor
    nodes: frozenset[Node] = frozenset()  # that the arguments come from
    before_casts: frozenset[Node] = frozenset()  # that the results come from, but for their casts
    versions: tuple[int, ...] = ()  # of the arguments as the forward got them
    has_casts: bool = False  # whether autocast was on then
    # Puts random numbers back to where it began; `None` where float32 will not be tried
    begin: Callable[[], None] | None = None
    is_wrong: bool = False  # whether a forward inside was found to return inf or nan


class _Stack(threading.local):
    """The forwards under way on each thread."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.mode: OperationMode | None = None


class Tracer:
    """Watches the modules of an engine's models while it is armed."""

    def __init__(self, engine: EngineCore) -> None:
        """Watch nothing yet, and do not keep ``engine`` alive.

        Its events tell of backwards and steps while this is armed.
        """
        self._master_of = partial(master_of, weakref.ref(engine))
        self._named: set[str] = set()  # modules whose forward an overflow has come from
        self._looks = not engine.policy.is_dynamic  # for overflows, where no loss scale does
        engine.ledger.on_overflow.append(self._told)
        events = engine.events
        self._subscriptions: tuple[tuple[list[Any], Any], ...] = (
            (events.block_begins, self._note_watching),
            (events.loss_scaled, self._watch_loss),
            (events.gradients_made, self._pause),
            (events.block_over, self._end_backward),
            (events.update_begins, self._look_before_update),
            (events.step_over, self._end_step),
        )
        self._models = list(engine.models)
        self._hooks: dict[int, UndoStack] = {}
        self._stays = False
        self._backward = 1
        self._has_warned = False  # of gradients that no block has made
        self._is_over = False  # whether a step was taken or not since the latest forward
        self._is_between = False  # whether a forward with gradients has ended, and no loss is there
        self._has_seen = False  # a forward with gradients
        self._thread = 0  # of the first forward
        self._nodes_before = 0  # that were made when the watching began
        self.values, self.observation = Values(), Observation()
        self.stack = _Stack()  # forwards under way

    @property
    def is_armed(self) -> bool:
        """Whether anything is watched."""
        return bool(self._hooks)

    def arm(self, *, stays: bool = False, is_first: bool = False) -> None:
        """Put hooks on all modules, if there are none; they may stay after an overflow too.

        ``is_first`` if there was no backward yet.
        """
        self._stays = self._stays or stays
        if self.is_armed:
            return
        self.values, self.observation = Values(), Observation(follows=is_first)
        self._is_over = self._has_seen = self._is_between = False
        self._thread, self._nodes_before = 0, nodes_made()
        self._hooks = {id(model): UndoStack() for model in self._models}
        for listeners, listener in self._subscriptions if self._models else ():
            listeners.append(listener)
        own: weakref.ref[Tracer] = weakref.ref(self)
        link = Link(own)
        for model in self._models:
            undo = self._hooks[id(model)]
            for place, module in _places_of(self._models, model):
                for kind, method, options in _HOOKS if module is model else _HOOKS[:-1]:
                    add_hook(module, kind, _Hook(link, place, method), undo, **options)

    def disarm(self) -> None:
        """Take all hooks off and forget what was seen."""
        for undo in self._hooks.values():
            undo.unwind()
        self._unsubscribe()
        self._hooks = {}
        self._stays = False
        self.values, self.observation = Values(), Observation()
        self._pause()
        self.stack.mode = None

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
        if not self.observation.is_whole:
            self.observation.is_whole = is_made_since(loss, self._nodes_before)
        self._resume()
        with unheard():
            _watch_nodes([loss], _Call(self, self.observation, Pass(OUTSIDE, "forward")))

    def saw_backward(
        self, seen: Pass, grad_outputs: Sequence[Any], grad_inputs: Sequence[Any]
    ) -> None:
        """Read what a node of the graph has got and what it returned, and add that to ``seen``."""
        given, made = leaves(grad_outputs), leaves(grad_inputs)
        with unheard():
            seen.inputs, seen.outputs = self.values.read(given), self.values.read(made)
        seen.backward = self._backward
        self._add(self.observation, seen)

    def begin_call(self, place: Place, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A module's forward begins. Reads its arguments before they are cast."""
        del module
        stack, tensors = self.stack, tensors_of((args, kwargs))
        if stack.calls and stack.calls[0].step is not self.observation:
            stack.calls.clear()  # forwards that went on when the step was over
        outer = stack.calls[-1].seen if stack.calls else None
        # Inside of a forward with gradients one without is a checkpoint's.
        has_grad = torch.is_grad_enabled() if outer is None else outer.has_grad
        if outer is None:
            self._renew()
            if not has_grad and not self.observation.is_under_way:
                self.values.begin_step()
                self.observation = self.observation.without_passes()
            self._listen(has_grad)
        self._has_seen |= has_grad
        step = self.observation
        seen = Pass(
            place, "forward", self.values.read(tensors, outer), call=outer, has_grad=has_grad
        )
        seen.began, seen.backward = self.values.tick(), self._backward
        _note_caller(seen)
        nodes = _nodes_of(tensors)
        begin = note_random(tensors[0].device) if self._may_read(place, tensors) else None
        stack.calls.append(_Call(self, step, seen, tuple(map(id, tensors)), nodes, begin=begin))

    def see_arguments(self, place: Place, module: nn.Module, args: Any, kwargs: Any) -> None:
        """All other hooks have run. Reads the arguments again where they have replaced these."""
        del module
        call, tensors = self._latest(place), tensors_of((args, kwargs))
        if call is None:
            return
        if call.begin is not None:
            call.versions = tuple(map(counted_version, tensors))
            call.has_casts = torch.is_autocast_enabled(tensors[0].device.type)
        if call.arguments != tuple(map(id, tensors)):
            call.seen.given = call.seen.inputs
            call.seen.inputs = self.values.read(tensors, call.seen)

    def see_results(self, place: Place, module: nn.Module, args: Any, output: Any) -> None:
        """A model's own forward has ended. Reads the results before they are cast."""
        del module, args
        call, tensors = self._latest(place), tensors_of(output)
        if call is not None:
            call.seen.made = self.values.read(tensors, call.seen, is_made=True)
            call.before_casts = _nodes_of(tensors)

    def _latest(self, place: Place) -> _Call | None:
        """The innermost forward under way, if it is that of the module at ``place``."""
        call = self.stack.calls[-1] if self.stack.calls else None
        return call if call is not None and call.seen.place == place else None

    def _may_read(self, place: Place, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the host may read them at once: it waits for a device only where it has to."""
        if not tensors or is_capturing(tensors[0].device):
            return False
        return host_reaches(tensors[0]) or place.module in self._named

    def end_call(
        self, place: Place, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """A module's forward has ended. Reads its results, and hooks the nodes it has made."""
        calls, tensors = self.stack.calls, tensors_of(output)
        while calls and calls[-1].seen.place != place:
            calls.pop()  # its end was not told
        if not calls:
            return
        call = calls.pop()
        if not calls:
            self._listen(threading.get_ident() == self._thread)
            self._is_between |= call.seen.has_grad
        if call.step is self.observation:
            call.seen.outputs = self.values.read(tensors, call.seen, is_made=True)
            if call.begin is not None:
                self._try_float32(call, module, (args, kwargs), tensors)
            self._add(call.step, call.seen)
            if call.seen.has_grad:
                _watch_nodes(tensors, call)

    def _try_float32(
        self, call: _Call, module: nn.Module, given: Any, tensors: Sequence[torch.Tensor]
    ) -> None:
        """Compute it in float32 if it is the first to go wrong, while its input is there."""
        seen, begin = call.seen, call.begin
        results = seen.outputs if seen.made is None else seen.made
        is_wrong = not all(one.is_finite for one in results)
        if self.stack.calls:
            self.stack.calls[-1].is_wrong |= is_wrong or call.is_wrong
        if begin is None or not is_wrong or call.is_wrong:
            return
        arguments = tensors_of(given)
        if not all(one.is_finite for one in seen.inputs):
            return
        if not (call.has_casts or uses_halves(module, (*arguments, *tensors))):
            return
        if call.versions != tuple(map(counted_version, arguments)):
            seen.float32 = Float32Record(found="failed", why="it has written to its arguments")
        else:
            seen.float32 = compute(module, given, begin, self._master_of)

    # -- functions -----------------------------------------------------------------------------

    def _listen(self, hears: bool) -> None:
        """Hear of torch's functions on this thread from now on, or no longer.

        Not in forwards without gradients, where some modules would take another way.
        """
        own, is_compiled = threading.get_ident(), may_be_compiled()
        self._thread = self._thread or own
        self.observation.hears &= own == self._thread and not is_compiled
        mode = self.stack.mode
        if hears and not is_compiled:
            if mode is None:
                own_ref: weakref.ref[Tracer] = weakref.ref(self)
                mode = self.stack.mode = OperationMode(partial(_tell, own_ref))
                if own == self._thread:  # elsewhere it ends with the forward
                    weakref.finalize(self, mode.leave).atexit = False
            mode.enter()
        elif mode is not None:
            mode.leave()
            if is_compiled or own != self._thread:
                self.stack.mode = None

    def _pause(self, backward: object = None) -> None:
        """What the engine does by itself from now on is not to be heard."""
        if self.stack.mode is not None:
            self.stack.mode.leave()

    def _resume(self) -> None:
        if self.stack.mode is not None:
            self.stack.mode.enter()

    def heard(self, name: str, args: Sequence[Any], result: Any) -> None:
        """A function has been called, by a forward or between two."""
        call = self.stack.calls[-1].seen if self.stack.calls else None
        arguments, results = leaves(args), leaves((result,))
        if name == "backward":
            self._is_between = False
        if name == "__setitem__":
            results = arguments[:1]

        def describe(inputs: Sequence[Reading]) -> Operation:
            until = 0 if call is None else call.frame
            lines = calls_of_program(inspect.currentframe(), until)
            floats = (one for one in args if isinstance(one, Real) and not isinstance(one, int))
            # A function of no tensors, such as `torch.tensor`, has its values from the program.
            has_constant = not arguments or not all(map(math.isfinite, floats))
            # Of a product that runs wide, its casts are heard one by one.
            asked, given = asked_for(name, args)
            others = (one for one in leaves(given) if not any(one is made for made in results))
            readings = inputs if given is args else self.values.read(others, call)
            return Operation(asked, lines, inputs, call, readings, has_constant)

        with unheard():  # by another engine as well
            operation = self.values.hear(
                arguments,
                results,
                call,
                describe,
                moves=name in _MOVES,
                is_between=self._is_between,
            )
            for node in () if operation is None else _nodes_of(results):
                if not _is_own(node):
                    cast("Any", node).metadata.setdefault(_TAG, operation)

    # -- what the engine reports ---------------------------------------------------------------

    def _note_watching(self, backward: Backward) -> None:
        """The note of the coming backward keeps what is seen."""
        self._pause()
        self._is_between = False
        if not self.observation.trained:  # else it may be of a forward from before the latest step
            self._renew()
        with unheard():
            losses = self.values.read([backward.loss])
        self.observation.losses += [(self._backward, loss) for loss in losses]
        backward.note.watched = self._finder()

    def _renew(self) -> None:
        """Begin a new observation, if a step has ended the one before."""
        if self._is_over:
            self.values.begin_step()
            self.observation = Observation(follows=True, is_whole=True)
            self._is_over = False

    def _finder(self) -> Callable[[bool], Finding]:
        """See `find`; given whether the loss was finite."""
        step, backward = self.observation, self._backward

        def found(loss_was_finite: bool) -> Finding:
            trace = None
            with unheard():
                self.values.collect()
                # Where no forward is seen, as of compiled models, a backward shows what it led to.
                if self._has_seen or not step.is_whole or loss_was_finite:
                    trace = find(step, backward, loss_was_finite, self._weights_of, self._name_of)
            if trace is not None and trace.phase == "forward":
                self._named.add(trace.module)
            trained = any(call.backward <= backward for call in step.trained)
            return Finding(trained or step.is_whole, trace)

        return found

    def _weights_of(self, place: Place) -> list[Reading]:
        """Read a module's own parameters, without those of modules inside."""
        values = Values()
        for model in self._models:
            for name, module in _places_of(self._models, model):
                if name == place:
                    found = values.read(module.parameters(recurse=False))
                    values.collect()
                    return found
        return []

    def _name_of(self, tensor: torch.Tensor | None) -> str:
        """What a parameter, a buffer or what else a module keeps is called; empty for others."""
        for index, model in enumerate(self._models):
            for name, own in own_tensors(model):
                if own is tensor:
                    return f"{index}.{name}" if len(self._models) > 1 else name
        return ""

    def _add(self, step: Observation, seen: Pass) -> None:
        seen.ended = self.values.tick()
        step.add(seen)

    def _end_backward(self, backward: Backward) -> None:
        """A backward has ended."""
        del backward
        self._resume()
        self.values.collect()
        self._backward += 1

    def _look_before_update(self, session: OptimizerSession, has_closure: bool) -> None:
        """No loss scale has looked for an overflow: do so while the weights are as they were."""
        if has_closure:
            return
        self._pause()
        if not self._looks:
            return
        is_known = self._has_warned or session.watched or not self.observation.trained
        if not is_known and session.holds_any(of_blocks=False):
            self._has_warned = True
            warnings.warn(_unwatched(), stacklevel=2)
        for note in session.watched:
            if note.watched is not None and host_reaches(note.scale):
                if any(bool(flag != 0) for flag in note.found_inf):
                    finding = note.watched(bool(note.loss_finite))
                    note.watched = lambda _, finding=finding: finding

    def _end_step(self, session: object) -> None:
        """A step has been taken or not; the next forward begins another one."""
        del session
        self._resume()  # between steps too: a hidden state may be cloned or copied there
        self._is_over, self._is_between = True, False

    def _told(self, session: object, cause: OverflowCause) -> None:
        """An overflow was told: if its step was watched, that was it. A listener of the ledger."""
        del session
        if cause.was_watched and not self._stays:
            self.disarm()


def _unwatched() -> str:
    return message(
        "optimizer.step() was called with gradients that no scale_loss block has made, while "
        "overflows are traced",
        "A trace begins at the loss that the block was given; of this step nothing is told",
        "Write: with preamp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()",
    )


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
    """Calls a method of a tracer while there is one; in a copied model there is none."""

    def __init__(self, link: Link[weakref.ref[Tracer]], place: Place, method: str) -> None:
        self._link = link
        self._place = place
        self._method = method

    def __call__(self, module: nn.Module, *given: Any) -> None:
        if may_not_be_read() or self._link.target is None:
            return
        if (tracer := _armed(self._link.target)) is not None:
            with unheard():
                getattr(tracer, self._method)(self._place, module, *given)


_HOOKS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    # First, so that casts of the arguments belong to the module.
    ("register_forward_pre_hook", "begin_call", {"prepend": True, "with_kwargs": True}),
    ("register_forward_pre_hook", "see_arguments", {"with_kwargs": True}),
    # Also after an exception, when the forward has no result.
    ("register_forward_hook", "end_call", {"always_call": True, "with_kwargs": True}),
    ("register_forward_hook", "see_results", {"prepend": True}),  # of a model, not of its layers
)
"""How torch takes each hook, and the method of a tracer that it calls."""


def _armed(tracer: weakref.ref[Tracer]) -> Tracer | None:
    own = tracer()
    return own if own is not None and own.is_armed else None


def _tell(tracer: weakref.ref[Tracer], name: str, args: Sequence[Any], result: Any) -> None:
    if (own := _armed(tracer)) is not None:
        own.heard(name, args, result)


def _places_of(models: Sequence[nn.Module], model: nn.Module) -> Iterable[tuple[Place, nn.Module]]:
    """The modules of ``model`` that can be watched, by what they are called among ``models``."""
    prefix = f"{models.index(model)}." if len(models) > 1 else ""
    for name, module in _watchable(model):
        yield Place((prefix + name).rstrip("."), type(module).__name__), module


def _note_caller(seen: Pass) -> None:
    """Note who calls the module whose hook runs; an operation in it is followed up to here only."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_call_impl":
        frame = frame.f_back
    if frame is not None:
        seen.frame = id(frame)  # alive, and no other's, as long as the forward is under way
        seen.lines = calls_of_program(frame.f_back, 0 if seen.call is None else seen.call.frame)


def _watch_nodes(outputs: Sequence[torch.Tensor], call: _Call) -> None:
    """Hook the nodes between a forward's arguments and ``outputs`` that no inner module has."""
    pending: list[tuple[Node, Operation | None, bool]] = [
        (node, None, bool(call.before_casts)) for node in map(node_of, outputs) if node is not None
    ]
    is_outside = call.seen.place is OUTSIDE
    seen: set[Node] = set()
    while pending:
        node, operation, is_cast = pending.pop()
        if node in seen or node in call.nodes:
            continue
        seen.add(node)
        notes: dict[str, Any] = cast("Any", node).metadata  # torch's stubs have a method there
        # Nodes that a function has made on its way have none, as those of the program's own.
        operation = notes.get(_TAG, None if _is_own(node) else operation)
        is_cast = is_cast and node not in call.before_casts
        following = [after for after, _ in node.next_functions if after is not None]
        pending += [(after, operation, is_cast) for after in following]
        if is_outside and node.name() == _COMPILED:
            continue  # nobody knows which modules are in it
        # Nodes without successors collect the gradients of parameters.
        if following:
            _watch_node(node, call, operation, is_cast=is_cast)


def _watch_node(
    node: Node, call: _Call, operation: Operation | None, *, is_cast: bool = False
) -> None:
    """Hook a node, unless a module inside of the one that is called has done so."""
    notes: dict[str, Any] = cast("Any", node).metadata
    mark = f"preamp.trace.{id(call.tracer)}"
    if mark not in notes:
        notes[mark] = True
        own = notes.get(_TAG, operation)
        tracer = weakref.ref(call.tracer)
        node.register_hook(partial(_see_node, tracer, call.seen, own, _named(node), is_cast))


def _see_node(
    tracer: weakref.ref[Tracer],
    call: Pass,
    operation: Operation | None,
    name: str,
    is_cast: bool,
    grad_inputs: Sequence[Any],
    grad_outputs: Sequence[Any],
) -> None:
    """A node's hook: reads the gradients that go in and out of it."""
    if (own := _armed(tracer)) is not None:
        outer = None if call.place is OUTSIDE else call
        seen = Pass(call.place, "backward", call=outer, is_cast=is_cast)
        seen.operation, seen.name = operation, name
        own.saw_backward(seen, grad_outputs, grad_inputs)


def _nodes_of(tensors: Iterable[torch.Tensor]) -> frozenset[Node]:
    """The nodes that have made them."""
    return frozenset(node for node in map(node_of, tensors) if node is not None)


def _is_own(node: Node) -> bool:
    """Whether it is of a `torch.autograd.Function`, which no function of torch has made."""
    return isinstance(node, BackwardCFunction)


def _named(node: Node) -> str:
    """``"nll_loss"`` for ``NllLossBackward0``; of a program's own its class."""
    if _is_own(node):
        own: type = cast("Any", node)._forward_cls  # noqa: SLF001
        return "" if own.__module__.startswith("preamp.") else own.__name__
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
