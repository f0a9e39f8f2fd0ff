# SPDX-License-Identifier: BSD-3-Clause
"""The op table holds: each row, both half dtypes, half, float32 and mixed arguments.

What each function returns is said by lists that were written without the table. They follow torch's
lists for CUDA (``ATen/autocast_mode.h``), its list for CPUs, Apex's lists and, for the rest, what
is said beside it. So a row that is lost or gets another rule is noticed.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from casting.op_examples import example, has_function, options
from casting.probe import BF16, F16, F32, casting, held, install_wide_half
from kit.refusals import refused
from op_table import render
from preamp.casting.functions import install_function_casts, namespace_owner, row_wrapper
from preamp.casting.op_lists import OP_TABLE, Namespace, OpRow, Rule
from preamp.casting.thread_casts import disable_casts
from preamp.core.pytree import map_tensors

# Some rows are functions that torch itself deprecates, or warns about in general.
pytestmark = pytest.mark.filterwarnings("ignore")

HALVES = (F16, BF16)
EITHER_HALF = pytest.mark.parametrize("half", HALVES, ids=str)
CAST_RULES = ("half", "float", "promote", "sequence_promote")

F: Namespace = "torch.nn.functional"
TENSOR: Namespace = "torch.Tensor"
LINALG: Namespace = "torch.linalg"
RECURRENT: Namespace = "recurrent layers"

# half on CUDA; with those that are composed of them, tensordot too, which CUDA promotes
PRODUCTS = "addmm addmv addr matmul mm mv addbmm baddbmm bmm prelu"
CONVOLUTIONS = "conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d"
CELLS = "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
# fp32 on CUDA
POINTWISE = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow exp2"
)
SUMS = "prod cumprod cumsum sum logsumexp logcumsumexp nansum trace"  # the last by the CPU's list
NORMS = "norm dist renorm"
LOSSES = (
    "poisson_nll_loss cosine_embedding_loss nll_loss hinge_embedding_loss kl_div l1_loss mse_loss "
    "smooth_l1_loss huber_loss margin_ranking_loss multilabel_margin_loss soft_margin_loss "
    "triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits cross_entropy "
    "ctc_loss multilabel_soft_margin_loss gaussian_nll_loss"
)
# fp32 on the CPU, for want of half kernels
SOLVERS = (
    "cholesky cholesky_inverse cholesky_solve inverse pinverse lu lu_solve orgqr ormqr geqrf qr "
    "svd triangular_solve det logdet slogdet matrix_exp matrix_power"
)
TRANSFORMS = (
    "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft "
    "hfft2 ihfft2 hfftn ihfftn"
)
WITHOUT_HALF = "quantile nanquantile histc igamma igammac angle"
# promoted on CUDA, or on the CPU, or by Apex
PROMOTED = "addcdiv addcmul atan2 cross dot vdot index_put scatter_add index_copy inner"
ARITHMETIC = "add div mul sub eq equal ge gt le lt ne"
OPERATORS = "add radd sub rsub mul rmul div truediv eq ge gt le lt ne"
IN_PLACE_OPERATORS = "iadd isub imul idiv itruediv"


def _dunder(names: str) -> str:
    return " ".join([f"__{name}__" for name in names.split()])


EXPECTED: dict[tuple[Rule, Namespace], str] = {
    ("half", "torch"): f"{PRODUCTS} {CONVOLUTIONS} einsum chain_matmul tensordot",
    ("half", TENSOR): f"{PRODUCTS} {_dunder('matmul rmatmul')}",
    ("half", F): f"{CONVOLUTIONS} prelu linear scaled_dot_product_attention",
    ("half", LINALG): "vecdot multi_dot matmul",
    ("half", RECURRENT): f"{CELLS} lstm gru rnn_tanh rnn_relu",
    ("float", "torch"): f"{POINTWISE} {SUMS} {NORMS} {SOLVERS} {WITHOUT_HALF} softmax log_softmax "
    "layer_norm group_norm rms_norm cosine_similarity pdist cdist std var std_mean var_mean cov "
    "corrcoef lu_unpack pca_lowrank svd_lowrank stft histogram polar complex view_as_complex",
    ("float", TENSOR): f"{POINTWISE} {SUMS} {NORMS} {SOLVERS} {WITHOUT_HALF} softmax log_softmax "
    f"std var cov corrcoef stft cpu {_dunder('pow rpow ipow rdiv rtruediv')}",
    ("float", F): f"{LOSSES} softplus softmax log_softmax softmin gelu logsigmoid gumbel_softmax "
    "layer_norm group_norm rms_norm local_response_norm normalize cosine_similarity "
    "pairwise_distance pdist interpolate upsample grid_sample affine_grid",
    ("float", LINALG): "norm vector_norm matrix_norm cond matrix_rank solve solve_ex cholesky "
    "cholesky_ex svd svdvals eig eigh eigvals eigvalsh inv inv_ex householder_product tensorinv "
    "tensorsolve qr lstsq det slogdet lu lu_factor lu_factor_ex lu_solve ldl_factor ldl_factor_ex "
    "ldl_solve matrix_exp matrix_power pinv solve_triangular vander",
    ("float", "torch.fft"): TRANSFORMS,
    ("promote", "torch"): f"{PROMOTED} {ARITHMETIC} bilinear kron outer ger where",
    ("promote", TENSOR): f"{PROMOTED} {ARITHMETIC} {_dunder(OPERATORS)} "
    f"{_dunder(IN_PLACE_OPERATORS)}",
    ("promote", F): "bilinear",
    ("promote", LINALG): "cross",
    ("sequence_promote", "torch"): "cat stack concat concatenate hstack vstack dstack "
    "column_stack row_stack",
}
"""Where the result is half, or float32, or float32 if an argument is → in which namespace → of
which functions."""

IN_PLACE = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"
GUARDED: dict[tuple[Rule, Namespace], str] = {
    ("banned", F): "binary_cross_entropy",
    ("no_half_in_place", "torch"): IN_PLACE,
    ("no_half_in_place", TENSOR): f"{IN_PLACE} erfinv_ pow_ cumprod_ cumsum_ renorm_",
    ("match_self", TENSOR): "addmm_ addmv_ addr_ addbmm_ baddbmm_",
}
"""As in Apex; the other in-place functions that it had cast torch brings to the target's dtype."""

