# SPDX-License-Identifier: BSD-3-Clause
"""What is recorded of a step is of the gradients that it used, and nothing of it gets lost."""

import copy
import math
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import preamp
from cases.host_reads import far_from_the_host
from cases.levels import WITH_MASTERS
from cases.selection import examples
from kit.loops import loss_of, make, started, train_step
from kit.run import Net
from preamp.engine import ledger
from preamp.kernels.reference import tally
from preamp.numerics import (
    CastsRecord,
    History,
    MemoryRecord,
    NumericsRecord,
    Record,
    ResumeRecord,
    StepRecord,
    read_history,
)
from preamp.optimizers import FusedAdam
from preamp.watch import host_copies, recorder
from preamp.watch.meter import Meter


def history_of(thing: Any) -> History:
    return preamp.engine_of(thing).history


def backward(model: nn.Module, optimizer: Any, step: int, **arguments: Any) -> torch.Tensor:
    loss = loss_of(model, step)
    with preamp.scale_loss(loss, optimizer, **arguments) as scaled:
        scaled.backward()
    return loss.detach()


def largest(record: NumericsRecord) -> list[float]:
    """Of each gradient, without the loss scale."""
    return [t.max_abs / t.scale for t in record.tensors if t.what == "gradient"]


# -- whose numbers they are --------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_gradients_left_scaled_are_measured_as_their_sum(level: str) -> None:
    model, optimizer = started(level, numerics="light")
    preamp.engine_of(model).scaler(0).set_scale(16.0)
    for step in range(3):
        backward(model, optimizer, step, delay_unscale=step < 2)
    grads = [p.grad.abs().max().item() for p in preamp.master_params(optimizer)]
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert largest(record) == grads


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_used_up_gradients_are_no_later_steps(level: str) -> None:
    """The half ones stay where they are until they are zeroed."""
    model, optimizer = started(level, numerics="light", numerics_every=1)
    preamp.engine_of(model).scaler(0).set_scale(16.0)
    backward(model, optimizer, 0)
    optimizer.step()
    optimizer.step()
    first, second = history_of(model).of(NumericsRecord)
    halves = {name for name, p in model.named_parameters() if p.dtype is not torch.float32}
    assert halves <= {tensor.name for tensor in first.tensors}
    assert not halves & {tensor.name for tensor in second.tensors}


def test_gradients_whose_backward_was_not_measured_have_their_scale() -> None:
    """Loading counters in between makes the step another one, a measured one perhaps."""
    model, optimizer = started("O2", numerics="light", numerics_every=100)
    preamp.engine_of(model).scaler(0).set_scale(16.0)
    state = preamp.state_dict(model)
    train_step(model, optimizer, 0)
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    preamp.load_state_dict(model, state)
    optimizer.step()
    record = history_of(model).of(NumericsRecord)[-1]
    scales = {tensor.dtype: tensor.scale for tensor in record.tensors}
    assert scales == {"float16": 16.0, "float32": 1.0}  # float32 ones are unscaled by now


def test_line_searches_leave_the_last_backward() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O0", verbosity=0, numerics="light")
    seen = list[tuple[float, list[float]]]()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = backward(model, optimizer, 0)
        grads = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
        seen.append((loss.item(), grads))
        return loss

    optimizer.step(closure)
    assert len(seen) > 1
    (step,) = history_of(model).of(StepRecord)
    (record,) = history_of(model).of(NumericsRecord)
    assert (step.losses[0], largest(record)) == seen[-1]


def test_looks_that_are_overtaken_are_let_go() -> None:
    """A long accumulation keeps the numbers of one backward."""
    model, optimizer = started("O2", numerics="light")
    for step in range(5):
        backward(model, optimizer, step)
    (steps,) = preamp.engine_of(model).recorder._optimizers.values()
    (look,) = steps.pending.statistics.values()
    assert len(look.copies._tensors) == 1 + 2 * len(list(model.parameters()))


# -- nothing gets lost -------------------------------------------------------------------------


def test_loading_a_checkpoint_loses_no_record_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    path = tmp_path / "run.jsonl"
    model, optimizer = started("O5", numerics="light", numerics_every=100, history=path)
    state = preamp.state_dict(model)
    for step in range(3):
        train_step(model, optimizer, step)
    preamp.load_state_dict(model, state)
    records = read_history(path)
    assert [record.step for record in records if isinstance(record, StepRecord)] == [1, 2, 3]
    assert isinstance(records[-1], ResumeRecord)
    train_step(model, optimizer, 3)
    assert [record.step for record in history_of(model).of(StepRecord)] == [1]


