# SPDX-License-Identifier: BSD-3-Clause
"""What does not fit is refused before anything is changed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kit.refusals import assert_refused
from multi_tensor.strategies import new_flag
from preamp.compat.multi_tensor import amp_C


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def scale(lists: Any, flag: Any = None) -> None:
    amp_C.multi_tensor_scale(65536, new_flag() if flag is None else flag, lists, 2.0)


LISTS: dict[str, list[list[Any]]] = {
    "lists of other lengths": [[ones(2), ones(2)], [ones(2)]],
    "empty lists": [[], []],
    "other sizes": [[ones(2), ones(3)], [ones(2), ones(2, 2)]],
    "two devices": [[ones(2)], [torch.ones(2, device="meta")]],
    "other strides": [[ones(2, 3).t()], [ones(3, 2)]],
    "a sparse tensor": [[ones(2).to_sparse()], [ones(2)]],
    "two dtypes in a list": [[ones(2), ones(2)], [ones(2), ones(2, dtype=torch.float16)]],
    "integers": [[ones(2)], [ones(2, dtype=torch.int64)]],
    "something other than a tensor": [[ones(2)], [None]],
}
FLAGS: dict[str, Any] = {
    "a flag of float32": torch.zeros(1),
    "a flag of int64": torch.zeros(1, dtype=torch.int64),
    "a flag of two elements": torch.zeros(2, dtype=torch.int32),
    "a flag on another device": torch.zeros(1, dtype=torch.int32, device="meta"),
    "a number as flag": 7,
}


def values(lists: Sequence[Sequence[Any]]) -> list[list[float]]:
    readable = [t for tensors in lists for t in tensors if t is not None and t.device.type == "cpu"]
    return [t.to_dense().flatten().tolist() for t in readable]


@pytest.mark.parametrize("name", [*LISTS, *FLAGS])
def test_what_does_not_fit(name: str) -> None:
    lists = LISTS.get(name, [[ones(2)], [ones(2)]])
    before = values(lists)
    assert_refused("multi_tensor", name, lambda: scale(lists, FLAGS.get(name)))
    assert values(lists) == before


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_flag_of_one_element_may_have_any_shape(shape: tuple[int, ...]) -> None:
    flag = torch.zeros(shape, dtype=torch.int32)
    scale([[torch.tensor([torch.inf])], [ones(1)]], flag)
    assert flag.item() == 1


def test_tensors_are_paired_by_index_where_shapes_agree() -> None:
    source = torch.arange(48.0).view(2, 3, 2, 4)
    target = torch.zeros_like(source).to(memory_format=torch.channels_last)
    scale([[source], [target]])
    assert torch.equal(target, source * 2)
    volume = torch.zeros(1, 2, 3, 2, 4).to(memory_format=torch.channels_last_3d)
    scale([[source.view(1, 2, 3, 2, 4)], [volume]])
    assert torch.equal(volume, source.view_as(volume) * 2)


def test_tensors_of_other_shapes_are_paired_by_memory() -> None:
    source = torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last)
    flat = torch.zeros(48)
    scale([[source], [flat]])
    assert torch.equal(flat.view(2, 2, 4, 3), source.permute(0, 2, 3, 1) * 2)
    part = torch.zeros(100)[50:98]  # an offset into its memory
    scale([[flat.view(6, 8)], [part]])
    assert torch.equal(part, flat * 2)
