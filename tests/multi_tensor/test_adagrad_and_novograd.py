# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_adagrad`` and ``multi_tensor_novograd``."""

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
    math_of,
    new_flag,
    random_list,
    seeds,
    shapes,
)
from preamp.compat.multi_tensor import amp_C

bits = st.sampled_from([0, 1])
decays = st.sampled_from([0.0, 0.1])


@pytest.mark.apex("8 multi_tensor_adagrad")
@settings(max_examples=examples(60))
@given(shapes, dtypes, dtypes, dtypes, seeds, layouts, bits, decays)
def test_adagrad(
    shapes: Any,
    grad: torch.dtype,
    param: torch.dtype,
    state: torch.dtype,
    seed: int,
    layout: str,
    mode: int,
    wd: float,
) -> None:
    lists = [
        random_list(shapes, grad, seed, layout=layout),
        random_list(shapes, param, seed + 1, layout=layout),
        random_list(shapes, state, seed + 2, layout=layout, positive=True),
    ]
    rows = zip(*map(in_float64, lists), strict=True)
    exact = [oracles.adagrad(*row, 0.1, 1e-3, mode, wd) for row in rows]
    amp_C.multi_tensor_adagrad(65536, new_flag(1), lists, 0.1, 1e-3, mode, wd)
    for ours, wanted in zip(lists[1:], zip(*exact, strict=True), strict=True):
        assert_near(ours, wanted, math=math_of(grad, param, state))


@pytest.mark.apex("8 multi_tensor_novograd")
@settings(max_examples=examples(80))
@given(
    shapes,
    st.tuples(dtypes, dtypes, dtypes),
    seeds,
    layouts,
    st.sampled_from([(0.9, 0.999), (0.95, 0.0), (0.0, 0.5)]),
    st.sampled_from([1, 2, 100]),
    st.tuples(bits, bits, bits),
    st.sampled_from([0, 2]),
    decays,
)
def test_novograd(
    shapes: Any,
    kinds: tuple[torch.dtype, ...],
    seed: int,
    layout: str,
    betas: tuple[float, float],
    step: int,
    choices: tuple[int, int, int],
    norm_type: int,
    wd: float,
) -> None:
    lists = [random_list(shapes, kind, seed + n, layout=layout) for n, kind in enumerate(kinds)]
    norms = torch.linspace(0.5, 2.0, len(shapes))
    bias_correction, averaging, mode = choices
    options = (0.1, *betas, 1e-3, step, bias_correction, wd, averaging, mode, norm_type)
    rows = zip(*map(in_float64, lists), norms.double(), strict=True)
    exact = [oracles.novograd(*row, *options) for row in rows]
    amp_C.multi_tensor_novograd(65536, new_flag(1), lists, norms, *options)
    wanted_params, wanted_moments, wanted_norms = zip(*exact, strict=True)
    assert_near([norms], [torch.stack(wanted_norms)])
    # Norms are float32, so errors are divided by what they divide by.
    floor = min(1.0, *(float(v) for v in wanted_norms))
    for ours, wanted in zip(lists[1:], (wanted_params, wanted_moments), strict=True):
        assert_near(ours, wanted, ulps=64 / (floor + 1e-3) ** 2)
