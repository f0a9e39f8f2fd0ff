# SPDX-License-Identifier: BSD-3-Clause
"""Known bugs of Apex, one test each, showing the right behaviour."""

from __future__ import annotations

import collections
import copy
import io
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cases.levels import LEVEL_NAMES, WITH_MASTERS
from engine.harness import Net, halves_match, loss_of, make, masters, same, weights
from preamp import amp
from preamp.core.errors import PreampStateError

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


def started(level: str, **arguments: Any) -> Any:
    return amp.initialize(*make(), opt_level=level, verbosity=0, **arguments)


def one_weight(level: str, **arguments: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A single weight 1; with a loss of n times its sum, its gradient is n."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **arguments)


def backward(
    model: nn.Module, optimizers: Any, factor: float = 1.0, loss_id: int = 0, **arguments: Any
) -> None:
    loss = model.weight.float().sum() * factor
    with amp.scale_loss(loss, optimizers, loss_id, **arguments) as scaled:
        scaled.backward()


def gradient(optimizer: torch.optim.Optimizer) -> list[float]:
    return next(amp.master_params(optimizer)).grad.flatten().tolist()


@pytest.mark.apex("2.2 static 1.0 with master weights", "10 A-2")
@pytest.mark.parametrize(("level", "scale"), [("O2", 1.0), ("O5", None), ("O2", 2.0)])
def test_a02_accumulated_float32_gradients_count(level: str, scale: float | None) -> None:
    model, optimizer = started(level, loss_scale=scale)
    for _ in range(2):
        with amp.scale_loss((model.bn.weight * 3).sum(), optimizer) as scaled:
            scaled.backward()
    assert model.bn.weight.grad.tolist() == [6.0] * 8


@pytest.mark.apex("10 A-3", "B 10: loading before and after, and at another level")
@MASTERS
@pytest.mark.parametrize("moment", ["before zero_grad", "after zero_grad", "after a step"])
def test_a03_loaded_weights_reach_the_masters(level: str, moment: str) -> None:
    model, optimizer = one_weight(level, loss_scale=8.0)
    if moment != "before zero_grad":
        optimizer.zero_grad()
    if moment == "after a step":
        backward(model, optimizer)
        optimizer.step()
    optimizer.zero_grad()
    model.load_state_dict({"weight": torch.full((1, 2), 5.0)})
    backward(model, optimizer)
    optimizer.step()
    assert model.weight.tolist() == [[4.0, 4.0]]


@pytest.mark.apex("10 A-4")
@MASTERS
def test_a04_checkpoints_hold_the_masters(level: str) -> None:
    model, optimizer = started(level)
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "amp": amp.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, second = started(level)
    other.load_state_dict(saved["model"])
    assert same(masters(second), masters(optimizer))
    assert not torch.equal(saved["model"]["first.weight"], model.first.weight.float())


@pytest.mark.apex("2.6 zero_grad", "2.7 three ways to zero gradients", "10 A-5")
@ALL_LEVELS
@pytest.mark.parametrize("to_none", [True, False])
def test_a05_zero_grad_takes_set_to_none(level: str, to_none: bool) -> None:
    model, optimizer = one_weight(level)
    backward(model, optimizer)
    optimizer.zero_grad(set_to_none=to_none)
    for grad in (model.weight.grad, next(amp.master_params(optimizer)).grad):
        assert grad is None or (not to_none and grad.abs().sum() == 0)
    backward(model, optimizer)
    assert gradient(optimizer) == [1.0, 1.0]


@pytest.mark.apex("10 A-17", "B 1: schedulers built before hold groups and the bound step")
@ALL_LEVELS
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("kind", ["StepLR", "OneCycleLR"])
def test_a17_schedulers_do_not_warn(level: str, built: str, kind: str) -> None:
    def schedule() -> Any:
        if kind == "StepLR":
            return torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)

    model, optimizer = make()
    scheduler = schedule() if built == "before" else None
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    scheduler = scheduler or schedule()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):  # the first one is skipped
            optimizer.zero_grad()
            with amp.scale_loss(loss_of(model, step), optimizer) as scaled:
                (scaled * float("inf") if step == 0 else scaled).backward()
            optimizer.step()
            scheduler.step()
    assert built == "after" or optimizer.step.__func__ is not None
    assert scheduler.last_epoch == 3


