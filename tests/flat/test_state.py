# SPDX-License-Identifier: BSD-3-Clause
"""The flat FP16_Optimizer's checkpoints: Apex's keys, exact, refused as a whole."""

from __future__ import annotations

import copy
import io
import re
from typing import Any

import pytest
import torch

from cases.models import loss_of, values
from cases.tolerances import assert_same
from flat.test_flat import BUILDS, HALVES, Build, assert_bound, master_values, wrapped
from preamp.compat.flat import FP16_Optimizer

APEX_KEYS = {"dynamic_loss_scale", "cur_scale", "cur_iter"}
APEX_KEYS |= {"optimizer_state_dict", "fp32_groups_flat"}
DYNAMIC_KEYS = {"last_overflow_iter", "scale_factor", "scale_window"}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def train(model: torch.nn.Module, optimizer: FP16_Optimizer, *batches: int) -> None:
    for index in batches:
        optimizer.zero_grad()
        optimizer.backward(loss_of([model], index))
        optimizer.step()


@pytest.mark.apex("6 state_dict")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("dynamic", [True, False])
def test_resuming_is_going_on(dtype: torch.dtype, name: str, dynamic: bool) -> None:
    build: Build = BUILDS[name]
    options = {"init_scale": 64.0, "scale_window": 3}
    model, optimizer = wrapped(
        build,
        dtype,
        static_loss_scale=64.0,
        dynamic_loss_scale=dynamic,
        dynamic_loss_args=options,
        verbose=False,
    )
    train(model, optimizer, 0, 1)
    state = through_a_file(optimizer.state_dict())
    assert state.keys() == APEX_KEYS | (DYNAMIC_KEYS if dynamic else set())
    train(model, optimizer, 2, 3)
    other, second = wrapped(build, dtype, static_loss_scale=4.0, verbose=False)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    second.load_state_dict(state)
    assert_bound(other, second)  # the model's weights come from the masters
    train(other, second, 2, 3)
    assert torch.equal(master_values(second), master_values(optimizer))
    assert all(map(torch.equal, values(other), values(model)))
    for name in ("cur_scale", "cur_iter", "dynamic_loss_scale", *(DYNAMIC_KEYS if dynamic else ())):
        assert getattr(second, name) == getattr(optimizer, name), name
    assert optimizer.cur_scale == (128.0 if dynamic else 64.0)


@pytest.mark.apex("6 state_dict")
def test_the_tensors_are_not_copied() -> None:
    _, optimizer = wrapped()
    saved = optimizer.state_dict()["fp32_groups_flat"]
    masters = optimizer.fp32_groups_flat
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in masters]
    assert not any(t.requires_grad for t in saved)


def test_model_weights_written_before_saving_are_saved() -> None:
    model, optimizer = wrapped()
    with torch.no_grad():
        model.a.weight.fill_(3.0)
    assert optimizer.state_dict()["fp32_groups_flat"][0][:6].tolist() == [3.0] * 6


@pytest.mark.apex("6 load_state_dict")
def test_loading_binds_parameters_that_were_given_other_data() -> None:
    model, optimizer = wrapped()
    state = copy.deepcopy(optimizer.state_dict())
    model.a.weight.data = torch.zeros(2, 3, dtype=torch.float16)
    optimizer.load_state_dict(state)
    assert_bound(model, optimizer)
    assert model.a.weight.any()


def picture(model: torch.nn.Module, optimizer: FP16_Optimizer) -> dict[str, Any]:
    return {**copy.deepcopy(optimizer.state_dict()), "model": values(model)}


def lacking(state: dict[str, Any]) -> None:
    del state["cur_iter"], state["fp32_groups_flat"]


def lacking_dynamic(state: dict[str, Any]) -> None:
    state["dynamic_loss_scale"] = True


def other_sizes(state: dict[str, Any]) -> None:
    state["fp32_groups_flat"] = [torch.zeros(8), torch.zeros(7)]


def other_groups(state: dict[str, Any]) -> None:
    state["fp32_groups_flat"] = state["fp32_groups_flat"][:1]


def useless_scale(state: dict[str, Any]) -> None:
    state["cur_scale"] = -2.0


NOTHING = "Pass what state_dict() returned; nothing was loaded."
PLACE = "Groups and parameters are those that the state was saved with, in the same order."
REBUILD = "Build the model and the optimizer as in the saved run; nothing was loaded."


@pytest.mark.apex("6 load_state_dict")
@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (
            lacking,
            "The state has no 'cur_iter', 'fp32_groups_flat'; it has 'dynamic_loss_scale', "
            "'cur_scale', 'optimizer_state_dict'. Needed is the state of the flat FP16_Optimizer. "
            "Pass what its state_dict() returned; nothing was loaded.",
        ),
        (
            lacking_dynamic,
            "The state has no 'last_overflow_iter', 'scale_factor', 'scale_window'; it has "
            "'dynamic_loss_scale', 'cur_scale', 'cur_iter', 'optimizer_state_dict', "
            "'fp32_groups_flat'. Needed is the state of the flat FP16_Optimizer. Pass what its "
            "state_dict() returned; nothing was loaded.",
        ),
        (
            other_sizes,
            "The state has flat masters of shapes [(8,), (7,)], this optimizer [(8,), (8,)]. "
            f"{PLACE} {REBUILD}",
        ),
        (
            other_groups,
            "The state has flat masters of shapes [(8,)], this optimizer [(8,), (8,)]. "
            f"{PLACE} {REBUILD}",
        ),
        (
            useless_scale,
            "The state has cur_scale=-2.0. Scales and windows are finite numbers above 0, and "
            f"steps are numbers. {NOTHING}",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused_as_a_whole(spoil: Any, text: str) -> None:
    model, optimizer = wrapped(BUILDS["adam"], static_loss_scale=4.0)
    train(model, optimizer, 0)
    state = copy.deepcopy(wrapped(BUILDS["adam"], static_loss_scale=2.0)[1].state_dict())
    spoil(state)
    before = picture(model, optimizer)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        optimizer.load_state_dict(state)
    after = picture(model, optimizer)
    for key in ("model", "fp32_groups_flat"):
        for a, b in zip(before.pop(key), after.pop(key), strict=True):
            assert_same(a, b, key)
    inner = [s.pop("optimizer_state_dict") for s in (before, after)]
    assert inner[0]["param_groups"] == inner[1]["param_groups"]
    assert inner[0]["state"].keys() == inner[1]["state"].keys()
    assert before == after


@pytest.mark.apex("6 load_state_dict")
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("cur_scale", torch.inf),
        ("cur_scale", "big"),
        ("cur_scale", None),
        ("scale_factor", 0.0),
        ("scale_window", 0),
        ("cur_iter", "1"),
        ("last_overflow_iter", None),
    ],
)
def test_numbers_that_the_next_step_would_fail_on_are_refused(key: str, value: Any) -> None:
    model, optimizer = wrapped(BUILDS["adam"], dynamic_loss_scale=True)
    state = {**copy.deepcopy(optimizer.state_dict()), key: value}
    before = picture(model, optimizer)
    with pytest.raises(ValueError, match=re.escape(f"The state has {key}={value!r}. ")):
        optimizer.load_state_dict(state)
    assert before.keys() == picture(model, optimizer).keys()
    assert getattr(optimizer, key) == before[key]
