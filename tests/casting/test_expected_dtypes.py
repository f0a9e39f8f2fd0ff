# SPDX-License-Identifier: BSD-3-Clause
"""What each function returns under casts, from lists that were written without the op table.

They follow torch's lists for CUDA (``ATen/autocast_mode.h``), its list for CPUs, Apex's lists and,
for the rest, what is said beside it. So a row that is lost or gets another rule is noticed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from casting.op_examples import example, has_function, options
from casting.probe import held
from preamp.casting.functions import install_function_casts, namespace_owner
from preamp.casting.op_lists import OP_TABLE, Namespace, OpRow, Rule
from preamp.casting.thread_casts import push_thread_casts
from preamp.core.pytree import map_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # torch deprecates some of the functions

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


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    handle = held(install_function_casts)
    yield
    handle.remove()


def _dtypes(value: Any) -> set[torch.dtype]:
    if isinstance(value, (list, tuple)):
        return {dtype for item in value for dtype in _dtypes(item)}
    if isinstance(value, torch.Tensor) and value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    is_floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return {value.dtype} if is_floating else set()


def _called(row: OpRow, half: torch.dtype, which: str) -> set[torch.dtype]:
    """The dtypes of what the function returns; all arguments are half, the first alone, or none."""
    count = 0

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        is_half = which == "all" or (which == "first" and count == 1)
        return tensor.to(half) if is_half else tensor

    args = tuple(map_tensors(convert, arg) for arg in example(row))
    if which == "first" and count == 1:
        return {torch.float32}  # there is nothing to promote to
    torch.manual_seed(0)
    handle = held(push_thread_casts, {"cpu"}, half)
    try:
        return _dtypes(getattr(namespace_owner(row.namespace), row.name)(*args, **options(row)))
    finally:
        handle.remove()


@pytest.mark.parametrize("rule_and_namespace", EXPECTED, ids=" ".join)
def test_results_have_the_expected_dtype(rule_and_namespace: tuple[Rule, Namespace]) -> None:
    of_half = {"half": "half", "float": "float32"}
    rows = [row for row in ROWS if (row.rule, row.namespace) == rule_and_namespace]
    for row in filter(has_function, rows):
        for half in (torch.float16, torch.bfloat16):
            dtypes = {"half": half, "float32": torch.float32}
            alone = dtypes[of_half.get(row.rule, "half")]
            mixed = half if row.rule == "half" else torch.float32
            assert _called(row, half, "all") <= {alone}, row.name
            assert _called(row, half, "first") <= {mixed}, row.name
            assert _called(row, half, "none") <= {mixed}, row.name


def test_the_lists_and_the_table_have_the_same_functions() -> None:
    listed = {(row.rule, row.namespace, row.name) for row in ROWS}
    assert listed == {(row.rule, row.namespace, row.name) for row in OP_TABLE}
    assert len(listed) == len(ROWS)
