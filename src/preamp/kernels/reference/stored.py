# SPDX-License-Identifier: BSD-3-Clause
"""Updates of lists that are kept in fewer bits: widened, updated, and kept again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.stored import (
    Format,
    Stored,
    decode,
    encode,
    join,
    noise,
    round_by_chance,
    split,
)
from preamp.kernels.update import Update


@dataclass(frozen=True, slots=True)
class Unpacked:
    """One parameter and its state as float32, and how they are kept."""

    param: torch.Tensor
    state: list[torch.Tensor]
    update: Update  # what the rule is told of them, as plain tensors
    _kept: Sequence[torch.Tensor]  # the parameter and its state as given
    _stored: Stored
    _step: int | torch.Tensor

    @classmethod
    def of(cls, place: int, kept: Sequence[Tensors], update: Update) -> Unpacked:
        """Widen what stands at ``place``; ``kept`` has the parameters, then the lists of state."""
        given = update.at([place])
        if given.stored is None:
            raise AssertionError
        stored = given.stored
        tensors = [column[place].detach() for column in kept]
        param = tensors[0] if stored.lows is None else join(tensors[0], stored.lows[0].detach())
        state: list[torch.Tensor] = []
        for row, tensor in enumerate(tensors[1:]):
            kind, scales = _format(stored, row)
            if scales is not None:
                tensor = decode(tensor, scales, kind)
            state.append(tensor.float() if kind is Format.BFLOAT16 else tensor)
        plain = replace(given, stored=None)
        return cls(param, state, plain, tensors, stored, update.step)

    def keep(self) -> None:
        """Keep the new values as the old ones were; a skipped step leaves every bit."""
        if self._stored.lows is not None:
            half, low = split(self.param, self._kept[0].dtype)
            self._put(self._kept[0], half)
            self._put(self._stored.lows[0].detach(), low)
        for row, (tensor, value) in enumerate(zip(self._kept[1:], self.state, strict=True)):
            kind, scales = _format(self._stored, row)
            if kind is Format.BFLOAT16:
                self._put(tensor, round_by_chance(value, self._noise(value, row)))
            elif scales is not None:
                codes, sizes = encode(value, kind, self._noise(value, row))
                self._put(tensor, codes)
                self._put(scales, sizes)

    def _noise(self, value: torch.Tensor, row: int) -> torch.Tensor:
        stored = self._stored
        found = noise(
            value.numel(),
            start=stored.starts[0],
            step=self._step,
            row=row,
            seed=stored.seed,
            number=stored.numbers[0],
            device=value.device,
        )
        return found.view(value.shape)

    def _put(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if self.update.found_inf is not None:
            value = torch.where(self.update.found_inf.to(target.device) != 0, target, value)
        target.copy_(value)


def _format(stored: Stored, row: int) -> tuple[Format, torch.Tensor | None]:
    kind = stored.formats[row] if stored.formats else Format.PLAIN
    scales = stored.scales[row] if kind.has_scales else None
    return kind, None if scales is None else scales[0].detach()


def update_stored(
    run: Callable[[Unpacked, torch.Tensor], None],
    params: Tensors,
    grads: Tensors,
    state: Sequence[Tensors],
    update: Update,
) -> None:
    """Let ``run`` update each parameter with its gradient, and keep the result."""
    for place, grad in enumerate(grads):
        unpacked = Unpacked.of(place, (params, *state), update)
        run(unpacked, grad)
        unpacked.keep()
