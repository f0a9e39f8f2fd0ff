# SPDX-License-Identifier: BSD-3-Clause
"""torch.amp.GradScaler with the optimizers that read its scale and flag on the device."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cases.fused import ADAM, EARLY_ADAM, FUSED, MIXED_LAMB, FusedCase, every_dtype, variant_id
from cases.host_reads import NoHostReads, far_from_the_host
from cases.optimizers import clone_state
from cases.tolerances import assert_same
from kit.refusals import assert_refused

Build = Callable[[Any], Any]
LAMB = {"lr": 0.125, "max_grad_norm": 1.0, "weight_decay": 0.1}
BUILDS: dict[str, Build] = {
    "adam": lambda p: ADAM.kind(p, lr=0.125, capturable=True),
    "adam masters": lambda p: ADAM.kind(p, lr=0.125, capturable=True, master_weights=True),
    "adam on the host": lambda p: ADAM.kind(p, lr=0.125),
    "lamb": lambda p: MIXED_LAMB.kind(p, **LAMB),
    "lamb fp16 copies": lambda p: MIXED_LAMB.kind(p, reduced_precision_dtype=torch.float16, **LAMB),
}
every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
SCALE = 8.0


def make(dtype: torch.dtype, build: Build) -> tuple[list[nn.Parameter], Any]:
    params = [nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    return params, build(groups)


def backward(params: list[nn.Parameter], factor: float, step: int) -> torch.Tensor:
    """Gradients are exact, and those of the last parameter are multiplied by ``factor``."""
    coefficients = torch.tensor([0.5 + step, -1.5])
    losses = [(param.float() * coefficients).sum() for param in params]
    return losses[0] + losses[1] * factor


def snapshot(params: list[nn.Parameter], optimizer: Any) -> list[Any]:
    state = {k: v for k, v in clone_state(optimizer).items() if not k.endswith("master_param")}
    counts = [torch.tensor(int(group.get("step", 0))) for group in optimizer.param_groups]
    return [[param.detach().clone() for param in params], counts, state]


def assert_unchanged(before: list[Any], params: list[nn.Parameter], optimizer: Any) -> None:
    values, counts, state = snapshot(params, optimizer)
    for a, b in zip([*values, *counts], [*before[0], *before[1]], strict=True):
        assert_same(a, b)
    for key, value in state.items():  # state may have been made, as zeros
        assert_same(value, before[2].get(key, torch.zeros_like(value)))


@every_dtype
@every_build
@pytest.mark.parametrize("when", [None, 0, 1])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("far", [False, True], ids=["", "far from the host"])
@pytest.mark.parametrize(
    "through", [lambda s, o: s.step(o), lambda s, o: o.step(grad_scaler=s)], ids=["scaler", "apex"]
)
def test_scaled_training_is_unscaled_training(
    build: Build,
    dtype: torch.dtype,
    when: int | None,
    bad: float,
    through: Any,
    far: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A-16: an overflow changes nothing, not in the first step either, and for no group."""
    if far:
        far_from_the_host(monkeypatch)
    params, optimizer = make(dtype, build)
    plain, reference = make(dtype, build)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1000)
    for step in range(3):
        before = snapshot(params, optimizer)
        scaler.scale(backward(params, bad if step == when else 1.0, step)).backward()
        grad = params[0].grad.clone()
        with NoHostReads() if far else nullcontext():
            through(scaler, optimizer)
            scaler.update()
        if step == when:
            assert_unchanged(before, params, optimizer)
            assert_same(params[0].grad, grad)  # still scaled: nothing happened
            assert scaler.get_scale() == SCALE / 2
        else:
            backward(plain, 1.0, step).backward()
            reference.step(grad_scaler=None)
            for a, b in zip(params, plain, strict=True):
                assert_same(a.grad, b.grad)  # left unscaled
        optimizer.zero_grad()
        reference.zero_grad()
    for a, b in zip(params, plain, strict=True):
        if far:  # where the device counts steps, and corrects moments in float32
            assert torch.allclose(a, b, rtol=0, atol=8 * max(torch.finfo(dtype).eps, 2.0**-23))
        else:
            assert_same(a.detach(), b.detach())
    taken = 3 if when is None else 2
    assert [int(group["step"]) for group in optimizer.param_groups] == [taken] * 2


@pytest.mark.parametrize("far", [False, True], ids=["", "far from the host"])
@pytest.mark.parametrize("case", FUSED, ids=variant_id)
@pytest.mark.product
def test_autocast_and_scaler_of_torch_around_any_of_them(
    case: FusedCase, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What scripts do that leave amp behind: the usual loop, with a step skipped in it."""
    if far:
        far_from_the_host(monkeypatch)
    counts_on_host = case is EARLY_ADAM  # so that torch's scaler reads
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    twin = copy.deepcopy(model)
    optimizers = [case.kind(m.parameters(), **case.needs) for m in (model, twin)]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(3):
        x = torch.full((3, 4), 0.5 + step)
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(x).float().square().mean()
            if net is twin:
                if step != 1:
                    loss.backward()
                    optimizer.step()
                continue
            scaler.scale(loss * (math.inf if step == 1 else 1.0)).backward()
            with NoHostReads() if far and not counts_on_host else nullcontext():
                scaler.step(optimizer)
                scaler.update()
    assert scaler.get_scale() == SCALE / 2
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        # Corrections by counters on the device are within a few ulps of those by numbers.
        torch.testing.assert_close(a, b) if far else assert_same(a.detach(), b.detach())


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_other_keywords_are_refused(name: str) -> None:
    params, optimizer = make(torch.float32, BUILDS[name])
    backward(params, 1.0, 0).backward()
    act, kind = partial(optimizer.step, gradscaler=None), type(optimizer).__name__
    assert_refused("optim", "a misspelled grad_scaler", act, optimizer, kind=kind)


@every_build
def test_a_step_without_any_gradient(build: Build) -> None:
    params, optimizer = make(torch.float32, build)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    scaler.scale(torch.zeros(()))  # makes the scale
    scaler.step(optimizer)
    assert torch.equal(params[0], torch.tensor([1.0, -2.0]))


def test_only_device_counters_announce_the_protocol() -> None:
    param = nn.Parameter(torch.ones(1))
    early = ADAM.kind([param], max_grad_norm=1.0)  # counts on the host
    for case in FUSED:
        assert case.kind([param], **case.needs)._step_supports_amp_scaling is True
    assert ADAM.kind([param], capturable=True)._step_supports_amp_scaling is True
    assert early._step_supports_amp_scaling is False


@every_build
def test_half_gradients_do_not_underflow_when_unscaled(build: Build) -> None:
    """The update sees what the scale saved, although the gradient left behind cannot hold it."""
    params, optimizer = make(torch.float16, build)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**16), torch.tensor(0.0)
    for param in params:
        param.grad = torch.full_like(param, 2.0**-10)
    optimizer.step()
    for param in params:
        moment = optimizer.state[param]["exp_avg"]
        assert moment.tolist() == pytest.approx([0.1 * 2.0**-26] * 2, rel=1e-6)
        assert not param.grad.any()