def test_a_failing_listener_does_not_keep_a_checkpoint_from_counting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    model, optimizer = started("O5", numerics="light")
    state = preamp.state_dict(model)
    heard = list[Record]()

    def listener(record: Record) -> None:
        heard.append(record)
        if isinstance(record, StepRecord) and record.step == 2:
            raise RuntimeError("from a listener")

    for step in range(3):
        train_step(model, optimizer, step)
    preamp.engine_of(model).recorder.history.listen(listener)
    with pytest.raises(RuntimeError, match="from a listener"):
        preamp.load_state_dict(model, state)
    assert [getattr(record, "step", None) for record in heard] == [1, 1, 2, 3, 0]
    assert history_of(model).of(ResumeRecord) == [ResumeRecord(step=0, steps=[0])]


def test_memory_and_casts_are_taken_back_with_their_own_optimizer() -> None:
    """The first one may have made fewer steps than the others."""
    models = [Net(), Net()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    preamp.initialize(
        models, optimizers, opt_level="O1", verbosity=0, numerics="full", numerics_every=1
    )
    engine = preamp.engine_of(optimizers[0])
    for step in range(4):
        train_step(models[1], optimizers[1], step)
    train_step(models[0], optimizers[0], 0)
    state = engine.state_dict()
    for step in range(3):
        train_step(models[0], optimizers[0], step)
    for kind in (MemoryRecord, CastsRecord):
        assert max(record.step for record in engine.history.of(kind)) == 4
    engine.load_state_dict(state)  # steps [1, 4]
    for kind in (MemoryRecord, CastsRecord):
        assert {record.optimizer for record in engine.history.of(kind)} <= {0}
        assert all(record.step <= 1 for record in engine.history.of(kind))


def test_memory_is_counted_for_optimizers_without_state() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, numerics="light")
    for step in range(3):
        train_step(model, optimizer, step)
    (record,) = history_of(model).of(MemoryRecord)
    assert record.step == 2
    assert record.categories["optimizer state"] == 0
    assert record.categories["gradients"] == 2 * sum(
        p.numel() if p.dtype is torch.float16 else 2 * p.numel() for p in model.parameters()
    )


def test_uncoalesced_gradients_are_counted_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O0", verbosity=0)
    model(torch.tensor([1, 1, 2])).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_coalesced()

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("coalescing waits for the device")

    monkeypatch.setattr(torch.Tensor, "coalesce", refuse)
    found = preamp.count_memory(preamp.engine_of(model))
    assert found["gradients"] == 3 * 8 + 3 * 4 * 4  # places, values


# -- other threads -----------------------------------------------------------------------------


def test_another_thread_may_read_the_history_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer = started("O2", numerics="light", numerics_every=1, history=path)
    engine = preamp.engine_of(model)
    failures, ends = list[BaseException](), threading.Event()

    def read() -> None:
        try:
            while not ends.wait(0.001):  # or each operation of a step waits 5 ms for the lock again
                numbers = [record.step for record in engine.history.of(StepRecord)]
                assert numbers == list(range(1, len(numbers) + 1))
                assert len(list(engine.history)) <= len(engine.history) + 3
                assert engine.steps_applied >= len(numbers)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for step in range(40):
            train_step(model, optimizer, step)
    finally:
        ends.set()
        thread.join()
    assert failures == []
    steps = [record for record in read_history(path) if isinstance(record, StepRecord)]
    assert [record.step for record in steps] == list(range(1, 41))


def test_records_are_made_once_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread makes records, another one waits for it."""
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    model, optimizer = started("O5", numerics="light", numerics_every=100)
    for step in range(3):
        train_step(model, optimizer, step)
    engine = preamp.engine_of(model)
    inside, goes_on, found = threading.Event(), threading.Event(), list[int]()

    def listener(record: Record) -> None:
        if isinstance(record, StepRecord) and record.step == 1:
            inside.set()
            assert goes_on.wait(10)

    engine.recorder.history.listen(listener)
    threads = [
        threading.Thread(target=lambda: found.append(len(engine.history.of(StepRecord))))
        for _ in range(2)
    ]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join()
    assert found == [3, 3]
    assert [record.step for record in engine.history.of(StepRecord)] == [1, 2, 3]


# -- the end -----------------------------------------------------------------------------------


class Failing:
    """A listener that fails when told, and when closed."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, record: Record) -> None:
        if self.fails:
            raise RuntimeError(f"told of {record.kind}")

    def close(self) -> None:
        raise RuntimeError("closed")


