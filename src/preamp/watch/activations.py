# SPDX-License-Identifier: BSD-3-Clause
"""What goes in and out of chosen modules: statistics, gradients, and frames of whole forwards."""

from __future__ import annotations

import sys
import weakref
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast, get_args

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from preamp.core.errors import bad_type, bad_value
from preamp.core.link import Link
from preamp.core.undo import UndoStack
from preamp.engine.events import Backward, Events
from preamp.kernels.autograd import backward_under_way
from preamp.kernels.extremes import extremes
from preamp.kernels.modules import add_hook
from preamp.kernels.operations import unheard
from preamp.numerics.records import OfModules
from preamp.watch.meter import Meter
from preamp.watch.observation import Place, tensors_of
from preamp.watch.steps import Frames, Statistics
from preamp.watch.trace import places_of

_Seen = MutableMapping[torch.Tensor, set[tuple[str, OfModules]]]


class Activations:
    """Reads arguments and results of modules, and their gradients, in chosen steps."""

    def __init__(self, meter: Meter, events: Events, lock: AbstractContextManager[object]) -> None:
        """Watch nothing yet; the ``lock`` is for forwards and backwards on several threads."""
        self._meter = meter
        self._lock = lock
        self._step = 1
        self._taken: dict[int, Statistics] = {}  # since the last step, by loss id
        self._frames = Frames()  # since the last step
        self._seen = cast("_Seen", WeakTensorKeyDictionary())  # what each tensor was read as
        # On the tensors whose gradients are read, by what has seen them
        self._handles: dict[_Hook, list[RemovableHandle]] = {}
        self._backward: Backward | None = None  # the block that is open
        self._scale: int | None = None  # place of its loss scale among the copies, if it is there
        self._events = events

    def begin_step(self, number: int) -> list[Statistics]:
        """Step ``number`` is the next; return what was read since the one before."""
        with self._lock:
            taken, self._taken, self._step = list(self._taken.values()), {}, number
            self._frames = Frames()
            self._seen.clear()
            self._remove(list(self._handles))
        return taken

    def take_frames(self) -> Frames:
        """Return those that were read since the last step."""
        with self._lock:
            taken, self._frames = self._frames, Frames()
        return taken

    def watch(
        self,
        modules: Iterable[tuple[Place, nn.Module, UndoStack]],
        kinds: Collection[str],
        steps: Container[int],
    ) -> Callable[[], None]:
        """Put hooks on modules, which the stacks take away; returns what does so at once.

        Without ``kinds`` they read frames.
        """
        if self._block_begins not in self._events.block_begins:
            self._events.block_begins.append(self._block_begins)
            self._events.block_over.append(self._block_over)
        own: weakref.ref[Activations] = weakref.ref(self)
        link, all_hooks = Link(own), UndoStack()
        for place, module, undo in modules:
            name = place.module or (place.type if kinds else "")
            hooks = UndoStack()
            undo.push(hooks.unwind)
            all_hooks.push(hooks.unwind)
            for kind in (_Before, _After) if kinds else (_Whole,):
                if kind is _Whole or kind.KIND in kinds or kind.GRADIENT in kinds:
                    hook = kind(link, name, kinds, steps)
                    hooks.push(partial(self._remove, [hook]))
                    hook.add_to(module, hooks)
        return all_hooks.unwind

    def saw(self, hook: _Hook, tensors: Sequence[torch.Tensor]) -> None:
        """A forward has begun with ``tensors``, or returned them. Does not synchronise."""
        if self._step not in hook.steps:
            return
        named = [
            (f"{hook.name}[{place}]" if place else hook.name, tensor)
            for place, tensor in enumerate(tensors)
        ]
        # In a backward a checkpoint computes once more what was read before.
        if hook.KIND in hook.kinds and backward_under_way() == -1:
            self._read(hook.KIND, self._unseen(hook.KIND, named))
        if hook.GRADIENT in hook.kinds and torch.is_grad_enabled():
            own: weakref.ref[Activations] = weakref.ref(self)
            differentiable = [(name, tensor) for name, tensor in named if tensor.requires_grad]
            handles = self._handles.setdefault(hook, [])
            for name, tensor in self._unseen(hook.GRADIENT, differentiable):
                saw = partial(_saw_gradient, own, hook.GRADIENT, name)
                handles.append(cast("Any", tensor).register_hook(saw))

    def saw_frame(self, hook: _Hook, module: nn.Module, given: Any, output: Any) -> None:
        """A forward was ``given`` these, and has returned ``output``. Does not synchronise."""
        if self._step in hook.steps and backward_under_way() == -1:
            weights = list(module.parameters(recurse=False))
            with self._lock, unheard():
                found = [
                    [parts for parts in map(extremes, tensors) if parts is not None]
                    for tensors in (tensors_of(given), tensors_of(output), weights)
                ]
                self._frames.add(hook.name, type(module).__name__, found)

    def _remove(self, hooks: Iterable[_Hook]) -> None:
        """Take the hooks off the tensors that these have seen; leaves would keep them for ever."""
        for hook in hooks:
            for handle in self._handles.pop(hook, ()):
                handle.remove()

    def _unseen(
        self, kind: OfModules, named: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[str, torch.Tensor]]:
        """Those that this is called with for the first time in a step.

        A module may be watched twice, and checkpoints hand it the same tensors once more.
        """
        found: list[tuple[str, torch.Tensor]] = []
        for name, tensor in named:
            seen = self._seen.setdefault(tensor, set())
            if (name, kind) not in seen:
                seen.add((name, kind))
                found.append((name, tensor))
        return found

    def saw_gradient(self, kind: OfModules, name: str, grad: torch.Tensor) -> None:
        """All parts of a gradient have been added up. Does not synchronise."""
        if not torch.is_grad_enabled():  # else the script goes on with it, as in a penalty
            self._read(kind, [(name, grad)], self._backward)

    def _read(
        self,
        kind: OfModules,
        named: Iterable[tuple[str, torch.Tensor]],
        backward: Backward | None = None,
    ) -> None:
        with self._lock:
            loss_id = 0 if backward is None else backward.note.loss_id
            taken = self._taken.setdefault(loss_id, Statistics(loss_id, []))
            if backward is not None and self._scale is None:
                self._scale = taken.copies.put(backward.note.scale.clone())
            pairs = [(name, tensor.detach()) for name, tensor in named]
            scale = None if backward is None else self._scale
            scales = [scale] * len(pairs)
            taken.readings.extend(self._meter.read(pairs, kind, taken.copies, scales=scales))

    def _block_begins(self, backward: Backward) -> None:
        self._backward, self._scale = backward, None

    def _block_over(self, backward: Backward) -> None:
        del backward
        self._backward = self._scale = None


