# SPDX-License-Identifier: BSD-3-Clause
"""FP16_Optimizer's checkpoints: exact, plain data, refused as a whole where they do not fit."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cases.models import loss_of
from cases.optimizers import MAIN, OptimizerCase
from fp16_utils.steps import HALVES, assert_agree, pair, plain_step, wrapped

APEX_KEYS = {
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", MAIN, ids=lambda case: case.name)
def test_resuming_is_going_on(dtype: torch.dtype, case: OptimizerCase) -> None:
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 3}}
    model, optimizer, plain, reference = pair(dtype, case.build, **options)
    for index in range(2):
        optimizer.zero_grad()
        optimizer.backward(loss_of([model], index))
        optimizer.step()
        plain_step(plain, reference, index)
    state = through_a_file(optimizer.state_dict())
    assert state.keys() == APEX_KEYS
    # Another seed, another scale: everything has to come from the file.
    model, optimizer, *_ = pair(dtype, case.build, static_loss_scale=2.0)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
        model.norm.load_state_dict(plain.norm.state_dict())  # float32 weights are the model's
    optimizer.load_state_dict(state)
    assert_agree(model, optimizer, plain)
    for index in range(2, 5):
        optimizer.zero_grad()
        optimizer.backward(loss_of([model], index))
        optimizer.step()
        plain_step(plain, reference, index)
        assert_agree(model, optimizer, plain)
    assert optimizer.loss_scale == 2.0**17  # the third clean update, counted from the file on


def test_every_field_survives() -> None:
    limits = {"init_scale": 8.0, "scale_factor": 4.0, "scale_window": 5}
    limits |= {"min_loss_scale": 0.5, "max_loss_scale": 2.0**10}
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args=limits)
    optimizer.backward(model.loss())
    optimizer.backward(model.loss(torch.nan))
    optimizer.backward(model.wide.sum())
    optimizer.overflow, optimizer.first_closure_call_this_step = True, False
    saved = through_a_file(optimizer.state_dict())
    _, other = wrapped()
    other.load_state_dict(saved)
    assert saved["loss_scaler"] == {
        "dynamic": True,
        "loss_scale": optimizer.loss_scale,
        "unskipped": 0,
        "scale_factor": 4.0,
        "scale_window": 5,
        "min_loss_scale": 0.5,
        "max_loss_scale": 2.0**10,
    }
    again = other.state_dict()
    for key in APEX_KEYS - {"fp32_from_fp16"}:
        assert again[key] == saved[key], key
    assert (other.overflow, other.first_closure_call_this_step) == (True, False)
    assert other.dynamic_loss_scale


def test_the_tensors_are_not_copied() -> None:
    _, optimizer = wrapped()
    (master,) = optimizer.all_fp32_from_fp16_params
    saved = optimizer.state_dict()["fp32_from_fp16"][0][0]
    assert saved.data_ptr() == master.data_ptr()
    assert not saved.requires_grad


def test_model_weights_written_before_saving_are_saved() -> None:
    model, optimizer = wrapped()
    with torch.no_grad():
        model.low.fill_(3.0)
    assert optimizer.state_dict()["fp32_from_fp16"][0][0].tolist() == [3.0, 3.0]


class AmpScaler:
    """What ``apex.amp.scaler.LossScaler`` kept in its attributes."""

    def __init__(self) -> None:
        self.dynamic = True
        self._loss_scale = 512.0
        self._max_loss_scale = 2.0**20
        self._min_loss_scale = None
        self._scale_seq_len = 100
        self._unskipped = 99
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)


class OldDynamicScaler:
    """What ``apex.fp16_utils.loss_scaler.DynamicLossScaler`` kept."""

    def __init__(self) -> None:
        self.cur_scale = 512.0
        self.cur_iter = 349
        self.last_overflow_iter = 249
        self.scale_factor = 2.0
        self.scale_window = 100


@pytest.mark.parametrize("kind", [AmpScaler, OldDynamicScaler])
def test_live_objects_of_apex_are_understood(kind: Callable[[], Any]) -> None:
    """The next clean update is the one that doubles the scale, under either rule."""
    model, optimizer = wrapped()
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": kind()})
    assert optimizer.loss_scale == 512.0
    optimizer.backward(model.loss())
    assert optimizer.loss_scale == 1024.0


def test_a_loaded_scale_above_the_ceiling_stays() -> None:
    scaler = OldDynamicScaler()
    scaler.cur_scale = 2.0**32
    _, optimizer = wrapped()
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
    assert optimizer.loss_scale == 2.0**32