ROWS = [
    OpRow(namespace=namespace, name=name, rule=rule, reason="")
    for (rule, namespace), names in (EXPECTED | GUARDED).items()
    for name in names.split()
]


def _rows(*rules: str) -> list[Any]:
    return [
        pytest.param(row, id=f"{row.namespace}.{row.name}".replace(" ", "_"))
        for row in OP_TABLE
        if row.rule in rules and has_function(row)
    ]


def _tensors(value: Any) -> list[torch.Tensor]:
    """The floating tensors of arguments or results, complex ones as pairs of real numbers."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, torch.Tensor) and value.is_complex():
        return [torch.view_as_real(value.resolve_conj())]
    return [value] if isinstance(value, torch.Tensor) and value.is_floating_point() else []


def _call(row: OpRow, args: tuple[Any, ...]) -> Any:
    torch.manual_seed(0)
    return getattr(namespace_owner(row.namespace), row.name)(*args, **options(row))


def _arguments(row: OpRow, half: torch.dtype, kind: str) -> tuple[Any, ...]:
    """The example's arguments, all half, all float32, or the first half and the rest float32."""
    count = itertools.count()

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_first = next(count) == 0
        return tensor.to(half) if kind == "half" or (kind == "mixed" and is_first) else tensor

    return _mapped(convert, example(row))


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], args: tuple[Any, ...]) -> Any:
    return tuple(map_tensors(change, arg) for arg in args)


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    handle = held(install_function_casts)
    yield
    handle.remove()


@pytest.fixture
def casts() -> Iterator[None]:
    with casting(BF16):
        yield


# -- dtypes and numbers ------------------------------------------------------------------------


@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("rule_and_namespace", EXPECTED, ids=" ".join)
@pytest.mark.product
def test_results_have_the_expected_dtype(
    rule_and_namespace: tuple[Rule, Namespace], wide: bool
) -> None:
    """Also beneath wide products, as at O1 on CPUs without float16 units."""
    rows = [row for row in ROWS if (row.rule, row.namespace) == rule_and_namespace]
    handle = held(install_wide_half, F16) if wide else held(lambda undo: None)
    for row, half in itertools.product(filter(has_function, rows), HALVES):
        alone = F32 if row.rule == "float" else half
        mixed = half if row.rule == "half" else F32
        for kind, wanted in (("half", alone), ("mixed", mixed), ("float", mixed)):
            args = _arguments(row, half, kind)
            if kind == "mixed" and len(_tensors(args)) == 1:
                continue  # there is nothing to promote to
            with casting(half):
                found = {tensor.dtype for tensor in _tensors(_call(row, args))}
            assert found <= {wanted}, (row.name, kind)
    handle.remove()


