# SPDX-License-Identifier: BSD-3-Clause
"""FP16_Optimizer's checkpoints: exact, plain data, refused as a whole where they do not fit."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import preamp
import preamp.optimizers
from cases.models import loss_of, values
from cases.optimizers import MAIN, OptimizerCase
from cases.tolerances import assert_same
from fp16_utils.steps import HALVES, Weights, assert_agree, pair, picture, plain_step, sgd, wrapped
from preamp.core.errors import PreampStateError
from preamp.fp16_utils import FP16_Optimizer

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


# -- refusals ------------------------------------------------------------------------------------

DO = "Build the model and the optimizer as in the saved run; nothing was loaded."
GROUPS = "Groups and parameters are those that the state was saved with, in the same order."


def refused(error: type[Exception], text: str) -> Any:
    return pytest.raises(error, match=f"^{re.escape(text)}$")


@pytest.mark.parametrize(
    ("masters", "shown"),
    [([[torch.zeros(3)]], "[[(3,)]]"), ([[]], "[[]]"), ([[torch.zeros(2)], []], "[[(2,)], []]")],
)
def test_masters_of_other_parameters_are_refused(masters: Any, shown: str) -> None:
    model, optimizer = wrapped()
    before = picture(optimizer, model)
    state = {**wrapped(static_loss_scale=4.0)[1].state_dict(), "fp32_from_fp16": masters}
    text = f"The state has masters of shapes {shown}, this optimizer [[(2,)]]. {GROUPS} {DO}"
    with refused(ValueError, text):
        optimizer.load_state_dict(state)
    assert_same_picture(before, picture(optimizer, model))


def test_other_groups_inside_are_refused() -> None:
    model, optimizer = wrapped()
    before = picture(optimizer, model)
    state = wrapped(static_loss_scale=4.0)[1].state_dict()
    state["optimizer_state_dict"] = {"state": {}, "param_groups": []}
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict(state)
    assert_same_picture(before, picture(optimizer, model))


def test_incomplete_states_are_refused() -> None:
    model, optimizer = wrapped()
    before = picture(optimizer, model)
    state = wrapped(static_loss_scale=4.0)[1].state_dict()
    del state["loss_scaler"], state["overflow"]
    text = (
        "The state has no 'loss_scaler', 'overflow'; it has 'dynamic_loss_scale', "
        "'first_closure_call_this_step', 'optimizer_state_dict', 'fp32_from_fp16'. Needed is the "
        "state of fp16_utils.FP16_Optimizer. Pass what its state_dict() returned; nothing was "
        "loaded."
    )
    with refused(ValueError, text):
        optimizer.load_state_dict(state)
    assert_same_picture(before, picture(optimizer, model))


NESTED: Any = ()
for _ in range(40):  # a tuple whose repr would never end
    NESTED = (NESTED, NESTED)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "big", None, NESTED])
def test_unusable_scalers_are_refused(scale: Any) -> None:
    model, optimizer = wrapped()
    before = picture(optimizer, model)
    state = optimizer.state_dict()
    known = state["loss_scaler"]
    for scaler in ({**known, "loss_scale": scale}, {"loss_scale": scale}, object(), scale):
        state["loss_scaler"] = scaler
        text = r"^A loss scaler's state .* cannot be read .*Needed are "
        with pytest.raises(ValueError, match=text) as got:
            optimizer.load_state_dict(state)
        assert len(str(got.value)) < 1000
    assert_same_picture(before, picture(optimizer, model))


# -- errors of the constructor and of calls ------------------------------------------------------


def build(optimizer: Any = None, **arguments: Any) -> FP16_Optimizer:
    inner = sgd(Weights().parameters()) if optimizer is None else optimizer
    return FP16_Optimizer(inner, verbose=False, **arguments)


BOTH = pytest.mark.parametrize(
    "kind", [FP16_Optimizer, preamp.optimizers.FP16_Optimizer], ids=["general", "flat"]
)


def half_sgd() -> torch.optim.Optimizer:
    return sgd([torch.nn.Parameter(torch.ones(2).half())])


def initialized() -> torch.optim.Optimizer:
    model = torch.nn.Linear(2, 2)
    inner = sgd(model.parameters())
    preamp.initialize(model, inner, opt_level="O2", verbosity=0)
    return inner


def inside_one(kind: Any) -> torch.optim.Optimizer:
    """Its parameters are the other's masters: the model would never change."""
    inner = half_sgd()
    kind(inner, verbose=False)
    return inner


