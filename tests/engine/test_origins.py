# SPDX-License-Identifier: BSD-3-Clause
"""Whom a watched step names, and nobody where that was not seen; losses that do no harm."""

import gc
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, overrides
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from engine.test_trace import Watched
from preamp.core.torch_private.operations import OperationMode


@pytest.fixture(autouse=True, scope="module")
def nobody_listens_afterwards() -> Iterator[None]:
    yield
    gc.collect()


class Function(nn.Module):
    """A linear layer, and a function of what it returns."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def line_of(function: Callable[..., object], offset: int = 0) -> str:
    return f"test_origins.py:{inspect.getsourcelines(function)[1] + offset}"


# -- what no module has made -----------------------------------------------------------------------


class Cell(nn.Module):
    """Returns a number to train, and a state for the step after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by = 1.0

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y + state, y.exp() * self.by


KEPT: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda s: s,
    lambda s: torch.cat([s[:1], s[1:]]).clone(),
    lambda s: s.mT.contiguous().view(4, 2).t(),
    lambda s: torch.zeros(2, 4).copy_(s),
    lambda s: torch.zeros(3, 2, 4).index_copy_(0, torch.tensor([1]), s[None])[1],
    lambda s: s.clone().mul_(1.0),
]


@pytest.mark.parametrize("keep", KEPT)
def test_a_state_of_the_step_before(keep: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It is no data, whatever was done to it in between."""
    model = Cell()
    run = Watched("O0", model, overflow="trace")
    state = torch.zeros(2, 4)
    for index in range(3):
        model.by = math.inf if index == 1 else 1.0
        y, state = model(torch.ones(2, 4), state)
        run.learn(y.square().sum())
        assert len(run.engine.overflow_causes) == int(index > 1)
        state = keep(state.detach())
    assert run.told == ("Cell", "forward", "mul")
    assert run.trace.where.endswith(line_of(Cell.forward, 2))


def test_a_state_from_before_the_watching() -> None:
    """Whether it is data nobody knows, and that is said."""
    model = Cell()
    run = Watched("O0", model)
    y, state = model(torch.ones(2, 4), torch.full((2, 4), 1e38))
    run.learn(y.sum())
    run.engine.trace_overflow()
    run.learn(model(torch.ones(2, 4), state.detach() * math.inf)[0].square().sum())
    assert run.trace.told() == (
        "No module was seen to make it: the Cell itself was given inf in a float32 argument. "
        "Look at the batch first, then at what the program computes outside of its models or "
        "keeps from step to step."
    )


def test_a_state_that_is_kept_for_long_is_not_known() -> None:
    model = Cell()
    run = Watched("O0", model, overflow="trace")
    model.by = math.inf
    y, state = model(torch.ones(2, 4), torch.zeros(2, 4))
    run.learn(y.sum())
    state = state.detach()
    for _ in range(3):
        run.learn(model(torch.ones(2, 4), torch.zeros(2, 4))[0].sum())
    run.learn(model(torch.ones(2, 4), state)[0].square().sum())
    assert run.told is None


def bad_layer() -> nn.Linear:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.bias.fill_(math.nan)
    return layer


MADE: list[tuple[Callable[[torch.Tensor], torch.Tensor], str]] = [
    (lambda x: x, "data"),
    (lambda x: torch.stack([x[0], x[1]]).requires_grad_(), "data"),
    (lambda x: x.log(), "given"),
    (lambda x: x.log().detach()[:1], "given"),
    (lambda x: x.mul_(math.inf), "given"),
    (lambda x: (x.double() * 1e300).float(), "given"),
    (lambda x: bad_layer()(x).detach(), "given"),
]


@pytest.mark.parametrize(("make", "phase"), MADE)
def test_data_are_what_no_function_has_made(make: Any, phase: str) -> None:
    """Else it may be another model's, or computed by the program, and that is said."""
    run = Watched("O0", Function(torch.tanh), overflow="trace")
    run.learn(run.model(torch.ones(2, 4)).sum())
    run.learn(run.model(make(torch.full((2, 4), math.nan if phase == "data" else -1.0))).sum())
    assert run.told == ("Function", phase, "")
    assert "came in with the data" not in run.trace.told()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_weight_outside_of_the_watched_modules(is_frozen: bool) -> None:
    model, judge = Function(torch.tanh), bad_layer().requires_grad_(not is_frozen)
    run = Watched("O0", model, overflow="trace")
    run.learn(judge(model(torch.ones(2, 4))).square().sum())
    assert run.told == ("", "weight", "")
    assert "nan in a float32 parameter" in run.trace.told()


def test_data_that_another_thread_has_made() -> None:
    """It may have been with a model; functions are heard on one thread only."""
    model = Function(torch.exp)
    run = Watched("O0", model, overflow="trace")
    made: list[torch.Tensor] = []

    def features() -> None:
        with torch.no_grad():
            made.append(model(torch.full((2, 4), 1e30)).mean(0, keepdim=True))

    run.learn(model(torch.ones(2, 4)).sum())
    thread = threading.Thread(target=features)
    thread.start()
    thread.join()
    run.learn(model(made[0]).sum())
    assert run.told is None


# -- operations ------------------------------------------------------------------------------------


def later(x: torch.Tensor) -> torch.Tensor:
    """Which elements a causal mask hides."""
    return torch.ones_like(x, dtype=torch.bool).triu(1)


LOWEST: Any = np.float32(-math.inf)
HANDLED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: (x + torch.tensor([0.0, 0.0, 0.0, -math.inf])).softmax(-1),
    lambda x: x.masked_fill(later(x), LOWEST).softmax(-1),
    lambda x: (x + torch.full(x.shape, -math.inf).triu(1)).softmax(-1),
    lambda x: x.masked_fill(later(x), value=-math.inf).logsumexp(-1, keepdim=True) + x,
    lambda x: torch.where(x > 9.0, x, torch.tensor(-math.inf)).clamp(min=-1.0) + x,
    lambda x: torch.maximum(torch.empty_like(x).fill_(-math.inf), x),
    lambda x: x + 0 * (x.detach() * 0.0).log().shape[0],  # which nothing uses
    lambda x: F.scaled_dot_product_attention(
        x, x, x, attn_mask=torch.full((4, 4), -math.inf).triu(1)
    ),
]


