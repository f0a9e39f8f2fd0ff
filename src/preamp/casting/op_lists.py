# SPDX-License-Identifier: BSD-3-Clause
"""Which function runs in which precision at O1: data, one row per function.

A row holds on every device and for both half dtypes. ``native`` names the device types whose
``torch.autocast`` already does what the row says through the dispatcher; there the function is not
wrapped, which keeps autocast's weight cache and its reach into C++. ``docs/op-table.md`` is
generated from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

Rule = Literal[
    "half", "float", "promote", "sequence_promote", "banned", "no_half_in_place", "match_self"
]
"""What happens to the floating tensors among the arguments, while casts are active:

``half``: cast to the half dtype. ``float``: half is cast to float32. ``promote``: half mixed with
float32 is cast to float32, 0-dim tensors included. ``sequence_promote``: the same for the items of
the first argument. ``banned``: a half argument is refused. ``no_half_in_place``: the in-place form
of a float function refuses a half target. ``match_self``: the other arguments are cast to the
dtype of the target. Functions without a row are torch's. float64 is never touched.
"""

Namespace = Literal[
    "torch", "torch.Tensor", "torch.nn.functional", "torch.linalg", "torch.fft", "recurrent layers"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One function, its rule and the reason for it."""

    namespace: Namespace
    name: str
    rule: Rule
    reason: str
    native: frozenset[str] = frozenset()  # device types whose autocast needs no wrapper
    is_closed: bool = False  # autocast must not see it, or the inner products it is made of


F: Final = "torch.nn.functional"
BOTH: Final = ("torch", "torch.Tensor")

MATRIX = "Matrix products are what half-precision units speed up; they accumulate in float32."
RECURRENT = "A recurrent layer is a chain of matrix products."
COMPOSED = "Composed of matrix products, so it follows them."
RANGE = "The result leaves the range of float16, or loses its small values, for ordinary inputs."
SUM = "A long sum loses its small terms in half precision."
STATISTICS = "Mean and variance are long sums, and their difference cancels."
NORMALISE = "Divides by a sum of squares, which overflows float16 above 65504."
LOSS = "A loss is a small difference or a long sum, and the gradient of everything starts there."
SAMPLE = "Sampling coordinates need more than 11 bits on images wider than 2048 pixels."
SOLVE = "Factorisations amplify rounding errors, and torch has no half kernels for them."
FOURIER = "Sums over the whole signal; torch has half kernels for some sizes on CUDA alone."
COMPLEX = "torch computes with complex numbers of float32; those of float16 are a stub."
NO_HALF = "torch has no half kernel for it, or not on every device."
TO_HOST = "Host code such as numpy expects float32 and has no bfloat16."
PROMOTE = "Half with float32 gives float32, for 0-dim tensors too."
JOIN = "Tensors of both precisions are joined in float32."
BANNED = "The logarithm of a half sigmoid output is infinite for confident predictions."
GUARD = "The function runs in float32, which cannot be stored in place in a half tensor."
MATCH = "A matrix product takes one dtype, and the result is stored in the target."
REBIND = (
    "As with Apex, half combined with float32 binds the name to a new float32 tensor; other names "
    "of the half tensor do not see it. To write into the tensor itself call its method (`add_`)."
)

# What autocast casts by itself, as a device type's own list or as the sum of its parts. Read on
# torch 2.13: CPU by running, CUDA from the list of ops in torch's documentation.
_EVERYWHERE: Final = frozenset({"cpu", "cuda"})
_CUDA: Final = frozenset({"cuda"})


def _rows(
    where: Namespace | tuple[Namespace, ...],
    names: str,
    rule: Rule,
    reason: str,
    *,
    native: frozenset[str] = frozenset(),
    is_closed: bool = False,
) -> Iterator[OpRow]:
    row = partial(OpRow, rule=rule, reason=reason, native=native, is_closed=is_closed)
    for namespace in (where,) if isinstance(where, str) else where:
        for name in names.split():
            yield row(namespace=namespace, name=name)


