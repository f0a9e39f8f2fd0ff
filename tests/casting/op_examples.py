# SPDX-License-Identifier: BSD-3-Clause
"""A small call for each row of the op table, in float32.

What holds for most functions is the default of the rule; the rest is listed by name.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

from preamp.casting.functions import namespace_owner
from preamp.casting.op_lists import OpRow


def _square(seed: int = 0) -> torch.Tensor:
    values = torch.rand(4, 4, generator=torch.Generator().manual_seed(seed))
    return values / 4 + 0.5 * torch.eye(4)


def _symmetric() -> torch.Tensor:
    return (_square() + _square().T) / 2 + 2 * torch.eye(4)


def _vector(seed: int = 0, size: int = 4) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) * 0.5 + 0.25


def _batch(seed: int = 0) -> torch.Tensor:
    return torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(seed))


def _image(dims: int) -> torch.Tensor:
    return torch.rand(1, 2, *[4] * dims, generator=torch.Generator().manual_seed(1))


def _kernel(dims: int) -> torch.Tensor:
    return torch.rand(2, 2, *[2] * dims, generator=torch.Generator().manual_seed(2))


_SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])
_CLASSES = torch.tensor([0, 1, 2, 3])
_PIVOTS = torch.tensor([1, 2, 3, 4], dtype=torch.int32)


def _lstm(gates: int, *, has_cell: bool) -> tuple[Any, ...]:
    state = torch.zeros(1, 2, 4)
    weights = [_vector(s, gates * 16).reshape(-1, 4) for s in (1, 2)]
    biases = [_vector(s, gates * 4) for s in (3, 4)]
    hidden = (state, state.clone()) if has_cell else state
    return (_batch(), hidden, [*weights, *biases], True, 1, 0.0, True, False, True)


def _cell(gates: int, *, has_cell: bool) -> tuple[Any, ...]:
    state = torch.zeros(4, 4)
    weights = [_vector(s, gates * 16).reshape(-1, 4) for s in (1, 2)]
    biases = [_vector(s, gates * 4) for s in (3, 4)]
    return (_square(), [state, state.clone()] if has_cell else state, *weights, *biases)


def _matrix_pair() -> tuple[Any, ...]:
    return (_square(1), _square(2))


_OF_TWO_MATRICES = (
    "linear matmul mm __matmul__ __rmatmul__ vecdot cosine_similarity pairwise_distance dist cdist "
    "poisson_nll_loss kl_div l1_loss mse_loss smooth_l1_loss huber_loss "
    "multilabel_soft_margin_loss binary_cross_entropy_with_logits binary_cross_entropy "
    "solve lstsq solve_ex triangular_solve cholesky_solve igamma igammac complex polar "
    "add_ sub_ mul_ div_ atan2_ eq_ ge_ gt_ le_ lt_ ne_"
)
_ALONG_A_DIMENSION = (
    "softmin softmax log_softmax cumprod cumsum cumprod_ cumsum_ logsumexp logcumsumexp"
)
_CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    **{f"conv{d}d": (lambda d=d: (_image(d), _kernel(d))) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (lambda d=d: (_image(d), _kernel(d))) for d in (1, 2, 3)},
    "conv_tbc": lambda: (_batch(), _batch(3), _vector()),
    "prelu": lambda: (_square(), _vector(size=1)),
    **dict.fromkeys(_OF_TWO_MATRICES.split(), _matrix_pair),
    **dict.fromkeys(
        ["addmm", "addmm_", "addcdiv", "addcmul", "addcdiv_", "addcmul_"],
        lambda: (_square(0), _square(1), _square(2)),
    ),
    **dict.fromkeys(
        ["chain_matmul", "triplet_margin_loss", "gaussian_nll_loss"],
        lambda: (_square(1), _square(2), _square(3)),
    ),
    "bmm": lambda: (_batch(1), _batch(2)),
    **dict.fromkeys(["addbmm", "addbmm_"], lambda: (_square(), _batch(1), _batch(2))),
    **dict.fromkeys(["baddbmm", "baddbmm_"], lambda: (_batch(0), _batch(1), _batch(2))),
    "mv": lambda: (_square(), _vector()),
    **dict.fromkeys(["addmv", "addmv_"], lambda: (_vector(0), _square(), _vector(1))),
    **dict.fromkeys(["addr", "addr_"], lambda: (_square(), _vector(0), _vector(1))),
    "scaled_dot_product_attention": lambda: (_batch(1), _batch(2), _batch(3)),
    "einsum": lambda: ("ij,jk->ik", _square(1), _square(2)),
    "tensordot": lambda: (_square(1), _square(2), 1),
    "multi_dot": lambda: ([_square(1), _square(2), _square(3)],),
    "lstm": lambda: _lstm(4, has_cell=True),
    "gru": lambda: _lstm(3, has_cell=False),
    **dict.fromkeys(["rnn_tanh", "rnn_relu"], lambda: _lstm(1, has_cell=False)),
    "lstm_cell": lambda: _cell(4, has_cell=True),
    "gru_cell": lambda: _cell(3, has_cell=False),
    **dict.fromkeys(["rnn_tanh_cell", "rnn_relu_cell"], lambda: _cell(1, has_cell=False)),
    **dict.fromkeys(_ALONG_A_DIMENSION.split(), lambda: (_square(), -1)),
    "layer_norm": lambda: (_square(), [4], _vector(1), _vector(2)),
    "rms_norm": lambda: (_square(), [4], _vector(1)),
    "group_norm": lambda: (_image(2), 2),
    "local_response_norm": lambda: (_image(2), 2),
    **dict.fromkeys(["renorm", "renorm_"], lambda: (_square(), 2, 0, 0.5)),
    **dict.fromkeys(["interpolate", "upsample"], lambda: (_image(2), [8, 8])),
    "grid_sample": lambda: (_image(2), torch.rand(1, 3, 3, 2)),
    "affine_grid": lambda: (torch.rand(1, 2, 3), [1, 2, 4, 4]),
    "cosine_embedding_loss": lambda: (_square(1), _square(2), _SIGNS),
    "cross_entropy": lambda: (_square(), _CLASSES, _vector()),
    "nll_loss": lambda: (_square(), _CLASSES),
    "hinge_embedding_loss": lambda: (_vector(), _SIGNS),
    "margin_ranking_loss": lambda: (_vector(1), _vector(2), _SIGNS),
    "soft_margin_loss": lambda: (_vector(), _SIGNS),
    "multilabel_margin_loss": lambda: (_square(), torch.tensor([[3, 0, -1, 1]] * 4)),
    "multi_margin_loss": lambda: (_square(), _CLASSES),
    "ctc_loss": lambda: (
        _batch().transpose(0, 1),
        torch.tensor([[1, 2], [2, 1]]),
        torch.tensor([4, 4]),
        torch.tensor([2, 2]),
    ),
    **dict.fromkeys(
        ["pow", "__pow__", "__rpow__", "__ipow__", "pow_", "__rdiv__", "__rtruediv__"],
        lambda: (_square(), 2.0),
    ),
    "solve_triangular": lambda: (_square().triu(), _square(2)),
    **dict.fromkeys(
        ["cholesky", "cholesky_ex", "eigh", "eigvalsh", "ldl_factor", "ldl_factor_ex"],
        lambda: (_symmetric(),),
    ),
    "cholesky_inverse": lambda: (_square().tril(),),
    "orgqr": lambda: (_square(), _vector()),
    "vander": lambda: (_vector(),),
    "ormqr": lambda: (_square(1), _vector(), _square(2)),
    "lu_unpack": lambda: (_square(), _PIVOTS),
    "ldl_solve": lambda: (_symmetric(), _PIVOTS, _square(2)),
    "tensorsolve": lambda: (_square().reshape(2, 2, 4), _vector().reshape(2, 2)),
    **dict.fromkeys(["pca_lowrank", "svd_lowrank"], lambda: (_square(), 2)),
    **dict.fromkeys(["quantile", "nanquantile"], lambda: (_square(), 0.25)),
    "histogram": lambda: (_square(), 4),
    "view_as_complex": lambda: (_batch()[..., :2].contiguous(),),
    "matrix_power": lambda: (_square(), 3),
    "tensorinv": lambda: (_square().reshape(4, 2, 2), 1),
    "householder_product": lambda: (_square(), _vector()),
    **dict.fromkeys(
        ["dot", "vdot", "inner", "kron", "outer", "ger"], lambda: (_vector(1), _vector(2))
    ),
    "index_copy": lambda: (_square(), 0, torch.tensor([2, 0]), _square(1)[:2]),
    "index_put": lambda: (_square(), (torch.tensor([2, 0]),), _square(1)[:2]),
    "scatter_add": lambda: (_square(), 0, torch.tensor([[0, 1, 2, 0]]), _square(1)[:1]),
    "cross": lambda: (_vector(1, 3), _vector(2, 3)),
    "bilinear": lambda: (_square(1), _square(2), _batch()),
    "where": lambda: (torch.tensor([True, False, True, False]), _vector(1), _vector(2)),
}


def has_function(row: OpRow) -> bool:
    """Whether this torch has the function; some names remain that only raise (torch 2.15)."""
    owner = namespace_owner(row.namespace)
    if not hasattr(owner, row.name):
        return False
    if row.name not in ("cholesky", "qr") or "linalg" in row.namespace:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # both are deprecated
            getattr(owner, row.name)(*example(row), **options(row))
    except RuntimeError as error:
        return "is now removed" not in str(error)
    return True


def example(row: OpRow) -> tuple[Any, ...]:
    """Positional arguments, float tensors in float32, with which the row's function runs."""
    if row.namespace == "torch.linalg" and row.name in ("norm", "vector_norm"):
        return (_square(),)
    if row.name == "lu_solve":  # torch.linalg takes the right side last
        is_last = row.namespace == "torch.linalg"
        return (_square(), _PIVOTS, _square(2)) if is_last else (_square(2), _square(), _PIVOTS)
    if row.name in _CALLS:
        return _CALLS[row.name]()
    if row.rule == "sequence_promote":
        return ([_square(1), _square(2)],)
    if row.rule in ("promote", "match_self"):
        return _matrix_pair()
    return (_square(),)


def options(row: OpRow) -> dict[str, Any]:
    """Keyword arguments that go with ``example``."""
    if row.name == "stft":
        return {"n_fft": 4, "return_complex": True}
    return {"upper": True} if row.name == "solve_triangular" else {}
