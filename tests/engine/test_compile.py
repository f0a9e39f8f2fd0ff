# SPDX-License-Identifier: BSD-3-Clause
"""``torch.compile`` of what runs between two steps: the same numbers, in one graph if it can."""

import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional as F

import preamp
from cases.host_reads import NoHostReads, far_from_the_host
from cases.levels import CASTING_FUNCTIONS, LEVEL_NAMES
from kit.loops import begin, scaled_backward
from preamp.numerics import NumericsRecord, StepRecord
from preamp.optim.fused import base, checks
from preamp.optimizers import FusedAdam, FusedLAMB

# torch's compiler looks at the gradients of what it is given, and warns of it itself.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


class Perceptron(nn.Module):
    """Linear layers, a norm, functions that O1 casts either way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x)))).softmax(dim=-1)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


class Training:
    """A model, and its loss as a function that can be compiled."""

    def __init__(self, make: Any, level: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = make()
        self.optimizer = FusedAdam(self.model.parameters(), lr=0.01)
        self.loss: Any = self._loss
        # Casts that are on around the model are part of its graph.
        settings = {"opt_level": level, "verbosity": 0, "scope": "thread", **options}
        preamp.initialize(self.model, self.optimizer, **settings)

    def _loss(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.model(x).float(), target)

    def run(self, steps: int) -> list[float]:
        losses: list[float] = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 8, generator=generator)
            loss = self.loss(x, torch.ones(8, 4))
            with preamp.scale_loss(loss, self.optimizer) as scaled, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, about its own compiler
                scaled.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


# torch's compiler takes seconds: the quick suite has one level.
@pytest.mark.parametrize("level", ["O1", pytest.param("O2", marks=pytest.mark.full)])
def test_gradients_are_dropped_within_a_compiled_function(level: str) -> None:
    """In a graph without masters; those are dropped between two."""
    model = Perceptron()
    optimizer = begin(level, model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaled_backward(model(torch.ones(8, 8)).float().sum(), optimizer)
    has_masters = preamp.OPT_LEVELS[level].master_weights

    @torch.compile(backend="eager", fullgraph=not has_masters)
    def drop_and_add(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        return x + 1

    assert drop_and_add(torch.ones(())) == 2
    assert [param.grad for param in optimizer.param_groups[0]["params"]] == [None] * 6


@dataclass(frozen=True)
class Way:
    """How a training is compiled, and whether its one graph has no break, traced once.

    Not where functions are cast: a hook of the model turns that on, which no graph can do.
    """

    loss: Callable[[Training], Any] = lambda training: compiled(training._loss)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    make: Any = Perceptron
    is_whole: Callable[[str], bool] = lambda level: level not in CASTING_FUNCTIONS


def compiled(what: Any) -> Any:
    return torch.compile(what, backend="aot_eager")


def of_a_model(training: Training) -> Any:
    """Torch runs the hooks of the outermost module outside; its forward is one graph."""
    model = compiled(training.model)
    return lambda x, target: F.mse_loss(model(x).float(), target)


MEASURED = {"numerics": "full", "numerics_every": 1}
WAYS = {
    "the loss": Way(),
    "the loss, measured": Way(options=MEASURED),
    "the loss, watched": Way(options={"overflow": "trace"}),
    "the loss, casts in the model only": Way(options={"scope": "model"}),
    "the model": Way(of_a_model, is_whole=lambda _: True),
    "the model, casts in it only": Way(of_a_model, {"scope": "model"}, is_whole=lambda _: True),
    "before initialize": Way(lambda training: training._loss, make=lambda: compiled(Perceptron())),
}


def cases() -> Iterator[Any]:
    """The quick suite has one level of each."""
    for name, level in itertools.product(WAYS, LEVEL_NAMES):
        quick = "O2" if name in ("the loss, measured", "the loss, watched") else "O1"
        yield pytest.param(name, level, marks=[] if level == quick else [pytest.mark.full])


@pytest.mark.parametrize(("name", "level"), [*cases()])
def test_compiled_training_is_the_same(name: str, level: str) -> None:
    way = WAYS[name]
    training = Training(way.make, level, loss_scale=64.0, **way.options)
    training.loss = way.loss(training)
    losses = training.run(2)
    first = graphs()
    preamp.engine_of(training.model).scaler(0).set_scale(32.0)  # a number, and not traced again
    losses += training.run(4)[2:]
    if name != "before initialize":
        assert bool(torch._dynamo.utils.counters["graph_break"]) is not way.is_whole(level)
        one = first == 1 or way.loss is of_a_model  # beside which torch traces the model's hooks
        assert (graphs() == first and one) or not way.is_whole(level), "traced again"
    if MEASURED.items() <= way.options.items():
        history = preamp.engine_of(training.model).history
        assert [record.losses[0] for record in history.of(StepRecord)] != []
        assert len(history.of(NumericsRecord)) == 6
    options = {key: value for key, value in way.options.items() if key == "scope"}
    assert_same_training(training, losses, Training(Perceptron, level, loss_scale=64.0, **options))


def assert_same_training(ours: Training, losses: list[float], eager: Training) -> None:
    preamp.engine_of(ours.model).close()
    torch._dynamo.reset()
    wanted = eager.run(2)
    wanted += eager.run(4)[2:]
    tolerance = 2e-2 if preamp.engine_of(eager.model).policy.half_dtype else 1e-5
    assert losses == pytest.approx(wanted, rel=tolerance)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_generated_code(level: str) -> None:
    pytest.importorskip("setuptools")
    training = Training(Perceptron, level)
    training.loss = torch.compile(training._loss, fullgraph=level not in CASTING_FUNCTIONS)
    losses = training.run(2)
    losses += training.run(4)[2:]
    assert_same_training(training, losses, Training(Perceptron, level))


# -- what is left undone while a graph is captured; tests/devices has whole steps -------------


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaled_backward(model(torch.ones(1, 2)).float().sum(), optimizer)
    with NoHostReads():
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB])
def test_a_counter_of_the_host_is_not_captured(
    kind: Any, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replays would be the same step; a tensor is counted, whatever the optimizer."""
    far_from_the_host(monkeypatch)
    model = torch.nn.Linear(2, 1)
    optimizer = begin(level, model, kind(model.parameters(), lr=0.125), loss_scale=1.0)
    _step(model, optimizer)
    before = model.weight.detach().clone()
    for module in (base, checks):
        monkeypatch.setattr(module, "is_capturing", lambda _: True)
    with pytest.raises(preamp.PreampStateError) as refused:
        _step(model, optimizer)
    assert str(refused.value).startswith(
        "optimizer.step() was captured in a CUDA graph with group['step']=1. Replays see"
    )
    assert torch.equal(model.weight, before)
    assert optimizer.param_groups[0]["step"] == 1
    optimizer.zero_grad()
    group = optimizer.param_groups[0]
    group["step"] = torch.tensor(group["step"], dtype=torch.int32)
    _step(model, optimizer)
    assert int(group["step"]) == 2
    assert not torch.equal(model.weight, before)


def test_new_state_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would zero the moments."""
    far_from_the_host(monkeypatch)
    model = torch.nn.Linear(2, 1)
    optimizer = begin("O5", model, FusedAdam(model.parameters(), lr=0.125, capturable=True))
    for module in (base, checks):
        monkeypatch.setattr(module, "is_capturing", lambda _: True)
    with pytest.raises(preamp.PreampStateError, match="state it would make or convert"):
        _step(model, optimizer)
    assert not any(optimizer.state.values())
