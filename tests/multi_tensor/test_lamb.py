# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_lamb``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from multi_tensor import oracles
from multi_tensor.strategies import (
    assert_near,
    dtypes,
    in_float64,
    layouts,
    new_flag,
    random_list,
    seeds,
    shapes,
)
from preamp.compat.multi_tensor import amp_C

Lists = list[list[torch.Tensor]]
kinds_of_lists = st.tuples(dtypes, dtypes, dtypes, dtypes)
ULPS = 512
"""Norms, their quotient and the quotient in the update: more roundings than in Adam."""

options_of_lamb = st.fixed_dictionaries(
    {
        "step": st.sampled_from([1, 2, 1000]),
        "bias_correction": st.sampled_from([0, 1]),
        "wd": st.sampled_from([0.0, 0.1]),
        "averaging": st.sampled_from([0, 1]),
        "mode": st.sampled_from([0, 1]),
        "norm": st.sampled_from([0.5, 4.0]),
        "largest": st.sampled_from([0.0, 1.0, 100.0]),
        "nvlamb": st.booleans(),
    }
)
BETAS_AND_EPS = (0.9, 0.99, 1e-3)


def lists_for(
    shapes: Any, kinds: tuple[torch.dtype, ...], seed: int = 0, layout: str = "contiguous"
) -> Lists:
    return [
        random_list(shapes, kind, seed + n, layout=layout, positive=n == 3)
        for n, kind in enumerate(kinds)
    ]


def exact_step(lists: Lists, o: dict[str, Any]) -> list[Any]:
    """Updates, parameters and both moments after one step, in float64."""
    results = []
    for g, p, m, v in zip(*map(in_float64, lists), strict=True):
        u, m, v = oracles.lamb_update(
            g, p, m, v, *BETAS_AND_EPS, o["step"], o["bias_correction"], o["wd"],
            o["averaging"], o["mode"], o["norm"], o["largest"],
        )  # fmt: skip
        results.append((u, oracles.lamb_apply(p, u, 0.1, o["wd"], o["nvlamb"]), m, v))
    return [list(column) for column in zip(*results, strict=True)]


def assert_step(lists: Lists, exact: list[Any]) -> None:
    for ours, wanted in zip(lists, exact, strict=True):
        assert_near(ours, wanted, ulps=ULPS)


@pytest.mark.apex("8 multi_tensor_lamb", "10 A-14")
@settings(max_examples=examples(80))
@given(shapes, kinds_of_lists, seeds, layouts, options_of_lamb)
def test_lamb(shapes: Any, kinds: Any, seed: int, layout: str, options: dict[str, Any]) -> None:
    lists, o, flag = lists_for(shapes, kinds, seed, layout), options, new_flag(1)
    if seed % 4 == 0:
        lists[1][0].zero_()  # a norm of 0 makes the rate lr
    exact = exact_step(lists, o)
    amp_C.multi_tensor_lamb(
        65536, flag, lists, 0.1, *BETAS_AND_EPS, o["step"], o["bias_correction"], o["wd"],
        o["averaging"], o["mode"], torch.tensor([o["norm"]]), o["largest"], o["nvlamb"],
    )  # fmt: skip
    assert_step(lists, exact)
    assert flag.item() == 1  # neither read nor set