def _saw_gradient(
    own: weakref.ref[Activations], kind: OfModules, name: str, grad: torch.Tensor
) -> None:
    activations = own()
    if activations is not None:
        activations.saw_gradient(kind, name, grad)


class _Hook:
    """A hook that reports to an engine's `Activations`; that of a copied model does nothing."""

    KIND: OfModules
    GRADIENT: OfModules

    def __init__(
        self,
        link: Link[weakref.ref[Activations]],
        name: str,
        kinds: Container[str],
        steps: Container[int],
    ) -> None:
        self._link = link
        self.name = name
        self.kinds = kinds
        self.steps = steps

    def _listener(self, module: nn.Module) -> Activations | None:
        # What is traced must not change by being watched; an evaluation is no part of a step.
        if torch.compiler.is_compiling() or not module.training or self._link.target is None:
            return None
        return self._link.target()

    def _tell(self, module: nn.Module, value: Any) -> None:
        activations = self._listener(module)
        if activations is not None:
            activations.saw(self, tensors_of(value))


class _Before(_Hook):
    KIND = "input"
    GRADIENT = "input gradient"

    def add_to(self, module: nn.Module, undo: UndoStack) -> None:
        add_hook(module, "register_forward_pre_hook", self, undo, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._tell(module, (args, kwargs))


class _After(_Hook):
    KIND = "output"
    GRADIENT = "output gradient"

    def add_to(self, module: nn.Module, undo: UndoStack) -> None:
        add_hook(module, "register_forward_hook", self, undo)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        self._tell(module, output)


class _Whole(_Hook):
    """Tells of a forward as a whole."""

    def add_to(self, module: nn.Module, undo: UndoStack) -> None:
        add_hook(module, "register_forward_hook", self, undo, with_kwargs=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        activations = self._listener(module)
        if activations is not None:
            activations.saw_frame(self, module, (args, kwargs), output)


def check_kinds(kinds: Any) -> list[str]:
    """Return what ``kinds`` names, a word or several."""
    chosen = _words("kinds", kinds)
    if not chosen or not set(chosen) <= set(get_args(OfModules)):
        raise bad_value(
            f"kinds={kinds!r} is not known",
            "Allowed are one or several of " + ", ".join(map(repr, get_args(OfModules))),
            "Pass for example kinds=('output', 'output gradient')",
        )
    return chosen


def check_steps(steps: Any, every: int) -> Container[int]:
    """Return the numbers of the steps to look at: one in ``every`` for ``None``."""
    if steps is None:
        return range(1, sys.maxsize, every)
    if not isinstance(steps, Container):
        raise bad_type(
            f"steps={steps!r} cannot be used",
            "Allowed are None, for every numerics_every steps, and a range, list or set of numbers",
            "Pass for example steps=range(1, 101, 10)",
        )
    return cast("Container[int]", steps)


def choose(
    models: Sequence[nn.Module], undo: Mapping[int, UndoStack], pattern: Any
) -> list[tuple[Place, nn.Module, UndoStack]]:
    """Return the modules that match, each with its place and its model's stack.

    ``undo`` has the stacks by ``id`` of the model; models without one are another engine's now.
    """
    patterns = _words("pattern", pattern)
    modules = [
        (place, module, undo[id(model)])
        for model in models
        if id(model) in undo
        for place, module in places_of(models, model)
    ]
    found = [
        (place, module, stack)
        for place, module, stack in modules
        if any(fnmatchcase(place.module, pattern) for pattern in patterns)
    ]
    if not found:
        names = ", ".join(repr(place.module) for place, _, _ in modules[1:9])
        raise bad_value(
            f"No module matches {pattern!r}",
            f"There are {len(modules)} modules, such as {names}",
            "Pass a name or a pattern with *, such as 'layers.*.mlp'; '*' is all of them",
        )
    return found


def _words(argument: str, value: Any) -> list[str]:
    words: list[Any] = (
        [value] if isinstance(value, str) or not isinstance(value, Iterable) else [*value]
    )
    if not all(isinstance(word, str) for word in words):
        raise bad_type(
            f"{argument}={value!r} cannot be used",
            "Allowed are a string and a list of strings",
            f"Pass for example {argument}='{'*' if argument == 'pattern' else 'output'}'",
        )
    return words
