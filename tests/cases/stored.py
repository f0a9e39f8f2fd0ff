# SPDX-License-Identifier: BSD-3-Clause
"""Updates of lists that are kept in fewer bits, as tests of every back end make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cases.layouts import channels_last, plain, transposed, unaligned, unaligned_transposed
from cases.rules import BF16, F16, RuleRow
from preamp.kernels import Update
from preamp.kernels.stored import Format, Stored, decode, encode, join, noise, split

SHAPES = ((33, 100), (7, 300), (8, 128), (5, 129), (40, 3, 3, 3))
"""Rows of less than a block, of several, of one, of one and an element, and of four dimensions."""

KINDS = {"float32": Format.PLAIN, "bfloat16": Format.BFLOAT16, "8bit": Format.SIGNED}
"""Formats of first moments, by the names of storages."""

STORAGES = [
    (half, kind) for half in (None, BF16, F16) for kind in KINDS if half or kind != "float32"
]
"""Of split half weights, or float32 ones, and of moments."""


def spaced(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element is somebody else's; of any dtype."""
    return torch.stack([tensor, torch.ones_like(tensor)], dim=-1)[..., 0]


LAYOUTS = (plain, spaced, unaligned, transposed, unaligned_transposed, channels_last)
Layout = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Case:
    """Lists of an update; `Case.of` makes them."""

    row: RuleRow
    lists: list[list[torch.Tensor]]
    stored: Stored

    @classmethod
    def of(
        cls,
        row: RuleRow,
        half: torch.dtype | None,
        kind: str,
        *,
        shapes: Sequence[Any] = SHAPES,
        seed: int = 0,
        layout: Layout = plain,
        scale: float = 0.1,
    ) -> Case:
        """Random weights, gradients and state as after some steps."""
        random = torch.Generator().manual_seed(seed)
        draw = lambda: [torch.randn(shape, generator=random) for shape in shapes]  # noqa: E731
        params, grads = draw(), [(tensor * scale).to(half or BF16) for tensor in draw()]
        lows = None
        if half is not None:
            pairs = [split(tensor, half) for tensor in params]
            params, lows = ([layout(pair[i]) for pair in pairs] for i in range(2))
        stored = Stored(
            lows=lows, seed=seed, numbers=range(3, 3 + len(shapes)), starts=[0] * len(shapes)
        )
        state: list[Any] = [[tensor * scale for tensor in draw()] for _ in range(row.states)]
        if row.rule.has_numbers:
            state[-1] = [torch.tensor(0.5) for _ in shapes]
        formats = [Format.PLAIN] * row.states
        scales: list[Any] = [None] * row.states
        for number in range(row.states - row.rule.has_numbers):
            is_first = number == 0 and row.op != "adagrad_"
            if not is_first:
                state[number] = [tensor.square() for tensor in state[number]]
            formats[number] = KINDS[kind]
            if kind == "8bit" and not is_first:
                formats[number] = Format.UNSIGNED
            kept = [kept_as(value, formats[number]) for value in state[number]]
            state[number] = [layout(pair[0]) for pair in kept]
            if kind == "8bit":
                scales[number] = [pair[1] for pair in kept]
        grads, params = list(map(layout, grads)), params if half else list(map(layout, params))
        stored = replace(stored, formats=tuple(formats), scales=tuple(scales))
        return cls(row, [params, grads, *state], stored)

    def run(self, ops: Any, **told: Any) -> Case:
        """Update copies, and return them."""
        made = replace(self, lists=copied(self.lists), stored=copy_of(self.stored))
        update = Update(**{"step": 3, "inv_scale": torch.tensor(0.5), **told}, stored=made.stored)
        ops.update_(*made.lists, rule=self.row.rule, update=update)
        return made

    @property
    def params(self) -> list[torch.Tensor]:
        """As float32."""
        lows = self.stored.lows
        if lows is None:
            return self.lists[0]
        return [join(half, low) for half, low in zip(self.lists[0], lows, strict=True)]

    @property
    def state(self) -> list[list[torch.Tensor]]:
        """As float32, without numbers; what a rule leaves alone is left out."""
        if self.row.rule.leaves_state:
            return []
        found: list[list[torch.Tensor]] = []
        for number in range(self.row.states - self.row.rule.has_numbers):
            kind, scales = self.stored.formats[number], self.stored.scales[number]
            column = self.lists[2 + number]
            if scales is not None:
                pairs = zip(column, scales, strict=True)
                column = [decode(codes, scale, kind) for codes, scale in pairs]
            found.append([tensor.float() for tensor in column])
        return found

    @property
    def kept(self) -> list[torch.Tensor]:
        """Every tensor that the update may write."""
        scales = [column for column in self.stored.scales if column is not None]
        lists = [self.lists[0], *self.lists[2:], self.stored.lows or [], *scales]
        return [tensor for column in lists for tensor in column]

    @property
    def kept_state(self) -> list[torch.Tensor]:
        """Of these what is not parameters."""
        scales = [column for column in self.stored.scales if column is not None]
        return [tensor for column in (*self.lists[2:], *scales) for tensor in column]

    def part(self, slices: Sequence[slice]) -> Case:
        """The same of rows alone."""
        cut = lambda column: [t[s] for t, s in zip(column, slices, strict=True)]  # noqa: E731
        shaped = len(self.lists) - self.row.rule.has_numbers
        lists = [cut(column) for column in self.lists[:shaped]] + self.lists[shaped:]
        stored = self.stored
        starts = [t.stride(0) * (s.start or 0) for t, s in zip(self.lists[0], slices, strict=True)]
        scales = tuple([None if column is None else cut(column) for column in stored.scales])
        lows = None if stored.lows is None else cut(stored.lows)
        return replace(
            self, lists=lists, stored=replace(stored, lows=lows, scales=scales, starts=starts)
        )


