# SPDX-License-Identifier: BSD-3-Clause
"""Estimated peaks against the allocator's own record of a training step."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_KIND
from preamp.kernels.wide_half import native_products
from preamp.memory.peak import Held
from preamp_bench.gpt import GPT, ModelConfig, loss_of

SIZE = ModelConfig(layers=2, width=64, heads=4, context=32)


def allocated_peak(function: Callable[[], None]) -> int:
    """The most that torch's CPU allocator handed out, as its profiler recorded it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    results: Any = profile.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def gpt() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(0)
    text = torch.randint(0, 256, (8, SIZE.context), generator=random)
    return GPT(SIZE, random), (text, text)


@pytest.mark.parametrize("level", BY_KIND)
def test_the_peak_of_a_gpt_is_within_five_percent(level: str) -> None:
    model, batch = gpt()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    estimate = preamp.estimate(model, level, optimizer, loss_fn=loss_of, batch=batch)
    assert estimate.peak is not None
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    engine = preamp.engine_of(model)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(128.0)

    def step() -> None:
        with preamp.scale_loss(loss_of(model, batch), optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with native_products():  # as on a GPU, also where this CPU computes products in float32
        step()
        kept = sum(preamp.count_memory(engine).values())
        measured = kept + allocated_peak(step)
    assert estimate.peak == pytest.approx(measured, rel=0.05)


def test_what_is_traced_equals_what_runs() -> None:
    model, batch = gpt()
    estimate = preamp.estimate(model, "O0", None, loss_fn=loss_of, batch=batch)
    with Held() as held:
        loss = loss_of(model, batch)
        loss.backward()
        del loss
    assert held.peak == estimate.activations
    assert held.live == sum(4 * param.numel() for param in model.parameters())


def test_the_caller_keeps_everything() -> None:
    model, batch = gpt()
    before = copy.deepcopy(model.state_dict())
    random = torch.get_rng_state()
    preamp.estimate(model, "O2", loss_fn=loss_of, batch=batch)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(random, torch.get_rng_state())
    assert all(param.grad is None for param in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_meta_model_has_a_peak_too() -> None:
    batch = torch.ones(4, 8)
    on_cpu = preamp.estimate(nn.Linear(8, 16), "O5", loss_fn=_mean, batch=batch)
    on_meta = preamp.estimate(lambda: nn.Linear(8, 16), "O5", loss_fn=_mean, batch=batch)
    assert on_meta == on_cpu


def _mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def test_views_hold_nothing() -> None:
    x = torch.ones(4, 8)
    with Held() as held:
        x.t().t().view(2, 16)
    assert held.live == 0
    with Held() as held:
        y = x + 1
        y.add_(x)
    assert held.live == held.peak == 128
    del y
    assert held.live == 0


# -- losses ------------------------------------------------------------------------------------


def activations(loss_fn: Any, batch: Any) -> int | None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return preamp.estimate(model, "O2", loss_fn=loss_fn, batch=batch).activations


def test_a_batch_that_is_written_to_is_left_alone() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(1.5)
        return _mean(model, batch["x"])

    batch = {"x": torch.ones(16, 8)}
    assert activations(loss_fn, batch)
    assert torch.equal(batch["x"], torch.ones(16, 8))


def test_a_loss_may_have_tensors_of_its_own() -> None:
    weights = torch.rand(16, 1)
    assert activations(lambda model, x: (model(x).float() * weights).mean(), torch.ones(16, 8))


def penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = batch.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.float().square().mean() + (grad.float().norm(dim=1) - 1).square().mean()


def test_a_loss_that_takes_gradients_itself_is_traced() -> None:
    assert activations(penalty, torch.ones(16, 8))


@pytest.mark.parametrize("is_frozen", [False, True])
def test_modules_that_a_loss_closes_over_keep_their_gradients(is_frozen: bool) -> None:
    criterion, old = nn.Linear(4, 1), nn.Linear(4, 1)
    kept = [torch.ones_like(param) for param in old.parameters()]
    for param, grad in zip(old.parameters(), kept, strict=True):
        param.grad = grad

    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = model(x).float()
        return (criterion(out) + old(out)).mean()

    model = nn.Linear(8, 4).requires_grad_(not is_frozen)
    found = preamp.estimate(model, "O5", "AdamW", loss_fn=loss_fn, batch=torch.ones(2, 8))
    assert (found.peak or 0) >= found.on_device + found.master_gradients  # at the step
    assert all(param.grad is None for param in criterion.parameters())
    assert all(p.grad is g for p, g in zip(old.parameters(), kept, strict=True))
