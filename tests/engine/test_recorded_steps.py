# SPDX-License-Identifier: BSD-3-Clause
"""What is recorded of a step is of the gradients that it used, and nothing of it gets lost."""

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.host_reads import far_from_the_host
from cases.levels import WITH_MASTERS
from kit.loops import loss_of, make, started, train_step
from kit.run import Net
from preamp.engine import ledger
from preamp.kernels.plain import tally
from preamp.numerics import History, NumericsRecord, Record, ResumeRecord, StepRecord, read_history
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
    state = preamp.engine_of(model).state_dict()
    train_step(model, optimizer, 0)
    optimizer.zero_grad()
    backward(model, optimizer, 1)
    preamp.engine_of(model).load_state_dict(state)
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
    state = preamp.engine_of(model).state_dict()
    for step in range(3):
        train_step(model, optimizer, step)
    preamp.engine_of(model).load_state_dict(state)
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
    state = preamp.engine_of(model).state_dict()
    heard = list[Record]()

    def listener(record: Record) -> None:
        heard.append(record)
        if isinstance(record, StepRecord) and record.step == 2:
            raise RuntimeError("from a listener")

    for step in range(3):
        train_step(model, optimizer, step)
    preamp.engine_of(model).recorder.history.listen(listener)
    with pytest.raises(RuntimeError, match="from a listener"):
        preamp.engine_of(model).load_state_dict(state)
    assert [getattr(record, "step", None) for record in heard] == [1, 1, 2, 3, 0]
    assert history_of(model).of(ResumeRecord) == [ResumeRecord(step=0, steps=[0])]


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


# -- whatever a script does between two steps -------------------------------------------------