INSIDE = (
    "init_optimizer, an SGD, is inside an FP16_Optimizer. It holds the masters of that one, which "
    "no other can write to the model. Make a new optimizer from the model's parameters, and wrap "
    "that."
)


@BOTH
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            Weights,
            TypeError,
            "init_optimizer is of type Weights. FP16_Optimizer wraps an optimizer with "
            "param_groups and state. Pass for example torch.optim.SGD(model.parameters(), lr=0.1).",
        ),
        (
            lambda: wrapped()[1],
            PreampStateError,
            "init_optimizer is an FP16_Optimizer already. FP16_Optimizer wraps an optimizer once. "
            "Use it as it is, or make a new optimizer from the model's parameters.",
        ),
        (
            lambda: preamp.optimizers.FP16_Optimizer(half_sgd()),
            PreampStateError,
            "init_optimizer is an FP16_Optimizer already. FP16_Optimizer wraps an optimizer once. "
            "Use it as it is, or make a new optimizer from the model's parameters.",
        ),
        (lambda: inside_one(FP16_Optimizer), PreampStateError, INSIDE),
        (lambda: inside_one(preamp.optimizers.FP16_Optimizer), PreampStateError, INSIDE),
        (
            initialized,
            PreampStateError,
            "init_optimizer went through initialize and has loss scaling already. An optimizer "
            "belongs to initialize or to FP16_Optimizer. Leave FP16_Optimizer out: scale_loss and "
            "O2 or O5 do what it does.",
        ),
    ],
    ids=["no optimizer", "wrapped", "wrapped flat", "inside", "inside a flat one", "initialized"],
)
def test_what_cannot_be_wrapped_is_refused(
    kind: Any, make: Callable[[], Any], error: type[Exception], text: str
) -> None:
    inner = make()
    params = [group["params"] for group in getattr(inner, "param_groups", ())]
    with refused(error, text):
        kind(inner, verbose=False)
    kept = [group["params"] for group in getattr(inner, "param_groups", ())]
    assert all(now is before for now, before in zip(kept, params, strict=True))


NO_COPY = "An FP16_Optimizer cannot be pickled or copied. Its masters belong to one model. Save "
NO_COPY += "optimizer.state_dict(), and load it into one made for the other model."


@BOTH
@pytest.mark.parametrize(
    "how", [copy.copy, copy.deepcopy, pickle.dumps, lambda o: o.__setstate__({})]
)
def test_copies_are_refused(kind: Any, how: Callable[[Any], Any]) -> None:
    optimizer = kind(half_sgd(), verbose=False)
    with refused(RuntimeError, NO_COPY):
        how(optimizer)


@BOTH
@pytest.mark.parametrize(("state", "shown"), [([], "a list"), (None, "a NoneType")])
def test_a_state_that_is_none_is_refused(kind: Any, state: Any, shown: str) -> None:
    text = (
        f"load_state_dict got {shown}. A state is the dict that state_dict() returned. Take it out "
        "of the checkpoint first, as in checkpoint['optimizer']."
    )
    with refused(TypeError, text):
        kind(half_sgd(), verbose=False).load_state_dict(state)


def test_untrainable_dtypes_are_refused() -> None:
    params = [torch.ones(2).half().requires_grad_(), torch.ones(3, dtype=torch.complex64)]
    params[1].requires_grad_()
    inner = sgd(params)
    with refused(
        TypeError,
        "A parameter of shape (3,) has dtype torch.complex64. FP16_Optimizer takes float16, "
        "bfloat16, float32 and float64 parameters. Convert it, or leave it out of the optimizer.",
    ):
        build(inner)
    assert inner.param_groups[0]["params"][0] is params[0]


