# SPDX-License-Identifier: BSD-3-Clause
"""Known bugs of Apex, one test each, showing the right behaviour."""

import collections
from typing import Any

import pytest
import torch
from torch import nn

from cases.levels import LEVEL_NAMES
from kit.compare import same
from kit.loops import loss_of, make, weights
from kit.refusals import refused
from preamp import amp

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)


def started(level: str, **arguments: Any) -> Any:
    return amp.initialize(*make(), opt_level=level, verbosity=0, **arguments)


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


def test_a25_keys_are_matched_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    started("O2", num_losses=2)
    one, two = ({"loss_scale": scale, "unskipped": 3} for scale in (8.0, 16.0))
    amp.load_state_dict(collections.OrderedDict(loss_scaler1=two, loss_scaler0=one))
    assert amp.state_dict() == {"loss_scaler0": one, "loss_scaler1": two}
    assert capsys.readouterr().out == ""


def test_a25_static_scales_keep_their_value() -> None:
    started("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 3}})
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}}


@pytest.mark.parametrize(
    "entry", [None, 5, {}, {"loss_scale": 4.0}, {"loss_scale": "x", "unskipped": 0}]
)
def test_a25_no_entry_is_applied_when_a_later_one_cannot_be_read(entry: Any) -> None:
    _kept_alive = started("O2", num_losses=2)
    before = amp.state_dict()
    good = {"loss_scale": 2.0, "unskipped": 3}
    with refused("compat", "an unreadable scaler", entry=repr(entry)):
        amp.load_state_dict({"loss_scaler0": good, "loss_scaler1": entry})
    assert amp.state_dict() == before


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


def test_a26_scale_factor() -> None:
    scaler = amp.LossScaler("dynamic", init_scale=16.0, scale_factor=8.0, scale_window=1)
    scaler.update_scale()
    assert scaler.loss_scale() == 128.0


def test_a26_the_scale_has_a_floor() -> None:
    scaler = amp.LossScaler("dynamic", init_scale=2.0**-23)
    for _ in range(5):
        scaler._has_overflow = True
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**-24


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a26_no_gradient_is_left_unwritten_behind_a_bad_one(bad: int) -> None:
    scaler = amp.LossScaler("dynamic", init_scale=4.0)
    grads = [torch.full((2,), float("inf") if i == bad else 8.0) for i in range(3)]
    out = [torch.full((2,), float("nan")) for _ in range(3)]
    scaler.unscale(grads, out, 1.0)
    assert [t[0].item() for i, t in enumerate(out) if i != bad] == [2.0, 2.0]
    assert scaler.update_scale() is True


def test_a26_finite_gradients_with_a_huge_sum_are_no_overflow() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    amp._amp_state.loss_scalers[0]._loss_scale = 1.0
    with amp.scale_loss(model.weight.sum(), optimizer) as scaled:
        (scaled * 3e38).backward()
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 1.0, "unskipped": 1}
