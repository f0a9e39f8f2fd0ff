# SPDX-License-Identifier: BSD-3-Clause
"""The op table holds: each row, both half dtypes, half, float32 and mixed arguments."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from casting.op_examples import example, has_function, options
from casting.probe import casting, held, install_wide_half
from kit.refusals import refused
from op_table import render
from preamp.casting.functions import install_function_casts, namespace_owner, row_wrapper
from preamp.casting.op_lists import OP_TABLE, OpRow
from preamp.casting.thread_casts import disable_casts
from preamp.core.pytree import map_tensors
from preamp.kernels.wide_half import WIDE_FUNCTIONS

# Some rows are functions that torch itself deprecates, or warns about in general.
pytestmark = pytest.mark.filterwarnings("ignore")

HALVES = [torch.float16, torch.bfloat16]
CAST_RULES = ("half", "float", "promote", "sequence_promote")
# Their reductions are blocked by memory alignment, so the last bit depends on where data lies.
INEXACT = {"lstsq"}


def _rows(*rules: str) -> list[Any]:
    return [
        pytest.param(row, id=f"{row.namespace}.{row.name}".replace(" ", "_"))
        for row in OP_TABLE
        if row.rule in rules and has_function(row)
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _results(value: Any) -> list[torch.Tensor]:
    """The floating tensors in what a function returned, complex ones as pairs of real numbers."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        return [torch.view_as_real(value.resolve_conj())]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _results(v)]
    return _tensors(value)


def _call(row: OpRow, args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return getattr(namespace_owner(row.namespace), row.name)(*args, **options(row))


def _arguments(row: OpRow, dtype: torch.dtype, kind: str) -> tuple[Any, ...]:
    """The example's arguments, all half, all float32, or the first half and the rest float32."""
    count = 0

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        is_half = kind == "half" or (kind == "mixed" and count == 1)
        return tensor.to(dtype) if is_half else tensor

    return tuple(map_tensors(convert, a) for a in example(row))


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    handle = held(install_function_casts)
    yield
    handle.remove()


@pytest.fixture
def casts() -> Iterator[None]:
    with casting(torch.bfloat16):
        yield


def _is_wide(row: OpRow) -> bool:
    return (row.namespace, row.name) in WIDE_FUNCTIONS


WIDE = [param for param in _rows("half", "promote") if _is_wide(param.values[0])]


@pytest.mark.parametrize("row", WIDE)
def test_wide_products_have_the_dtype_of_the_rule(row: OpRow) -> None:
    """On CPUs without float16 units these functions have both layers at O1."""
    handle = held(install_wide_half, torch.float16)
    for dtype in HALVES:
        for kind in ("half", "float", "mixed"):
            with casting(dtype):
                results = _results(_call(row, _arguments(row, dtype, kind)))
            expected = dtype if row.rule == "half" or kind == "half" else torch.float32
            assert all(result.dtype is expected for result in results), kind
    handle.remove()


@pytest.mark.parametrize("row", _rows("float"))
def test_float_functions_compute_in_float32_throughout(row: OpRow) -> None:
    """In that of either half dtype."""
    for dtype in HALVES:
        with casting(dtype):
            for half in HALVES:
                _check_float_functions_compute_in_float32_throughout(row, half)


def _check_float_functions_compute_in_float32_throughout(row: OpRow, dtype: torch.dtype) -> None:
    args = _arguments(row, dtype, "half")

    results = _results(_call(row, args))

    with disable_casts():
        expected = _results(_call(row, tuple(map_tensors(torch.Tensor.float, a) for a in args)))
    assert all(result.dtype is torch.float32 for result in results)
    tolerance = 1e-6 if row.name in INEXACT else 0.0
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["float", "mixed"])
@pytest.mark.parametrize("row", _rows("promote", "sequence_promote"))
def test_promoted_functions_compute_in_float32_throughout(row: OpRow, kind: str) -> None:
    for dtype in HALVES:
        with casting(dtype):
            args = _arguments(row, dtype, kind)
            with disable_casts():
                single = tuple(map_tensors(torch.Tensor.float, a) for a in args)
                expected = _results(_call(row, tuple(map_tensors(torch.clone, a) for a in single)))

            results = _results(_call(row, args))

        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("row", _rows(*CAST_RULES))
