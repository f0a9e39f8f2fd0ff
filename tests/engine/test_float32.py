# SPDX-License-Identifier: BSD-3-Clause
"""What float32 makes of a forward that a watched step names, and that trying it changes nothing."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.records import overflow
from cases.tolerances import assert_same
from kit.loops import scaled_step
from preamp.numerics import TraceRecord
from preamp.numerics.records import from_json, to_json
from preamp.watch import float32, trace


@pytest.fixture(autouse=True, scope="module")
def nobody_listens_afterwards() -> Iterator[None]:
    yield
    gc.collect()


class Layer(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], calls: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.function(self.linear(x))


def traced(model: nn.Module, level: str, *, steps: int = 1) -> TraceRecord:
    """Train on ones; return the trace of the last step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options: dict[str, Any] = {"overflow": "trace", "loss_scale": "dynamic", "verbosity": 0}
    preamp.initialize(model, optimizer, opt_level=level, **options)
    engine = preamp.engine_of(optimizer)
    engine.scaler(0).set_scale(1.0)
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).float().square().mean()
        scaled_step(loss, optimizer)
    assert len(engine.overflow_causes) == steps
    found = engine.overflow_causes[-1].trace
    assert found is not None
    return found


def large(weight: float = 40000.0) -> nn.Linear:
    """Its output is four times the weight for ones."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.zero_()
    return layer


BETWEEN = "on the way it leaves float16's range, 6e-08 to 65,504."
FAR = "times float16's largest number, 65,504: before the precision, look at"
FOUND: list[tuple[str, Any, Any, str]] = [  # levels, a model, what float32 finds, and the words
    ("O1 O2 O3", large, 160000.0, "finite, up to 1.6e+05; float16 ends at 65,504."),
    ("O2", lambda: Layer(lambda x: (x * 0 + 100) ** 4 / 1e5), 1000.0, BETWEEN),
    ("O2", lambda: Layer(lambda x: torch.rsqrt(x * 0 + 1e-8)), 1e4, "output, from zeros. In float"),
    ("O1", lambda: large(4e8), 1.6e9, FAR),
    ("O2", lambda: large(40001.0), 160004.0, ""),  # of masters and not of rounded weights
    ("O1 O2 O5", lambda: Layer(lambda x: x / (x * 0)), "inf", "In float32 it is inf as well"),
    ("O1 O2 O5", lambda: Layer(lambda x: (x * 0 - 1).log()), "nan", "In float32 it is nan as well"),
]


@pytest.mark.parametrize(
    ("level", "make", "finds", "words"),
    [(level, *row) for levels, *row in FOUND for level in levels.split()],
)
def test_what_float32_finds_is_told(level: str, make: Any, finds: Any, words: str) -> None:
    found = traced(nn.Sequential(nn.Identity(), make()), level)
    assert (found.module, found.phase) == ("1", "forward")
    assert found.float32 is not None
    is_finite = isinstance(finds, float)
    assert found.float32.found == ("finite" if is_finite else finds)
    assert found.float32.max_abs == (pytest.approx(finds) if is_finite else None)
    assert words in found.told()
    record = overflow(1, trace=found)
    assert from_json(to_json(record)) == record


class Scaled(nn.Module):
    """Multiplies by a number of its own, which float16 cannot hold."""

    def __init__(self, kind: str, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        number = torch.tensor([1.0, value])
        if kind == "buffer":
            self.register_buffer("number", number)
        else:
            self.number = nn.Parameter(number, requires_grad=kind == "weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.number.to(x.dtype)[1]


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("kind", ["buffer", "frozen", "weight"])
@pytest.mark.parametrize("value", [1e6, -1e6])
@pytest.mark.filterwarnings("ignore:The cast to float16 changes buffers")
def test_what_the_models_own_cast_has_lost(level: str, kind: str, value: float) -> None:
    """Nobody has its float32 value but a master, so float32 is not told to fail as well."""
    found = traced(nn.Sequential(nn.Identity(), Scaled(kind, value)), level)
    assert (found.module, found.phase) == ("1", "forward")
    assert found.float32 is not None
    if kind == "weight" and level == "O2":
        assert (found.float32.found, found.held) == ("finite", "1.number")
        return
    assert found.told().endswith(
        " It could not be computed in float32: its 'number' is infinite in float16 already, as a "
        "cast makes what is too large for it; keep_fp32 leaves it as it is."
    )
    if value > 0:  # minus infinity may be a mask, so there the product is named
        assert found.told().startswith(
            "'1.number' was inf in float16 already when the forward of '1' (Scaled) used it: "
            "nothing in this step was seen to make it so. "
        )


# -- nothing changes -------------------------------------------------------------------------------


class Noisy(nn.Module):
    """Has buffers that training changes, draws random numbers, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5)
        self.own = Layer(lambda x: x)
        self.large = large()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.norm(x + torch.rand_like(x)))
        x = self.own(x).float()
        return torch.nn.functional.linear(x.to(self.large.weight.dtype), self.large.weight) * 4000.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_nothing_changes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tried = Noisy()
    left = copy.deepcopy(tried)
    heard: list[int] = []
    for model in (tried, left):
        model.own.register_forward_hook(lambda *_: heard.append(1))
    numbers: list[torch.Tensor] = []
    for model in (tried, left):
        torch.manual_seed(1)
        found = traced(model, level, steps=2)
        numbers.append(torch.rand(3))
        assert (found.float32 is not None) == (model is tried)
        monkeypatch.setattr(trace, "compute", lambda *_: None)
    assert len(heard) == 4
    assert_same(numbers[0], numbers[1])
    assert tried.own.calls == left.own.calls == 2
    for ours, theirs in zip(tried.buffers(), left.buffers(), strict=True):
        assert_same(ours, theirs)
    assert len(list(tried.buffers())) == 3


