# SPDX-License-Identifier: BSD-3-Clause
"""What ranks tell each other of the tensors they save: little, and enough to notice what is wrong.

Ranks are lists of tensors here; `test_sharded` has real ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from preamp.checkpoint.gathering import Summary, are_as_usual, compare_details, fingerprints
from preamp.checkpoint.shards import Box, Frame, Shard

Tensors = dict[str, torch.Tensor | Shard]
NAMES = ("models/0/state/a", "models/0/state/b")


def piece(first: int, rows: int, *, copies: int = 1, is_first: bool = True) -> Shard:
    """Rows of a tensor with six, of which each number is its row's."""
    data = torch.arange(first, first + rows).float()[:, None].expand(rows, 2).clone()
    box = Box((first, 0), (rows, 2)) if rows else Box((0, 0), (0, 0))
    return Shard(data, Frame((6, 2)), box, copies == 1, copies, is_first)


def ranks_of(kind: str) -> list[Tensors]:
    """What four ranks have."""
    cuts = {
        "cut over all": [piece(0, 2), piece(2, 2), piece(4, 2), piece(6, 0)],
        "cut over two, copied": [
            piece(3 * (rank % 2), 3, copies=2, is_first=rank < 2) for rank in range(4)
        ],
        "copied": [piece(0, 6, copies=4, is_first=rank == 0) for rank in range(4)],
    }
    return [
        {
            **dict.fromkeys(NAMES, own),
            "optimizers/0/state/state/0/step": torch.ones(()),
            "rng/torch": torch.full((2,), rank),
        }
        for rank, own in enumerate(cuts[kind])
    ]


KINDS = ("cut over all", "cut over two, copied", "copied")


def summaries(ranks: list[Tensors]) -> list[Summary]:
    return [Summary.of(one, fingerprints(one), frozenset(), 1) for one in ranks]


@pytest.mark.parametrize("kind", KINDS)
def test_summaries_and_details_agree_on_who_writes(kind: str) -> None:
    ranks = ranks_of(kind)
    assert are_as_usual(summaries(ranks))
    _, writers = compare_details([fingerprints(one) for one in ranks])
    for one, names in zip(ranks, writers, strict=True):
        cut = {name: kept for name, kept in one.items() if isinstance(kept, Shard)}
        assert names == [n for n, kept in cut.items() if kept.is_first and kept.box.numel]


def lose(ranks: list[Tensors]) -> None:
    ranks[1][NAMES[0]] = piece(0, 0)


def shift(ranks: list[Tensors]) -> None:
    """As many elements as there are in all, but of one tensor too many and of the other too few."""
    ranks[1][NAMES[0]], ranks[1][NAMES[1]] = piece(2, 1), piece(2, 3)


def widen(ranks: list[Tensors]) -> None:
    own = ranks[2][NAMES[1]]
    assert isinstance(own, Shard)
    ranks[2][NAMES[1]] = replace(own, data=own.data.double())


def reshape(ranks: list[Tensors]) -> None:
    own = ranks[2][NAMES[1]]
    assert isinstance(own, Shard)
    ranks[2][NAMES[1]] = replace(own, frame=Frame((7, 2)))


def step(ranks: list[Tensors]) -> None:
    ranks[3]["optimizers/0/state/state/0/step"] = torch.zeros(())


def rename(ranks: list[Tensors]) -> None:
    ranks[3]["models/0/state/c"] = ranks[3].pop(NAMES[0])


def make_whole(ranks: list[Tensors]) -> None:
    ranks[3][NAMES[0]] = torch.ones(6, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [lose, shift, widen, reshape, step, rename, make_whole])
def test_what_is_wrong_is_noticed(kind: str, change: Callable[[list[Tensors]], None]) -> None:
    ranks = ranks_of(kind)
    change(ranks)
    assert not are_as_usual(summaries(ranks))


@pytest.mark.parametrize("kind", ["cut over two, copied", "copied"])
def test_copies_that_differ_are_noticed(kind: str) -> None:
    ranks = ranks_of(kind)
    own = ranks[3][NAMES[0]]
    assert isinstance(own, Shard)
    ranks[3][NAMES[0]] = replace(own, data=own.data + 1)
    assert not are_as_usual(summaries(ranks))


def test_ten_thousand_tensors_are_told_in_as_many_bytes_as_one() -> None:
    def size(count: int) -> int:
        tensors: Tensors = {f"models/0/state/{number}": piece(0, 6) for number in range(count)}
        return len(pickle.dumps(Summary.of(tensors, fingerprints(tensors), frozenset(), 1)))

    assert size(10_000) < size(1) + 16 < 500