@pytest.mark.apex("10 A-17")
@ALL_LEVELS
def test_a17_scheduler_built_while_an_overflow_is_pending(level: str) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    before = weights(model)
    with amp.scale_loss(loss_of(model.eval(), 0), optimizer) as scaled:
        (scaled * float("inf")).backward()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert same(weights(model), before)


@pytest.mark.apex("1.8 model.forward after initialize", "10 A-18", "B 9: torch.save(model)")
@ALL_LEVELS
@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a18_copies_compute_with_their_own_weights(level: str, way: str) -> None:
    model, _ = started(level)
    if way == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    for param in twin.last.parameters():
        param.data.zero_()
    x = torch.ones(3, 4)
    assert twin(x).abs().sum() == 0
    assert model(x).abs().sum() > 0


class Point(NamedTuple):
    x: torch.Tensor
    y: int


class Output(collections.OrderedDict):  # type: ignore[type-arg]
    @property
    def logits(self) -> torch.Tensor:
        return self["logits"]


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, point: Point, helper: nn.Module, numbers: Any) -> Any:
        assert type(point) is Point
        assert list(numbers) == [0, 1]
        assert next(helper.parameters()).dtype is torch.float32
        out = self.linear(point.x)
        return Output(logits=out), Point(out, point.y), (row for row in out), range(2)


@pytest.mark.apex("10 A-19")
@ALL_LEVELS
def test_a19_containers_keep_their_types(level: str) -> None:
    model = amp.initialize(Containers(), opt_level=level, verbosity=0)
    helper = nn.Linear(1, 1)
    output, point, rows, numbers = model(Point(torch.ones(3, 2), 7), helper, range(2))
    wide = torch.float32 if level not in ("O1", "O4") else output.logits.dtype
    assert type(output) is Output
    assert output.logits.dtype is wide
    assert (type(point), point.y) == (Point, 7)
    assert {row.dtype for row in rows} == {wide}
    assert numbers == range(2)
    assert helper.weight.dtype is torch.float32


@pytest.mark.apex(
    "2.1 tuples and other collections of optimizers", "10 A-21", "B 18: a tuple of optimizers"
)
@ALL_LEVELS
@pytest.mark.parametrize("form", [tuple, list, iter, lambda given: given[0]])
def test_a21_any_sequence_of_optimizers(level: str, form: Any) -> None:
    model, optimizer = one_weight(level, loss_scale=4.0)
    for _ in range(2):
        backward(model, form([optimizer]))
    assert gradient(optimizer) == [2.0, 2.0]


@pytest.mark.apex("10 A-22")
@MASTERS
def test_a22_parameters_unfrozen_later_are_trained_right(level: str) -> None:
    model, optimizer = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), None
    frozen = model[1].weight.requires_grad_(False)
    frozen.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    frozen.requires_grad_(True)
    with amp.scale_loss(frozen.float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert frozen.tolist() == [[0.5]]
    assert [p.grad for p in amp.master_params(optimizer) if p.grad is not None] == []
    assert halves_match(model)


@pytest.mark.apex("2.1 an exception in the block", "10 A-23")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a23_an_exception_in_the_body_loses_nothing(level: str) -> None:
    model, optimizer = one_weight(level, loss_scale=8.0)
    backward(model, optimizer)

    def fails() -> None:
        with amp.scale_loss(model.weight.float().sum(), optimizer) as scaled:
            scaled.backward()
            raise ValueError("from the body")

    before = amp.state_dict()
    with pytest.raises(ValueError, match="from the body"):
        fails()
    assert gradient(optimizer) == [1.0, 1.0]
    assert amp.state_dict() == before
    backward(model, optimizer)
    assert gradient(optimizer) == [2.0, 2.0]


@pytest.mark.apex("2.7 three ways to zero gradients", "10 A-24")
@ALL_LEVELS
@pytest.mark.parametrize("to_none", [True, False])
def test_a24_zeroing_the_model_drops_the_masters_gradients(level: str, to_none: bool) -> None:
    model, optimizer = one_weight(level)
    backward(model, optimizer, 8.0)
    model.zero_grad(set_to_none=to_none)  # and no step
    backward(model, optimizer)
    assert gradient(optimizer) == [1.0, 1.0]
    optimizer.step()
    assert model.weight.tolist() == [[0.0, 0.0]]


@pytest.mark.apex(
    "1.1 enabled=False", "3 amp.state_dict() when amp is off or was never initialized", "10 A-25"
)
def test_a25_state_when_amp_is_off() -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict(amp.state_dict())


@pytest.mark.apex(
    "0 apex.amp.load_state_dict",
    "3 its format, loss_scaler0 and so on",
    "3 the order of entries",
    "10 A-25",
)
def test_a25_keys_are_matched_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    started("O2", num_losses=2)
    one, two = ({"loss_scale": scale, "unskipped": 3} for scale in (8.0, 16.0))
    amp.load_state_dict(collections.OrderedDict(loss_scaler1=two, loss_scaler0=one))
    assert amp.state_dict() == {"loss_scaler0": one, "loss_scaler1": two}
    assert capsys.readouterr().out == ""


@pytest.mark.apex("3 loading into a static scale", "10 A-25")
def test_a25_static_scales_keep_their_value() -> None:
    started("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}}


@pytest.mark.apex("3 unknown keys", "10 A-25")
def test_a25_nothing_is_applied_when_it_raises() -> None:
    started("O2")
    before = amp.state_dict()
    with pytest.raises(PreampStateError, match="unknown keys"):
        amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}, "other": {}})
    assert amp.state_dict() == before