def test_gradients_arrive_in_the_dtype_of_the_argument(row: OpRow) -> None:
    for dtype in HALVES:
        with casting(dtype):
            _check_gradients_arrive_in_the_dtype_of_the_argument(row, dtype)


def _check_gradients_arrive_in_the_dtype_of_the_argument(row: OpRow, dtype: torch.dtype) -> None:
    args = _arguments(row, dtype, "mixed")
    leaves = [t.detach() for t in _tensors(args)]
    for leaf in leaves[: 1 if row.name in FIRST_ONLY else None]:
        leaf.requires_grad_()
    remaining = iter(leaves)
    args = tuple(map_tensors(lambda _: next(remaining), a) for a in args)
    if row.name == "__ipow__" or re.fullmatch(r"__i\w+__", row.name):
        args = (args[0] * 1, *args[1:])  # a leaf that requires grad cannot change in place

    outputs = [t for t in _results(_call(row, args)) if t.requires_grad]

    if not outputs or row.name in NO_GRADIENT:
        assert row.name.strip("_") in NOT_DIFFERENTIABLE | NO_GRADIENT
        return
    torch.autograd.backward([t.float().sum() for t in outputs])
    assert any(leaf.grad is not None for leaf in leaves)
    assert all(leaf.grad is None or leaf.grad.dtype is leaf.dtype for leaf in leaves)


NOT_DIFFERENTIABLE = {"eq", "equal", "ge", "gt", "le", "lt", "ne", "matrix_rank"}
NOT_DIFFERENTIABLE |= {"histc"}
# torch has no derivative, or none of a sum of what they return.
NO_GRADIENT = {"eig", "geqrf", "histogram", "igamma", "igammac"}
NO_GRADIENT |= {"ldl_factor", "ldl_factor_ex", "ldl_solve"}
FIRST_ONLY = {"cross_entropy", "soft_margin_loss"}  # the other tensors are weights and targets


@pytest.mark.parametrize("row", _rows(*CAST_RULES, "no_half_in_place", "match_self", "banned"))
def test_neither_disabled_casts_nor_float64_are_touched(row: OpRow, casts: None) -> None:
    args = _arguments(row, torch.float16, "float")
    double = tuple(map_tensors(torch.Tensor.double, a) for a in args)

    with disable_casts():
        outside = _results(_call(row, args))
    inside_double = _results(_call(row, double))

    assert all(t.dtype is torch.float32 for t in outside)
    assert all(t.dtype is torch.float64 for t in inside_double)


@pytest.mark.parametrize("row", _rows("no_half_in_place"))
def test_in_place_float_functions_refuse_half(row: OpRow) -> None:
    for dtype in HALVES:
        with casting(dtype):
            _check_in_place_float_functions_refuse_half(row, dtype)


def _check_in_place_float_functions_refuse_half(row: OpRow, dtype: torch.dtype) -> None:
    args = _arguments(row, dtype, "half")
    name = row.name.rstrip("_")

    half = str(dtype).removeprefix("torch.")
    with refused("casting", "a half target", function=f"{name}_", half=half, other=name):
        _call(row, args)

    with disable_casts():
        _call(row, args)


