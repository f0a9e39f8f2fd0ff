# SPDX-License-Identifier: BSD-3-Clause
"""Calls that mix float32 and half tensors, which torch refuses without the patches."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from casting.probe import held
from preamp.casting.mixed import install_mixed_calls

HALVES = pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
F32 = torch.float32


@pytest.fixture
def installed() -> Iterator[None]:
    handle = held(install_mixed_calls)
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
    "vdot": (lambda a, b: a.vdot(b), (4,), (4,)),
    "addr": (lambda a, b: torch.addr(a, b[0], b[0]), (4, 4), (4, 4)),
    "tensordot": (lambda a, b: torch.tensordot(a, b, 1), (3, 4), (4, 5)),
    "prelu": (lambda a, b: F.prelu(a, b), (3, 4), (4,)),
    "vecdot": (lambda a, b: torch.linalg.vecdot(a, b), (3, 4), (3, 4)),
    "addmm": (lambda a, b: torch.addmm(a[0], b, b.T), (3, 3), (3, 4)),
    "baddbmm by name": (lambda a, b: torch.baddbmm(a, batch1=b, batch2=b), (2, 3, 3), (2, 3, 3)),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), (3, 4), (4, 5)),
    "einsum of a list": (lambda a, b: torch.einsum("ij,jk->ik", [a, b]), (3, 4), (4, 5)),
    "multi_dot": (lambda a, b: torch.linalg.multi_dot([a, b, b.T]), (3, 4), (4, 5)),
    "linear": (lambda a, b: F.linear(a, b, b[:, 0]), (3, 4), (5, 4)),
    "convolution": (lambda a, b: F.conv1d(a, b), (2, 4, 9), (3, 4, 3)),
    "embedding_bag": (
        lambda a, b: F.embedding_bag(
            torch.tensor([[0, 1], [2, 0]]), b, mode="sum", per_sample_weights=a
        ),
        (2, 2),
        (3, 4),
    ),
    "bilinear": (lambda a, b: F.bilinear(a, a, b), (3, 4), (5, 4, 4)),
    "attention": (lambda a, b: F.scaled_dot_product_attention(a, b, b), (2, 3, 8), (2, 3, 8)),
    "attention of a value by name": (
        lambda a, b: F.scaled_dot_product_attention(b, b, value=a, is_causal=True),
        (2, 3, 8),
        (2, 3, 8),
    ),
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


INDEX = torch.tensor([2, 0, 1])
MASK = torch.ones(3, 4, dtype=torch.bool)


def _set(target: torch.Tensor, at: Any, source: torch.Tensor) -> torch.Tensor:
    target[at] = source
    return target


STORED: dict[str, Call] = {
    "index_add_": lambda a, b: a.index_add_(0, INDEX, b),
    "index_add by name": lambda a, b: torch.index_add(a, dim=0, index=INDEX, source=b),
    "index_copy": lambda a, b: a.index_copy(0, INDEX, b),
    "index_put_": lambda a, b: a.index_put_((INDEX,), b, accumulate=True),
    "scatter_add_": lambda a, b: a.scatter_add_(0, INDEX[:, None].expand(3, 4), b),
    "scatter_reduce": lambda a, b: a.scatter_reduce(0, INDEX[:, None].expand(3, 4), b, "amax"),
    "masked_scatter": lambda a, b: a.masked_scatter(MASK, b),
    "put": lambda a, b: torch.put(a, INDEX, b.flatten()[:3], accumulate=True),
    "put_": lambda a, b: a.put_(INDEX, b.flatten()[:3]),
    "index_reduce": lambda a, b: a.index_reduce(0, INDEX, b, "amax"),
    "index_reduce_ by name": lambda a, b: a.index_reduce_(
        dim=0, index=INDEX, source=b, reduce="mean"
    ),
    "item by indices": lambda a, b: _set(a, INDEX, b),
    "item by a mask": lambda a, b: _set(a, MASK, b.flatten()),
    "addmm_": lambda a, b: a[:, :3].clone().addmm_(b, b.T),
    "baddbmm_": lambda a, b: a[None, :, :3].clone().baddbmm_(b[None], b.T[None]),
}


@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
@pytest.mark.usefixtures("installed")
@HALVES
@pytest.mark.parametrize("kind", STORED)
def test_what_is_stored_gets_the_dtype_of_the_target(kind: str, half: torch.dtype) -> None:
    call = STORED[kind]
    a, b = values(3, 4), values(4, 3).T.contiguous()
    for target, source in ((a, b.to(half)), (a.to(half), b)):
        expected = call(target.clone(), source.to(target.dtype))
        found = call(target.clone(), source)
        assert found.dtype is target.dtype
        assert torch.equal(found, expected)


PROMOTED_CALLS: dict[str, Call] = {
    "grid_sample": lambda a, b: F.grid_sample(
        a.view(1, 1, 4, 4), b.view(1, 2, 4, 2), align_corners=False
    ),
    "lerp": lambda a, b: torch.lerp(a, b, 0.25),
    "cross": lambda a, b: torch.cross(a[:, :3], b[:, :3], dim=1),
    "loss of probabilities": lambda a, b: F.binary_cross_entropy(
        a.abs().clamp(max=1), b.abs().clamp(max=1)
    ),
    "huber_loss": lambda a, b: F.huber_loss(a, b),
    "huber_loss with a weight": lambda a, b: F.huber_loss(a, b, weight=b.detach().abs()),
    "weights of classes": lambda a, b: F.cross_entropy(a, INDEX[[0, 1, 2, 0]], b[0].detach().abs()),
}
NORMS: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "layer_norm": lambda a, b: F.layer_norm(a, [4], b[0]),
    "group_norm": lambda a, b: F.group_norm(input=a, num_groups=2, weight=b[0]),
}


@HALVES
@pytest.mark.parametrize("kind", NORMS)
def test_norms_of_half_inputs_are_torch_s(
    kind: str, half: torch.dtype, request: pytest.FixtureRequest
) -> None:
    a, b = values(4, 4).to(half), values(4, 4)
    expected = NORMS[kind](a, b)
    request.getfixturevalue("installed")
    found = NORMS[kind](a, b)
    assert found.dtype is half
    assert torch.equal(found, expected)


@pytest.mark.usefixtures("installed")
@HALVES
@pytest.mark.parametrize("kind", [*PROMOTED_CALLS, *NORMS])
def test_other_functions_compute_in_float32(kind: str, half: torch.dtype) -> None:
    call = (PROMOTED_CALLS | NORMS)[kind]
    a, b = values(4, 4).to(half), values(4, 4)
    for given in ((b, a),) if kind in NORMS else ((a, b), (b, a)):
        mixed = [tensor.detach().requires_grad_() for tensor in given]
        wide = [tensor.detach().float().requires_grad_() for tensor in given]
        found, expected = call(*mixed), call(*wide)
        assert torch.equal(found, expected)
        found.sum().backward()
        expected.sum().backward()
        for one, other in zip(mixed, wide, strict=True):
            assert (one.grad is None) is (other.grad is None)
            if one.grad is not None:
                assert one.grad.dtype is one.dtype
                assert torch.equal(one.grad, other.grad.to(one.dtype))


Forward = Callable[[torch.Tensor], torch.Tensor]


def _causal(h: torch.Tensor) -> torch.Tensor:
    mask = torch.full((h.shape[-2], h.shape[-2]), float("-inf")).triu(1)
    return (h @ h.mT + mask).softmax(-1) @ h


def _experts(h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape)
    out[h.float().sum(-1) > 0] = h[h.float().sum(-1) > 0]
    return out.index_add_(1, INDEX, h)


class _OwnNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, [4], self.weight)


FORWARDS: dict[str, Forward] = {
    "causal mask": _causal,
    "experts": _experts,
    "positions": lambda h: F.layer_norm(h + torch.arange(4.0), [4]),
}


class _Made(nn.Module):
    def __init__(self, inside: Forward) -> None:
        super().__init__()
        self.layer, self.norm, self.inside = nn.Linear(4, 4), _OwnNorm(), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        return self.inside(h) + self.norm(h + torch.arange(4.0)).sum()


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_float32_made_in_a_forward_needs_no_other_object(kind: str, level: str) -> None:
    torch.manual_seed(0)
    model = _Made(FORWARDS[kind])
    twin = _Made(FORWARDS[kind])
    twin.load_state_dict(model.state_dict())
    plain = model(values(2, 3, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    found = model(values(2, 3, 4))
    with preamp.scale_loss(found.square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    torch.testing.assert_close(found, plain, rtol=0.1, atol=0.1)
    preamp.engine_of(model).close()

    other = nn.Linear(4, 4)
    other.register_buffer("constant", torch.ones(3), persistent=False)
    engines = [preamp.initialize(m, opt_level=level, verbosity=0) for m in (other, twin)]
    assert torch.equal(engines[1](values(2, 3, 4)), found)


def test_a_checkpoint_mixes_in_its_second_forward_too() -> None:
    torch.manual_seed(0)
    model = _Made(lambda h: torch.utils.checkpoint.checkpoint(_causal, h, use_reentrant=False))
    model = preamp.initialize(model, opt_level="O5", verbosity=0)
    model(values(2, 3, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.layer.parameters())
