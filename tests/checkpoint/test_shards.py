# SPDX-License-Identifier: BSD-3-Clause
"""Cutting pieces out of pieces, in plain tensors: every element arrives where it belongs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preamp.checkpoint.shards import Box, Frame, Place, SavedShards, cut


@st.composite
def frames(draw: Any, shape: tuple[int, ...]) -> Frame:
    order = draw(st.one_of(st.none(), st.permutations(range(len(shape)))))
    return Frame(shape, None if order is None else tuple(order))


def boxes_of(draw: Any, frame: Frame) -> list[Box]:
    """Cut it at random places along every dimension."""
    spans: list[list[tuple[int, int]]] = []
    for length in frame.extent:
        inner = draw(st.lists(st.integers(0, length), max_size=2))
        ends = [0, *sorted(inner), length]
        spans.append([(a, b - a) for a, b in itertools.pairwise(ends)])
    return [
        Box(tuple(a for a, _ in block), tuple(size for _, size in block))
        for block in itertools.product(*spans)
    ]


def pieces_of(tensor: torch.Tensor, frame: Frame, boxes: list[Box]) -> SavedShards:
    held = [(box, cut(tensor, frame, box)) for box in boxes if box.numel]
    return SavedShards(frame, tensor.dtype, held)


@given(st.data())
def test_any_piece_out_of_any_others(data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 5), max_size=3)))
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    saved, wanted = data.draw(frames(shape)), data.draw(frames(shape))
    pieces = pieces_of(tensor, saved, boxes_of(data.draw, saved))
    pieces.check()
    assert torch.equal(pieces.whole(), tensor)
    for box in boxes_of(data.draw, wanted):
        found = cut(pieces, wanted, box)
        assert torch.equal(found, cut(tensor, wanted, box))
        assert torch.equal(found, wanted.laid_out(tensor)[box.within(wanted.all())])
    assert Box.from_json(wanted.all().to_json()) == wanted.all()


ROWS = torch.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    "boxes",
    [
        [],
        [Box((0, 0), (2, 2))],
        [Box((0, 0), (2, 2)), Box((1, 0), (1, 2))],
        [Box((0, 0), (2, 2)), Box((0, 0), (1, 2))],
        [Box((1, 0), (3, 2))],
        [Box((0,), (3,))],
    ],
)
def test_pieces_that_are_not_the_tensor(boxes: list[Box]) -> None:
    held = [(box, torch.zeros(box.sizes, dtype=torch.int64)) for box in boxes]
    with pytest.raises(ValueError, match="do not make it up"):
        SavedShards(Frame((3, 2)), torch.int64, held).check()


def test_pieces_of_another_kind() -> None:
    with pytest.raises(ValueError, match="a piece of a tensor is"):
        SavedShards(Frame((3, 2)), torch.int32, [(Frame((3, 2)).all(), ROWS)]).check()


def test_the_part_of_a_number() -> None:
    """It has no rows."""
    value = torch.tensor(3.0)
    assert Place.of_part(value, 0, 1).taken_from(value).tolist() == [3.0]
    assert Place.of_part(value, 1, 1).taken_from(value).tolist() == []
