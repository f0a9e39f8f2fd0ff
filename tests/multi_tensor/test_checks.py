# SPDX-License-Identifier: BSD-3-Clause
"""What does not fit is refused before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from multi_tensor.strategies import new_flag
from preamp.compat.multi_tensor import amp_C


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def scale(lists: Any, flag: Any = None) -> None:
    amp_C.multi_tensor_scale(65536, new_flag() if flag is None else flag, lists, 2.0)


REFUSED: list[tuple[str, list[list[Any]], str]] = [
    (
        "lengths",
        [[ones(2), ones(2)], [ones(2)]],
        "multi_tensor_scale got tensor lists of 2, 1 tensors. The lists of a call are equally "
        "long, and not empty. Pass one tensor in every list for each element, or leave the call "
        "out.",
    ),
    (
        "nothing",
        [[], []],
        "multi_tensor_scale got tensor lists of 0, 0 tensors. The lists of a call are equally "
        "long, and not empty. Pass one tensor in every list for each element, or leave the call "
        "out.",
    ),
    (
        "sizes",
        [[ones(2), ones(3)], [ones(2), ones(2, 2)]],
        "multi_tensor_scale got a size mismatch: out[1] has 4 elements, in[1] has 3. Tensors at "
        "the same place of each list have equally many elements. Check the order of the lists.",
    ),
    (
        "devices",
        [[ones(2)], [torch.ones(2, device="meta")]],
        "multi_tensor_scale: A tensor was not on the same device as the first tensor: out[0] is "
        "on meta, in[0] on cpu. All tensors of a call lie on one device. "
        "Call the op once for each device.",
    ),
    (
        "strides",
        [[ones(2, 3).t()], [ones(3, 2)]],
        "multi_tensor_scale: in[0] is not contiguous: it has shape (3, 2) and strides (1, 3). "
        "Tensors are dense and contiguous, channels_last or channels_last_3d. "
        "Pass its contiguous() and copy back what the op changes.",
    ),
    (
        "sparse",
        [[ones(2).to_sparse()], [ones(2)]],
        "multi_tensor_scale: in[0] is not contiguous: it has shape (2,) and layout "
        "torch.sparse_coo. Tensors are dense and contiguous, channels_last or channels_last_3d. "
        "Pass its contiguous() and copy back what the op changes.",
    ),
    (
        "dtypes",
        [[ones(2), ones(2)], [ones(2), ones(2, dtype=torch.float16)]],
        "multi_tensor_scale: out[1] is float16, the first of its list float32. The tensors of "
        "one list share a dtype. Call the op once for each dtype.",
    ),
    (
        "integers",
        [[ones(2)], [ones(2, dtype=torch.int64)]],
        "multi_tensor_scale: out[0] is int64. Tensors are float16, bfloat16, float32, float64. "
        "Leave other tensors out of every list.",
    ),
]


def values(lists: Sequence[Sequence[Any]]) -> list[list[float]]:
    readable = [t for tensors in lists for t in tensors if t.device.type == "cpu"]
    return [t.to_dense().flatten().tolist() for t in readable]


@pytest.mark.parametrize(
    ("lists", "text"), [(lists, text) for _, lists, text in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_lists_that_do_not_fit(lists: list[list[Any]], text: str) -> None:
    before = values(lists)
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scale(lists)
    assert values(lists) == before


def test_something_other_than_a_tensor() -> None:
    text = (
        "multi_tensor_scale: out[0] is a NoneType. Lists hold tensors only. "
        "Leave parameters without a gradient out of every list."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        scale([[ones(2)], [None]])


@pytest.mark.parametrize(
    ("flag", "got"),
    [
        (torch.zeros(1), "float32 of shape (1,) on cpu"),
        (torch.zeros(1, dtype=torch.int64), "int64 of shape (1,) on cpu"),
        (torch.zeros(2, dtype=torch.int32), "int32 of shape (2,) on cpu"),
        (torch.zeros(1, dtype=torch.int32, device="meta"), "int32 of shape (1,) on meta"),
    ],
)
def test_flags_that_do_not_fit(flag: torch.Tensor, got: str) -> None:
    text = (
        f"multi_tensor_scale: noop_flag is {got}. noop_flag is a contiguous int32 tensor with "
        "numel 1 on cpu. Make it with torch.zeros(1, dtype=torch.int32, device='cpu')."
    )
    target = ones(2)
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        scale([[ones(2)], [target]], flag)
    assert target.tolist() == [1.0, 1.0]


def test_a_flag_that_is_no_tensor() -> None:
    text = (
        "multi_tensor_scale: noop_flag is an int. noop_flag is a contiguous int32 tensor with "
        "numel 1 on cpu. Make it with torch.zeros(1, dtype=torch.int32, device='cpu')."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        scale([[ones(2)], [ones(2)]], 7)


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
