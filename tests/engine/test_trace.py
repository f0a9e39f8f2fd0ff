# SPDX-License-Identifier: BSD-3-Clause
"""Watching the modules: what is told, and nothing else changes; whom, on generated overflows."""

import dataclasses
import functools
import gc
import inspect
import itertools
import math
import re
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import attribution
import preamp
from attribution import Score
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from cases.records import overflow
from kit.loops import scaled_backward, scaled_step
from kit.refusals import refused
from kit.run import Run
from preamp.numerics import Float32Record, TraceRecord
from preamp.numerics.records import from_json, to_json

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
Pair = namedtuple("Pair", ["kept", "nothing"])


class Spoil(nn.Module):
    """Multiplies by one, forward and backward, until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_by = self.backward_by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.forward_by
        by = self.backward_by
        if by != 1.0 and y.requires_grad:
            y.grad_fn.register_hook(lambda got, _: tuple(g if g is None else g * by for g in got))  # type: ignore[union-attr]
        return y


class Block(nn.Module):
    """A residual block with a module that writes in place, and a value that is handed through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, extra: Any = None) -> Any:
        return Pair(x + self.outer(self.act(self.inner(x))), extra)


class Model(nn.Module):
    """Blocks that are called by keyword, one of them twice, and an activation used three times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.spoil = Spoil()
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, self.blocks[0]):
            x = x + x.tanh() + block(x, extra=None).kept
        return self.last(self.spoil(x))


class Watched(Run):
    """A run of a model, its scale low enough for nothing to overflow by itself."""

    def __init__(self, level: str = "O2", model: Any = None, **options: Any) -> None:
        options = {"loss_scale": "dynamic", **options}
        super().__init__(level, model=Model if model is None else lambda: model, **options)
        self.optimizer.param_groups[0].update(lr=2.0**-8, momentum=0.0)
        if self.engine.policy.is_dynamic:
            self.engine.scaler(0).set_scale(2.0)
        self.forward: Callable[[torch.Tensor], torch.Tensor] = self.model

    def train(self, index: int = 0, *, factor: float = 1.0) -> torch.Tensor:
        """A step on a mean square of what ``forward`` gives."""
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
        return self.learn(self.forward(x).float().square().mean() * factor)

    def learn(self, loss: torch.Tensor) -> torch.Tensor:
        self.back(loss)
        self.play("step; zero")
        return loss.detach()

    @property
    def trace(self) -> Any:
        """What is told of the latest overflow; ``None`` where nobody is named."""
        assert self.engine.overflow_causes[-1].was_watched
        return self.engine.overflow_causes[-1].trace

    @property
    def where(self) -> tuple[str, str]:
        return self.trace.module, self.trace.phase

    @property
    def told(self) -> tuple[str, str, str] | None:
        trace = self.trace
        return None if trace is None else (trace.type, trace.phase, trace.operation)


def hooks_of(model: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]


# -- what is named -----------------------------------------------------------------------------


@pytest.mark.parametrize("lacks", [False, True])
def test_a_float16_overflow_in_the_forward(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told alike on CPUs without units for float16, where a float32 product is rounded."""
    monkeypatch.setattr("preamp.casting.functions.cpu_lacks_matmul", lambda _: lacks)
    run = Watched("O2")
    run.engine.trace_overflow()
    with torch.no_grad():
        run.model.first.weight.fill_(30000.0)
        run.model.first.bias.fill_(0.0)
    run.forward = lambda x: run.model(torch.full_like(x, 2.0))
    run.train()
    assert dataclasses.replace(run.trace, frames=[], where="", stack=[]) == TraceRecord(
        module="first",
        type="Linear",
        phase="forward",
        input_max_abs=2.0,
        output_found="inf",
        dtype="float16",
        operation="linear",
        operation_max_abs=30000.0,
        operation_min=0.0,  # of weights and biases
        float32=Float32Record(found="finite", max_abs=240000.0),
    )
    assert re.search(r"test_trace\.py:\d+$", run.trace.where)