def test_closing_undoes_everything_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    far_from_the_host(monkeypatch)
    model = Net()
    optimizer = FusedAdam(model.parameters(), lr=0.01)
    preamp.initialize(
        model, optimizer, opt_level="O2", verbosity=0, numerics="light", history=tmp_path / "r"
    )
    engine = preamp.engine_of(model)
    engine.trace_overflow()
    failing, closed = Failing(), list[str]()

    class Last:
        def __call__(self, record: Record) -> None: ...

        def close(self) -> None:
            closed.append("last")

    engine.history.listen(failing)
    engine.history.listen(Last())
    told = StepRecord(step=0, losses={}, scales={}, skipped=False)
    engine.ledger.on_step.append(lambda *_: failing(told))
    engine.on_close(lambda: closed.append("callback"))
    engine.ledger.settle = lambda wait: None  # type: ignore[method-assign] # as on a device
    for step in range(3):
        train_step(model, optimizer, step)
    del engine.ledger.settle
    failing.fails = True
    with pytest.raises(RuntimeError, match="told of step"):
        engine.close()
    assert engine.closed
    assert closed == ["callback", "last"]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert not engine.tracer.is_armed
    assert not any(module._forward_hooks for module in model.modules())
    assert (engine.ledger._open, engine.sessions[id(optimizer)].steps_applied) == (
        type(engine.ledger._open)(),
        3,
    )
    with pytest.raises(preamp.PreampStateError):
        preamp.engine_of(model)
    assert sum(isinstance(r, StepRecord) for r in read_history(tmp_path / "r")) == 3
    History(tmp_path / "r").close()  # the file is free
    engine.close()


def test_a_hook_that_cannot_be_removed_keeps_no_weights() -> None:
    model, optimizer = started("O2")
    engine = preamp.engine_of(model)
    train_step(model, optimizer, 0)
    exact = {name: value.clone() for name, value in model.state_dict().items()}

    def fail() -> None:
        raise RuntimeError("stuck")

    engine.undo.push(fail)
    with pytest.raises(RuntimeError, match="stuck"):
        engine.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, exact[name])
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_a_failed_initialize_is_undone_where_the_disk_fails_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = make()
    before = {name: param.clone() for name, param in model.named_parameters()}

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(History, "add", fail)
        patch.setattr(History, "close", fail)
        with pytest.raises(OSError, match="No space left"):
            preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, history=tmp_path / "r")
    for name, param in model.named_parameters():
        assert param.dtype is torch.float32
        assert torch.equal(param, before[name])
    assert "step" not in vars(optimizer)


# -- CUDA graphs -------------------------------------------------------------------------------


def test_a_captured_step_without_a_flag_is_no_steps_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a static scale; it used to be counted, and to take the number of the step before."""
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    model, optimizer = started("O5", numerics="light")
    train_step(model, optimizer, 0)
    with monkeypatch.context() as patch:
        for module in (ledger, recorder):
            patch.setattr(module, "is_capturing", lambda _: True)
        loss = backward(model, optimizer, 1)
        optimizer.step()
        optimizer.zero_grad()
    loss = backward(model, optimizer, 2)
    optimizer.step()
    engine = preamp.engine_of(model)
    steps = engine.history.of(StepRecord)
    assert [record.step for record in steps] == [1, 2]
    assert steps[1].losses == {0: loss.item()}
    assert engine.steps_applied == 2


# -- the stall meter ---------------------------------------------------------------------------


def test_weights_before_a_step_take_no_more_than_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a temporary as large as a tensor, however its elements lie."""
    monkeypatch.setattr(tally, "_BLOCK_ON_CPU", 5)
    torch.manual_seed(0)
    model: Any = nn.Conv2d(2, 3, 3)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-16)
    preamp.initialize(model, optimizer, opt_level="O3", verbosity=0, numerics="full")
    engine = preamp.engine_of(model)
    with preamp.scale_loss(model(torch.ones(1, 2, 4, 4)).float().sum(), optimizer) as scaled:
        scaled.backward()
    with torch.no_grad():
        model.weight.grad[0].zero_()
        model.weight[1, 0, 0, 0] = math.nan
    weight, moves = model.weight.detach().clone(), model.weight.grad != 0
    before = Meter(engine.names, torch.float16).before(engine.sessions[id(optimizer)])
    assert {copy.dtype for copy in before.values()} == {torch.float16}
    optimizer.step()
    (record,) = engine.history.of(NumericsRecord)
    (found,) = (t for t in record.tensors if t.what == "weight" and t.name == "weight")
    assert found.stalled == int(((model.weight == weight) & moves).sum())
    assert 0 < (found.stalled or 0) < moves.sum()


