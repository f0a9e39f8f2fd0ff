# SPDX-License-Identifier: BSD-3-Clause
"""What a step costs: calls of Python, gradients of masters, second passes, waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import preamp
from cases.fused import FUSED, FusedCase, variant_id
from cases.host_reads import HostReads, far_from_the_host
from cases.levels import WITH_MASTERS
from cases.models import Parts, values
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.loops import begin, scaled_backward
from kit.pair import Pair
from preamp.engine import ledger
from preamp.kernels.by_device import ByDevice
from preamp.optimizers import FusedAdam, FusedSGD
from step_map import calls_per_parameter, make_step, trace

every_class = pytest.mark.parametrize("case", FUSED, ids=variant_id)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


def iterate(pair: Pair, count: int, act: Callable[[Pair], object] = lambda _: None) -> None:
    """Whole iterations of preamp's side, with an act between backward and step."""
    for index in range(count):
        pair.ours(index)
        act(pair)
        pair.optimizer.step()
        pair.optimizer.zero_grad()


def overflow(pair: Pair, count: int) -> None:
    for _ in range(count):
        pair.overflow()
        pair.optimizer.step()
        pair.optimizer.zero_grad()


def count_calls(monkeypatch: pytest.MonkeyPatch, op: str) -> list[int]:
    """How many tensors each call of an op gets from now on."""
    counts: list[int] = []
    original = getattr(ByDevice, op)

    def count(self: Any, first: Any, *rest: Any) -> Any:
        counts.append(len(first))
        return original(self, first, *rest)

    monkeypatch.setattr(ByDevice, op, count)
    return counts


