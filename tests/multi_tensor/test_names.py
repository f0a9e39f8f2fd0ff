# SPDX-License-Identifier: BSD-3-Clause
"""The applier, ``apex_C``, and the ways scripts use all of them."""

from typing import Any

import pytest
import torch
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from kit.refusals import refused
from multi_tensor.strategies import new_flag, random_list
from preamp.compat.multi_tensor import amp_C, apex_C
from preamp.multi_tensor_apply import (
    MultiTensorApply,
    multi_tensor_applier,
    multi_tensor_applier_l2norm,
)


def test_the_appliers_state() -> None:
    assert MultiTensorApply.available is True
    assert MultiTensorApply.warned is False
    assert MultiTensorApply.import_err is None
    assert multi_tensor_applier.chunk_size == 2048 * 32
    assert multi_tensor_applier_l2norm.chunk_size == 2048 * 32


def test_the_applier_passes_everything_on() -> None:
    seen: list[Any] = []

    def op(*args: Any, **kwargs: Any) -> str:
        seen.extend((args, kwargs))
        return "result"

    flag, lists = new_flag(), [[torch.ones(1)]]
    assert MultiTensorApply(7)(op, flag, lists, 1, "two", three=3) == "result"
    assert seen == [(7, flag, lists, 1, "two"), {"three": 3}]


def test_an_applier_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiTensorApply, "available", False)
    with refused("multi_tensor", "an applier that is off"):
        multi_tensor_applier(amp_C.multi_tensor_l2norm, new_flag(), [[torch.ones(1)]])


# -- apex_C ----------------------------------------------------------------------------------

SHAPES = ((2, 3), (0,), (), (1, 2, 2, 2))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_flatten_and_unflatten_are_torchs(layout: str) -> None:
    tensors = random_list(SHAPES, torch.float16, layout=layout)
    flat = apex_C.flatten(tensors)
    assert torch.equal(flat, _flatten_dense_tensors(tensors))
    pieces = apex_C.unflatten(flat, tensors)
    wanted = _unflatten_dense_tensors(flat, tensors)
    for piece, other, tensor in zip(pieces, wanted, tensors, strict=True):
        assert piece.shape == tensor.shape
        assert torch.equal(piece, tensor)
        assert torch.equal(piece, other)


def test_unflattened_tensors_share_the_flat_memory() -> None:
    flat = torch.zeros(10, requires_grad=True)
    first, second = apex_C.unflatten(flat, [torch.empty(2, 3), torch.empty(3)])
    amp_C.multi_tensor_scale(65536, new_flag(), [[torch.ones(3)], [second]], 5.0)
    with torch.no_grad():
        first.fill_(1.0)
    assert flat.tolist() == [1.0] * 6 + [5.0] * 3 + [0.0]
    with pytest.raises(RuntimeError, match="exceeds dimension size"):
        apex_C.unflatten(flat, [torch.empty(11)])


def test_flattening_is_differentiable() -> None:
    tensors = [torch.ones(2, requires_grad=True), torch.ones(1, 1, requires_grad=True)]
    (apex_C.flatten(tensors) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [t.grad.flatten().tolist() for t in tensors if t.grad is not None] == [[1, 2], [3]]
