# SPDX-License-Identifier: BSD-3-Clause
"""What an engine leaves in its history and its report; nothing of it gets lost."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, HALF_WEIGHTS, LEVEL_NAMES
from kit.loops import (
    begin,
    loss_of,
    make,
    scaled_backward,
    scaled_step,
    started,
    train_plain,
    train_step,
)
from kit.refusals import refused
from kit.run import Net, Run, batch_of
from preamp.core.version import __version__
from preamp.numerics import (
    History,
    NumericsRecord,
    OverflowRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TensorStatistics,
    read_history,
)
from preamp.watch import host_copies

every_level = pytest.mark.parametrize("level", LEVEL_NAMES)


def history_of(thing: Any) -> History:
    return preamp.engine_of(thing).history


def named(record: NumericsRecord, what: str = "gradient") -> dict[str, TensorStatistics]:
    return {tensor.name: tensor for tensor in record.tensors if tensor.what == what}


# -- which records ---------------------------------------------------------------------------


@every_level
def test_the_run_is_described(level: str, tmp_path: Path) -> None:
    model, optimizer = started(level, history=tmp_path / "run.jsonl")
    (record,) = history_of(model).of(RunRecord)
    assert record.opt_level == level
    assert record.preamp == preamp.__version__ == __version__
    assert record.torch == torch.__version__
    assert record.device == "cpu"
    assert record.parameters == {name: p.numel() for name, p in model.named_parameters()}
    assert record.dtypes == {
        name: str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters()
    }
    policy = preamp.engine_of(optimizer).policy
    assert record.policy["loss_scale"] == str(policy.loss_scale)
    assert record.policy["storage"] == str(policy.storage)
    assert set(record.policy) == {*preamp.Policy.__dataclass_fields__}
    assert read_history(tmp_path / "run.jsonl") == [record]


def test_the_learning_rate_is_that_of_the_step_and_may_be_a_tensor(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), capturable=False)
    preamp.initialize(model, optimizer, opt_level="O0", verbosity=0, history=tmp_path / "r")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        train_step(model, optimizer, step)
        scheduler.step()
    assert [record.lr for record in history_of(model).of(StepRecord)] == [0.5, 0.25, 0.125]


def test_a_loop_without_scale_loss_is_recorded_too() -> None:
    model, optimizer = started("O5", numerics="full", numerics_every=2)
    for step in range(3):
        train_plain(model, optimizer, step)
    history = history_of(model)
    assert [record.losses for record in history.of(StepRecord)] == [{}, {}, {}]
    first, second = history.of(NumericsRecord)
    assert (first.step, second.step) == (1, 3)
    assert [*named(first)] == [name for name, _ in model.named_parameters()]
    assert all(tensor.scale == 1.0 for tensor in first.tensors)


def test_giving_up_is_in_the_history(tmp_path: Path) -> None:
    model, optimizer = started("O2", max_consecutive_skips=2, history=tmp_path / "deep" / "run")
    train_step(model, optimizer, 0, poison=True)
    with pytest.raises(preamp.LossScaleError, match="2 optimizer steps in a row"):
        train_step(model, optimizer, 1, poison=True)
    kinds = [record.kind for record in read_history(tmp_path / "deep" / "run")]
    assert kinds == ["run", "overflow", "step", "overflow", "step"]


@pytest.mark.parametrize(("acts", "norm"), [("step", None), ("clip; step", 0.0)])
def test_gradients_that_the_script_dropped_are_of_no_step(acts: str, norm: float | None) -> None:
    run = Run("O0", numerics="light")
    run.play("backward")
    run.model.zero_grad()
    run.play(acts)
    run.play("backward; zero; step")
    run.play("backward; clip; backward 1; step")
    first, second, third = run.engine.history.of(StepRecord)
    assert (first.losses, first.norm, second.losses, third.norm) == ({}, norm, {}, None)


def test_a_loss_that_is_not_scalar_is_told_by_its_mean() -> None:
    run = Run("O0", numerics="light")
    loss = run.model(batch_of(run.model, 0)).square()
    with preamp.scale_loss(loss, run.optimizer) as scaled:
        scaled.sum().backward()
    mean = loss.detach().mean().item()
    loss.detach().zero_()  # what the script does to its tensor later does not count
    run.play("step")
    (record,) = run.engine.history.of(StepRecord)
    assert (record.losses, record.lr) == ({0: mean}, run.optimizer.param_groups[0]["lr"])


def test_disabled_engines_have_an_empty_history(tmp_path: Path) -> None:
    model, optimizer = make()
    preamp.initialize(model, optimizer, enabled=False, numerics="full", history=tmp_path / "r")
    train_step(model, optimizer, 0)
    assert len(history_of(model)) == 0
    assert not (tmp_path / "r").exists()


# -- statistics ------------------------------------------------------------------------------


def test_statistics_come_every_so_many_steps() -> None:
    model, optimizer = started("O2", numerics="light", numerics_every=3)
    for step in range(8):
        train_step(model, optimizer, step, poison=step == 3)
    records = history_of(model).of(NumericsRecord)
    assert [record.step for record in records] == [1, 4, 7]
    assert [{t.scale for t in record.tensors} for record in records] == [{2**16}, {2**16}, {2**15}]


def test_far_numbers_are_read_at_the_next_due_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    model, optimizer = started("O5", numerics="light", numerics_every=3)
    heard, counts = list[Record](), list[int]()
    history_of(model).listen(heard.append)
    for step in range(7):
        train_step(model, optimizer, step)
        counts.append(sum(isinstance(record, StepRecord) for record in heard))
    assert counts == [0, 0, 0, 3, 3, 3, 6]


@every_level
def test_weights_are_measured_after_the_step(level: str) -> None:
    model, optimizer = started(level, numerics="full")
    train_step(model, optimizer, 0)
    (record,) = history_of(model).of(NumericsRecord)
    found = named(record, "weight")
    for name, param in model.named_parameters():
        assert found[name].max_abs == param.detach().abs().max().item()
        assert found[name].dtype == str(param.dtype).removeprefix("torch.")
        assert found[name].scale == 1.0
        is_half = param.dtype in (torch.float16, torch.bfloat16)
        assert (found[name].stalled is not None) == is_half
        wanted = param.dtype if is_half else (BY_NAME[level].half or torch.float16)
        assert found[name].form == str(wanted).removeprefix("torch.")


class Table(nn.Module):
    """Weights 1, gradients as asked for."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.parametrize("level", HALF_WEIGHTS)
