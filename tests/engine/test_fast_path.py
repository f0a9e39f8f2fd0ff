# SPDX-License-Identifier: BSD-3-Clause
"""What fused optimizers are spared: gradients of masters, second passes, waiting for the device."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import preamp
from cases.fused import FUSED, FusedCase, variant_id
from cases.host_reads import HostReads, NoHostReads, far_from_the_host
from cases.levels import EXACT, WITH_MASTERS
from cases.models import Parts, batch
from cases.tolerances import assert_same
from kit.compare import halves_match
from preamp.core.errors import LossScaleError
from preamp.engine import ledger
from preamp.kernels.by_device import ByDevice
from preamp.optimizers import FusedAdam, FusedSGD

every_class = pytest.mark.parametrize("case", FUSED, ids=variant_id)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


class Training:
    """A small model that is trained by a fused optimizer."""

    def __init__(self, level: str, build: Callable[[Any], Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Parts()
        self.optimizer = build(self.model.parameters())
        settings = {"opt_level": level, "verbosity": 0, **options}
        preamp.initialize(self.model, self.optimizer, **settings)
        self.engine = preamp.engine_of(self.model)
        if self.engine.policy.is_dynamic:
            self.engine.scaler(0).set_scale(64.0)  # from 2**16 on this model would skip some steps

    def backward(self, seed: int, factor: float = 1.0) -> None:
        inputs, target = batch(seed)
        loss = torch.nn.functional.mse_loss(self.model(inputs).float(), target) * factor
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()

    def run(self, steps: int, between: Callable[[Training], Any] = lambda _: None) -> None:
        for step in range(steps):
            self.backward(step)
            between(self)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> list[torch.Tensor]:
        masters = list(preamp.master_params(self.optimizer))
        return [p.detach().clone() for p in (*self.model.parameters(), *masters)]


def same_weights(a: Training, b: Training) -> None:
    for ours, wanted in zip(a.weights(), b.weights(), strict=True):
        assert_same(ours, wanted)


def read_gradients(training: Training) -> None:
    for master in preamp.master_params(training.optimizer):
        assert master.grad is not None


def count_calls(monkeypatch: pytest.MonkeyPatch, op: str) -> list[int]:
    """How many tensors each call of an op gets from now on."""
    counts: list[int] = []
    original = getattr(ByDevice, op)

    def count(self: Any, first: Any, *rest: Any) -> Any:
        counts.append(len(first))
        return original(self, first, *rest)

    monkeypatch.setattr(ByDevice, op, count)
    return counts


@with_masters
@pytest.mark.parametrize("order", [1, -1])
def test_each_gradient_is_unscaled_by_its_own_factor(level: str, order: int) -> None:
    """A clip of some parameters leaves the others theirs."""
    late, made = (Training(level, lambda p: FusedSGD(p, lr=0.5)) for _ in range(2))
    for training in (late, made):
        training.backward(0)
        few = list(training.model.parameters())[::order][:2]
        preamp.clip_grad_norm_(few, 0.01)
        if training is made:
            read_gradients(training)
        training.optimizer.step()
    same_weights(late, made)


@every_class
@with_masters
def test_gradients_of_masters_are_not_made(
    case: FusedCase, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(level, lambda p: case.kind(p, **case.needs))
    for op in ("widen_add", "cast_copy_"):
        calls = count_calls(monkeypatch, op)
        training.run(2, lambda t: preamp.clip_grad_norm_(t.optimizer, 0.1))
        assert sum(calls) == 0, op  # the update reads half gradients and rounds the weights
    assert halves_match(training.model)


@every_class
@with_masters
@pytest.mark.parametrize("to_none", [True, False, None], ids=["none", "zeros", "as constructed"])
def test_gradients_of_zeros_add_nothing(
    case: FusedCase, level: str, to_none: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero_grad obeys set_grad_none, and zeros have no float32 gradient made of them either."""
    training = Training(level, lambda p: case.kind(p, **case.needs))
    made = count_calls(monkeypatch, "widen_add")
    for step in range(3):
        training.backward(step)
        training.optimizer.step()
        training.optimizer.zero_grad(to_none)
        drops = training.optimizer.set_grad_none if to_none is None else to_none
        grads = [param.grad for param in training.model.parameters()]
        assert [grad is None for grad in grads] == [drops] * len(grads)
    assert made == []