_CONVOLUTIONS = (
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc prelu"
)
_LAYERS = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"
_PRODUCTS = "matmul mm addmm bmm addbmm baddbmm"
_VECTOR_PRODUCTS = "mv addmv addr"  # CPU autocast has no entry for these
_POINTWISE_F32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan exp2 log1p pow"
)
_SUMS = "cumprod cumsum sum prod logsumexp logcumsumexp nansum trace"
_SOLVERS = (
    "cholesky cholesky_inverse cholesky_solve det geqrf inverse logdet lu lu_solve matrix_exp "
    "matrix_power orgqr ormqr pinverse qr slogdet svd triangular_solve"
)
_TRANSFORMS = (
    "fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn irfft irfft2 irfftn hfft hfft2 hfftn "
    "ihfft ihfft2 ihfftn"
)
_WITHOUT_HALF = "angle histc igamma igammac nanquantile quantile"
_COMPARE = "eq equal ge gt le lt ne"
_ARITHMETIC = "add div mul sub"
# What torch's autocast promotes, on some device types, and refuses for the other half dtype.
_PROMOTED = "addcdiv addcmul atan2 cross dot vdot inner"
_SCATTER = "index_copy index_put scatter_add"
_OPERATORS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __div__ __truediv__ "
    "__eq__ __ge__ __gt__ __le__ __lt__ __ne__"
)
_IN_PLACE_OPERATORS = "__iadd__ __isub__ __imul__ __idiv__ __itruediv__"

_HALF: Final = (
    *_rows(F, _CONVOLUTIONS + " linear", "half", MATRIX, native=_EVERYWHERE),
    *_rows("torch", _CONVOLUTIONS, "half", MATRIX, native=_EVERYWHERE),
    *_rows(BOTH, _PRODUCTS, "half", MATRIX, native=_EVERYWHERE),
    *_rows("torch.Tensor", "prelu __matmul__ __rmatmul__", "half", MATRIX, native=_EVERYWHERE),
    *_rows(BOTH, _VECTOR_PRODUCTS, "half", MATRIX, native=_CUDA),
    *_rows(F, "scaled_dot_product_attention", "half", MATRIX, native=_EVERYWHERE),
    *_rows("torch", "einsum", "half", COMPOSED, native=_EVERYWHERE),
    *_rows("torch", "chain_matmul tensordot", "half", COMPOSED),
    *_rows("torch.linalg", "matmul vecdot", "half", MATRIX, native=_EVERYWHERE),
    *_rows("torch.linalg", "multi_dot", "half", COMPOSED),
    *_rows("recurrent layers", _LAYERS, "half", RECURRENT, native=_CUDA),
)

