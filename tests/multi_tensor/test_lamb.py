# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_lamb`` in one call, with everything on the device, and in two stages."""

from __future__ import annotations

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


def exact_step(lists: Lists, o: dict[str, Any], factor: float = 1.0) -> list[Any]:
    """Updates, parameters and both moments after one step, in float64."""
    results = []
    for g, p, m, v in zip(*map(in_float64, lists), strict=True):
        u, m, v = oracles.lamb_update(
            g * factor, p, m, v, *BETAS_AND_EPS, o["step"], o["bias_correction"], o["wd"],
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


def on_device(o: dict[str, Any], inv_scale: float, found_inf: float = 0.0) -> tuple[Any, ...]:
    scale = 1 / inv_scale
    return (
        torch.tensor([0.1]), *BETAS_AND_EPS, torch.tensor([o["step"]], dtype=torch.int32),
        o["bias_correction"], o["wd"], o["averaging"], o["mode"],
        torch.tensor([o["norm"] * scale]), torch.tensor([o["largest"] * scale]), o["nvlamb"],
        torch.tensor([found_inf]), torch.tensor([inv_scale]),
    )  # fmt: skip


@pytest.mark.apex("8 multi_tensor_lamb_mp")
@settings(max_examples=examples(60))
@given(
    shapes,
    kinds_of_lists,
    st.sampled_from([None, *DTYPES]),
    seeds,
    layouts,
    options_of_lamb,
    st.sampled_from([1.0, 2.0**-4]),
)
def test_lamb_on_scaled_gradients(
    shapes: Any,
    kinds: Any,
    copy: torch.dtype | None,
    seed: int,
    layout: str,
    options: dict[str, Any],
    inv_scale: float,
) -> None:
    lists = lists_for(shapes, kinds, seed, layout)
    lists[0] = [grad / inv_scale for grad in lists[0]]
    exact = exact_step(lists, options, inv_scale)
    if copy is not None:
        lists.append([torch.zeros_like(p, dtype=copy) for p in lists[1]])
    amp_C.multi_tensor_lamb_mp(65536, new_flag(), lists, *on_device(options, inv_scale))
    assert_step(lists[:4], exact)
    for target, param in zip(*lists[4:], lists[1] if copy else [], strict=False):
        assert_same(target, param.to(target.dtype))


# -- two stages ------------------------------------------------------------------------------


@pytest.mark.apex("8 multi_tensor_lamb_stage1_cuda")
@settings(max_examples=examples(60))
@given(
    shapes,
    st.tuples(dtypes, dtypes, dtypes, dtypes, dtypes),
    seeds,
    layouts,
    st.sampled_from([0, 1, 1000]),
    st.sampled_from([0.5, 4.0]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([float, torch.tensor, lambda norm: torch.tensor([[norm]])]),
)
def test_stage_one(
    shapes: Any,
    kinds: Any,
    seed: int,
    layout: str,
    step: int,
    norm: float,
    largest: float,
    given_as: Any,
) -> None:
    lists = lists_for(shapes, kinds, seed, layout)
    before = [copies(tensors) for tensors in lists[:2]]
    decays = torch.linspace(0.0, 0.2, len(shapes))
    exact = [
        oracles.lamb_update(*row, *BETAS_AND_EPS, step + 1, 1, decay, 1, 1, norm, largest)
        for *row, decay in zip(*map(in_float64, lists[:4]), decays.tolist(), strict=True)
    ]
    amp_C.multi_tensor_lamb_stage1_cuda(
        65536, new_flag(), lists, decays, step, *BETAS_AND_EPS, given_as(norm), largest
    )
    assert_step([lists[4], *lists[2:4]], [list(c) for c in zip(*exact, strict=True)])
    for ours, old in zip(lists[:2], before, strict=True):
        for tensor, was in zip(ours, old, strict=True):
            assert_same(tensor, was)


@pytest.mark.apex("8 multi_tensor_lamb_stage2_cuda")
@settings(max_examples=examples(60))
@given(
    shapes,
    dtypes,
    dtypes,
    seeds,
    layouts,
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([None, False, True]),
)
def test_stage_two(
    shapes: Any,
    param: torch.dtype,
    update: torch.dtype,
    seed: int,
    layout: str,
    wd: float,
    use_nvlamb: bool | None,
) -> None:
    lists = lists_for(shapes, (param, update), seed, layout)
    if seed % 4 == 0:
        lists[seed // 4 % 2][0].zero_()
    rows = zip(*map(in_float64, lists), strict=True)
    exact = [oracles.lamb_apply(p, u, 0.1, wd, bool(use_nvlamb)) for p, u in rows]
    norms = [amp_C.multi_tensor_l2norm(1, new_flag(), [tensors], True)[1] for tensors in lists]
    amp_C.multi_tensor_lamb_stage2_cuda(65536, new_flag(), lists, *norms, 0.1, wd, use_nvlamb)
    assert_near(lists[0], exact, ulps=ULPS)
