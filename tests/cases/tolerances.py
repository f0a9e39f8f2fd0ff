# SPDX-License-Identifier: BSD-3-Clause
"""The error budget: where results are not exact, they may be twice as far off as torch's."""

import torch

TINY = 2.0**-20
"""What rounding alone may add to a result of magnitude one."""


def assert_same(ours: object, wanted: object, where: str = "") -> None:
    """Both are equal bitwise: same dtype, same values, nan where the other has nan."""
    if isinstance(ours, torch.Tensor) and isinstance(wanted, torch.Tensor):
        assert ours.dtype is wanted.dtype, f"{where}: {ours.dtype} is not {wanted.dtype}"
        if _bits_agree(ours, wanted):  # many times faster to see than that nan are in both
            return
        assert torch.equal(ours.isnan(), wanted.isnan()), where
        a, b = ours.detach().nan_to_num(0.0, torch.inf, -torch.inf), wanted.detach()
        b = b.nan_to_num(0.0, torch.inf, -torch.inf)
        assert torch.equal(a, b), f"{where}: {ours} is not {wanted}"
        assert torch.equal(torch.signbit(a), torch.signbit(b)), f"{where}: sign of a zero"
    else:
        assert ours == wanted, f"{where}: {ours} is not {wanted}"


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits_agree(ours: torch.Tensor, wanted: torch.Tensor) -> bool:
    tensors = [ours, wanted]
    if not all(
        type(t) in _PLAIN and t.layout is torch.strided and t.is_floating_point() for t in tensors
    ):
        return False
    return torch.equal(*[t.detach().view(_WORDS[t.itemsize]) for t in tensors])


def assert_within_budget(ours: torch.Tensor, torch_low: torch.Tensor, oracle: torch.Tensor) -> None:
    """``|ours - oracle| <= 2 · max|torch_low - oracle| + tiny``, everything in float64."""
    exact = oracle.double()
    budget = 2 * (torch_low.double() - exact).abs().max() + TINY * exact.abs().max()
    assert ((ours.double() - exact).abs() <= budget).all()
