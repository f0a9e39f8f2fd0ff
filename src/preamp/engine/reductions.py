# SPDX-License-Identifier: BSD-3-Clause
"""Whether DistributedDataParallel will reduce the gradients of the coming backward.

It reduces what lies in ``param.grad``. What a rank has accumulated under ``no_sync`` is its own
until a later backward reduces it, and must be in place then. What was reduced already may be away
meanwhile, which is exact where being in place is not. So it matters to know, and where it cannot
be known, gradients that may be a rank's own stay in place.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from preamp.casting.autocast_state import untraced
from preamp.core.link import EngineHook, Link
from preamp.core.ranks import has_other_ranks, has_process_group
from preamp.core.splits import Splits
from preamp.core.torch_private.data_parallel import (
    active_data_parallel,
    is_hooked_to_parameters,
    is_joining,
    parameters_in,
    uses_reducer,
)
from preamp.core.torch_private.modules import add_hook
from preamp.core.undo import UndoStack
from preamp.engine import refusals

REDUCED = frozenset({True})
NO_ANSWER: frozenset[bool] = frozenset()


class Comparison(Protocol):
    """Compares the ranks that train a model; see ``engine/agreement.py``."""

    def of_shards(self, model: nn.Module) -> None:
        """Of a sharded model."""
        ...

    def of_wrapper(self, wrapper: DistributedDataParallel) -> None:
        """Of a wrapped one."""
        ...


class Reductions:
    """What an engine knows of the wrappers around and inside its models."""

    def __init__(self, models: Sequence[nn.Module], splits: Splits) -> None:
        """Look into ``models``, and around them when they run; ``splits`` are their parameters'."""
        self.splits = splits  # over which ranks parameters are split
        self.on_forward: Callable[[], None] | None = None  # called when a model runs, may refuse it
        # How many forwards or blocks so far were under ``no_sync``; whoever remembers an earlier
        # number may hold gradients of this rank alone
        self.unreduced = 0
        self._models = models
        self._around: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # Of the forwards whose losses blocks scale now, however many there are of each
        self._forwards: set[bool] = set()
        self._is_scaled = False  # whether a block has scaled one: the next forward is of others
        self._agreed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Wrappers that ran in evaluation mode, whose ranks were not compared yet
        self.unasked: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        # Called for each wrapper and each sharded model, on all of its ranks, once and again
        # after `compare_again`; there before a model is hooked
        self.comparison: Comparison

    def note(self, model: nn.Module) -> None:
        """Look at the forward of ``model`` that begins; at the first in training compare ranks.

        Nobody else knows when all ranks are sure to take part: ``initialize`` may be a matter of
        some of them, as in pipelines. Trainings that ``join`` may begin without some ranks.
        """
        if self.on_forward is not None:
            self.on_forward()
        if self._is_new(model):
            self.comparison.of_shards(model)
            self._agreed.add(model)
        wrapper = active_data_parallel()
        if wrapper is not None:
            if wrapper not in self._around and not is_hooked_to_parameters(wrapper):
                raise refusals.wrapped_before_cast()
            if self._is_new(wrapper):
                self._compare(wrapper)
            elif wrapper not in self._agreed:
                self.unasked.add(wrapper)
            self._around.add(wrapper)
        self._note_answers(_wrappers_in([model]) if wrapper is None else [wrapper])

    def _note_answers(self, wrappers: Sequence[DistributedDataParallel]) -> None:
        if self._is_scaled and wrappers:
            self._forwards.clear()
            self._is_scaled = False
        answers = {bool(wrapper.require_backward_grad_sync) for wrapper in wrappers}
        self._forwards |= answers
        self.unreduced += False in answers

    def compare_late(self, params: Callable[[], Iterable[torch.Tensor]]) -> None:
        """Compare ranks that train ``params()`` in evaluation mode, before a step at the latest.

        A forward does not tell such a training from one rank's evaluation; a backward of what
        optimizers update does.
        """
        if not self.unasked:
            return
        own = set(map(id, params()))
        for wrapper in tuple(self.unasked):
            if own.intersection(map(id, parameters_in(wrapper))):
                self.unasked.discard(wrapper)
                if wrapper not in self._agreed:
                    self._compare(wrapper)

    def compare_again(self) -> None:
        """Something was loaded that all ranks have in common: let the next forward compare it."""
        self._agreed.clear()

    def _compare(self, wrapper: DistributedDataParallel) -> None:
        if not is_joining(wrapper):
            self.comparison.of_wrapper(wrapper)
            self._agreed.add(wrapper)

    def _is_new(self, model: nn.Module) -> bool:
        return model.training and model not in self._agreed

    def retire_wrappers(self) -> None:
        """The parameters are about to be cast back: wrappers around them are of no more use."""
        for wrapper in filter(uses_reducer, self._around):
            wrapper.register_forward_pre_hook(_refuse_closed)

    @property
    def are_by_hand(self) -> bool:
        """Whether there are other ranks, and no wrapper that gives all of them one's weights."""
        if not has_other_ranks() or self.splits.given or self._around:
            return False
        return not _wrappers_in(self._models)

    def begin_block(self) -> frozenset[bool]:
        """Return whether the coming backward is reduced: one answer, or both if it may be.

        torch's wrapper goes by its forward, wherever the backward is; ours by the backward where
        it reduces afterwards.
        """
        wrappers = (*_wrappers_in(self._models), *self._around)
        answers = {bool(wrapper.require_backward_grad_sync) for wrapper in wrappers}
        answers |= self._forwards
        self.unreduced += False in answers
        return frozenset(answers)

    def end_block(self) -> None:
        """What ran inside the block belongs to it, and what runs from now on to a later one."""
        self._is_scaled = True


def _wrappers_in(models: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    parts = (part for model in models for part in model.modules())
    return [part for part in parts if isinstance(part, DistributedDataParallel)]


def _refuse_closed(wrapper: nn.Module, args: Any) -> None:
    del args
    if wrapper.training and torch.is_grad_enabled():
        raise refusals.wrapped_for_closed()


@untraced
def _note(reductions: Reductions, model: nn.Module) -> None:
    reductions.note(model)


class NoteReduction(EngineHook):
    """Forward pre-hook that keeps `Reductions` up to date; a copied model's hook does nothing."""

    def __init__(self, reductions: Reductions) -> None:
        """Report to ``reductions``."""
        self.link = Link(reductions)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look, where there are ranks and a backward can follow."""
        del args
        target = self.link.target
        if target is not None and has_process_group() and torch.is_grad_enabled():
            _note(target, module)


def attach_reductions(model: nn.Module, reductions: Reductions, undo: UndoStack) -> None:
    """Hook ``model``, before ``fully_shard`` gathers."""
    add_hook(model, "register_forward_pre_hook", NoteReduction(reductions), undo, prepend=True)