@pytest.mark.parametrize("factor", [1.0, math.inf, math.nan])
@pytest.mark.parametrize("level", ["O0", "O4", "O5"])
def test_clipping_is_no_loss_scale(level: str, factor: float) -> None:
    """Without ``scale_loss``, where the factor that clips is zero or nan too."""
    model, optimizer = started(level, numerics="light")
    (loss_of(model, 0) * factor).backward()
    made = {name: param.grad for name, param in model.named_parameters()}
    norm = preamp.clip_grad_norm_(optimizer, 2.0**-6)
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert [tensor.scale for tensor in record.tensors] == [1.0] * len(made)
    if factor == 1.0:
        assert norm > 2.0**-6
        found = {tensor.name: tensor.max_abs for tensor in record.tensors}
        assert found == {name: grad.abs().max() for name, grad in made.items() if grad is not None}


def calls_of(history: History) -> list[tuple[int, int]]:
    records = history.of(CastsRecord)
    return [(record.step, sum(cast.calls for cast in record.casts)) for record in records]


def test_casts_of_steps_that_are_not_measured_are_not_counted_after_a_resume() -> None:
    model, optimizer = started("O1", numerics="full", numerics_every=4)
    for step in range(6):
        train_step(model, optimizer, step)
    counters = preamp.engine_of(optimizer).state_dict()
    ((_, one), (_, two)) = calls_of(history_of(model))
    assert two == 2 * one
    resumed, optimizer = started("O1", numerics="full", numerics_every=4)
    preamp.engine_of(optimizer).load_state_dict(counters)
    for step in range(6, 9):  # number 9 is measured
        train_step(resumed, optimizer, step)
    assert calls_of(history_of(resumed)) == [(9, one)]


@pytest.mark.parametrize("first", [0, 1])
def test_casts_of_optimizers_that_take_turns_are_counted_as_often(first: int) -> None:
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    opts = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    preamp.initialize(
        nets, opts, opt_level="O1", numerics="full", numerics_every=2, verbosity=0, loss_scale=1.0
    )
    for _ in range(4):
        for index in (first, 1 - first):
            with preamp.scale_loss(nets[index](torch.ones(2, 4)).sum(), opts[index]) as scaled:
                scaled.backward()
            opts[index].step()
    engine = preamp.engine_of(nets[0])
    engine.close()
    (*_, (_, calls)) = calls_of(engine.history)
    assert calls == 2 * 2 * 3  # measured steps, optimizers; input, weight and bias


# -- whatever a script does between two steps -------------------------------------------------


LOSSES = 2


@dataclass(frozen=True)
class Backward:
    """Of one loss, of one model or both."""

    loss_id: int
    models: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Call:
    """On one model or its optimizer."""

    name: Literal["step", "zero_grad", "zeros", "model.zero_grad", "by hand", "clip"]
    model: int


which = st.sampled_from([0, 1])
backwards = st.builds(
    Backward, st.integers(0, LOSSES - 1), st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 9)
)
calls = st.builds(
    Call,
    st.sampled_from(["step", "step", "zero_grad", "zeros", "model.zero_grad", "by hand", "clip"]),
    which,
)
FIRST_STEP = Call("step", 0)
programs = st.lists(backwards | backwards | calls, min_size=4, max_size=16)


@dataclass
class Expected:
    """What plain torch has for the coming step of one optimizer."""

    losses: dict[int, float] = field(default_factory=dict[int, float])
    grads: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])
    norm: float | None = None