@pytest.mark.parametrize("before", HANDLED)
def test_what_is_handled_is_not_named(before: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A mask, what makes one, and what does not lead to the loss."""

    def function(x: torch.Tensor) -> torch.Tensor:
        y = before(x)
        return (y * 1e30).square()

    run = Watched("O0", Function(function), overflow="trace")
    run.learn(run.model(torch.ones(4, 4)).sum())
    assert run.told == ("Function", "forward", "square")
    assert run.trace.where.endswith(line_of(function, 2))


WRITES: list[tuple[Callable[[torch.Tensor], object], str]] = [
    (lambda values: values.mul_(0.0).add_(-math.inf), "softmax"),
    (lambda values: values.mul_(0.0).add_(math.nan), ""),
    (lambda values: values.__setitem__(slice(None), math.nan), ""),
]


@pytest.mark.parametrize(("write", "named"), WRITES)
def test_what_is_written_through_data(write: Callable[[torch.Tensor], object], named: str) -> None:
    """Torch counts no such write for the tensor. Minus infinity is a mask; nan is not softmax's."""

    def function(x: torch.Tensor) -> torch.Tensor:
        scores = x * 1.0
        write(scores.data)
        return scores.softmax(-1)

    run = Watched("O0", Function(function), overflow="trace")
    run.learn(run.model(torch.ones(2, 4)).square().sum())
    assert run.told == ("Function", "forward", named)


PARTS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda both: both[1:],
    lambda both: both.narrow(0, 1, 1).flatten(),
    lambda both: both.unbind()[1],
]


@pytest.mark.parametrize("part_of", PARTS)
@pytest.mark.parametrize("other", [math.inf, 2.0**125, -(2.0**125)])
def test_what_is_told_of_a_part_is_not_of_the_whole(part_of: Any, other: float) -> None:
    """Neither what made the rest of it infinite, nor the magnitudes of the rest."""

    def function(x: torch.Tensor) -> torch.Tensor:
        both = torch.stack([x * 0.0 + other, x * 0.0 + 2.0**100])
        return part_of(both).square()

    run = Watched("O0", Function(function), overflow="trace")
    run.learn(run.model(torch.ones(2, 4)).square().sum())
    assert run.told == ("Function", "forward", "square")
    assert run.trace.where.endswith(line_of(function, 2))
    assert (run.trace.operation_min, run.trace.operation_max_abs) == (2.0**100, 2.0**100)


def test_a_mask_of_everything_that_came_in() -> None:
    run = Watched("O0", Function(torch.tanh), overflow="trace")
    mask = torch.zeros(4, 4)
    mask[2] = -math.inf
    run.learn((run.model(torch.ones(4, 4)) + mask).softmax(-1).square().sum())
    assert run.told == ("", "forward", "softmax")


def test_a_mask_that_a_module_keeps() -> None:
    model = Function(lambda x: (x + model.mask).softmax(-1))
    model.register_buffer("mask", torch.full((4, 4), -math.inf))
    run = Watched("O0", model, overflow="trace")
    run.learn(model(torch.ones(4, 4)).sum())
    assert run.told == ("Function", "forward", "softmax")


def test_a_weight_that_the_program_computes_of_data() -> None:
    run = Watched("O0", nn.Linear(4, 4), overflow="trace")
    for rewards in (torch.arange(3.0), torch.zeros(3)):
        y = run.model(torch.ones(3, 4)).square().mean(1)
        run.learn((y * (rewards / rewards.std())).mean())
    assert run.told == ("", "forward", "div")


