# SPDX-License-Identifier: BSD-3-Clause
"""Stop anywhere, resume by the standard recipe, and get bitwise what an uninterrupted run gets."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from kit.compare import halves_match, same
from kit.loops import (
    OPTIMIZERS,
    everything,
    make,
    masters,
    started,
    train_plain,
    train_step,
    weights,
)
from kit.run import Net
from preamp import amp

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)
STEPS = 6
POISONED = frozenset({1, 3})


class Run:
    """One training run with a scheduler and overflows at fixed steps."""

    def __init__(self, level: str, optimizer: str, seed: int = 0, **arguments: Any) -> None:
        self.level, self.arguments = level, arguments
        self.model, self.optimizer = make(seed, optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

    def initialize(self) -> None:
        preamp.initialize(
            self.model, self.optimizer, opt_level=self.level, verbosity=0, **self.arguments
        )

    def train(self, steps: range, poisoned: frozenset[int] = POISONED) -> None:
        for step in steps:
            train_step(self.model, self.optimizer, step, poison=step in poisoned)
            self.scheduler.step()

    def save(self) -> bytes:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "amp": preamp.state_dict(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, file)
        return file.getvalue()

    def load(self, state: dict[str, Any], *parts: str) -> None:
        for part in parts:
            if part == "amp":
                preamp.load_state_dict(self.optimizer, state["amp"])
            else:
                getattr(self, part).load_state_dict(state[part])

    def numbers(self) -> dict[str, Any]:
        return {**everything(self.model, self.optimizer), "lr": self.scheduler.get_last_lr()}


# Which parts are loaded before initialize, and which after.
ORDERS = {
    "after": ((), ("model", "optimizer", "amp", "scheduler")),
    "before": (("model", "optimizer", "scheduler"), ("amp",)),
    "model before": (("model",), ("amp", "optimizer", "scheduler")),
    "optimizer before": (("optimizer",), ("scheduler", "amp", "model")),
    "optimizer first": ((), ("optimizer", "model", "scheduler", "amp")),
}


def check_resume(level: str, optimizer: str, stop: int, order: str, **arguments: Any) -> None:
    whole = Run(level, optimizer, **arguments)
    whole.initialize()
    whole.train(range(stop))
    saved = whole.save()
    whole.train(range(stop, STEPS))
    expected = whole.numbers()
    preamp.engine_of(whole.model).close()

    resumed = Run(level, optimizer, 1, **arguments)  # other weights to begin with
    state = torch.load(io.BytesIO(saved), weights_only=True)
    before, after = ORDERS[order]
    resumed.load(state, *before)
    resumed.initialize()
    resumed.load(state, *after)
    resumed.train(range(stop, STEPS))
    assert same(resumed.numbers(), expected)
    preamp.engine_of(resumed.model).close()


# The order of the loads decides what is overwritten; the step at which the run stopped only changes
# the values, so that no fault needs the level, the optimizer, the order and that step together.
@pytest.mark.threes
@ALL_LEVELS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stop", [0, 2, 4])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_resume(level: str, optimizer: str, order: str, stop: int) -> None:
    check_resume(level, optimizer, stop, order, loss_scale="dynamic")


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_the_check_can_fail() -> None:
    """A run resumed without its optimizer's state is another run."""
    whole = Run("O2", "Adam")
    whole.initialize()
    whole.train(range(2))
    state = torch.load(io.BytesIO(whole.save()), weights_only=True)
    resumed = Run("O2", "Adam", 1)
    resumed.initialize()
    resumed.load(state, "model", "amp", "scheduler")
    for run in (whole, resumed):
        run.train(range(2, STEPS))
    assert not same(resumed.numbers(), whole.numbers())


@pytest.mark.product
@ALL_LEVELS
@pytest.mark.parametrize("then", LEVEL_NAMES)
def test_resume_at_another_level(level: str, then: str) -> None:
    first = started(level, optimizer="Adam")
    train_step(*first, 0)
    state = copy.deepcopy({"model": first[0].state_dict(), "optimizer": first[1].state_dict()})
    second = started(then, 1, "Adam")
    second[0].load_state_dict(state["model"])
    second[1].load_state_dict(state["optimizer"])
    loaded = {k: v for k, v in second[0].state_dict().items() if "running" not in k}
    if then != "O3":
        assert same(loaded, {k: state["model"][k] for k in loaded})
    train_step(*second, 1)
    assert halves_match(second[0])
    assert all(p.dtype is torch.float32 or then == "O3" for p in amp.master_params(second[1]))


@ALL_LEVELS
def test_dynamic_scale_and_counters_are_restored(level: str) -> None:
    run = started(level, loss_scale="dynamic", num_losses=2)
    train_step(*run, 0, poison=True)
    train_step(*run, 1)
    engine = preamp.engine_of(run[0])
    engine.scaler(1).set_scale(16.0)
    saved = preamp.state_dict(run[0])
    other = started(level, 1, loss_scale="dynamic", num_losses=2)
    preamp.load_state_dict(other[1], saved)
    assert preamp.state_dict(other[0]) == saved
    assert preamp.engine_of(other[0]).loss_scale(1) == 16.0
    assert preamp.engine_of(other[0]).steps_skipped == engine.steps_skipped >= 1
    assert preamp.engine_of(other[0]).steps_applied == engine.steps_applied