def test_unknown_options_are_refused() -> None:
    with refused(
        TypeError,
        "dynamic_loss_args has 'window'. Known are init_scale, scale_factor, scale_window, "
        "min_loss_scale, max_loss_scale. Leave the others out.",
    ):
        build(dynamic_loss_scale=True, dynamic_loss_args={"window": 3})
    build(dynamic_loss_args={"window": 3})  # not dynamic: ignored, as in Apex


@pytest.mark.parametrize(
    "arguments",
    [
        {"static_loss_scale": 0},
        {"static_loss_scale": "big"},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"init_scale": -1}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 0}},
        {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_factor": 0.5}},
        {
            "dynamic_loss_scale": True,
            "dynamic_loss_args": {"min_loss_scale": 8.0, "max_loss_scale": 4.0},
        },
    ],
)
def test_unusable_numbers_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        build(**arguments)


def test_a_scale_set_by_hand_has_to_be_usable() -> None:
    optimizer = build(static_loss_scale=4.0)
    with pytest.raises(ValueError, match="out of range: loss_scale"):
        optimizer.loss_scale = 0.0
    assert optimizer.loss_scale == 4.0


@BOTH
@pytest.mark.parametrize(
    ("loss", "shown"), [(1.5, "float"), (torch.tensor(1), "torch.int64"), (None, "NoneType")]
)
def test_a_loss_that_is_none_is_refused(kind: Any, loss: Any, shown: str) -> None:
    text = (
        f"optimizer.backward got a loss of {shown}. The loss is a floating-point tensor with one "
        "element. Pass the loss itself, not loss.item() or a tuple."
    )
    with refused(TypeError, text):
        kind(half_sgd(), verbose=False).backward(loss)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("step", lambda optimizer: optimizer.step()),
        ("clip_master_grads", lambda optimizer: optimizer.clip_master_grads(1.0)),
        ("inspect_master_grad_data", lambda optimizer: optimizer.inspect_master_grad_data()),
    ],
)
def test_gradients_that_have_not_reached_the_masters(
    name: str, call: Callable[[FP16_Optimizer], Any]
) -> None:
    model, optimizer = wrapped()
    optimizer.backward(model.loss(), update_master_grads=False)
    text = (
        f"{name} was called while gradients had not reached the masters. A backward with "
        "update_master_grads=False, or one that failed, is followed by update_master_grads() or "
        "zero_grad(). Call optimizer.update_master_grads() after the last backward."
    )
    with refused(PreampStateError, text):
        call(optimizer)
    optimizer.update_master_grads()
    call(optimizer)
    optimizer.backward(model.loss(), update_master_grads=False)
    optimizer.zero_grad()
    call(optimizer)


def test_a_closure_without_backward_is_refused() -> None:
    model, optimizer = wrapped()

    def closure() -> torch.Tensor:
        loss = model.loss()
        loss.backward()
        return loss

    before = values(model)
    with refused(
        PreampStateError,
        "The closure given to FP16_Optimizer.step made no gradients. It calls "
        "optimizer.backward(loss), with update_master_grads left on. Replace loss.backward() in "
        "it by optimizer.backward(loss).",
    ):
        optimizer.step(closure)
    assert all(map(torch.equal, values(model), before))


def test_a_model_that_became_float32_is_refused() -> None:
    model, optimizer = wrapped()
    model.float()
    text = (
        "A half parameter of shape (2,) became torch.float32 after FP16_Optimizer was made. "
        "Parameters with a master keep their dtype. Convert a copy of the model, or make the "
        "optimizer after converting it."
    )
    with refused(PreampStateError, text):
        optimizer.step()


def assert_same_picture(before: Any, after: Any) -> None:
    for key in before:
        old, new = before[key], after[key]
        if isinstance(old, list):
            for a, b in zip(old, new, strict=True):
                assert_same(a, b, key)
        else:
            assert old == new, key
