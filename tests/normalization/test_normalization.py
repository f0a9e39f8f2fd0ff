# SPDX-License-Identifier: BSD-3-Clause
"""preamp.normalization: forward and backward against float64, in every mix of dtypes."""

import copy
import inspect
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from cases.selection import examples
from cases.tolerances import assert_same, assert_within_budget
from kit.refusals import refused
from preamp.core.errors import with_article
from preamp.normalization import (
    FusedLayerNorm,
    FusedRMSNorm,
    MixedFusedLayerNorm,
    MixedFusedRMSNorm,
    fused_layer_norm,
)
from preamp.normalization.fused_layer_norm import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
    manual_rms_norm,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LAYERS = (FusedLayerNorm, FusedRMSNorm, MixedFusedLayerNorm, MixedFusedRMSNorm)
ALL_LAYERS = pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)


def oracle(x: Any, w: Any, b: Any, dims: int, eps: float, *, centred: bool) -> torch.Tensor:
    """The formula, in the dtype of its arguments, differentiable."""
    over = list(range(-dims, 0))
    if centred:
        x = x - x.mean(over, keepdim=True)
    x = x / (x.square().mean(over, keepdim=True) + eps).sqrt()
    return (x if w is None else x * w) + (0 if b is None else b)


def run(fn: Any, tensors: list[Any], dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of ``fn``."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    y = fn(*leaves)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf is not None)]


def further(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Which of two is further away from ``exact``."""
    return a if (a - exact).abs().max() > (b - exact).abs().max() else b


def layer_like(kind: Any, shape: tuple[int, ...], w: Any, b: Any, **arguments: Any) -> Any:
    layer = kind(shape, **arguments)
    if w is not None:
        layer.weight = torch.nn.Parameter(w.clone())
    if b is not None and "Layer" in kind.__name__:
        layer.bias = torch.nn.Parameter(b.clone())
    return layer


@settings(max_examples=examples(60))
@given(
    kind=st.sampled_from(LAYERS),
    leading=st.lists(st.integers(1, 4), max_size=2),
    shape=st.lists(st.integers(2, 9), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from(DTYPES),
    eps=st.sampled_from([1e-5, 1e-2]),
    offset=st.sampled_from([0.0, 8.0]),
)
def test_layers_against_the_formula(
    kind: Any,
    leading: list[int],
    shape: list[int],
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    eps: float,
    offset: float,
) -> None:
    generator = torch.Generator().manual_seed(math.prod(shape) + 100 * len(leading))
    x = (torch.randn(*leading, *shape, generator=generator) + offset).to(dtype)
    w = (torch.rand(shape, generator=generator) + 0.5).to(weight_dtype)
    centred, mixed = "Layer" in kind.__name__, "Mixed" in kind.__name__
    b = torch.rand(shape, generator=generator).to(weight_dtype) if centred else None
    layer = layer_like(kind, tuple(shape), w, b, eps=eps)
    out = weight_dtype if mixed else dtype
    dy = torch.randn(x.shape, generator=generator).to(out)

    def formula(x: Any, w: Any, b: Any = None) -> torch.Tensor:
        return oracle(x, w, b, len(shape), eps, centred=centred)

    def torchs_own(x: Any, w: Any, b: Any = None) -> torch.Tensor:
        args = () if b is None else (b,)
        return (F.layer_norm if centred else F.rms_norm)(x, shape, w, *args, eps)

    given_all = [t for t in (x, w, b) if t is not None]
    low = dtype if dtype is weight_dtype else torch.promote_types(torch.float32, dtype)
    exact = run(formula, [t.double() for t in given_all], dy.double())
    coarse = run(torchs_own, [t.to(low) for t in given_all], dy.to(low))

    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    ours = [y.detach(), leaf.grad, *(p.grad for p in layer.parameters())]
    kept = [out, dtype, *[weight_dtype] * (len(ours) - 2)]
    for mine, wanted, torchs, own_dtype in zip(ours, exact, coarse, kept, strict=True):
        assert mine.dtype is own_dtype
        rounded = further(wanted.to(own_dtype).double(), torchs.to(own_dtype).double(), wanted)
        assert_within_budget(mine, rounded, wanted)


def test_statistics_of_half_inputs_are_in_float32() -> None:
    x = torch.full((1, 4096), 200.0, dtype=torch.float16)  # its square is infinite in float16
    assert FusedRMSNorm(4096).half()(x).unique().tolist() == [1.0]
    assert FusedLayerNorm(4096).half()(x).abs().max() < 0.01


FUNCTIONS: list[tuple[Any, int, bool, bool]] = [
    (fused_layer_norm.fused_layer_norm, 0, True, False),
    (fused_layer_norm.fused_layer_norm_affine, 2, True, False),
    (fused_layer_norm.mixed_dtype_fused_layer_norm_affine, 2, True, True),
    (fused_layer_norm.fused_rms_norm, 0, False, False),
    (fused_layer_norm.fused_rms_norm_affine, 1, False, False),
    (fused_layer_norm.mixed_dtype_fused_rms_norm_affine, 1, False, True),
]
CLASSES: list[tuple[Any, int, bool, bool]] = [
    (FusedLayerNormFunction.apply, 0, True, False),
    (FusedLayerNormAffineFunction.apply, 2, True, False),
    (FusedLayerNormAffineMixedDtypesFunction.apply, 2, True, True),
    (FusedRMSNormFunction.apply, 0, False, False),
    (FusedRMSNormAffineFunction.apply, 1, False, False),
    (FusedRMSNormAffineMixedDtypesFunction.apply, 1, False, True),
]
"""The function, how many parameters it takes, whether it centres, and has the weight's dtype."""


@pytest.mark.parametrize(
    ("fn", "params", "centred", "mixed"),
    FUNCTIONS + CLASSES,
    ids=lambda fn: getattr(fn, "__qualname__", ""),
)
def test_functions(fn: Any, params: int, centred: bool, mixed: bool) -> None:
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    affine = [torch.rand(2, 4, dtype=torch.float64) + 0.5 for _ in range(params)]
    affine = [t.requires_grad_() for t in affine]

    def call(x: torch.Tensor, *affine: torch.Tensor) -> torch.Tensor:
        return fn(x, *affine, (2, 4), 1e-3, False)

    given_all = [*affine, None, None][:2]
    torch.testing.assert_close(call(x, *affine), oracle(x, *given_all, 2, 1e-3, centred=centred))
    assert torch.autograd.gradcheck(call, (x, *affine))
    out = fn(x.half(), *(t.float() for t in affine), (2, 4), 1e-3)
    assert out.dtype is (torch.float32 if mixed else torch.float16)


@ALL_LAYERS
def test_keeping_the_output_is_refused(kind: Any) -> None:
    with refused("normalization", "memory_efficient"):
        kind(6, memory_efficient=True)
    with refused("normalization", "memory_efficient"):
        fused_layer_norm.fused_rms_norm(torch.ones(2, 6), 6, memory_efficient=True)


@ALL_LAYERS
def test_autocast_casts_the_arguments(kind: Any) -> None:
    layer = kind(6)
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3, 6, dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = layer(x)
        # float64 stays what it is, as in autocast itself.
        stays = dtype is torch.float64 and "Mixed" not in kind.__name__
        assert out.dtype is (torch.float64 if stays else torch.bfloat16)
        if dtype is torch.float32:
            assert_same(out.detach(), copy.deepcopy(layer).bfloat16()(x.bfloat16()).detach())


@ALL_LAYERS
def test_state_and_copies(kind: Any) -> None:
    layer = kind((2, 3))
    names = ["weight", "bias"] if "Layer" in kind.__name__ else ["weight"]
    assert list(layer.state_dict()) == names
    assert layer.weight.unique().tolist() == [1.0]
    layer.weight.data.normal_()
    twin = copy.deepcopy(layer)
    x = torch.randn(4, 2, 3)
    assert_same(twin(x).detach(), layer(x).detach())
    layer.reset_parameters()
    assert layer.weight.unique().tolist() == [1.0]
    assert not torch.equal(twin.weight, layer.weight)
    assert repr(layer) == f"{kind.__name__}((2, 3), eps=1e-05, elementwise_affine=True)"


def test_without_weights_and_shapes_that_are_numbers() -> None:
    x = torch.randn(3, 5)
    for layer, function in ((FusedLayerNorm, F.layer_norm), (FusedRMSNorm, F.rms_norm)):
        norm = layer(np.int64(5), elementwise_affine=False)
        assert (norm.state_dict(), norm.weight, norm.normalized_shape) == ({}, None, (5,))
        assert_same(norm(x), function(x, (5,), eps=1e-5))
    assert_same(FusedLayerNormFunction.apply(x, 5, 1e-5), F.layer_norm(x, (5,), eps=1e-5))
    assert fused_layer_norm.fused_rms_norm(x, np.int32(5)).shape == (3, 5)


@ALL_LAYERS
def test_compiled_and_traced(kind: Any) -> None:
    layer = kind(6)
    x = torch.randn(3, 6)
    with warnings.catch_warnings():
        # torch deprecates tracing, and what its own compiler does with autograd functions.
        warnings.simplefilter("ignore")
        for made in (
            torch.compile(layer, backend="eager", fullgraph=True),
            torch.jit.trace(layer, x),
        ):
            assert_same(made(x).detach(), layer(x).detach())


@ALL_LAYERS
def test_scripting_is_refused(kind: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting
        with refused("normalization", "torch.jit.script", kind=with_article(kind.__name__)):
            torch.jit.script(torch.nn.Sequential(kind(3)))


@pytest.mark.parametrize("kind", [MixedFusedLayerNorm, MixedFusedRMSNorm])
def test_mixed_layers_have_weights(kind: Any) -> None:
    name = kind.__name__
    with pytest.warns(UserWarning, match=f"{name} always has a weight"):
        kind(3, elementwise_affine=True)
    with refused("normalization", "a mixed norm without weight", kind=name, plain=name[5:]):
        kind(3, elementwise_affine=False)


def test_signatures_are_those_of_apex() -> None:
    for kind in LAYERS:
        found = inspect.signature(kind).parameters
        assert (found["eps"].default, found["memory_efficient"].default) == (1e-5, False)
        is_keyword = found["memory_efficient"].kind is inspect.Parameter.KEYWORD_ONLY
        assert is_keyword is ("Mixed" in kind.__name__)
    for fn, params, *_ in FUNCTIONS:  # which default to a smaller eps
        found = inspect.signature(fn).parameters
        assert [*found][:-2] == ["input", *["weight", "bias"][:params], "normalized_shape"]
        assert [found[name].default for name in [*found][-2:]] == [1e-6, False]


# -- the autograd.Function classes, by Apex's order of arguments -------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_rms_norm_by_plain_operations(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    w = torch.rand(5, dtype=dtype)
    y = manual_rms_norm(x.to(dtype), 5, w, 1e-5)
    assert y.dtype is dtype
    exact = oracle(x.to(dtype).double(), w.double(), None, 1, 1e-5, centred=False)
    assert (y.double() - exact).abs().max() <= 4 * torch.finfo(dtype).eps
    assert manual_rms_norm(x.to(dtype), 5, None, 1e-5).dtype is torch.promote_types(
        torch.float32, dtype
    )
