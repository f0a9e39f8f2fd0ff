# SPDX-License-Identifier: BSD-3-Clause
"""Masters and optimizer states that ranks share: this rank's parts of them, as pieces."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preamp.checkpoint.pieces import Box, Frame, Piece
from preamp.checkpoint.subjects import Subjects, params_of
from preamp.core.errors import bad_state
from preamp.kernels import fsdp
from preamp.optim import Twin, pair_of


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank has of a weight's master, or of its optimizer's state."""

    frame: Frame  # of the whole one
    box: Box  # its elements

    def piece(self, data: torch.Tensor) -> Piece:
        """Return ``data``, the elements, as what is saved."""
        return Piece(data, self.frame, self.box, is_alone=False)

    def is_of(self, key: str, value: object) -> bool:
        """Whether an entry of the optimizer's state has these elements."""
        return (
            key != "step"
            and isinstance(value, torch.Tensor)
            and tuple(value.shape) == self.box.sizes
        )


class Shares:
    """Everything of which `shard_optimizer` has left a part on this rank."""

    def __init__(self, subjects: Subjects) -> None:
        """Look at the optimizers. Not mutated."""
        self._of: dict[int, Share] = {}
        self._twins: dict[int, Twin] = {}
        for engine in subjects.engines:
            for session in engine.sessions.values():
                for param, weight, span in session.sharing.shared():
                    frame = Frame(tuple(weight.shape), _memory_order(weight))
                    share = Share(frame, Box((span.start,), (span.stop - span.start,)))
                    self._of[id(param)] = share
                    twin = pair_of(param)
                    if twin is not None:
                        self._twins[id(weight)] = twin

    def of(self, param: torch.Tensor) -> Share | None:
        """The share of what an optimizer updates."""
        return self._of.get(id(param))

    def value_of(self, value: torch.Tensor, weight: int) -> torch.Tensor | Piece:
        """The float32 value of the weight with this ``id``: a piece if this rank has only that."""
        twin = self._twins.get(weight)
        if twin is None:
            return value
        return self._of[id(twin.master)].piece(twin.master.detach())

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return ``model.state_dict()``, with pieces where masters are shared."""
        state = self.model_forms(model)
        for name, param in model.named_parameters(remove_duplicate=False):
            if id(param) in self._twins and name in state:
                state[name] = self.value_of(param, id(param))
        return state

    def model_forms(self, model: nn.Module) -> dict[str, Any]:
        """Return ``model.state_dict()``, with tensors without memory where masters are shared."""
        with self._stood_in():
            return model.state_dict()

    @contextmanager
    def _stood_in(self) -> Generator[None]:
        """Let the state dict have tensors without memory for what this rank does not know."""
        for twin in self._twins.values():
            twin.absorb_external_write()
            twin.held.gathered = torch.empty(twin.half.shape, device="meta")
        try:
            yield
        finally:
            for twin in self._twins.values():
                twin.held.gathered = None

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return ``optimizer.state_dict()``, with pieces where states are shared."""
        state = optimizer.state_dict()
        shares = [self.of(param) for param in params_of(optimizer)]
        if not any(shares):
            return state
        own: dict[int, Any] = dict(state["state"])
        for number, share in enumerate(shares):  # the numbers that state_dict gives
            if share is not None and number in own:
                own[number] = _with_pieces(own[number], share)
        return {**state, "state": own}


def _with_pieces(entries: Mapping[str, Any], share: Share) -> dict[str, Any]:
    return {
        key: share.piece(value) if share.is_of(key, value) else value
        for key, value in entries.items()
    }


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its dimensions, from the largest stride to the smallest."""
    if tensor.is_contiguous():
        return tuple(range(tensor.dim()))
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def check_reduced(models: Sequence[nn.Module]) -> None:
    """Raise `PreampStateError` if ``fully_shard`` keeps gradients that were not reduced yet."""
    if any(map(fsdp.holds_unreduced, models)):
        raise bad_state(
            "save_checkpoint was called while gradients lie unreduced inside of fully_shard, "
            "after set_requires_gradient_sync(False)",
            "Gradients are saved that were reduced, sharded as their parameters are",
            "Save after the backward that reduces them, or before the accumulation",
        )
