# SPDX-License-Identifier: BSD-3-Clause
"""Whether DistributedDataParallel will reduce the gradients of the coming backward.

It reduces what lies in ``param.grad``. Gradients that a rank has accumulated under ``no_sync`` are
its own until a later backward reduces them, and must be in place then; those that were reduced
already, or whose forward ran in no DistributedDataParallel, may be away meanwhile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from preamp.casting.autocast_state import untraced
from preamp.core.link import Link
from preamp.core.ranks import has_process_group
from preamp.core.undo import Removable
from preamp.kernels.data_parallel import reduces_next_backward


class Reductions:
    """What the forwards since the latest ``scale_loss`` block were told about their backward."""

    def __init__(self) -> None:
        """No forward yet."""
        self._seen: set[bool] = set()

    def note(self) -> None:
        """Look at the forward under way."""
        reduces = reduces_next_backward()
        if reduces is not None:
            self._seen.add(reduces)

    def take(self) -> frozenset[bool]:
        """Return what was seen, and start again: both values if forwards differed."""
        seen = frozenset(self._seen)
        self._seen.clear()
        return seen


@untraced
def _note(reductions: Reductions) -> None:
    reductions.note()


class NoteReduction:
    """Forward pre-hook that keeps `Reductions` up to date; a copied model's hook does nothing."""

    def __init__(self, reductions: Reductions) -> None:
        """Report to ``reductions``."""
        self.link = Link(reductions)

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Look, where there are ranks and a backward can follow."""
        del module, args
        target = self.link.target
        if target is not None and has_process_group() and torch.is_grad_enabled():
            _note(target)


def attach_reductions(model: nn.Module, reductions: Reductions) -> Removable:
    """Hook ``model``; returns the handle that undoes it."""
    return model.register_forward_pre_hook(NoteReduction(reductions))