def test_a_target_given_by_keyword_is_refused_too(casts: None) -> None:
    half = torch.zeros(2, dtype=torch.bfloat16)

    with refused("casting", "a half target", function="exp_", half="bfloat16", other="exp"):
        torch.exp_(input=half)

    assert half.tolist() == [0.0, 0.0]
    assert torch.exp_(input=torch.zeros(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("row", _rows("match_self"))
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["half", "float", "mixed"])
def test_in_place_functions_cast_to_the_target(row: OpRow, dtype: torch.dtype, kind: str) -> None:
    with casting(dtype):
        args = _arguments(row, dtype, kind)
        wide = tuple(map_tensors(torch.Tensor.double, a) for a in args)
        expected = _call(row, wide)

        result = _call(row, args)

    assert result is args[0]
    assert result.dtype is (torch.float32 if kind == "float" else dtype)
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


STORING = [
    OpRow(namespace="torch.Tensor", name=f"{name}_", rule="match_self", reason="")
    for name in "add sub mul div addcdiv addcmul atan2 eq ge gt le lt ne".split()
]
"""Functions that torch brings to the target's dtype by itself."""


@pytest.mark.parametrize("row", STORING, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", ["half", "float", "mixed"])
def test_pointwise_in_place_functions_round_once(row: OpRow, kind: str, dtype: torch.dtype) -> None:
    with casting(dtype):
        args = _arguments(row, dtype, kind)
        wide = tuple(map_tensors(lambda t: t.float().clone(), a) for a in args)

        result = _call(row, args)

        assert result is args[0]
        assert torch.equal(result, _call(row, wide).to(result.dtype))


def test_in_place_functions_take_what_half_cannot_hold() -> None:
    with casting(torch.float16):
        half = torch.full((2,), 3.0, dtype=torch.float16)
        half.div_(torch.tensor(1e5))

    assert torch.equal(half, torch.full((2,), 3e-5).half())


@pytest.mark.parametrize("name", ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
def test_in_place_operators_with_float32_bind_a_new_tensor(name: str, casts: None) -> None:
    half = torch.full((2,), 2.0, dtype=torch.bfloat16)
    alias = half

    result = getattr(half, name)(torch.full((2,), 3.0))

    assert result.dtype is torch.float32
    assert alias.tolist() == [2.0, 2.0]


def test_zero_dim_float_promotes_half(casts: None) -> None:
    product = torch.ones(3, dtype=torch.bfloat16) * torch.tensor(2.0)
    two_halves = torch.ones(3, dtype=torch.float16) * torch.ones(3, dtype=torch.bfloat16)
    with_double = torch.ones(3, dtype=torch.float16) * torch.ones(3, dtype=torch.float64)
    two_wide = torch.ones(3) * torch.ones(3, dtype=torch.float64)
    with_bfloat16 = torch.ones(3) * torch.ones(3, dtype=torch.bfloat16)
    target = total = torch.ones(3, dtype=torch.bfloat16)
    total += torch.ones(3)

    assert product.dtype is two_halves.dtype is total.dtype is torch.float32
    assert with_double.dtype is two_wide.dtype is torch.float64
    assert with_bfloat16.dtype is torch.float32
    assert target.dtype is torch.bfloat16
    assert torch.equal(target, torch.ones(3, dtype=torch.bfloat16))


def test_out_argument_is_left_alone(casts: None) -> None:
    out = torch.zeros(3, dtype=torch.bfloat16)
    torch.exp(torch.zeros(3, dtype=torch.bfloat16), out=out)

    assert out.tolist() == [1.0, 1.0, 1.0]


def test_the_other_half_dtype_is_promoted_too(casts: None) -> None:
    other = torch.ones(3, dtype=torch.float16)
    total = other
    total += torch.ones(3)
    assert (other * torch.tensor(2.0)).dtype is torch.float32
    assert (other * torch.ones(3)).dtype is total.dtype is torch.float32
    assert torch.cat([other, torch.ones(1, dtype=torch.bfloat16)]).dtype is torch.float32
    assert torch.cat([other, torch.ones(1)]).dtype is torch.float32


def test_the_other_half_dtype_meets_float32_in_the_half_dtype_of_the_casts(casts: None) -> None:
    """As inputs in float16 do in a model at O4."""
    other = torch.ones(3, 3, dtype=torch.float16)
    assert torch.mm(other, torch.ones(3, 3)).dtype is torch.bfloat16
    assert torch.nn.functional.layer_norm(other, [3], torch.ones(3)).dtype is torch.float32


def test_what_autocast_casts_natively_arrives_as_it_is() -> None:
    """A weight that the wrapper had cast would not be found in autocast's cache."""
    given = (torch.ones(2, 2), torch.ones(2, 2))
    for row in OP_TABLE:
        if row.rule == "half" and "cpu" in row.native and (wrap := row_wrapper(row)):
            with casting(torch.bfloat16):
                got = wrap(lambda *args: args)(*given)
            assert got[0] is given[0]
            assert got[1] is given[1]


def test_rows_are_unique_and_reasoned() -> None:
    assert len({(row.namespace, row.name) for row in OP_TABLE}) == len(OP_TABLE)
    assert all(row.reason.endswith(".") for row in OP_TABLE)


def test_documented_table_is_current(request: pytest.FixtureRequest) -> None:
    documented = request.config.rootpath / "docs" / "op-table.md"

    assert documented.read_text(encoding="utf-8") == render()
