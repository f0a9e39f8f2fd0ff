# SPDX-License-Identifier: BSD-3-Clause
"""Which leaves a backward reaches through a dtype, and whether it has freed its graph."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from preamp.core.torch_private.autograd import TELLS_HOOKS, is_freed, leaves_through, reached_from

HALF = torch.float16


def leaf(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(2, dtype=dtype, requires_grad=True)


def test_only_ways_through_the_dtype_count() -> None:
    through, beside, shared, half = leaf(), leaf(), leaf(), leaf(HALF)
    loss = (through.half() * half).float().sum() + (beside * shared).sum()
    assert leaves_through([loss], HALF) == {id(through), id(half)}
    assert leaves_through([loss], torch.bfloat16) == set()
    assert leaves_through([loss, shared.half().sum(), torch.ones(1)], HALF) == {
        *(id(through), id(half), id(shared))
    }
    assert leaves_through([], HALF) == leaves_through([through], HALF) == set()
    # One of two ways is enough, whichever is met first.
    for terms in ((shared.sum(), shared.half().float().sum()), (shared.half().sum(), beside.sum())):
        for ordered in (terms, terms[::-1]):
            assert leaves_through([ordered[0] + ordered[1]], HALF) == {id(shared)}


def test_what_is_shared_by_many_ways_is_read_twice_at_most() -> None:
    first = value = leaf()
    for _ in range(200):  # 2**200 ways
        value = value + value
    assert leaves_through([value.sum(), value.half().sum()], HALF) == {id(first)}


def test_functions_written_in_python() -> None:
    weight, x = leaf(), leaf()
    for reentrant, found in ((True, {id(x)}), (False, {id(x), id(weight)})):
        inside = checkpoint(lambda x: (x * weight).half(), x, use_reentrant=reentrant)
        assert leaves_through([inside.float().sum()], HALF) == found


def test_what_a_value_was_computed_from() -> None:
    parts = [leaf().exp(), leaf().exp(), leaf().exp()]
    nodes = {part.grad_fn for part in parts if part.grad_fn is not None}
    loss = (parts[0].sum() + torch.nan_to_num(parts[1]).mean()) / 3
    assert reached_from(loss, nodes) == {parts[0].grad_fn, parts[1].grad_fn}
    assert reached_from(parts[2], nodes) == {parts[2].grad_fn}
    assert reached_from(leaf(), nodes) == set()


@pytest.mark.parametrize(
    "loss_of",
    [lambda x: x.square().sum(), lambda x: x[torch.tensor([0, 2])].sum()],
    ids=["square", "items"],
)
def test_a_graph_is_freed_by_the_last_backward(loss_of: Any) -> None:
    """Hooks of what it keeps, as the list of indices of items, are not called to tell."""
    called: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        called.append(tensor)
        return tensor

    for hooked in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
            loss = loss_of(torch.ones(3, requires_grad=True))
        if not hooked:
            loss = loss_of(torch.ones(3, requires_grad=True))
            loss.backward(retain_graph=True)
        assert not is_freed(loss.grad_fn)
        assert not called
        loss.backward()
        assert bool(called) is hooked
        assert is_freed(loss.grad_fn) is TELLS_HOOKS
