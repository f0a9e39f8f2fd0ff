# SPDX-License-Identifier: BSD-3-Clause
"""What fp16_utils refuses; both kinds of FP16_Optimizer where they refuse the same."""

import copy
import pickle
import reprlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.models import values
from fp16_utils.steps import Weights, net, picture, sgd, wrapped
from kit.compare import same
from kit.refusals import assert_approved, assert_refused, refused
from preamp.fp16_utils import (
    FP16_Optimizer,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)

BOTH = pytest.mark.parametrize(
    "kind", [FP16_Optimizer, preamp.optimizers.FP16_Optimizer], ids=["general", "flat"]
)


def half_sgd() -> torch.optim.Optimizer:
    return sgd([nn.Parameter(torch.ones(2).half())])


def initialized() -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    inner = sgd(model.parameters())
    preamp.initialize(model, inner, opt_level="O2", verbosity=0)
    return inner


def inside_one(kind: Any) -> torch.optim.Optimizer:
    """Its parameters are the other's masters: the model would never change."""
    inner = half_sgd()
    kind(inner, verbose=False)
    return inner


UNFIT: dict[str, Callable[[], Any]] = {
    "no optimizer": Weights,
    "an FP16_Optimizer": lambda: wrapped()[1],
    "a flat FP16_Optimizer": lambda: preamp.optimizers.FP16_Optimizer(half_sgd()),
    "inside an FP16_Optimizer": lambda: inside_one(FP16_Optimizer),
    "inside a flat one": lambda: inside_one(preamp.optimizers.FP16_Optimizer),
    "an optimizer that initialize has": initialized,
}


@BOTH
@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_wrapped(kind: Any, name: str) -> None:
    inner = UNFIT[name]()
    assert_refused("fp16_utils", name, lambda: kind(inner, verbose=False), inner)


CALLS: dict[str, Callable[[Any], object]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "__setstate__": lambda optimizer: optimizer.__setstate__({}),
    "a list as state": lambda optimizer: optimizer.load_state_dict([]),
    "no state": lambda optimizer: optimizer.load_state_dict(None),
    "a number as loss": lambda optimizer: optimizer.backward(1.5),
    "a loss of integers": lambda optimizer: optimizer.backward(torch.tensor(1)),
    "no loss": lambda optimizer: optimizer.backward(None),
}


@BOTH
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_both(kind: Any, name: str) -> None:
    optimizer = kind(half_sgd(), verbose=False)
    subjects = optimizer, optimizer.optimizer
    assert_refused("fp16_utils", name, lambda: CALLS[name](optimizer), *subjects)


def build(**options: Any) -> Callable[[], object]:
    """Dynamic where there are ``args``, which are ``dynamic_loss_args``."""
    args: Any = options.pop("args", None)
    options |= {"dynamic_loss_scale": args is not None, "dynamic_loss_args": args}
    return lambda: FP16_Optimizer(sgd(Weights().parameters()), verbose=False, **options)


OPTIONS: dict[str, Callable[[], object]] = {
    "an unknown dynamic_loss_args": build(args={"window": 3}),
    "a static scale of 0": build(static_loss_scale=0),
    "a static scale in words": build(static_loss_scale="big"),
    "a negative init_scale": build(args={"init_scale": -1}),
    "a scale_window of 0": build(args={"scale_window": 0}),
    "a scale_factor below 1": build(args={"scale_factor": 0.5}),
    "limits the wrong way round": build(args={"min_loss_scale": 8.0, "max_loss_scale": 4.0}),
    "a flat master of two dtypes": lambda: prep_param_lists(
        convert_network(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.float16),
        flat_master=True,
    ),
    "a flat master of nothing": lambda: prep_param_lists(nn.ReLU(), flat_master=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    assert_refused("fp16_utils", name, OPTIONS[name])


def test_what_is_no_refusal() -> None:
    unused: Any = {"window": 3}  # not dynamic: ignored, as in Apex
    FP16_Optimizer(sgd(Weights().parameters()), dynamic_loss_args=unused, verbose=False)
    assert prep_param_lists(nn.ReLU()) == ([], [])


def test_untrainable_dtypes() -> None:
    tensors = torch.ones(2).half(), torch.ones(3, dtype=torch.complex64)
    inner = sgd([tensor.requires_grad_() for tensor in tensors])
    assert_refused("fp16_utils", "a complex parameter", lambda: FP16_Optimizer(inner), inner)


# -- of one that trains -----------------------------------------------------------------------


def load(*left_out: str, **changes: Any) -> Callable[[FP16_Optimizer], object]:
    """Load the state of another optimizer with changes."""

    def act(optimizer: FP16_Optimizer) -> None:
        state = wrapped(static_loss_scale=4.0)[1].state_dict() | changes
        optimizer.load_state_dict({k: v for k, v in state.items() if k not in left_out})

    return act


STATES: dict[str, Callable[[FP16_Optimizer], object]] = {
    "a master of another shape": load(fp32_from_fp16=[[torch.zeros(3)]]),
    "no master": load(fp32_from_fp16=[[]]),
    "one group of masters too many": load(fp32_from_fp16=[[torch.zeros(2)], []]),
    "other groups inside": load(optimizer_state_dict={"state": {}, "param_groups": []}),
    "an incomplete state": load("loss_scaler", "overflow"),
    "a scale of 0 by hand": lambda optimizer: setattr(optimizer, "loss_scale", 0.0),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    model, optimizer = wrapped(static_loss_scale=2.0)
    before = picture(optimizer, model)
    subjects = model, optimizer, optimizer.optimizer
    assert_refused("fp16_utils", name, lambda: STATES[name](optimizer), *subjects)
    assert same(picture(optimizer, model), before)


NESTED: Any = ()
for _ in range(40):  # a tuple whose repr would never end
    NESTED = (NESTED, NESTED)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), "big", None, NESTED])