@pytest.mark.apex("3 unknown keys")
@pytest.mark.parametrize(
    "entry", [None, 5, {}, {"loss_scale": 4.0}, {"loss_scale": "x", "unskipped": 0}]
)
def test_a25_no_entry_is_applied_when_a_later_one_cannot_be_read(entry: Any) -> None:
    started("O2", num_losses=2)
    before = amp.state_dict()
    good = {"loss_scale": 2.0, "unskipped": 3}
    with pytest.raises(ValueError, match=r"A loss scaler's state .* cannot be read"):
        amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": entry})
    assert amp.state_dict() == before


@pytest.mark.apex("3 amp.load_state_dict with more or fewer entries")
def test_a25_more_or_fewer_entries(capsys: pytest.CaptureFixture[str]) -> None:
    started("O2", num_losses=2)
    entry = {"loss_scale": 8.0, "unskipped": 3}
    fresh = {"loss_scale": 2.0**16, "unskipped": 0}
    amp.load_state_dict({"loss_scaler0": entry})
    assert amp.state_dict() == {"loss_scaler0": entry, "loss_scaler1": fresh}
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 1 entries, while 2 loss_scalers are used\n"
    )
    amp.load_state_dict({f"loss_scaler{i}": entry for i in range(3)})
    assert amp.state_dict() == {"loss_scaler0": entry, "loss_scaler1": entry}
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 3 entries, while 2 loss_scalers are used\n"
        "Skipping loss_scaler[2], since num_losses was set to 2\n"
    )


@pytest.mark.apex("3 scale_factor", "10 A-26")
def test_a26_scale_factor() -> None:
    scaler = amp.LossScaler("dynamic", init_scale=16.0, scale_factor=8.0, scale_window=1)
    scaler.update_scale()
    assert scaler.loss_scale() == 128.0


@pytest.mark.apex("3 update_scale()", "3 _has_overflow", "10 A-26")
def test_a26_the_scale_has_a_floor() -> None:
    scaler = amp.LossScaler("dynamic", init_scale=2.0**-23)
    for _ in range(5):
        scaler._has_overflow = True
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**-24


@pytest.mark.apex("2.7 delay_overflow_check=True", "10 A-26")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a26_a_delayed_check_loses_no_overflow(level: str) -> None:
    model, optimizer = one_weight(level)
    before = weights(model)
    backward(model, optimizer, float("inf"), delay_overflow_check=True)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**16
    backward(model, optimizer)
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 2.0**15
    optimizer.step()
    assert same(weights(model), before)


@pytest.mark.apex("10 A-26")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a26_no_gradient_is_left_unwritten_behind_a_bad_one(bad: int) -> None:
    scaler = amp.LossScaler("dynamic", init_scale=4.0)
    grads = [torch.full((2,), float("inf") if i == bad else 8.0) for i in range(3)]
    out = [torch.full((2,), float("nan")) for _ in range(3)]
    scaler.unscale(grads, out, 1.0)
    assert [t[0].item() for i, t in enumerate(out) if i != bad] == [2.0, 2.0]
    assert scaler.update_scale() is True


@pytest.mark.apex("10 A-26")
def test_a26_finite_gradients_with_a_huge_sum_are_no_overflow() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled:
        (scaled * 3e38).backward()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1.0, "unskipped": 1}


def test_net_is_what_these_tests_think() -> None:
    assert isinstance(Net().bn, nn.BatchNorm1d)