# -- the model's state_dict ------------------------------------------------------------------


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_state_is_float32_and_does_not_alias(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    assert {v.dtype for k, v in state.items() if "num_batches" not in k} == {torch.float32}
    frozen = copy.deepcopy(state)
    halves = {name for name, p in model.named_parameters() if p.dtype is not torch.float32}
    train_step(model, optimizer, 1)
    assert same({k: state[k] for k in halves}, {k: frozen[k] for k in halves})
    for name in halves:
        state[name].zero_()
    assert all(p.abs().sum() > 0 for n, p in model.named_parameters() if n in halves)
    assert not any(value.requires_grad for value in state.values())


@MASTERS
def test_state_of_a_part_is_exact(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    whole = model.state_dict()
    assert same(
        dict(model.first.state_dict()), {k: whole[f"first.{k}"] for k in ("weight", "bias")}
    )
    other, _ = started(level, 1)
    other.first.load_state_dict(model.first.state_dict())
    assert same(other.state_dict()["first.weight"], whole["first.weight"])
    assert halves_match(other)


@MASTERS
def test_half_values_load_too(level: str) -> None:
    """A file that somebody saved from the raw parameters holds half values."""
    model, optimizer = started(level)
    half = next(p.dtype for p in model.parameters())
    state = {k: v.to(half) if v.is_floating_point() else v for k, v in Net().state_dict().items()}
    model.load_state_dict(state)
    assert same(model.state_dict()["first.weight"], state["first.weight"].float())
    train_step(model, optimizer, 0)
    assert halves_match(model)


def _without(state: dict[str, Any]) -> None:
    del state["first.weight"]


def _misshapen(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.ones(2, 2)


@MASTERS
@pytest.mark.parametrize(
    ("change", "strict", "error"),
    [(_without, False, ""), (_without, True, "Missing key"), (_misshapen, True, "size mismatch")],
)
def test_a_state_that_does_not_fit(level: str, change: Any, strict: bool, error: str) -> None:
    """As in torch, what fits is loaded all the same."""
    model, optimizer = started(level)
    before, target = model.state_dict(), Net().state_dict()
    change(target)
    if error:
        with pytest.raises(RuntimeError, match=error):
            model.load_state_dict(target, strict=strict)
    else:
        result = model.load_state_dict(target, strict=strict)
        assert result.missing_keys == ["first.weight"]
    after = model.state_dict()
    assert same(after["first.weight"], before["first.weight"])
    assert same(after["last.weight"], target["last.weight"])
    assert halves_match(model)
    train_step(model, optimizer, 0)
    assert halves_match(model)


@MASTERS
def test_loading_leaves_the_file_s_tensors_alone(level: str) -> None:
    model, optimizer = started(level)
    state = Net().state_dict()
    kept = copy.deepcopy(state)
    ids = {key: id(value) for key, value in state.items()}
    model.load_state_dict(state)
    train_step(model, optimizer, 0)
    assert same(dict(state), dict(kept))
    assert {key: id(value) for key, value in state.items()} == ids


class Extra(nn.Module):
    """Extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_extra_state(level: str) -> None:
    model = preamp.initialize(Extra(), opt_level=level, verbosity=0)
    state = model.state_dict()
    assert state["_extra_state"] == {"note": "new"}
    state["_extra_state"] = {"note": "loaded"}
    model.load_state_dict(state)
    assert model.note == "loaded"


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@MASTERS
def test_tied_weights(level: str) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    exact = model.a.weight.detach().clone()
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    state = model.state_dict()
    assert same(state["a.weight"], exact)
    assert same(state["b.weight"], exact)
    target = Tied().state_dict()
    model.load_state_dict(target)
    assert same(model.state_dict()["b.weight"], target["b.weight"])
    assert model.a.weight is model.b.weight


# -- files of Apex ---------------------------------------------------------------------------


@ALL_LEVELS
def test_file_in_the_format_of_apex(level: str) -> None:
    """float32 model (widened halves), torch's optimizer dict, and the scalers' numbers."""
    source, trained = make(optimizer="Adam")
    train_plain(source, trained, 0)
    file = io.BytesIO()
    state = {
        "model": {
            k: v.half().float() if v.is_floating_point() else v
            for k, v in source.state_dict().items()
        },
        "optimizer": trained.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}},
    }
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    model, optimizer = make(1, "Adam")
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    assert amp.state_dict() == state["amp"]
    assert same(model.state_dict()["first.weight"], state["model"]["first.weight"]) or level in (
        "O3",
    )
    train_step(model, optimizer, 1)
    assert halves_match(model)
    assert all(p.isfinite().all() for p in model.parameters())


@MASTERS
def test_masters_saved_as_a_list(level: str) -> None:
    """The recipe for exact masters under Apex: their list in the file, copied back by ``data``."""
    model, optimizer = started(level, optimizer="Adam")
    train_step(model, optimizer, 0)
    saved = copy.deepcopy([p.detach() for p in amp.master_params(optimizer)])
    widened = {
        k: v.to(next(model.parameters()).dtype).float() if "weight" in k else v
        for k, v in model.state_dict().items()
    }
    state = copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, 1)
    expected = masters(optimizer)
    other, second = started(level, 1, "Adam")
    other.load_state_dict(widened)
    second.load_state_dict(state)
    for param, value in zip(amp.master_params(second), saved, strict=True):
        param.data.copy_(value.data)
    assert same(masters(second), saved)
    train_step(other, second, 1)
    assert halves_match(other)
    assert len(expected) == len(masters(second))
    assert not same(weights(other), weights(model)) or same(masters(second), expected)