def test_unusable_scalers(scale: Any) -> None:
    model, optimizer = wrapped()
    before = picture(optimizer, model)
    state = optimizer.state_dict()
    known = state["loss_scaler"]
    for scaler in ({**known, "loss_scale": scale}, {"loss_scale": scale}, object(), scale):
        with pytest.raises(ValueError) as got:  # noqa: PT011 - all of its words are below
            optimizer.load_state_dict({**state, "loss_scaler": scaler})
        said, shown = f"ValueError: {got.value}", reprlib.repr(scaler)
        assert_approved("fp16_utils", "an unusable scaler", said, scaler=shown)
        assert len(said) < 1000
    assert same(picture(optimizer, model), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda optimizer: optimizer.step(),
        lambda optimizer: optimizer.clip_master_grads(1.0),
        lambda optimizer: optimizer.inspect_master_grad_data(),
    ],
    ids=(names := ["step", "clip_master_grads", "inspect_master_grad_data"]),
)
def test_gradients_that_have_not_reached_the_masters(
    call: Callable[[FP16_Optimizer], Any], request: pytest.FixtureRequest
) -> None:
    model, optimizer = wrapped()
    optimizer.backward(model.loss(), update_master_grads=False)
    (name,) = (name for name in names if name in request.node.name)
    with refused("fp16_utils", "gradients not updated", model, optimizer.optimizer, call=name):
        call(optimizer)
    optimizer.update_master_grads()
    call(optimizer)
    optimizer.backward(model.loss(), update_master_grads=False)
    optimizer.zero_grad()
    call(optimizer)


def test_a_closure_without_backward() -> None:
    model, optimizer = wrapped()

    def closure() -> torch.Tensor:
        loss = model.loss()
        loss.backward()
        return loss

    before = values(model)
    assert_refused("fp16_utils", "a closure by loss.backward", lambda: optimizer.step(closure))
    assert all(map(torch.equal, values(model), before))


def test_a_model_that_became_float32() -> None:
    model, optimizer = wrapped()
    model.float()
    subjects = model, optimizer.optimizer
    assert_refused("fp16_utils", "a model that became float32", optimizer.step, *subjects)


# -- of functions -----------------------------------------------------------------------------


def test_a_flat_master_needs_every_gradient() -> None:
    params, masters = prep_param_lists(net(), flat_master=True)
    params[0].grad = torch.ones_like(params[0])
    with refused("fp16_utils", "a flat master without a gradient"):
        model_grads_to_master_grads(params, masters, flat_master=True)
    assert masters[0].grad.abs().sum() == 0


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("copies", [model_grads_to_master_grads, master_params_to_model_params])
def test_lists_that_do_not_belong_together(flat: bool, copies: Any) -> None:
    model = net()
    params, masters = prep_param_lists(model, flat_master=flat)
    name = "too few parameters for a flat master" if flat else "fewer parameters than masters"
    with refused("fp16_utils", name, model):
        copies(params[:2], masters, flat_master=flat)