def on(device: torch.device, case: Case) -> Case:
    """The same there."""
    move: Any = lambda rows: [[t.to(device) for t in row] for row in rows]  # noqa: E731
    stored = case.stored
    scales = tuple([None if row is None else move([row])[0] for row in stored.scales])
    lows = None if stored.lows is None else move([stored.lows])[0]
    return replace(case, lists=move(case.lists), stored=replace(stored, lows=lows, scales=scales))


def kept_as(value: torch.Tensor, kind: Format) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A float32 tensor as a list of that format has it, and scales."""
    if kind is Format.PLAIN:
        return value, None
    if kind is Format.BFLOAT16:
        return value.to(BF16), None
    return encode(value, kind, chance(value.numel()))


def chance(count: int, **told: int) -> torch.Tensor:
    """Noise."""
    given = {"start": 0, "step": 1, "row": 0, "seed": 1, "number": 2, **told}
    return noise(count, **given, device=torch.device("cpu"))


def copied(lists: Any) -> Any:
    """Of lists of tensors, in the layouts that they have."""
    return [[_copy(tensor) for tensor in column] for column in lists]


def copy_of(stored: Stored) -> Stored:
    """With tensors of its own."""
    scales = tuple([None if row is None else copied([row])[0] for row in stored.scales])
    lows = None if stored.lows is None else copied([stored.lows])[0]
    return replace(stored, lows=lows, scales=scales)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        tensor.untyped_storage().clone()
    )
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """As integers."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.itemsize])


def assert_bits(ours: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    """Every bit is the same, but those of nan."""
    assert len(ours) == len(wanted)
    for number, (one, other) in enumerate(zip(ours, wanted, strict=True)):
        assert one.dtype is other.dtype
        is_same = bits_of(one) == bits_of(other)
        if one.dtype.is_floating_point:
            is_same |= one.isnan().contiguous() & other.isnan()
        assert is_same.all(), f"{number}: {one[~is_same]} is not {other[~is_same]}"