@every_class
@with_masters
def test_gradients_of_masters_are_not_made(
    case: FusedCase, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(level, lambda params: case.kind(params, **case.needs))
    for op in ("widen_add", "cast_copy_"):
        calls = count_calls(monkeypatch, op)
        iterate(pair, 2, lambda pair: preamp.clip_grad_norm_(pair.optimizer, 0.01))
        assert sum(calls) == 0, op  # the update reads half gradients and rounds the weights
    assert halves_match(pair.model)


@every_class
@with_masters
@pytest.mark.parametrize("to_none", [True, False, None], ids=["none", "zeros", "as constructed"])
def test_gradients_of_zeros_add_nothing(
    case: FusedCase, level: str, to_none: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero_grad obeys set_grad_none, and zeros have no float32 gradient made of them either."""
    pair = Pair(level, lambda params: case.kind(params, **case.needs))
    optimizer: Any = pair.optimizer
    made = count_calls(monkeypatch, "widen_add")
    for step in range(3):
        pair.ours(step)
        optimizer.step()
        optimizer.zero_grad(to_none)
        drops = optimizer.set_grad_none if to_none is None else to_none
        assert {param.grad is None for param in pair.model.parameters()} == {drops}
    assert made == []


# -- the device decides ----------------------------------------------------------------------


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)


CLIPS: dict[str, tuple[int, Callable[[Pair], object]]] = {
    # How often the host reads in a step at most, and what happens after `unscale_`: whether there
    # was an overflow, and what the script did; torch reads, too, and a clip is looked at before and
    # after.
    "nothing": (2, lambda _: None),
    "by torch": (3, lambda pair: torch.nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)),
    "by preamp": (3, lambda pair: preamp.clip_grad_norm_(pair.optimizer, 0.01)),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_after_unscale_the_host_reads_at_most_thrice(
    clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the script did to gradients, and the overflow with it; torch reads the overflow too."""
    most, act = CLIPS[clip]

    def step(pair: Pair, index: int) -> None:
        scaler = preamp.GradScaler(pair.optimizer)
        scaler.scale(pair.loss(index) * (math.inf if index == 2 else 1.0)).backward()
        scaler.unscale_(pair.optimizer)
        act(pair)
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()

    near, far = (Pair("O2", lambda ps: FusedSGD(ps, lr=0.5, momentum=0.9)) for _ in range(2))
    for index in range(5):
        step(near, index)
    far_from_the_host(monkeypatch)
    reads = HostReads(monkeypatch)
    for index in range(5):
        before = reads.number
        with reads:
            step(far, index)
        assert 0 < reads.number - before <= most
    for ours, wanted in zip(values(far.optimizer), values(near.optimizer), strict=True):
        assert_same(ours, wanted)


@pytest.mark.usefixtures("far")
def test_the_message_comes_when_the_outcome_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    pair = Pair("O2", FusedAdam)
    pair.engine.verbosity = 1
    overflow(pair, 1)
    assert "Gradient overflow" not in capsys.readouterr().out
    iterate(pair, 1)
    assert "Gradient overflow.  Skipping step" in capsys.readouterr().out


@pytest.mark.usefixtures("far")
def test_a_failed_step_leaves_no_signals() -> None:
    pair = Pair("O2", FusedAdam)
    pair.ours(0)
    pair.optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        pair.optimizer.step()
    assert {"found_inf", "grad_scale"}.isdisjoint(vars(pair.optimizer))


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the host hear of no outcome that it has not asked about."""
    far_from_the_host(monkeypatch)
    monkeypatch.setattr(ledger._Flag, "has_come", lambda _: False)


@pytest.mark.usefixtures("unknown")
def test_a_later_step_of_another_optimizer_stays_the_latest() -> None:
    model, weight = Parts(), torch.nn.Parameter(torch.ones(2))
    optimizers = [FusedAdam(model.parameters()), torch.optim.SGD([weight], lr=0.1)]
    begin("O1", model, optimizers)
    losses = (model.a.bias.sum() * math.inf, weight.sum())
    for optimizer, loss in zip(optimizers, losses, strict=True):
        scaled_backward(loss, optimizer)
        optimizer.step()
    engine = preamp.engine_of(model)
    assert not engine.last_step_skipped
    assert (engine.steps_applied, engine.steps_skipped) == (1, 1)


@pytest.mark.usefixtures("unknown")
def test_steps_from_before_loading_do_not_count() -> None:
    pair = Pair("O2", FusedAdam)
    state = pair.engine.state_dict()
    iterate(pair, 2)
    pair.engine.load_state_dict(state)
    assert pair.engine.steps_applied == 0
    assert pair.engine.state_dict() == state


@pytest.mark.usefixtures("unknown")
def test_close_closes_where_scaling_cannot_go_on() -> None:
    pair = Pair("O2", FusedAdam, max_consecutive_skips=2)
    overflow(pair, 3)
    pair.engine.close()
    assert pair.engine.closed
    assert pair.engine.steps_skipped == 3


# -- what a steady step costs in Python ------------------------------------------------------------

HOWS: list[dict[str, Any]] = [{}, {"clips": True}, {"storage": "split"}]
COSTS = [
    *((name, how, 2) for name in ("FusedAdam", "FusedSGD", "FusedLAMB") for how in HOWS),
    ("AdamW", {}, 8),  # it reads each gradient several times, and each read of a master's is a call
]


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(("optimizer", "how", "calls"), COSTS)
def test_a_parameter_costs_few_calls(
    level: str, optimizer: str, how: dict[str, Any], calls: int
) -> None:
    assert calls_per_parameter(level, optimizer, **how) <= calls


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize(
    ("optimizer", "files", "functions"),
    [("FusedAdam", 20, 180), ("AdamW", 19, 165), ("FusedSGD", 23, 190), ("FusedLAMB", 25, 209)],
)
def test_a_step_enters_few_files(level: str, optimizer: str, files: int, functions: int) -> None:
    """Who follows one step opens no more; what is off, such as recording, is in none of them.

    Comprehensions count as functions before Python 3.12.
    """
    entered, _ = trace(make_step(level, optimizer, 50, clips=True))
    paths = {path for path, _ in entered}
    assert len(entered) <= functions
    assert len(paths) <= files
    assert not any(path.startswith("watch/") for path in paths)
    entries = entered.elements()  # before Python 3.11 without the class's name
    ops = [name.split(".")[-1] for path, name in entries if path == "kernels/by_device.py"]
    assert ops.count("widen_add") == (optimizer == "AdamW")  # all gradients of masters in one op