_FLOAT: Final = (
    *_rows(F, "softplus softmin softmax log_softmax gelu logsigmoid", "float", RANGE),
    *_rows(F, "gumbel_softmax", "float", RANGE),
    *_rows(F, "layer_norm group_norm rms_norm local_response_norm", "float", STATISTICS),
    *_rows(F, "normalize cosine_similarity pairwise_distance pdist", "float", NORMALISE),
    *_rows(F, "interpolate upsample grid_sample affine_grid", "float", SAMPLE, is_closed=True),
    *_rows(
        F,
        "poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss "
        "mse_loss margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss "
        "multi_margin_loss nll_loss binary_cross_entropy_with_logits smooth_l1_loss "
        "soft_margin_loss triplet_margin_loss ctc_loss huber_loss gaussian_nll_loss",
        "float",
        LOSS,
    ),
    *_rows(BOTH, _POINTWISE_F32, "float", RANGE),
    *_rows("torch.Tensor", "__ipow__", "float", REBIND),
    *_rows("torch.Tensor", "__pow__ __rpow__ __rdiv__ __rtruediv__", "float", RANGE),
    *_rows(BOTH, "softmax log_softmax", "float", RANGE),
    *_rows(BOTH, _SUMS, "float", SUM),
    *_rows(BOTH, "std var", "float", STATISTICS),
    *_rows("torch", "std_mean var_mean layer_norm group_norm rms_norm", "float", STATISTICS),
    *_rows(BOTH, "norm dist renorm", "float", NORMALISE),
    *_rows("torch", "cosine_similarity", "float", NORMALISE),
    *_rows("torch", "cdist pdist", "float", NORMALISE, is_closed=True),
    *_rows(BOTH, "cov corrcoef", "float", STATISTICS, is_closed=True),
    *_rows("torch.linalg", "norm vector_norm", "float", NORMALISE),
    *_rows("torch.linalg", "matrix_norm", "float", NORMALISE, is_closed=True),
    *_rows(
        "torch.linalg",
        "cholesky cholesky_ex cond det eig eigh eigvals eigvalsh inv inv_ex ldl_factor "
        "ldl_factor_ex ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_power "
        "matrix_rank pinv qr slogdet solve solve_ex solve_triangular svd svdvals tensorinv "
        "tensorsolve vander householder_product",
        "float",
        SOLVE,
        is_closed=True,
    ),
    *_rows(BOTH, _SOLVERS, "float", SOLVE, is_closed=True),
    *_rows("torch", "lu_unpack pca_lowrank svd_lowrank", "float", SOLVE, is_closed=True),
    *_rows("torch.fft", _TRANSFORMS, "float", FOURIER, is_closed=True),
    *_rows(BOTH, "stft", "float", FOURIER, is_closed=True),
    *_rows("torch", "complex polar view_as_complex", "float", COMPLEX, is_closed=True),
    *_rows(BOTH, _WITHOUT_HALF, "float", NO_HALF, is_closed=True),
    *_rows("torch", "histogram", "float", NO_HALF, is_closed=True),
    *_rows("torch.Tensor", "cpu", "float", TO_HOST),
)

_PROMOTE: Final = (
    *_rows(BOTH, f"{_ARITHMETIC} {_COMPARE}", "promote", PROMOTE),
    *_rows(BOTH, f"{_PROMOTED} {_SCATTER}", "promote", PROMOTE, is_closed=True),
    *_rows("torch", "kron outer ger where", "promote", PROMOTE),
    *_rows("torch", "bilinear", "promote", PROMOTE, is_closed=True),
    *_rows("torch.Tensor", _OPERATORS, "promote", PROMOTE),
    *_rows("torch.Tensor", _IN_PLACE_OPERATORS, "promote", REBIND),
    *_rows(F, "bilinear", "promote", PROMOTE, is_closed=True),
    *_rows("torch.linalg", "cross", "promote", PROMOTE, is_closed=True),
    *_rows("torch", "cat stack concat concatenate", "sequence_promote", JOIN),
    *_rows("torch", "hstack vstack dstack column_stack row_stack", "sequence_promote", JOIN),
)

_IN_PLACE_F32 = "acos_ asin_ cosh_ exp_ expm1_ log_ log10_ log2_ reciprocal_ rsqrt_ sinh_ tan_"
_GUARDED: Final = (
    *_rows(F, "binary_cross_entropy", "banned", BANNED),
    *_rows(BOTH, _IN_PLACE_F32, "no_half_in_place", GUARD),
    *_rows("torch.Tensor", "erfinv_ pow_ cumprod_ cumsum_ renorm_", "no_half_in_place", GUARD),
    *_rows("torch.Tensor", "addmm_ addmv_ addr_ addbmm_ baddbmm_", "match_self", MATCH),
)

OP_TABLE: Final[tuple[OpRow, ...]] = (*_HALF, *_FLOAT, *_PROMOTE, *_GUARDED)
"""Every row; a name that this torch does not have is skipped where the table is applied."""