@pytest.mark.parametrize("lacks", [False, True])
def test_a_float16_overflow_in_the_backward(lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights' gradient is the sum over the batch: 3 · 2 · 16384."""
    monkeypatch.setattr("preamp.casting.functions.cpu_lacks_matmul", lambda _: lacks)
    run = Watched("O2", nn.Linear(4, 2, bias=False))
    run.engine.scaler(0).set_scale(2.0**14)
    run.engine.trace_overflow()
    loss = run.model(torch.full((3, 4), 2.0)).float().sum()
    scaled_backward(loss, run.optimizer)
    run.optimizer.step()
    assert (run.trace.phase, run.trace.type, run.trace.output_found) == (
        "backward",
        "Linear",
        "inf",
    )
    assert run.trace.dtype == "float16"
    assert (run.trace.operation, run.trace.operation_max_abs) == ("linear", 2.0)
    assert run.trace.input_max_abs == 2.0**14  # and not the weights' gradient before rounding
    (cause,) = run.engine.overflow_causes
    assert cause.parameters == ("weight",)


class Keeping(nn.Module):
    """Uses all that a module can keep."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4).eval()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("sizes", torch.ones(4))
        self.attribute = torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x))
        for own in (self.frozen, self.sizes, self.attribute):
            x = x * own.to(x.dtype).reshape(1, 4)
        return self.last(x)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    "name", ["first.weight", "last.bias", "norm.running_mean", "frozen", "sizes", "attribute"]
)
def test_what_a_module_keeps_is_told_by_name(name: str, value: float, level: str) -> None:
    run = Watched(level, nn.Sequential(Keeping()), overflow="trace")
    run.train()
    with torch.no_grad():
        functools.reduce(getattr, name.split("."), run.model[0])[1] = value
    run.train()
    module = f"0.{name}".rpartition(".")[0]
    kind = "Keeping" if module == "0" else type(run.model.get_submodule(module)).__name__
    assert (run.trace.held, run.where) == (f"0.{name}", (module, "forward"))
    assert run.trace.told().startswith(
        f"'0.{name}' was {value} in {run.trace.dtype} already when the forward of {module!r} "
        f"({kind}) used it: nothing in this step was seen to make it so."
    )


# -- operations ------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Functions of torch, one to a line."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 2)
        self.limit = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(x)
        y = x.abs() + self.limit
        return torch.sqrt(y)


def test_all_calls_that_led_to_an_operation_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = Watched("O2", nn.Sequential(Plain()), overflow="trace")
    run.model[0].limit = -100.0
    for _ in range(2):
        run.train()
    first = inspect.getsourcelines(Plain.forward)[1]
    stack = run.engine.overflow_causes[-1].trace.stack
    assert re.search(rf"test_trace\.py:{first + 3}, in forward$", stack[0])
    assert any("in test_all_calls_that_led" in call for call in stack)
    assert not any(part in call for call in stack for part in ("/torch/", "src/preamp/"))
    assert capsys.readouterr().out.count(f"\n  {stack[0]}\n  {stack[1]}\n") == 1


def test_an_argument_that_its_function_cast_while_the_loss_stayed_finite() -> None:
    """Infinite in float16, saturated by tanh, and times a gradient of zero nan in the backward."""
    run = Watched(
        "O1", nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), overflow="trace"
    )
    x = torch.ones(3, 4)
    x[0, 0] = 7e4
    run.forward = lambda _: run.model(x)
    assert run.train().isfinite()
    assert run.where == ("0", "input cast")
    assert (run.trace.operation, run.trace.input_max_abs) == ("linear", float(x[0, 0]))


class Rows(nn.Module):
    """A product whose left argument has a row of nan, which the loss does not use."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.ones(3, 4))
        self.values = nn.Parameter(torch.full((4, 4), 8.0))
        self.product = product

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        hidden = torch.tensor([[True], [False], [False]])
        rows = self.scores.masked_fill(hidden, -math.inf).softmax(-1)
        return self.product(rows, self.values)[1:]


OF_ROWS = {
    "matmul": torch.matmul,
    "linear": F.linear,
    "einsum": functools.partial(torch.einsum, "ij,jk->ik"),
}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("is_large", [False, True])
def test_a_product_that_was_given_nan_is_not_named(name: str, is_large: bool) -> None:
    """What made it is, whether or not the left gradient is too large for float16."""
    run = Watched("O1", Rows(OF_ROWS[name]), overflow="trace")
    run.engine.scaler(0).set_scale(2.0**12 if is_large else 2.0)
    assert run.train().isfinite()
    assert (run.trace.operation, run.trace.output_found) == ("softmax", "nan")


# -- the message -------------------------------------------------------------------------------


def test_frames_are_of_what_was_seen_before() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    for param, value in zip(model.parameters(), (0.5, 0.25, 6e4, 0.0), strict=True):
        nn.init.constant_(param, value)
    run = Watched("O2", model, overflow="trace")
    run.learn(model(torch.ones(2, 4)).float().sum())
    first, relu = run.trace.frames[:2]
    assert (first.module, first.type, relu.module) == ("0", "Linear", "1")
    assert (first.inputs, first.outputs) == ([[1.0, 1.0]], [[2.25, 2.25]])
    assert (sorted(first.weights), relu.weights) == ([[0.25, 0.25], [0.5, 0.5]], [])
    record = overflow(1, trace=run.trace)
    assert from_json(to_json(record)) == record


def test_the_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    run = Watched(verbosity=1)
    run.engine.trace_overflow()
    capsys.readouterr()
    run.model.spoil.forward_by = math.inf
    run.train()
    out = capsys.readouterr().out
    assert out.startswith("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to")
    assert re.search(
        r"\)\. The first to go wrong was the forward of 'spoil' \(Spoil\), in mul at "
        r"\S*test_trace.py:\d+: \w+ in its float16 "
        r"output, from an input up to \S+\. In float32 it is \w+ as well, so its precision is not "
        r"the cause\.\n  \S*test_trace\.py:\d+, in forward\n",
        out,
    )


# -- when it begins and ends -------------------------------------------------------------------


@levels
@pytest.mark.parametrize("stays", [False, True])
def test_hooks_go_after_an_overflow_or_stay_on_request(level: str, stays: bool) -> None:
    run = Watched(level, overflow="trace" if stays else "skip")
    before = hooks_of(run.model)
    if not stays:
        run.engine.trace_overflow()
        run.engine.trace_overflow()
        assert all(now > then for now, then in zip(hooks_of(run.model), before, strict=True))
    for by in (1.0, math.inf, 1.0, math.inf):
        run.model.spoil.forward_by = by
        run.train()
    watched = [cause.was_watched for cause in run.engine.overflow_causes]
    assert watched == [True, stays]
    assert hooks_of(run.model) == before
    run.engine.close()
    assert set(hooks_of(run.model)) == {0}


def test_an_overflow_whose_forward_was_not_watched_does_not_count() -> None:
    run = Watched()
    run.model.spoil.forward_by = math.inf
    loss = run.model(torch.ones(3, 4)).float().sum()
    run.engine.trace_overflow()
    scaled_step(loss, run.optimizer)
    assert not run.engine.overflow_causes[0].was_watched
    run.train()
    assert run.engine.overflow_causes[1].trace is not None


@pytest.mark.parametrize("level", [n for n in LEVEL_NAMES if n not in WITH_MASTERS])
def test_steps_without_scale_loss_are_told_of_by_a_warning(level: str) -> None:
    run = Watched(level, loss_scale=1.0, overflow="trace")
    run.model(torch.ones(3, 4)).float().square().mean().backward()
    with pytest.warns(UserWarning, match="of this step nothing is told"):
        run.optimizer.step()
    run.optimizer.step()  # told once
    run.optimizer.zero_grad()
    run.train()


@pytest.mark.parametrize(("level", "scale"), [("O2", 128.0), *((n, 1.0) for n in LEVEL_NAMES)])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_static_scales(level: str, scale: float, way: str) -> None:
    """The step is taken, and told all the same."""
    run = Watched(level, loss_scale=scale, overflow="trace")
    setattr(run.model.spoil, f"{way}_by", math.inf)
    run.train()
    (cause,) = run.engine.overflow_causes
    assert not cause.was_skipped
    assert (cause.step, cause.old_scale, cause.new_scale) == (1, scale, scale)
    assert (run.trace.phase, cause.candidates) == (way, 1)
    assert (run.engine.steps_applied, run.engine.steps_skipped) == (1, 0)
    run.play("backward; step; step")  # the second of what is used up, without a warning


@pytest.mark.parametrize("value", ["stop", True, []])
def test_other_words_are_refused(value: Any) -> None:
    model = Model()
    with refused("engine", "unknown overflow", model, given=repr(value)):
        preamp.initialize(model, opt_level="O2", overflow=value)


def test_preamp_off() -> None:
    model = Model()
    preamp.initialize(model, enabled=False)
    preamp.engine_of(model).trace_overflow()
    assert set(hooks_of(model)) == {0}


# -- compiled and scripted models --------------------------------------------------------------


COMPILED: dict[str, Callable[[Any], Any]] = {
    "in place": lambda model: model.compile(backend="aot_eager"),
    "function": lambda model: torch.compile(model, backend="aot_eager"),
    "without a graph of its own": lambda model: torch.compile(model, backend="eager"),
    "with the loss": lambda model: torch.compile(
        lambda x: model(x).square().sum(), backend="eager"
    ),
    "scripted": lambda model: torch.jit.trace(model, torch.ones(3, 4)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("good_steps", [0, 1])
@pytest.mark.parametrize("way", COMPILED)
def test_of_a_model_that_is_compiled_as_a_whole_nothing_is_seen(
    way: str, good_steps: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """In its first step too; then it is watched no longer: hooks would have it compiled anew."""
    run = Watched("O1", nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), verbosity=1)
    before = hooks_of(run.model)
    run.forward = COMPILED[way](run.model) or run.model
    run.engine.trace_overflow()
    for _ in range(good_steps):
        run.train()
    capsys.readouterr()
    with torch.no_grad():
        run.model[2].bias.fill_(math.inf)
    run.train()
    (cause,) = run.engine.overflow_causes
    assert cause.was_watched
    assert cause.trace is None
    assert hooks_of(run.model) == before
    assert "). No module was seen to turn finite values into others: " in capsys.readouterr().out


def test_a_scripted_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Sequential(nn.Linear(4, 4))))
    run = Watched("O1", model, overflow="trace")
    run.train()
    with torch.no_grad():
        dict(model[1].named_parameters())["0.bias"].fill_(math.inf)
    run.train()
    assert run.where == ("", "forward")  # what it is in


def test_what_a_step_computed_goes_with_the_step() -> None:
    """Nothing of it waits for Python's garbage collector, which on a GPU would cost memory."""
    run = Watched("O2", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), overflow="trace")
    kept: list[weakref.ref[torch.Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            hidden = run.model[0](torch.ones(2, 4))
            weight = torch.ones(2, 1) / 2  # made from data between a forward and its loss
            kept += [weakref.ref(hidden), weakref.ref(weight)]
            run.learn((run.model[1](hidden).float() * weight).square().mean())
            del hidden, weight
        alive = [one() is not None for one in kept[:4]]
    finally:
        gc.enable()
    assert not any(alive)


@pytest.mark.parametrize(("scale", "is_told"), [(2.0**15, True), (1.0, False)])
def test_a_static_scale_above_one_may_be_smaller(
    scale: float, is_told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Watched("O2", nn.Linear(4, 4), loss_scale=scale, overflow="trace")
    run.train(factor=1e6)
    out = capsys.readouterr().out
    assert "The step is taken, since the loss scale is static" in out
    assert ("A smaller loss_scale can help; 'dynamic' finds one" in out) == is_told


# -- generated overflows whose cause is known; ``make bench`` has all of them ----------------------


def chosen() -> Iterator[attribution.Case]:
    """Each fault at each level it can be at; architectures and ways to train take turns."""
    possible = set(attribution.cases())
    pairs = itertools.product(attribution.FAULTS, attribution.LEVELS)
    kinds, ways = list(attribution.ARCHITECTURES), attribution.WAYS
    for number, (fault, level) in enumerate(pairs):
        turns = range(5 * number, 5 * number + len(ways))
        tried = (
            attribution.Case(kinds[turn % len(kinds)], fault, level, ways[turn % len(ways)])
            for turn in turns
        )
        yield from itertools.islice((case for case in tried if case in possible), 1)


def check(cases: list[attribution.Case], every_order: int) -> None:
    """Each case is answered, and rightly: the first parameter, the module, and the order."""
    parameter, module, order = Score("parameter"), Score("module"), Score("order")
    for case in cases:
        attribution.judge(case, parameter, module)
    orders = list(itertools.islice(attribution.order_cases(), 0, None, every_order))
    for one in orders:
        attribution.judge_order(*one, order)
    assert [wrong for score in (parameter, module, order) for wrong in score.wrong] == []
    assert (parameter.unknown, module.unknown, order.unknown) == (0, 0, 0)
    assert {case.fault for case in cases} == set(attribution.FAULTS)
    assert {case.architecture for case in cases} == set(attribution.ARCHITECTURES)
    assert {case.level for case in cases} == set(attribution.LEVELS)
    assert {case.way for case in cases} == set(attribution.WAYS)
    assert {program for program, _, _ in orders} == set(attribution.PROGRAMS)


@pytest.mark.filterwarnings("ignore")
def test_each_fault() -> None:
    """At one level; each architecture, level and way is among them."""
    by_fault = [list(some) for _, some in itertools.groupby(chosen(), lambda case: case.fault)]
    check([some[number % len(some)] for number, some in enumerate(by_fault)], 67)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_each_fault_at_each_level() -> None:
    check(list(chosen()), 13)


def test_a_wrong_answer_counts() -> None:
    parameter, module = Score("parameter"), Score("module")
    case = next(iter(attribution.cases()))
    attribution.FAULTS["lie"] = attribution.FAULTS[case.fault][0], attribution.Truth("1", "data")
    try:
        lie = attribution.Case(case.architecture, "lie", case.level, case.way)
        attribution.judge(lie, parameter, module)
    finally:
        del attribution.FAULTS["lie"]
    assert (parameter.right, len(module.wrong)) == (1, 1)