class Words(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.full((4, 4), math.nan)


def test_no_range_is_told_where_nothing_floating_went_in() -> None:
    run = Watched("O0", Words(4, 4), overflow="trace")
    run.learn(run.model(torch.arange(4)).square().sum())
    assert run.trace.told() == (
        "The first to go wrong was the forward of the Words itself, in full at "
        f"{run.trace.where}: nan in its float32 output."
    )


class Steep(torch.autograd.Function):
    """Passes values on; its gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * math.inf


@pytest.mark.parametrize(
    "after", [lambda x: x, lambda x: x.relu(), lambda x: x.float().contiguous(), torch.sin]
)
def test_the_backward_of_the_programs_own_function(after: Callable[[Any], Any]) -> None:
    """It is told by its name, not by that of the function after it."""
    run = Watched("O0", Function(lambda x: after(Steep.apply(x))), overflow="trace")
    run.learn(run.model(torch.ones(2, 4)).sum())
    assert run.told == ("Function", "backward", "Steep")
    run = Watched("O0", Function(lambda x: x), overflow="trace")
    run.learn(after(Steep.apply(run.model(torch.ones(2, 4)))).sum())
    assert run.told == ("", "backward", "Steep")


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_model_can_be_traced_by_torch_jit(is_watched: bool) -> None:
    """What watching reads is no part of the graph."""
    run = Watched("O0", Function(torch.tanh), overflow="trace")
    tanh = run.model if is_watched else Function(torch.tanh)
    features = run.model(torch.ones(2, 4)).detach()
    traced: Any = torch.jit.trace(tanh, features)
    torch.testing.assert_close(traced(features), tanh(features))
    assert "aminmax" not in str(traced.inlined_graph)


# -- several steps, and what stays -----------------------------------------------------------------


def tensors_alive() -> int:
    gc.collect()
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("trains", [False, True])
def test_what_was_watched_does_not_add_up(trains: bool) -> None:
    """Neither evaluations do, nor a state that goes from step to step."""
    before, alive = tensors_alive(), list[int]()
    run, state = Watched("O0", Cell(), overflow="trace"), torch.zeros(2, 4)
    for number in range(50):
        is_step = trains or number == 0
        with torch.set_grad_enabled(is_step):
            y, state = run.model(torch.ones(2, 4), state * 0.5)
        if is_step:
            run.learn(y.sum())
        state = state.detach()
        alive.append(tensors_alive() - before)
    assert max(alive[10:30]) == max(alive[30:]) < 24  # numbers that were read lie together


class Mode(TorchFunctionMode):
    """Does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("default", [None, "cpu"])
def test_functions_are_heard_below_the_programs_own_modes(default: str | None) -> None:
    """Which end by taking off the topmost."""
    gc.collect()  # engines of other tests listen until then
    stack = overrides._get_current_function_mode_stack
    model = Function(torch.exp)
    run = Watched("O0", model, overflow="trace")
    torch.set_default_device(default)
    try:
        for around in (Mode, partial(torch.device, "cpu")):
            with around(), Mode(), torch.device("cpu"):
                own = [mode for mode in stack() if not isinstance(mode, OperationMode)]
                y = model(torch.ones(2, 4))
                assert [mode for mode in stack() if not isinstance(mode, OperationMode)] == own
            assert len(stack()) == (1 if default is None else 2)
        y = model(torch.full((2, 4), 1e30))
    finally:
        torch.set_default_device(None)
    run.learn(y.sum())
    assert run.told == ("Function", "forward", "exp")
    run.engine.close()
    assert not stack()


def hidden(y: torch.Tensor) -> torch.Tensor:
    ratio = torch.zeros(3) / torch.zeros(3)
    return torch.where(ratio == 1, y.square().mean(1), ratio).mean()


LOSSES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: F.cross_entropy(y, torch.full((3,), -100)),  # all of it is ignored
    hidden,
    lambda y: y.square().mean(1)[:0].mean(),
]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_nothing_is_said_of_a_loss_whose_gradients_are_finite(
    level: str, loss_of: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Watched(level, nn.Linear(4, 4), overflow="skip", verbosity=1)
    for _ in range(2):
        run.learn(loss_of(run.model(torch.ones(3, 4)).float()))
    assert "nan" not in capsys.readouterr().out
    assert (run.engine.steps_skipped, run.engine.overflow_causes) == (0, [])


# -- derivatives of derivatives --------------------------------------------------------------------


class Critic(nn.Module):
    """Its derivative at zero is infinite, or finite with an infinite derivative of its own."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.power = power
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.factor
        return y.square().sum(1).sqrt() if self.power == 0.5 else y.abs().pow(self.power).sum(1)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
@pytest.mark.parametrize(("power", "loss_is_finite"), [(0.5, False), (1.5, True)])
def test_a_penalty_names_the_line_at_its_gradient(
    level: str, power: float, loss_is_finite: bool
) -> None:
    model = Critic(power)
    run = Watched(level, model, overflow="trace")
    for factor in (1.0, 0.0):
        model.factor = factor
        x = torch.ones(3, 4, requires_grad=True)
        y = model(x).float()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        norm = slope.square().sum(1)
        penalty = norm.add(1.0)
        loss = y.mean() + penalty.mean()
        run.learn(loss)
    (cause,) = run.engine.overflow_causes
    assert cause.loss_was_finite is loss_is_finite
    assert cause.trace is not None
    wanted = ("backward", "grad") if loss_is_finite else ("given", "square")
    assert (cause.trace.phase, cause.trace.operation) == wanted
