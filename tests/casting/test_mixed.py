# SPDX-License-Identifier: BSD-3-Clause
"""Products of float32 and half tensors, which torch refuses without the patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from casting.probe import held
from preamp.casting.functions import install_wide_half, namespace_owner
from preamp.casting.mixed import FUNCTIONS, install_mixed_products

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
F32 = torch.float32


@pytest.fixture
def installed() -> Iterator[None]:
    handle = held(install_mixed_products)
    yield
    handle.remove()


def values(*shape: int) -> torch.Tensor:
    """Float32 values that neither half format holds."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator)


Call = Callable[[torch.Tensor, torch.Tensor], Any]

CALLS: dict[str, tuple[Call, tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (lambda a, b: torch.matmul(a, b), (3, 4), (4, 5)),
    "operator": (lambda a, b: a @ b, (3, 4), (4, 5)),
    "method": (lambda a, b: a.mm(b), (3, 4), (4, 5)),
    "bmm": (lambda a, b: torch.bmm(a, b), (2, 3, 4), (2, 4, 5)),
    "mv": (lambda a, b: torch.mv(a, b), (3, 4), (4,)),
    "dot": (lambda a, b: torch.dot(a, b), (4,), (4,)),
    "inner": (lambda a, b: torch.inner(a, b), (3, 4), (5, 4)),
    "vecdot": (lambda a, b: torch.linalg.vecdot(a, b), (3, 4), (3, 4)),
    "addmm": (lambda a, b: torch.addmm(a[0], b, b.T), (3, 3), (3, 4)),
    "baddbmm by name": (lambda a, b: torch.baddbmm(a, batch1=b, batch2=b), (2, 3, 3), (2, 3, 3)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (3, 4), (4, 5)),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), (3, 4), (4, 5)),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, b.T]), (3, 4), (4, 5)),
    "linear": (lambda a, b: F.linear(a, b, b[:, 0]), (3, 4), (5, 4)),
    "convolution": (lambda a, b: F.conv1d(a, b), (2, 4, 9), (3, 4, 3)),
    "bilinear": (lambda a, b: F.bilinear(a, a, b), (3, 4), (5, 4, 4)),
    "attention": (lambda a, b: F.scaled_dot_product_attention(a, b, b), (2, 3, 8), (2, 3, 8)),
    "attention by name": (
        lambda a, b: F.scaled_dot_product_attention(query=b, key=a, value=b),
        (2, 3, 8),
        (2, 3, 8),
    ),
}


@pytest.mark.usefixtures("installed")
@HALVES
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("swapped", [False, True])
def test_activations_are_brought_to_half(kind: str, swapped: bool, half: torch.dtype) -> None:
    call, *shapes = CALLS[kind]
    a, b = (values(*shape).requires_grad_() for shape in shapes)
    given = (a.to(half), b) if swapped else (a, b.to(half))
    expected = call(a.to(half), b.to(half))
    found = call(*given)
    assert found.dtype is half
    assert torch.equal(found, expected)
    found.float().sum().backward()
    assert a.grad is not None
    assert b.grad is not None


@pytest.mark.usefixtures("installed")
@HALVES
@pytest.mark.parametrize("kind", sorted(CALLS.keys() - {"addmm"}))  # a view is an activation
def test_parameters_are_not_rounded(kind: str, half: torch.dtype) -> None:
    call, *shapes = CALLS[kind]
    a, b = nn.Parameter(values(*shapes[0])), values(*shapes[1]).to(half)
    found = call(a, b)
    assert found.dtype is F32
    assert torch.equal(found, call(a, b.float()))


@pytest.mark.usefixtures("installed")
@HALVES
def test_masks_of_attention_keep_their_lowest_values(half: torch.dtype) -> None:
    q = values(1, 2, 3, 8).to(half)
    mask = torch.full((3, 3), torch.finfo(F32).min)  # all of it, so that -inf would give nan
    for mixed in (q, q.float()):
        assert F.scaled_dot_product_attention(mixed, q, q, attn_mask=mask).isfinite().all()
        assert F.scaled_dot_product_attention(mixed, q, q, mask).isfinite().all()
    kept = nn.Parameter(q.float())
    narrow = torch.zeros(3, 3, dtype=half)
    assert F.scaled_dot_product_attention(kept, q, q, attn_mask=narrow).dtype is F32


@pytest.mark.usefixtures("installed")
@HALVES
def test_other_mixtures_are_torch_s(half: torch.dtype) -> None:
    other = torch.bfloat16 if half is torch.float16 else torch.float16
    a = values(3, 3)
    for one, two in ((a.double(), a.to(half)), (a.to(other), a.to(half)), (a, a.double())):
        with pytest.raises(RuntimeError):
            torch.mm(one, two)
    with pytest.raises(RuntimeError):
        torch.mm(a, a.to(half), out=torch.empty(3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a.to(half)).dtype is torch.bfloat16


@HALVES
@pytest.mark.parametrize("wide_first", [False, True])
def test_it_is_taken_off_again_in_any_order(half: torch.dtype, wide_first: bool) -> None:
    rows = [(namespace_owner(namespace), name) for namespace, name in FUNCTIONS]
    before = [vars(owner).get(name) for owner, name in rows]
    installs = [
        partial(held, install_wide_half, torch.float16),
        partial(held, install_mixed_products),
    ]
    if not wide_first:
        installs.reverse()
    handles = [install() for install in installs]
    a = values(3, 3)
    assert torch.equal(a @ a.to(half), (a.to(half).float() @ a.to(half).float()).to(half)) or (
        half is torch.bfloat16
    )
    for handle in handles:
        handle.remove()
    with pytest.raises(RuntimeError):
        torch.mm(a, a.to(half))
    assert [vars(owner).get(name) for owner, name in rows] == before
