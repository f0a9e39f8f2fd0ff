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


def large() -> nn.Linear:
    """Its output is 160,000 for ones."""
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.fill_(40000.0)
        layer.bias.zero_()
    return layer


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_too_large_for_float16(level: str) -> None:
    found = traced(nn.Sequential(nn.Identity(), large()), level)
    assert (found.module, found.phase, found.dtype) == ("1", "forward", "float16")
    assert found.float32 is not None
    assert (found.float32.found, found.float32.max_abs) == ("finite", 160000.0)
    assert "finite, up to 1.6e+05; float16 ends at 65,504." in found.told()
    record = overflow(1, trace=found)
    assert from_json(to_json(record)) == record


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize(
    ("function", "kind"),
    [(lambda x: x / (x * 0), "inf"), (lambda x: (x * 0 + 1000).exp(), "inf"), (torch.log, "nan")],
)
def test_no_precision_helps(level: str, function: Any, kind: str) -> None:
    model = Layer(function)
    nn.init.constant_(model.linear.weight, -1.0 if kind == "nan" else 1.0)
    found = traced(model, level)
    assert found.phase == "forward"
    assert found.float32 is not None
    assert (found.float32.found, found.float32.max_abs) == (kind, None)
    assert f"In float32 it is {kind} as well" in found.told()


def test_too_large_on_the_way() -> None:
    found = traced(Layer(lambda x: (x * 0 + 100) ** 4 / 1e5), "O2")
    assert found.float32 is not None
    assert found.float32.max_abs == 1000.0
    assert "on the way it leaves float16's range, 6e-08 to 65,504." in found.told()
    # What is named is the function, and so is what it was given.
    assert (found.operation, found.operation_max_abs, found.input_max_abs) == ("pow", 100.0, 1.0)
    assert "from values up to 100." in found.told()


def test_a_zero_that_a_function_fails_at_is_told() -> None:
    """Its largest value tells nothing; and float16 has no such small eps."""
    found = traced(Layer(lambda x: x * torch.rsqrt(x.sub(1).relu() + 1e-8)), "O2")
    assert (found.operation, found.operation_min) == ("rsqrt", 0.0)
    assert ", in rsqrt at " in found.told()
    assert "inf in its float16 output, from zeros. In float32 it is finite" in found.told()


def test_what_lies_far_beyond_float16_is_not_laid_to_it() -> None:
    layer = large()
    with torch.no_grad():
        layer.weight.mul_(1e4)
    found = traced(nn.Sequential(nn.Identity(), layer), "O1")
    assert found.float32 is not None
    assert found.float32.max_abs == pytest.approx(1.6e9)
    assert "times float16's largest number, 65,504: before the precision, look at" in found.told()
    assert "bfloat16" not in found.told()


def test_masters_and_not_rounded_weights() -> None:
    model = nn.Sequential(nn.Identity(), large())
    with torch.no_grad():
        model.get_parameter("1.weight").fill_(40001.0)  # 40,000 in float16
    found = traced(model, "O2")
    assert found.float32 is not None
    assert found.float32.max_abs == 160004.0


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


# -- what cannot be tried --------------------------------------------------------------------------


def test_a_try_that_fails_is_told() -> None:
    def choose(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float32:
            raise RuntimeError("halves only,\nplease.")
        return x * torch.inf

    found = traced(Layer(choose), "O2", steps=2)
    assert found.phase == "forward"
    assert found.float32 is not None
    assert found.told().endswith(
        "It could not be computed in float32: RuntimeError: halves only, please."
    )


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_what_casts_to_half_itself_tells_nothing(level: str) -> None:
    found = traced(Layer(lambda x: x.half() * 0 + 3e5), level)
    if level == "O0":  # nothing that it has or gets is half
        assert found.float32 is None
        return
    assert found.float32 is not None
    assert found.float32.why == "it casts to float16 itself"


def test_arguments_that_were_written_to() -> None:
    class Square(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2.0) * 65504.0

    found = traced(nn.Sequential(nn.Linear(4, 4), Square()), "O2")
    assert found.float32 is not None
    assert found.float32.why == "it has written to its arguments"


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