def test_the_lists_and_the_table_have_the_same_functions() -> None:
    listed = [(row.rule, row.namespace, row.name) for row in ROWS]
    assert sorted(listed) == sorted((row.rule, row.namespace, row.name) for row in OP_TABLE)
    assert len({row[1:] for row in listed}) == len(listed)
    assert all(row.reason.endswith(".") for row in OP_TABLE)


@pytest.mark.parametrize("row", _rows("float", "promote", "sequence_promote"))
def test_wide_functions_compute_in_float32_throughout(row: OpRow) -> None:
    """Of either half dtype where all is cast, of the casts' own beside float32."""
    # Its reductions are blocked by memory alignment, so the last bit depends on where data lies.
    tolerance = 1e-6 if row.name == "lstsq" else 0.0
    for dtype, half in itertools.product(HALVES, HALVES):
        for kind in ("half",) if row.rule == "float" else ("float", "mixed"):
            args = _arguments(row, half, kind)
            with casting(dtype):
                with disable_casts():
                    single = _mapped(lambda t: t.float().clone(), args)
                    expected = _tensors(_call(row, single))
                results = _tensors(_call(row, args))
            for ours, theirs in zip(results, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


NOT_DIFFERENTIABLE = {"eq", "equal", "ge", "gt", "le", "lt", "ne", "matrix_rank", "histc"}
# torch has no derivative, or none of a sum of what they return.
NO_GRADIENT = {"eig", "geqrf", "histogram", "igamma", "igammac"}
NO_GRADIENT |= {"ldl_factor", "ldl_factor_ex", "ldl_solve"}
FIRST_ONLY = {"cross_entropy", "soft_margin_loss"}  # the other tensors are weights and targets


@pytest.mark.parametrize("row", _rows(*CAST_RULES))
def test_gradients_arrive_in_the_dtype_of_the_argument(row: OpRow) -> None:
    for half in HALVES:
        args = _arguments(row, half, "mixed")
        leaves = [t.detach() for t in _tensors(args)]
        for leaf in leaves[: 1 if row.name in FIRST_ONLY else None]:
            leaf.requires_grad_()
        remaining = iter(leaves)
        args = _mapped(lambda _, rest=remaining: next(rest), args)
        if re.fullmatch(r"__i\w+__", row.name):
            args = (args[0] * 1, *args[1:])  # a leaf that requires grad cannot change in place
        with casting(half):
            outputs = [t for t in _tensors(_call(row, args)) if t.requires_grad]
            if not outputs or row.name in NO_GRADIENT:
                assert row.name.strip("_") in NOT_DIFFERENTIABLE | NO_GRADIENT
                continue
            torch.autograd.backward([t.float().sum() for t in outputs])
        assert any(leaf.grad is not None for leaf in leaves)
        assert all(leaf.grad is None or leaf.grad.dtype is leaf.dtype for leaf in leaves)


@pytest.mark.parametrize("row", _rows(*CAST_RULES, "no_half_in_place", "match_self", "banned"))
def test_neither_disabled_casts_nor_float64_are_touched(row: OpRow, casts: None) -> None:
    args = _arguments(row, F16, "float")
    double = _mapped(torch.Tensor.double, args)
    with disable_casts():
        outside = _tensors(_call(row, args))
    assert all(t.dtype is F32 for t in outside)
    assert all(t.dtype is torch.float64 for t in _tensors(_call(row, double)))


# -- functions that change a tensor -------------------------------------------------------------


@EITHER_HALF
@pytest.mark.product
@pytest.mark.parametrize("row", _rows("no_half_in_place"))
def test_in_place_float_functions_refuse_half(row: OpRow, half: torch.dtype) -> None:
    args, name = _arguments(row, half, "half"), row.name.rstrip("_")
    words = {"function": f"{name}_", "half": str(half).removeprefix("torch."), "other": name}
    with casting(half):
        with refused("casting", "a half target", **words):
            _call(row, args)
        with disable_casts():
            _call(row, args)


def test_a_target_given_by_keyword_is_refused_too(casts: None) -> None:
    half = torch.zeros(2, dtype=BF16)
    with refused("casting", "a half target", function="exp_", half="bfloat16", other="exp"):
        torch.exp_(input=half)
    assert half.tolist() == [0.0, 0.0]
    assert torch.exp_(input=torch.zeros(2)).tolist() == [1.0, 1.0]


STORING = [
    OpRow(namespace="torch.Tensor", name=f"{name}_", rule="match_self", reason="")
    for name in "add sub mul div addcdiv addcmul atan2 eq ge gt le lt ne".split()
]
"""Functions that torch brings to the target's dtype by itself."""


@EITHER_HALF
@pytest.mark.parametrize("row", [*_rows("match_self"), *STORING], ids=lambda row: row.name)
@pytest.mark.parametrize("kind", ["half", "float", "mixed"])
def test_in_place_functions_cast_to_the_target(row: OpRow, kind: str, half: torch.dtype) -> None:
    """Pointwise ones round once."""
    with casting(half):
        args = _arguments(row, half, kind)
        wide = _mapped(lambda t: t.float().clone() if row in STORING else t.double(), args)
        result, expected = _call(row, args), _call(row, wide)
    assert result is args[0]
    assert result.dtype is (F32 if kind == "float" else half)
    if row in STORING:
        assert torch.equal(result, expected.to(result.dtype))
    tolerance = 4 * torch.finfo(half).eps
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def test_in_place_functions_take_what_half_cannot_hold() -> None:
    with casting(F16):
        half = torch.full((2,), 3.0, dtype=F16)
        half.div_(torch.tensor(1e5))
    assert torch.equal(half, torch.full((2,), 3e-5).half())


@pytest.mark.parametrize("half", [F16, BF16], ids=["of another half dtype", "of the casts"])
@pytest.mark.parametrize("name", ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"])
def test_in_place_operators_with_float32_bind_a_new_tensor(
    name: str, half: torch.dtype, casts: None
) -> None:
    target = torch.full((2,), 2.0, dtype=half)
    result = getattr(target, name)(torch.full((2,), 3.0))
    assert result.dtype is F32
    assert target.tolist() == [2.0, 2.0]


# -- mixtures -----------------------------------------------------------------------------------

HALF, OTHER, SINGLE, DOUBLE = (torch.ones(3, 3, dtype=d) for d in (BF16, F16, F32, torch.double))
MIXTURES: dict[str, tuple[Callable[[], torch.Tensor], torch.dtype]] = {
    "half and a number of float32": (lambda: HALF * torch.tensor(2.0), F32),
    "both halves": (lambda: OTHER * HALF, F32),
    "half and float64": (lambda: OTHER * DOUBLE, torch.double),
    "float32 and float64": (lambda: SINGLE * DOUBLE, torch.double),
    "float32 and half": (lambda: SINGLE * HALF, F32),
    "the other half and a number of float32": (lambda: OTHER * torch.tensor(2.0), F32),
    "the other half and float32": (lambda: OTHER * SINGLE, F32),
    "a list of both halves": (lambda: torch.cat([OTHER, HALF]), F32),
    "a list of the other half and float32": (lambda: torch.cat([OTHER, SINGLE]), F32),
    # As inputs in float16 are in a model at O4
    "a product of the other half": (lambda: torch.mm(OTHER, SINGLE), BF16),
    "a norm of the other half": (
        lambda: torch.nn.functional.layer_norm(OTHER, [3], torch.ones(3)),
        F32,
    ),
    "an out argument": (lambda: torch.exp(0 * HALF, out=torch.zeros_like(HALF)), BF16),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str, casts: None) -> None:
    """Under casts to bfloat16."""
    make, wanted = MIXTURES[name]
    assert make().dtype is wanted


def test_a_banned_function(casts: None) -> None:
    half, target = torch.full((3,), 0.5, dtype=BF16), torch.ones(3)
    with refused("casting", "a banned function"):
        torch.nn.functional.binary_cross_entropy(half, target)
    assert torch.nn.functional.binary_cross_entropy(half.float(), target).dtype is F32


def test_what_autocast_casts_natively_arrives_as_it_is() -> None:
    """A weight that the wrapper had cast would not be found in autocast's cache."""
    given = (torch.ones(2, 2), torch.ones(2, 2))
    for row in OP_TABLE:
        if row.rule == "half" and "cpu" in row.native and (wrap := row_wrapper(row)):
            with casting(BF16):
                got = wrap(lambda *args: args)(*given)
            assert got[0] is given[0]
            assert got[1] is given[1]


def test_documented_table_is_current(request: pytest.FixtureRequest) -> None:
    documented = request.config.rootpath / "docs" / "op-table.md"
    assert documented.read_text(encoding="utf-8") == render()