@with_masters
def test_masters_that_a_step_hook_changes_are_rounded_again(level: str) -> None:
    torch.manual_seed(0)
    model = Parts()
    optimizer = FusedAdam(model.parameters())

    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for master in preamp.master_params(optimizer):
                master.clamp_(-0.01, 0.01)

    optimizer.register_step_post_hook(clamp)  # before the engine's own hook
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    inputs, target = batch(0)
    loss = torch.nn.functional.mse_loss(model(inputs).float(), target)
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert max(half.abs().max() for half in model.parameters()) <= 0.011
    assert halves_match(model)


# -- the norm that the census takes along ----------------------------------------------------


def clipped(level: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Training, Any]:
    """A training that was clipped once, and the list of later passes over its gradients."""
    training = Training(level, FusedAdam, loss_scale="dynamic", **options)
    training.run(1, lambda t: preamp.clip_grad_norm_(t.optimizer, 0.1))
    return training, count_calls(monkeypatch, "l2norm")


def norm_of(training: Training) -> torch.Tensor:
    grads = [m.grad for m in preamp.master_params(training.optimizer) if m.grad is not None]
    every = [torch.zeros(1), *grads]
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in every]))


every_scaled = pytest.mark.parametrize("level", EXACT)


@every_scaled
def test_clipping_again_takes_no_pass(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training, passes = clipped(level, monkeypatch)
    training.backward(1)
    norm = preamp.clip_grad_norm_(training.optimizer, 0.1)
    assert passes == []
    after = norm_of(training)
    assert norm > 0.1
    torch.testing.assert_close(after, torch.tensor(0.1, dtype=torch.float64), rtol=1e-4, atol=0)


def masters_of(training: Training) -> list[Any]:
    return list(preamp.master_params(training.optimizer))


def penalty(training: Training) -> None:
    """On the master of a weight whose half gradient is not there."""
    training.optimizer.zero_grad()
    loss = training.model(batch(1)[0], "a").float().square().mean()
    with preamp.scale_loss(loss, training.optimizer) as scaled:
        scaled.backward()
    masters_of(training)[2].double().square().sum().backward()


def written_outside(training: Training) -> None:
    """No loss scale is on what a backward outside of blocks makes."""
    training.optimizer.zero_grad()
    training.model(batch(1)[0]).float().square().mean().backward()
    params: Any = list(training.model.parameters())
    params[0].grad[1:] = 0
    params[2].grad.mul_(1)


def replaced(training: Training) -> None:
    for master in masters_of(training):
        master.grad = None
        master.grad = torch.full_like(master, 100.0)


CHANGES: dict[str, Callable[[Training], object]] = {
    "drop": lambda t: setattr(masters_of(t)[0], "grad", None),
    "accumulate": lambda t: t.backward(2),
    "assign": lambda t: setattr(masters_of(t)[0], "grad", torch.ones_like(masters_of(t)[0])),
    "write": lambda t: masters_of(t)[0].grad.mul_(3.0),
    "penalty": penalty,
    "written outside": written_outside,
    "replaced": replaced,
}


@every_scaled
@pytest.mark.parametrize("change", CHANGES)
def test_a_norm_of_other_gradients_is_taken_anew(
    level: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = clipped(level, monkeypatch)
    training.backward(1)
    CHANGES[change](training)
    norm = preamp.clip_grad_norm_(training.optimizer, math.inf)
    torch.testing.assert_close(norm.double(), norm_of(training), rtol=1e-5, atol=0)


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("again", [False, True])
def test_another_optimizer_of_the_weights_has_other_gradients(
    level: str, to_none: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = clipped(level, monkeypatch)
    other = FusedAdam(training.model.parameters())
    training.engine.close()
    optimizers: list[Any] = [training.optimizer, other]
    options: Any = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
    preamp.initialize(training.model, optimizers, **options)

    def backward(owners: Any, factor: float = 1.0) -> None:
        loss = training.model(batch(1)[0]).float().square().mean() * factor * 2.0**-8
        with preamp.scale_loss(loss, owners) as scaled:
            scaled.backward()

    backward(optimizers)
    for optimizer in optimizers:
        preamp.clip_grad_norm_(optimizer, math.inf)  # from now on the norm is taken along
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(optimizers)
    other.zero_grad(set_to_none=to_none)
    if again:
        backward([other], 3.0)
    norm = preamp.clip_grad_norm_(training.optimizer, math.inf)
    torch.testing.assert_close(norm.double(), norm_of(training), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_clipping_for_two_optimizers_of_the_same_weights(level: str) -> None:
    """What the first clip has shrunk is small already when the second one looks."""
    torch.manual_seed(0)
    model = Parts()
    optimizers = [FusedAdam(model.parameters()) for _ in range(2)]
    preamp.initialize(model, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    preamp.engine_of(model).scaler(0).set_scale(64.0)
    for _ in range(2):
        inputs, target = batch(0)
        loss = torch.nn.functional.mse_loss(model(inputs).float(), target)
        with preamp.scale_loss(loss, optimizers) as scaled:
            scaled.backward()
        first, second = (preamp.clip_grad_norm_(optimizer, 0.1) for optimizer in optimizers)
        assert first > 0.1
        torch.testing.assert_close(second, torch.tensor(0.1), rtol=1e-4, atol=0)
        for optimizer in optimizers:
            optimizer.zero_grad()


@every_scaled
def test_gradients_reduced_by_hand_have_another_norm(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """all_reduce writes to gradients without raising their version."""
    training, passes = clipped(level, monkeypatch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        training.backward(1)
        for param in training.model.parameters():
            assert param.grad is not None
            param.grad.data.mul_(3.0)  # as if there were more ranks
        norm = preamp.clip_grad_norm_(training.optimizer, math.inf)
    finally:
        dist.destroy_process_group()
    assert len(passes) == 1
    torch.testing.assert_close(norm.double(), norm_of(training), rtol=1e-5, atol=0)


@every_scaled
@pytest.mark.parametrize("clips", [True, False])
def test_a_norm_keeps_no_gradient_alive(level: str, clips: bool) -> None:
    training = Training(level, FusedAdam, loss_scale="dynamic")
    training.run(1, lambda t: preamp.clip_grad_norm_(t.optimizer, 0.1))
    training.backward(1)
    grads = [weakref.ref(param.grad) for param in training.model.parameters()]
    if clips:
        preamp.clip_grad_norm_(training.optimizer, 0.1)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert [grad() for grad in grads if grad() is not None] == []


def test_the_census_takes_a_norm_only_while_somebody_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training("O2", FusedAdam)
    asked: list[bool] = []
    original = ByDevice.census

    def note(self: Any, grads: Any, device: Any, **options: Any) -> Any:
        asked.append(options["with_norm"])
        return original(self, grads, device, **options)

    monkeypatch.setattr(ByDevice, "census", note)
    training.run(2, lambda t: preamp.clip_grad_norm_(t.optimizer, 0.1))
    training.run(2)
    assert asked == [False, True, True, False]


def test_scaled_squares_that_overflow_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = clipped("O0", monkeypatch)
    training.engine.scaler(0).set_scale(2.0**24)
    training.backward(1, factor=1e13)  # finite, but times 2**24 too large to be squared
    norm = preamp.clip_grad_norm_(training.optimizer, math.inf)
    assert torch.isfinite(norm)
    torch.testing.assert_close(norm.double(), norm_of(training), rtol=1e-5, atol=0)


# -- the device decides ----------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)


def train_with_overflow(training: Training, *, unread: bool) -> None:
    for step in range(4):
        inputs, target = batch(step)
        out = training.model(inputs).float()
        loss = torch.nn.functional.mse_loss(out, target) * (math.inf if step == 1 else 1.0)
        with preamp.scale_loss(loss, training.optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(training.optimizer, 0.5)
        if unread:
            with NoHostReads():
                training.optimizer.step()
        else:
            training.optimizer.step()
        training.optimizer.zero_grad()


CLIPS: dict[str, tuple[int, Callable[[Training], object]]] = {
    # How often the host reads in a step at most, and what happens after `unscale_`: whether there
    # was an overflow, and what the script did; torch reads, too, and a clip is looked at before and
    # after.
    "nothing": (2, lambda _: None),
    "by torch": (3, lambda t: torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.01)),
    "by preamp": (3, lambda t: preamp.clip_grad_norm_(t.optimizer, 0.01)),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_after_unscale_the_host_reads_at_most_thrice(
    clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script did to gradients, and the overflow with it; torch reads the overflow too."""
    most, act = CLIPS[clip]
    near, far = (Training("O2", lambda p: FusedSGD(p, lr=0.5, momentum=0.9)) for _ in range(2))
    for step in range(5):
        unscaled_step(near, act, step)
    far_from_the_host(monkeypatch)
    reads = HostReads(monkeypatch)
    for step in range(5):
        before = reads.number
        with reads:
            unscaled_step(far, act, step)
        assert 0 < reads.number - before <= most
    same_weights(far, near)


def unscaled_step(training: Training, act: Callable[[Training], object], step: int) -> None:
    scaler = preamp.GradScaler(training.optimizer)
    inputs, target = batch(step)
    out = training.model(inputs).float()
    loss = torch.nn.functional.mse_loss(out, target) * (math.inf if step == 2 else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(training.optimizer)
    act(training)
    scaler.step(training.optimizer)
    scaler.update()
    training.optimizer.zero_grad()


BUILDS = {
    **{case.name: (lambda p, case=case: case.kind(p, **case.needs)) for case in FUSED},
    "torch AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-4, fused=True),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_the_device_skips_as_the_host_does(
    name: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[Training] = []
    for unread in (False, True):
        with monkeypatch.context() as patch:
            if unread:
                far_from_the_host(patch)
                # A flag has always come on the CPU, and would be looked at in the next step.
                patch.setattr(ledger._Flag, "has_come", lambda _: False)
            training = Training(level, BUILDS[name], loss_scale="dynamic")
            train_with_overflow(training, unread=unread and name != "torch AdamW")
            results.append(training)
            assert training.engine.steps_applied == 3
            assert training.engine.steps_skipped == 1
            assert [cause.step for cause in training.engine.overflow_causes] == [2]
            assert not training.engine.last_step_skipped
            assert training.engine.loss_scale() == 32.0
    states = [training.engine.state_dict() for training in results]
    assert states[0] == states[1]
    counters = [t.optimizer.state_dict()["param_groups"][0].get("step") for t in results]
    assert counters[0] == counters[1]
    for a, b in zip(results[0].weights(), results[1].weights(), strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("far")
def test_the_message_comes_when_the_outcome_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    training = Training("O2", FusedAdam)
    training.engine.verbosity = 1
    training.backward(0, factor=math.inf)
    training.optimizer.step()
    training.optimizer.zero_grad()
    assert "Gradient overflow" not in capsys.readouterr().out
    training.backward(1)
    training.optimizer.step()
    assert "Gradient overflow.  Skipping step" in capsys.readouterr().out


@pytest.mark.usefixtures("far")
def test_training_that_cannot_go_on_stops_a_step_later() -> None:
    training = Training("O2", FusedAdam, max_consecutive_skips=2)
    for _ in range(2):
        training.backward(0, factor=math.inf)
        training.optimizer.step()
        training.optimizer.zero_grad()
    training.backward(0, factor=math.inf)
    with pytest.raises(LossScaleError, match="2 optimizer steps in a row skipped"):
        training.optimizer.step()
    assert len(training.engine.ledger.causes) == 2


@pytest.mark.usefixtures("far")
def test_a_failed_step_leaves_no_signals() -> None:
    training = Training("O2", FusedAdam)
    training.backward(0)
    training.optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        training.optimizer.step()
    assert not hasattr(training.optimizer, "found_inf")
    assert not hasattr(training.optimizer, "grad_scale")


@pytest.mark.usefixtures("far")
class TestUnknownOutcomes:
    """Steps that the device has decided on and the host has not asked about."""

    @pytest.fixture(autouse=True)
    def on_the_way(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ledger._Flag, "has_come", lambda _: False)

    def test_a_later_step_of_another_optimizer_stays_the_latest(self) -> None:
        model, weight = Parts(), torch.nn.Parameter(torch.ones(2))
        optimizers = [FusedAdam(model.parameters()), torch.optim.SGD([weight], lr=0.1)]
        preamp.initialize(model, optimizers, opt_level="O1", loss_scale="dynamic", verbosity=0)
        engine = preamp.engine_of(model)
        engine.scaler(0).set_scale(64.0)
        loss = model(batch(0)[0]).float().sum() * math.inf
        for optimizer, value in zip(optimizers, (loss, weight.sum()), strict=True):
            with preamp.scale_loss(value, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
        assert not engine.last_step_skipped
        assert (engine.steps_applied, engine.steps_skipped) == (1, 1)

    def test_steps_from_before_loading_do_not_count(self) -> None:
        training = Training("O2", FusedAdam)
        state = training.engine.state_dict()
        training.run(2)
        training.engine.load_state_dict(state)
        assert training.engine.steps_applied == 0
        assert training.engine.state_dict() == state

    def test_close_closes_where_scaling_cannot_go_on(self) -> None:
        training = Training("O2", FusedAdam, max_consecutive_skips=2)
        for _ in range(3):
            training.backward(0, factor=math.inf)
            training.optimizer.step()
            training.optimizer.zero_grad()
        training.engine.close()
        assert training.engine.closed
        assert training.engine.steps_skipped == 3