@pytest.mark.parametrize("fused", [False, True])
def test_weights_that_do_not_move_are_counted(level: str, fused: bool) -> None:
    """Of six weights one has no gradient; three updates round away in the half value."""
    ulp = torch.finfo(BY_NAME[level].half).eps  # spacing above 1; below it is half of that
    model = Table(6)
    kind = preamp.optimizers.FusedSGD if fused else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=1.0)
    settings = {"opt_level": level, "verbosity": 0, "loss_scale": 16.0}
    preamp.initialize(model, optimizer, numerics="full", numerics_every=1, **settings)
    steps = torch.tensor([0.0, ulp / 16, -ulp / 8, ulp / 8, ulp, -ulp])
    for _ in range(3):
        optimizer.zero_grad()
        scaled_backward(model(steps).float().sum(), optimizer)
        optimizer.step()
    records = history_of(model).of(NumericsRecord)
    stalled = [named(record, "weight")["weight"].stalled for record in records]
    # Masters add the small updates up, so with them the half value moves in the end.
    assert stalled == ([3, 3, 3] if level == "O3" else [3, 3, 2])


# -- files, checkpoints, the end -------------------------------------------------------------


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("{}\n")
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"Line 1 of .* is not a record of a run: it has no kind"):
        preamp.initialize(model, optimizer, "O2", history=tmp_path / "run.jsonl", verbosity=0)  # type: ignore[arg-type]
    assert (tmp_path / "run.jsonl").read_text() == "{}\n"


def test_a_run_that_begins_anew_takes_back_all_steps_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for _ in range(2):
        model, optimizer = started("O2", history=path)
        for step in range(2):
            train_step(model, optimizer, step, poison=step == 0)
        preamp.engine_of(model).close()
    history = History(path)
    assert [record.step for record in history.of(StepRecord)] == [1, 2]
    assert history.of(ResumeRecord) == [ResumeRecord(step=0, steps=[0])]
    assert [record.step for record in history.of(OverflowRecord)] == [1]
    history.close()


