# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that wait on the host: ``storage`` with ``release_gradients`` and ``place="host"``.

A hook on each leaf runs when autograd has the whole gradient of it, and sends the values to the
host, where masters and moments lie. What is left on the device has one element. It is the gradient
still, for all that books are kept of: versions, what a script drops or zeroes, what is accumulated.
Ops find the values (`core.away`), so looking for overflow, norms, sums and updates are the host's.

Another backward in the same block adds to a gradient in place, so its values come back for it.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.core.away import bring_back, is_away, send_away
from preamp.engine.engine import Engine
from preamp.engine.events import Backward
from preamp.engine.storage import check_no_ranks
from preamp.kernels import check_not_captured


class Waiting:
    """The hooks of one engine."""

    def __init__(self, engine: Engine) -> None:
        """Hook nothing yet."""
        self._engine = engine
        self._hooked: dict[int, tuple[torch.Tensor, list[RemovableHandle]]] = {}

    def attach(self) -> None:
        """Hook the parameters, until the engine is closed or hands a model over."""
        engine = self._engine
        for undo in (engine.undo, *map(engine.undo_of, engine.models)):
            undo.push(self._remove)
        engine.events.block_begins.append(self._hook)
        engine.events.block_over.append(self._send_rest)

    def _hook(self, block: Backward) -> None:
        """Hook what the block's optimizers update on a device, once."""
        check_no_ranks()
        check_not_captured(self._engine.device)
        leaves = [leaf for session in block.sessions for leaf in session.model_params()]
        for leaf in leaves:
            if leaf.requires_grad and leaf.is_cuda and id(leaf) not in self._hooked:
                hooked = cast("Any", leaf)
                handles = [
                    hooked.register_hook(partial(_make_room, weakref.ref(leaf))),
                    hooked.register_post_accumulate_grad_hook(partial(_send, weakref.ref(self))),
                ]
                self._hooked[id(leaf)] = leaf, handles

    def _send_rest(self, block: Backward) -> None:
        """Send what came back for a backward that added nothing, as that of ``autograd.grad``."""
        del block
        for leaf, _ in self._hooked.values():
            _send(weakref.ref(self), leaf)

    def _remove(self) -> None:
        for leaf, handles in self._hooked.values():
            for handle in handles:
                handle.remove()
            if leaf.grad is not None:
                bring_back(leaf.grad)
        self._hooked.clear()


def _make_room(own: weakref.ref[torch.Tensor], grad: torch.Tensor) -> None:
    """Another gradient is going to be added to what is there."""
    del grad
    leaf = own()
    if leaf is not None and leaf.grad is not None:
        bring_back(leaf.grad)


def _send(owner: weakref.ref[Waiting], leaf: torch.Tensor) -> None:
    grad = leaf.grad
    if grad is None or owner() is None or grad.requires_grad or is_away(grad):
        return
    if grad.layout is torch.strided:  # a sparse one is small
        send_away(grad)
