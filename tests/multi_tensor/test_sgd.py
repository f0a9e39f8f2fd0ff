# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_sgd``."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
from multi_tensor import oracles
from multi_tensor.strategies import (
    DTYPES,
    assert_near,
    copies,
    in_float64,
    layouts,
    math_of,
    new_flag,
    random_list,
    seeds,
    shapes,
)
from preamp.compat.multi_tensor import amp_C

F16, BF16, F32, F64 = DTYPES
SIGNATURES = [
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (F32, F32, F32),
    (F64, F64, F64),
    (F16, F32, F32, F16),
    (BF16, F32, F32, BF16),
    (F32, F32, F32, F16),
    (F32, F32, F32, BF16),
]
flags = st.booleans()


@pytest.mark.apex("8 multi_tensor_sgd")
@pytest.mark.parametrize("kinds", SIGNATURES, ids=lambda kinds: "-".join(map(str, kinds)))
@settings(max_examples=examples(20))
@given(
    shapes=shapes,
    seed=seeds,
    layout=layouts,
    wd=st.sampled_from([0.0, 0.1]),
    momentum=st.sampled_from([0.0, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=flags,
    first_run=flags,
    wd_after_momentum=flags,
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
)
def test_sgd(kinds: Any, shapes: Any, seed: int, layout: str, scale: float, **options: Any) -> None:
    lists = [random_list(shapes, kind, seed + n, layout=layout) for n, kind in enumerate(kinds)]
    grads, params, buffers = lists[:3]
    wd, momentum, dampening, *booleans = options.values()
    arguments = (wd, momentum, dampening, 0.1, *booleans, scale)
    rows = zip(*map(in_float64, lists[:3]), strict=True)
    exact = [oracles.sgd(*row, *arguments) for row in rows]
    before = copies(grads)
    amp_C.multi_tensor_sgd(65536, new_flag(), lists, *arguments)
    for ours, wanted in zip((params, buffers), zip(*exact, strict=True), strict=True):
        assert_near(ours, wanted, math=math_of(kinds[1]))
    for ours, was in zip(grads, before, strict=True):
        assert_same(ours, was)
    for half, param in zip(*lists[3:], params if len(kinds) == 4 else [], strict=False):
        assert_same(half, param.to(half.dtype))


def refused() -> list[tuple[torch.dtype, ...]]:
    every = [*itertools.product(DTYPES, repeat=3), *itertools.product(DTYPES, repeat=4)]
    return [kinds for kinds in every if kinds not in SIGNATURES]


@pytest.mark.apex("8 multi_tensor_sgd")
def test_sgd_refuses_every_other_signature() -> None:
    for kinds in refused():
        lists = [[torch.ones(1, dtype=kind)] for kind in kinds]
        names = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
        text = (
            f"multi_tensor_sgd: the lists are {names}. Without copies all have one dtype; with "
            "half copies, params and momentum_buffers are float32 and grads either float32 or of "
            "the copies' dtype. Sort the parameters by dtype and call the op once for each."
        )
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            amp_C.multi_tensor_sgd(
                1, new_flag(), lists, 0.0, 0.0, 0.0, 0.1, False, False, False, 1.0
            )
        assert all(tensor.item() == 1 for (tensor,) in lists)