REFUSED: dict[str, tuple[str, list[Any]]] = {
    "no kind of statistics": ("numerics", ["heavy"]),
    "no number of steps": ("numerics_every", [0, True, 2.0]),
    "no path": ("history", [True, "", "."]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    argument, values = REFUSED[name]
    model, optimizer = make()
    for given in values:
        with refused("history", name, model, optimizer, given=repr(given)):
            begin("O2", model, optimizer, **{argument: given})


def test_of_several_processes_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preamp.watch.recorder.is_first_rank", lambda: False)
    model, optimizer = started("O2", history=tmp_path / "run.jsonl")
    train_step(model, optimizer, 0)
    assert len(history_of(model).of(StepRecord)) == 1
    assert not (tmp_path / "run.jsonl").exists()


def backward(model: nn.Module, optimizer: Any, step: int, **arguments: Any) -> torch.Tensor:
    loss = loss_of(model, step)
    scaled_backward(loss, optimizer, **arguments)
    return loss.detach()


# -- whose numbers they are --------------------------------------------------------------------


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


# -- nothing gets lost -------------------------------------------------------------------------


def test_uncoalesced_gradients_are_counted_as_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O0", verbosity=0, numerics="full")
    model(torch.tensor([1, 1, 2])).sum().backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.is_coalesced()

    def refuse(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("coalescing waits for the device")

    monkeypatch.setattr(torch.Tensor, "coalesce", refuse)
    found = preamp.count_memory(preamp.engine_of(model))
    assert found["gradients"] == 3 * 8 + 3 * 4 * 4  # places, values
    monkeypatch.undo()
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert [(tensor.name, tensor.what) for tensor in record.tensors] == [("weight", "weight")]


# -- the end -----------------------------------------------------------------------------------


def test_closing_undoes_everything_whatever_fails(tmp_path: Path) -> None:
    options: dict[str, Any] = {"numerics": "light", "overflow": "trace", "history": tmp_path / "r"}
    model, optimizer = started("O2", **options)
    engine, closed = preamp.engine_of(model), list[str]()

    class Listener:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, record: Record) -> None: ...

        def close(self) -> None:
            closed.append(self.name)
            raise RuntimeError(self.name)

    for name in ("first", "last"):
        engine.history.listen(Listener(name))
    engine.on_close(lambda: closed.append("callback"))
    for step in range(3):
        train_step(model, optimizer, step)
    with pytest.raises(RuntimeError, match="first"):
        engine.close()
    assert engine.closed
    assert closed == ["callback", "first", "last"]
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(preamp.PreampStateError):
        preamp.engine_of(model)
    assert sum(isinstance(r, StepRecord) for r in read_history(tmp_path / "r")) == 3
    History(tmp_path / "r").close()  # the file is free
    engine.close()


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


# -- the page, listeners, and what an optimizer may be ---------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_page_tells_the_run(level: str, tmp_path: Path) -> None:
    """Of an engine that is closed, too."""
    model, optimizer = started(level, numerics="full", numerics_every=2)
    for step in range(5):
        train_step(model, optimizer, step)
    engine = preamp.engine_of(model)
    engine.report(tmp_path / "report.html", title="One & only")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "One &amp; only" in page
    assert f">{level}<" in page
    engine.close()
    engine.report(str(tmp_path / "closed.html"))
    assert (tmp_path / "closed.html").stat().st_size > 1000


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
def test_models_with_sparse_buffers() -> None:
    model = nn.Linear(4, 2)
    model.register_buffer("graph", torch.eye(4).to_sparse_csr())
    preamp.initialize(model, opt_level="O1", verbosity=0)
    graph = model.graph
    parts = (graph.crow_indices(), graph.col_indices(), graph.values())
    held = sum(part.untyped_storage().nbytes() for part in parts)
    assert preamp.count_memory(model)["buffers"] == held


class PairOfRates(torch.optim.Optimizer):
    """An optimizer with other ideas of a learning rate."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": (0.1, "slow")})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.data -= 0.1 * param.grad


def test_a_learning_rate_of_an_unknown_kind_is_left_out() -> None:
    model = nn.Linear(4, 2)
    optimizer = begin("O5", model, PairOfRates(model.parameters()), numerics="light")
    scaled_step(model(torch.ones(2, 4)).square().mean(), optimizer)
    (record,) = preamp.engine_of(optimizer).history.of(StepRecord)
    assert record.lr is None