def test_random_numbers_are_those_of_the_forward() -> None:
    drawn: list[float] = []

    def draw(x: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(()).item())
        return x * 0 + 2e5

    assert traced(Layer(draw), "O2").float32
    assert drawn[0] == drawn[1]


def test_far_from_the_host_only_what_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """There each look waits for the device."""
    monkeypatch.setattr(trace, "host_reaches", lambda _: False)
    assert traced(nn.Sequential(nn.Identity(), large()), "O2").float32 is None
    found = traced(nn.Sequential(nn.Identity(), large()), "O2", steps=2).float32
    assert (found and found.max_abs) == 160000.0


# -- what cannot be tried --------------------------------------------------------------------------


def choose(x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        raise RuntimeError("halves only,\nplease.")
    return x * torch.inf


class Square(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2.0) * 65504.0


WHY = [
    ("RuntimeError: halves only, please", lambda: Layer(choose)),
    ("it casts to float16 itself", lambda: Layer(lambda x: x.half() * 0 + 3e5)),
    ("it has written to its arguments", lambda: nn.Sequential(nn.Linear(4, 4), Square())),
]


@pytest.mark.parametrize(("why", "make"), WHY)
def test_what_cannot_be_tried_is_told(why: str, make: Callable[[], nn.Module]) -> None:
    found = traced(make(), "O2", steps=2 if "halves" in why else 1)
    assert found.phase == "forward"
    assert found.float32 is not None
    assert found.float32.why == why
    assert f"It could not be computed in float32: {why}" in found.told()


def test_what_may_talk_to_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32, "has_other_ranks", lambda: True)
    own = traced(Layer(lambda x: x * torch.inf), "O2")
    assert own.float32 is not None
    assert own.float32.why == "it may talk to other ranks"
    torchs = traced(nn.Sequential(nn.Identity(), large()), "O2")
    assert torchs.float32 is not None
    assert torchs.float32.found == "finite"


def test_a_backward_is_not_tried() -> None:
    found = traced(Layer(lambda x: (x * 0).sqrt()), "O2")
    assert (found.phase, found.float32) == ("backward", None)
