# SPDX-License-Identifier: BSD-3-Clause
"""``torch.compile`` of what runs between two steps: the same numbers, in one graph if it can."""

import shutil
import warnings
from collections.abc import Iterator
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

# torch's compiler takes seconds: the quick suite has one level.
levels = pytest.mark.parametrize(
    "level", ["O1", *(pytest.param(n, marks=pytest.mark.full) for n in LEVEL_NAMES if n != "O1")]
)

PLAIN_LEVELS = [name for name in LEVEL_NAMES if name not in CASTING_FUNCTIONS]
plain_levels = pytest.mark.parametrize(
    "level", ["O2", *(pytest.param(n, marks=pytest.mark.full) for n in PLAIN_LEVELS if n != "O2")]
)


class Perceptron(nn.Module):
    """Linear layers, a norm, functions that O1 casts either way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x)))).softmax(dim=-1)


class Attention(nn.Module):
    """Attention over the rows of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.last = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(x)).reshape(1, -1, 2, 12).transpose(1, 2).chunk(3, dim=-1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.last(mixed.transpose(1, 2).reshape(-1, 8))


models = pytest.mark.parametrize("make", [Perceptron, Attention])


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graph_breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])


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


@levels
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


def close(training: Training) -> None:
    preamp.engine_of(training.model).close()


def assert_same_training(ours: Training, losses: list[float], eager: Training) -> None:
    close(ours)
    wanted = eager.run(len(losses))
    tolerance = 2e-2 if preamp.engine_of(eager.model).policy.half_dtype else 1e-5
    assert losses == pytest.approx(wanted, rel=tolerance)
    close(eager)


@models
@plain_levels
def test_the_loss_is_one_graph(make: Any, level: str) -> None:
    """``fullgraph=True`` raises at a graph break; later steps trace nothing again.

    Not where functions are cast: a hook of the model turns that on, which no graph can do.
    """
    training = Training(make, level)
    training.loss = torch.compile(training._loss, backend="aot_eager", fullgraph=True)
    losses = training.run(1)
    assert graphs() == 1
    if preamp.engine_of(training.model).policy.is_dynamic:
        preamp.engine_of(training.model).scaler(0).set_scale(256.0)
    losses += training.run(3)[1:]
    assert graphs() == 1, "traced again"
    training.loss = training._loss
    eager = Training(make, level)
    if preamp.engine_of(eager.model).policy.is_dynamic:
        preamp.engine_of(eager.model).scaler(0).set_scale(256.0)
    assert losses[0] == pytest.approx(eager.run(1)[0], rel=2e-2)


@models
@levels
def test_training_by_a_compiled_loss_is_the_same(make: Any, level: str) -> None:
    training = Training(make, level, loss_scale=64.0)
    training.loss = torch.compile(training._loss, backend="aot_eager")
    losses = training.run(4)
    assert bool(graph_breaks()) is (level in CASTING_FUNCTIONS)
    assert_same_training(training, losses, Training(make, level, loss_scale=64.0))


@levels
@pytest.mark.parametrize("scope", ["model", "thread"])
def test_a_compiled_model_has_no_breaks(level: str, scope: str) -> None:
    """Torch runs the hooks of the outermost module outside; its forward is one graph."""
    training = Training(Perceptron, level, loss_scale=64.0, scope=scope)
    compiled = torch.compile(training.model, backend="aot_eager", fullgraph=True)
    training.loss = lambda x, target: F.mse_loss(compiled(x).float(), target)
    losses = training.run(3)
    assert graph_breaks() == {}
    eager = Training(Perceptron, level, loss_scale=64.0, scope=scope)
    assert_same_training(training, losses, eager)


@pytest.mark.parametrize("numerics", ["light", "full"])
@plain_levels
def test_statistics_break_no_graph(level: str, numerics: str) -> None:
    options = {"numerics": numerics, "numerics_every": 1, "loss_scale": 64.0}
    training = Training(Perceptron, level, **options)
    training.loss = torch.compile(training._loss, backend="aot_eager", fullgraph=True)
    losses = training.run(3)
    assert graph_breaks() == {}
    history = preamp.engine_of(training.model).history
    assert [record.losses[0] for record in history.of(StepRecord)] == losses
    assert len(history.of(NumericsRecord)) == 3
    plain = Training(Perceptron, level, loss_scale=64.0)
    plain.loss = torch.compile(plain._loss, backend="aot_eager", fullgraph=True)
    assert losses == plain.run(3)


@levels
def test_a_model_compiled_before_initialize(level: str) -> None:
    training = Training(
        lambda: torch.compile(Perceptron(), backend="aot_eager"), level, loss_scale=64.0
    )
    losses = training.run(3)
    assert_same_training(training, losses, Training(Perceptron, level, loss_scale=64.0))


@pytest.mark.parametrize("level", CASTING_FUNCTIONS)
def test_casts_inside_the_model_only(level: str) -> None:
    """Outside its forward casts are off, so the hook has to turn them on: the graph breaks."""
    training = Training(Perceptron, level, loss_scale=64.0, scope="model")
    training.loss = torch.compile(training._loss, backend="aot_eager")
    losses = training.run(3)
    eager = Training(Perceptron, level, loss_scale=64.0, scope="model")
    assert_same_training(training, losses, eager)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("level", ["O4", "O5"])
def test_generated_code(level: str) -> None:
    pytest.importorskip("setuptools")
    training = Training(Perceptron, level)
    training.loss = torch.compile(training._loss, fullgraph=level not in CASTING_FUNCTIONS)
    losses = training.run(3)
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
