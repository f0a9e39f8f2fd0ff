# SPDX-License-Identifier: BSD-3-Clause
"""What an engine leaves in its history, and that taking notes changes nothing."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, HALF_WEIGHTS, LEVEL_NAMES
from kit.loops import loss_of, make, started, train_plain, train_step
from kit.run import Net, batch_of
from preamp.core.version import __version__
from preamp.engine.optimizer_hooks import OptimizerHooks
from preamp.numerics import (
    FORMATS,
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


def test_by_default_only_skipped_steps_leave_records() -> None:
    model, optimizer = started("O2")
    for step in range(6):
        train_step(model, optimizer, step, poison=step in (1, 4))
    history = history_of(optimizer)
    assert history.path is None
    assert [type(record) for record in history] == [RunRecord, OverflowRecord, OverflowRecord]
    first, second = history.of(OverflowRecord)
    cause = preamp.engine_of(optimizer).overflow_causes[0]
    assert (first.step, second.step) == (2, 5)
    assert first.parameters == list(cause.parameters)
    assert (first.old_scale, first.new_scale) == (65536.0, 32768.0)
    assert first.loss_was_finite


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


def test_losses_that_are_not_scalars_are_averaged(tmp_path: Path) -> None:
    model, optimizer = started("O1", history=tmp_path / "run.jsonl")
    loss = model(batch_of(model, 0)).float().square()
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.sum().backward()
    mean = loss.detach().mean().item()
    with torch.no_grad():
        loss.zero_()  # what the script does to its tensor later does not count
    optimizer.step()
    assert history_of(model).of(StepRecord)[0].losses == {0: mean}


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
    assert all(t.what == "gradient" and t.histogram is None for r in records for t in r.tensors)
    assert all(t.nonfinite == t.elements for t in records[1].tensors)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_are_measured_as_the_backward_left_them(level: str) -> None:
    model, optimizer = started(level, numerics="full", loss_scale=1024.0)
    with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
        raw = {name: param.grad.clone() for name, param in model.named_parameters()}  # type: ignore[union-attr]
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert record.step == 1
    found = named(record)
    assert [*found] == [*raw]
    for name, grad in raw.items():
        values, form = grad.double(), FORMATS["float16"]
        tensor = found[name]
        assert tensor.dtype == str(grad.dtype).removeprefix("torch.")
        assert (tensor.scale, tensor.form) == (1024.0, "float16")
        assert tensor.max_abs == values.abs().max().item()
        assert tensor.zeros == (values == 0).sum()
        assert tensor.rms == pytest.approx(values.square().mean().sqrt().item(), rel=1e-5)
        nonzero = values[values != 0].abs()
        assert tensor.below_normal == (nonzero < 2.0**form.min_exponent).sum()
        assert tensor.unscaled_below_normal == (nonzero / 1024 < 2.0**form.min_exponent).sum()
        assert tensor.histogram is not None
        assert tensor.elements == sum(tensor.histogram.values()) + tensor.zeros


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
        with preamp.scale_loss(model(steps).float().sum(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    records = history_of(model).of(NumericsRecord)
    stalled = [named(record, "weight")["weight"].stalled for record in records]
    # Masters add the small updates up, so with them the half value moves in the end.
    assert stalled == ([3, 3, 3] if level == "O3" else [3, 3, 2])


def test_accumulated_gradients_count_for_the_stall_meter() -> None:
    """The element whose last gradient is zero has an earlier one."""
    model = Table(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0, numerics="full")
    for x in (torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])):
        with preamp.scale_loss(model(x).float().sum(), optimizer) as scaled:
            scaled.backward()
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert named(record, "weight")["weight"].stalled == 2


def test_a_skipped_step_stalls_nothing() -> None:
    model, optimizer = started("O2", numerics="full", numerics_every=1)
    train_step(model, optimizer, 0, poison=True)
    train_step(model, optimizer, 1)
    skipped, taken = history_of(model).of(NumericsRecord)
    assert {tensor.stalled for tensor in named(skipped, "weight").values()} == {None}
    assert named(taken, "weight")["first.weight"].stalled is not None


def test_sparse_gradients_are_left_out() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O0", verbosity=0, numerics="full")
    with preamp.scale_loss(model(torch.tensor([1, 2])).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert [*named(record)] == ["1.weight", "1.bias"]
    assert [*named(record, "weight")] == ["0.weight", "1.weight", "1.bias"]


def test_parameters_of_no_model_are_named_by_their_place() -> None:
    model, extra = Net(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, numerics="light")
    with preamp.scale_loss(loss_of(model, 0) + extra.sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (record,) = history_of(model).of(NumericsRecord)
    assert "optimizers[0].param_groups[0][8]" in named(record)


# -- numbers stay what they are --------------------------------------------------------------


def test_far_numbers_are_read_at_the_next_due_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copies, "host_reaches", lambda _: False)
    model, optimizer = started("O5", numerics="light", numerics_every=3)
    heard = list[Record]()
    history_of(model).listen(heard.append)
    counts = list[int]()
    for step in range(7):
        train_step(model, optimizer, step)
        counts.append(sum(isinstance(record, StepRecord) for record in heard))
    assert counts == [0, 0, 0, 3, 3, 3, 6]
    preamp.engine_of(model).close()
    assert sum(isinstance(record, StepRecord) for record in heard) == 7


# -- files, checkpoints, the end -------------------------------------------------------------


def test_closing_the_engine_closes_its_history(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer = started("O2", history=path)
    engine = preamp.engine_of(model)
    train_step(model, optimizer, 0)
    engine.close()
    engine.close()
    assert len(engine.history.of(StepRecord)) == 1
    started("O2", history=path)  # its file is free again


def test_two_engines_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer = started("O2", history=path)
    other, its_optimizer = make()
    before = {name: param.clone() for name, param in other.named_parameters()}
    with pytest.raises(preamp.PreampStateError, match="is being written already"):
        preamp.initialize(other, its_optimizer, opt_level="O2", verbosity=0, history=path)
    assert all(torch.equal(param, before[name]) for name, param in other.named_parameters())
    with pytest.raises(preamp.PreampStateError, match="has no engine"):
        preamp.engine_of(other)
    train_step(model, optimizer, 0)
    assert len(read_history(path)) == 2


def test_a_failed_initialize_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(hooks: object, undo: object) -> None:
        raise RuntimeError("no")

    model, optimizer = make()
    with monkeypatch.context() as patch:
        patch.setattr(OptimizerHooks, "attach", fail)
        with pytest.raises(RuntimeError, match="no"):
            preamp.initialize(model, optimizer, verbosity=0, history=tmp_path / "run.jsonl")
    assert list(tmp_path.iterdir()) == []
    preamp.initialize(model, optimizer, verbosity=0, history=tmp_path / "run.jsonl")


def test_a_damaged_file_is_refused_before_anything_changes(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("{}\n")
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"Line 1 of .* is not a record of a run: it has no kind"):
        preamp.initialize(model, optimizer, "O2", history=tmp_path / "run.jsonl", verbosity=0)  # type: ignore[arg-type]
    assert (tmp_path / "run.jsonl").read_text() == "{}\n"


def test_a_resumed_run_takes_back_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    model, optimizer = started("O2", history=path, numerics="light", numerics_every=2)
    for step in range(3):
        train_step(model, optimizer, step)
    state = preamp.engine_of(optimizer).state_dict()
    for step in range(3, 6):
        train_step(model, optimizer, step, poison=step == 4)
    preamp.engine_of(model).close()

    model, optimizer = started("O2", history=path, numerics="light", numerics_every=2)
    assert [r.step for r in history_of(model).of(StepRecord)] == [1, 2, 3, 4, 5, 6]
    preamp.engine_of(optimizer).load_state_dict(state)
    train_step(model, optimizer, 3)
    history = history_of(model)
    assert [record.step for record in history.of(StepRecord)] == [1, 2, 3, 4]
    assert [record.step for record in history.of(NumericsRecord)] == [1, 3]
    assert history.of(OverflowRecord) == []
    assert history.of(ResumeRecord) == [ResumeRecord(step=3, steps=[3])]
    assert len(history.of(RunRecord)) == 2
    assert sum(isinstance(record, StepRecord) for record in read_history(path)) == 7


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


def test_apexs_checkpoints_set_no_counter_and_take_nothing_back() -> None:
    model, optimizer = started("O2", numerics="light")
    train_step(model, optimizer, 0)
    preamp.engine_of(optimizer).load_state_dict(
        {"loss_scaler0": {"loss_scale": 8.0, "unskipped": 1}}
    )
    train_step(model, optimizer, 1)
    history = history_of(model)
    assert history.of(ResumeRecord) == []
    assert [record.step for record in history.of(StepRecord)] == [1, 2]


def test_giving_up_is_in_the_history(tmp_path: Path) -> None:
    model, optimizer = started("O2", max_consecutive_skips=2, history=tmp_path / "run.jsonl")
    train_step(model, optimizer, 0, poison=True)
    with pytest.raises(preamp.LossScaleError, match="2 optimizer steps in a row"):
        train_step(model, optimizer, 1, poison=True)
    kinds = [record.kind for record in read_history(tmp_path / "run.jsonl")]
    assert kinds == ["run", "overflow", "step", "overflow", "step"]


def test_a_listener_may_look_at_the_history_and_may_fail() -> None:
    model, optimizer = started("O2", numerics="light")
    seen = list[int]()

    def listener(record: Record) -> None:
        seen.append(len(history_of(model)))
        if isinstance(record, NumericsRecord):
            raise RuntimeError("from a listener")

    history_of(model).listen(listener)
    with pytest.raises(RuntimeError, match="from a listener"):
        train_step(model, optimizer, 0)
    train_step(model, optimizer, 1)
    assert seen == [2, 3, 4]
    assert preamp.engine_of(model).steps_applied == 2


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        (
            {"numerics": "heavy"},
            ValueError,
            "numerics='heavy' is not known. Choose one of 'off', 'light', 'full'. Pass 'light' "
            "for statistics of gradients, 'full' for histograms and weights too.",
        ),
        (
            {"numerics_every": 0},
            ValueError,
            "numerics_every=0 cannot be used. Allowed is a whole number from 1. Pass after how "
            "many optimizer steps statistics are taken again, such as 100.",
        ),
        ({"numerics_every": True}, ValueError, "numerics_every=True cannot be used. "),
        ({"numerics_every": 2.0}, ValueError, "numerics_every=2.0 cannot be used. "),
        (
            {"history": True},
            TypeError,
            "history=True is no path of a file. Allowed are the path of a file, which need not "
            "exist, and None. Pass for example history='run.jsonl'; the records themselves are in "
            "preamp.engine_of(optimizer).history.",
        ),
        ({"history": ""}, TypeError, "history='' is no path of a file. "),
        ({"history": "."}, TypeError, "history='.' is no path of a file. "),
    ],
)
def test_refusals(arguments: dict[str, Any], kind: type[Exception], message: str) -> None:
    model, optimizer = make()
    with pytest.raises(kind, match="^" + re.escape(message)):
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, **arguments)
    assert {param.dtype for param in model.parameters()} == {torch.float32}


def test_of_several_processes_the_first_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("preamp.watch.recorder.is_first_rank", lambda: False)
    model, optimizer = started("O2", history=tmp_path / "run.jsonl")
    train_step(model, optimizer, 0)
    assert len(history_of(model).of(StepRecord)) == 1
    assert not (tmp_path / "run.jsonl").exists()


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    model, optimizer = started("O2", history=tmp_path / "run.jsonl", numerics="full")
    train_step(model, optimizer, 0, poison=True)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    kinds = [json.loads(line, parse_constant=pytest.fail)["kind"] for line in lines]
    assert kinds == ["run", "overflow", "step", "numerics"]