class Pair:
    """Two models with an engine, the same two without, and what the records should say."""

    def __init__(self, level: str, loss_scale: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in "ab"]
        self.plain = copy.deepcopy(self.models)
        self.optimizers, self.plain_optimizers = (
            [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
            for models in (self.models, self.plain)
        )
        preamp.initialize(
            self.models,
            self.optimizers,
            opt_level=level,
            loss_scale=loss_scale,
            num_losses=LOSSES,
            verbosity=0,
            numerics="light",
            numerics_every=1,
        )
        self.engine = preamp.engine_of(self.optimizers[0])
        for scaler in self.engine.scalers if loss_scale == "dynamic" else ():
            scaler.set_scale(256.0)  # at which nothing overflows
        self.engine.scaler(1).set_scale(128.0) if loss_scale == "dynamic" else None
        self.scales = [self.engine.loss_scale(loss_id) for loss_id in range(LOSSES)]
        self.coming = [Expected(), Expected()]
        self.steps: list[tuple[int, Expected]] = []

    def backward(self, action: Backward) -> None:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(action.seed))
        ours, theirs = (
            torch.stack([models[index](x).square().mean() for index in action.models]).sum()
            for models in (self.models, self.plain)
        )
        optimizers = [self.optimizers[index] for index in action.models]
        params = [p for index in action.models for p in self.plain[index].parameters()]
        before = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params}
        theirs.backward()
        with preamp.scale_loss(ours, optimizers, loss_id=action.loss_id) as scaled:
            scaled.backward()
        for index in action.models:
            coming = self.coming[index]
            coming.losses[action.loss_id] = theirs.item()
            grads = [(p, p.grad) for p in self.plain[index].parameters()]
            coming.grads[action.loss_id] = [g - before[p] for p, g in grads if g is not None]
            coming.norm = None

    def call(self, action: Call) -> None:
        index = action.model
        model, plain = self.models[index], self.plain[index]
        if action.name == "clip":
            preamp.clip_grad_norm_(self.optimizers[index], 0.5).zero_()  # it is the script's own
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            self.coming[index].norm = norm.item()
            return
        if action.name == "step":
            self.optimizers[index].step()
            self.plain_optimizers[index].step()
            self.steps.append((index, self.coming[index]))
        of_model = action.name in ("model.zero_grad", "by hand")
        if action.name == "by hand":
            for param in (*model.parameters(), *plain.parameters()):
                param.grad = None
        else:
            owner = model if of_model else self.optimizers[index]
            for each in (owner, plain):
                each.zero_grad(set_to_none=action.name != "zeros")
        if not of_model or self.coming[index].losses:
            self.coming[index] = Expected()


@pytest.mark.parametrize(
    ("level", "loss_scale"),
    [
        ("O0", "dynamic"),
        ("O0", 256.0),
        ("O0", 1.0),
        ("O2", "dynamic"),
        ("O2", 256.0),
        ("O5", 256.0),
        ("O5", 1.0),
    ],
)
@settings(max_examples=examples(25), deadline=None)
@given(program=programs)
@example(program=[Backward(0, (0,), 0), Call("clip", 0), Backward(0, (0,), 1), FIRST_STEP])
@example(program=[Backward(1, (0,), 0), Call("clip", 0), Call("model.zero_grad", 0), FIRST_STEP])
@example(program=[Backward(0, (0, 1), 0), Call("zero_grad", 0), FIRST_STEP, Call("step", 1)])
def test_records_are_of_what_the_step_used(level: str, loss_scale: Any, program: list[Any]) -> None:
    pair = Pair(level, loss_scale)
    eps = 2.0**-20 if level == "O0" else 2.0**-5  # of sums of products in half precision
    near = partial(pytest.approx, rel=eps, abs=eps)
    for action in program:
        if isinstance(action, Backward):
            pair.backward(action)
        else:
            pair.call(action)
    steps, numerics = (pair.engine.history.of(StepRecord), pair.engine.history.of(NumericsRecord))
    assert [record.optimizer for record in steps] == [index for index, _ in pair.steps]
    for record, (index, expected) in zip(steps, pair.steps, strict=True):
        assert record.losses == near(expected.losses)
        assert record.scales == dict(enumerate(pair.scales))
        assert record.norm == (None if expected.norm is None else near(expected.norm))
        mine = [r for r in numerics if (r.step, r.optimizer) == (record.step, index)]
        # Zeros that were left in place of gradients may be measured too.
        measured = {r.loss_id: r.tensors for r in mine if any(t.max_abs for t in r.tensors)}
        assert measured.keys() == expected.grads.keys()
        if loss_scale == 1.0:
            continue  # they may add up in place, and the sum is measured
        for loss_id, grads in expected.grads.items():
            found = [tensor.max_abs / tensor.scale for tensor in measured[loss_id]]
            assert found == near([grad.abs().max().item() for grad in grads])
            found = [tensor.rms / tensor.scale for tensor in measured[loss_id]]
            assert found == near([grad.square().mean().sqrt().item() for grad in grads])
