# SPDX-License-Identifier: BSD-3-Clause
"""A run of an update: loaded for the computation, and stored again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.plain.lists import Lists, Run
from preamp.kernels.stored import (
    Format,
    Stored,
    bits_of,
    decode,
    encode,
    join,
    lead,
    noise,
    round_by_chance,
    split,
    taken_over,
)
from preamp.kernels.update import Scalar, Update

_torch: Any = torch

PARAM, GRAD, HALF, LOW, STATE = range(5)
"""Columns of an update: these, and all of the state."""


class Slot:
    """Parameters with gradients and state, in the dtype of the computation."""

    def __init__(self, run: Run, update: Update, dtype: torch.dtype, *, reads: bool) -> None:
        """Load, and if it ``reads``, look whether halves lead anywhere; nothing is written yet."""
        self._reads = reads
        self._run, self._update = run, update
        self._stored = update.stored or Stored()
        params, grads, halves, lows, *state = run.columns
        pairs = zip(params, halves, lows, strict=True)
        self.p = Lists([self._param(*pair, dtype) for pair in pairs])
        self.g = Lists([grad.to(dtype) for grad in grads])
        if update.inv_scale is not None:
            self.g = self.g * self.scalar(update.inv_scale)
        columns = (self._widened(row, tensors, dtype) for row, tensors in enumerate(state))
        self.state = tuple(map(Lists, columns))

    def _param(self, param: Any, half: Any, low: Any, dtype: torch.dtype) -> torch.Tensor:
        if low is not None:
            return join(param, low)
        if half is not None and self._update.halves_lead and lead(param.dtype, half.dtype):
            is_same = self._reads and torch.equal(*bits_of(param, half))
            return param if is_same else taken_over(param, half)
        return param.to(dtype)

    def _widened(self, row: int, tensors: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
        kind, scales = self._format(row)
        if scales is None:
            return [tensor.to(dtype) for tensor in tensors]
        return [decode(*pair, kind) for pair in zip(tensors, scales, strict=True)]

    def _format(self, row: int) -> tuple[Format, list[torch.Tensor] | None]:
        """How a list of state is kept, and the scales of its tensors."""
        kind = self._stored.formats[row] if self._stored.formats else Format.PLAIN
        scales = self._stored.scales[row] if kind.has_scales else None
        return kind, None if scales is None else [scales[place] for place in self._run.places]

    # -- numbers ---------------------------------------------------------------------------------

    def scalar(self, value: Any) -> Any:
        """A hyper-parameter as the computation takes it: tensors in its dtype and device."""
        if isinstance(value, torch.Tensor):
            like = self.p.each[0]
            value = value.to(like.device, like.dtype)
            return value.reshape(()) if value.numel() == 1 else value
        return value

    def of_each(self, value: Scalar) -> Any:
        """A 0-dim tensor for all, or of a vector with one for each place those of the run's."""
        value = self.scalar(value)
        if not isinstance(value, torch.Tensor):
            return self.p.each[0].new_full((), value)
        if value.dim() == 0:
            return value
        numbers = value.unbind()
        return Lists([numbers[place] for place in self._run.places])

    # -- storing ---------------------------------------------------------------------------------

    def store(self, p: Lists, *state: Lists) -> None:
        """Round new values into parameters and kept state, then the parameters into halves."""
        params, _, halves, lows, *kept = self._run.columns
        if self._stored.lows is None:
            self._put(params, p.each)
            wanted = [pair for pair in zip(halves, params, strict=True) if pair[0] is not None]
            self._put([half for half, _ in wanted], [param for _, param in wanted])
        else:
            pairs = [split(value, half.dtype) for value, half in zip(p.each, params, strict=True)]
            self._put(params, [half for half, _ in pairs])
            self._put(lows, [low for _, low in pairs])
        for row, (targets, values) in enumerate(zip(kept, state, strict=False)):
            self._keep(row, targets, values.each)

    def _keep(self, row: int, targets: Tensors, values: Tensors) -> None:
        kind, scales = self._format(row)
        if kind is not Format.PLAIN:
            chances = map(self._noise, values, self._run.places, [row] * len(values))
            if scales is None:
                values = list(map(round_by_chance, values, chances))
            else:
                pairs = [encode(v, kind, c) for v, c in zip(values, chances, strict=True)]
                self._put(scales, [sizes for _, sizes in pairs])
                values = [codes for codes, _ in pairs]
        self._put(targets, values)

    def _noise(self, value: torch.Tensor, place: int, row: int) -> torch.Tensor:
        stored = self._stored
        return noise(
            value.numel(),
            start=stored.starts[place],
            step=self._update.step,
            row=row,
            seed=stored.seed,
            number=stored.numbers[place],
            device=value.device,
        ).view(value.shape)

    def _put(self, targets: Tensors, values: Tensors) -> None:
        put(targets, values, self._update.found_inf)


def put(targets: Tensors, values: Sequence[torch.Tensor], skips: torch.Tensor | None) -> None:
    """Round values into tensors, which keep every bit if ``skips`` says so.

    Those that are their own values were written by a kernel that does not tell autograd.
    """
    if skips is not None:
        # As it is stored: rounding a widened nan may change its bits.
        pairs = zip(targets, values, strict=True)
        flag = skips.to(targets[0].device) != 0 if targets else skips
        values = [torch.where(flag, target, value.to(target.dtype)) for target, value in pairs]
    copies = [pair for pair in zip(targets, values, strict=True) if pair[0] is not pair[1]]
    if copies:
        _torch._foreach_copy_(*map(list, zip(*copies, strict=True)))
    if len(copies) < len(targets):
        own = {id(target) for target, _ in copies}
        torch.autograd.graph.increment_version([t for t in targets if id(t) not in own])
