# SPDX-License-Identifier: BSD-3-Clause
"""What fp16_utils and both of its FP16_Optimizers refuse."""

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
from cases.models import loss_of, values
from cases.optimizers import ADAM
from fp16_utils.steps import HALVES, KINDS, Weights, net, parts, picture, sgd, wrapped
from kit.compare import same
from kit.refusals import assert_approved, assert_refused, refused
from preamp.fp16_utils import (
    FP16_Optimizer,
    convert_network,
    master_params_to_model_params,
    model_grads_to_master_grads,
    prep_param_lists,
)
from preamp.optim import LARC

BOTH = pytest.mark.parametrize("kind", KINDS)
FLAT = KINDS["flat"]


def params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]


def half_sgd() -> torch.optim.Optimizer:
    return sgd(params(torch.float16))


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
    "a flat FP16_Optimizer": lambda: FLAT(half_sgd()),
    "inside an FP16_Optimizer": lambda: inside_one(FP16_Optimizer),
    "inside a flat one": lambda: inside_one(FLAT),
    "an optimizer that initialize has": initialized,
}


@BOTH
@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_wrapped(kind: str, name: str) -> None:
    inner = UNFIT[name]()
    assert_refused("fp16_utils", name, lambda: KINDS[kind](inner, verbose=False), inner)


def groups(*dtypes: torch.dtype) -> torch.optim.Optimizer:
    """The second group has one parameter of each dtype."""
    return sgd([{"params": params(torch.float16)}, {"params": params(*dtypes)}])


def stepped() -> torch.optim.Optimizer:
    (param,) = params(torch.float32)
    param.grad = torch.ones(2)
    inner = torch.optim.Adam([param])
    inner.step()
    return inner


class OfAFork(torch.optim.SGD):
    def step(self, closure: Any = None, grads: Any = None) -> None:
        raise AssertionError


FUSED = {
    name: lambda name=name: getattr(preamp.optimizers, name)(params(torch.float16), lr=0.1)
    for name in ("FusedLAMB", "FusedLARS", "FusedNovoGrad", "FusedMixedPrecisionLamb")
}
NOT_FLAT: dict[str, Callable[[], Any]] = {
    "a group of two half dtypes": lambda: groups(*HALVES),
    "a group of half and float32": lambda: groups(torch.float16, torch.float32),
    "a group of float64": lambda: groups(torch.float64),
    "LBFGS": lambda: torch.optim.LBFGS(params(torch.float16)),
    "Adafactor": lambda: torch.optim.Adafactor(params(torch.float16)),
    "LARC": lambda: LARC(half_sgd()),
    "an optimizer that has stepped": stepped,
    "an optimizer whose step takes grads": lambda: OfAFork(params(torch.float16), lr=0.1),
    "a FusedAdam with L2 decay": lambda: preamp.optimizers.FusedAdam(
        params(torch.float16), adam_w_mode=False
    ),
    **FUSED,
}


@pytest.mark.parametrize("name", NOT_FLAT)
def test_what_cannot_be_flat(name: str) -> None:
    inner = NOT_FLAT[name]()
    places = [param.data_ptr() for group in inner.param_groups for param in group["params"]]
    assert_refused("fp16_utils", name, lambda: FLAT(inner), inner)
    kept = [param.data_ptr() for group in inner.param_groups for param in group["params"]]
    assert kept == places


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
def test_calls_of_both(kind: str, name: str) -> None:
    optimizer = KINDS[kind](half_sgd(), verbose=False)
    subjects = optimizer, optimizer.optimizer
    assert_refused("fp16_utils", name, lambda: CALLS[name](optimizer), *subjects)


def build(kind: str = "general", **options: Any) -> Callable[[], object]:
    """Dynamic where there are ``args``, which are ``dynamic_loss_args``."""
    args: Any = options.pop("args", None)
    options |= {"dynamic_loss_scale": args is not None, "dynamic_loss_args": args}
    return lambda: wrapped(kind, **options)


OPTIONS: dict[str, Callable[[], object]] = {
    "an unknown dynamic_loss_args": build(args={"window": 3}),
    "an unknown one of the flat": build("flat", args={"min_loss_scale": 1}),
    "a static scale of 0": build(static_loss_scale=0),
    "a static scale in words": build(static_loss_scale="big"),
    "a negative init_scale": build(args={"init_scale": -1}),
    "a scale_window of 0": build(args={"scale_window": 0}),
    "a scale_window of 0, flat": build("flat", args={"scale_window": 0}),
    "a scale_factor below 1": build(args={"scale_factor": 0.5}),
    "a scale_factor below 1, flat": build("flat", args={"scale_factor": 0.5}),
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


@pytest.mark.parametrize("scale", [0, -1.0, torch.nan, torch.inf, "big", None])
def test_unusable_static_scales(scale: Any) -> None:
    with refused("fp16_utils", "an unusable static scale", scale=repr(scale)):
        FLAT(half_sgd(), static_loss_scale=scale)


@BOTH
def test_what_is_no_refusal(kind: str) -> None:
    build(kind, dynamic_loss_scale=False)()
    unused: Any = {"window": 3}  # not dynamic: ignored, as in Apex
    wrapped(kind, dynamic_loss_args=unused)
    assert prep_param_lists(nn.ReLU()) == ([], [])


def test_untrainable_dtypes() -> None:
    inner = sgd([*params(torch.float16), nn.Parameter(torch.ones(3, dtype=torch.complex64))])
    assert_refused("fp16_utils", "a complex parameter", lambda: FP16_Optimizer(inner), inner)


# -- of one that trains -----------------------------------------------------------------------


def load(make: Callable[[], Any], *left_out: str, **changes: Any) -> Callable[[Any], None]:
    """Load the state of another optimizer with changes."""

    def act(optimizer: Any) -> None:
        state = make().state_dict() | changes
        optimizer.load_state_dict({k: v for k, v in state.items() if k not in left_out})

    return act


def general(*left_out: str, **changes: Any) -> Callable[[Any], None]:
    return load(lambda: wrapped(static_loss_scale=4.0)[1], *left_out, **changes)


STATES: dict[str, Callable[[Any], object]] = {
    "a master of another shape": general(fp32_from_fp16=[[torch.zeros(3)]]),
    "no master": general(fp32_from_fp16=[[]]),
    "one group of masters too many": general(fp32_from_fp16=[[torch.zeros(2)], []]),
    "other groups inside": general(optimizer_state_dict={"state": {}, "param_groups": []}),
    "an incomplete state": general("loss_scaler", "overflow"),
    "a scale of 0 by hand": lambda optimizer: setattr(optimizer, "loss_scale", 0.0),
}


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    model, optimizer = wrapped(static_loss_scale=2.0)
    before = picture(optimizer, model)
    subjects = model, optimizer, optimizer.optimizer
    assert_refused("fp16_utils", name, lambda: STATES[name](optimizer), *subjects)
    assert same(picture(optimizer, model), before)


def flat_adam(dynamic: bool = False) -> tuple[Any, Any]:
    return parts(ADAM.build, static_loss_scale=4.0, dynamic_loss_scale=dynamic)


def flat(*left_out: str, dynamic: bool = False, **changes: Any) -> Callable[[Any], None]:
    return load(lambda: flat_adam(dynamic)[1], *left_out, **changes)


FLAT_STATES: dict[str, Callable[[Any], object]] = {
    "an incomplete flat state": flat("cur_iter", "fp32_groups_flat"),
    "a dynamic state of a static scale": flat(dynamic_loss_scale=True),
    "masters of other sizes": flat(fp32_groups_flat=[torch.zeros(8), torch.zeros(7)]),
    "a group of masters too few": flat(fp32_groups_flat=[torch.zeros(8)]),
    "a negative scale": flat(cur_scale=-2.0),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "cur_scale": (-2.0, torch.inf, "big", None),
    "scale_factor": (0.0,),
    "scale_window": (0,),
    "cur_iter": ("1",),
    "last_overflow_iter": (None,),
}
ROWS = [(name, act, "") for name, act in FLAT_STATES.items()] + [
    ("an unusable number", flat(dynamic=True, **{key: value}), f"{key}={value!r}")
    for key, values in NUMBERS.items()
    for value in values
]


@pytest.mark.parametrize(("name", "act", "shown"), ROWS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_flat_states(name: str, act: Any, shown: str, dynamic: bool) -> None:
    model, optimizer = flat_adam(dynamic)
    optimizer.backward(loss_of([model], 0))
    optimizer.step()
    before = picture(optimizer, model)
    with refused("fp16_utils", name, model, optimizer, optimizer.optimizer, number=shown):
        act(optimizer)
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


@pytest.mark.parametrize("name", ["step", "clip_master_grads", "inspect_master_grad_data"])
def test_gradients_that_have_not_reached_the_masters(name: str) -> None:
    model, optimizer = wrapped()
    arguments = (1.0,) if name == "clip_master_grads" else ()
    optimizer.backward(model.loss(), update_master_grads=False)
    with refused("fp16_utils", "gradients not updated", model, optimizer.optimizer, call=name):
        getattr(optimizer, name)(*arguments)
    for act in (optimizer.update_master_grads, optimizer.zero_grad):
        act()
        getattr(optimizer, name)(*arguments)
        optimizer.backward(model.loss(), update_master_grads=False)


def test_a_closure_without_backward() -> None:
    model, optimizer = wrapped()

    def closure() -> torch.Tensor:
        loss = model.loss()
        loss.backward()
        return loss

    before = values(model)
    assert_refused("fp16_utils", "a closure by loss.backward", lambda: optimizer.step(closure))
    assert all(map(torch.equal, values(model), before))


@BOTH
@pytest.mark.parametrize("use", ["step", "state_dict"])
def test_a32_models_cast_later(kind: str, use: str) -> None:
    model, optimizer = wrapped(kind)
    model.float()
    if kind == "general" and use == "state_dict":
        return
    subjects = model, optimizer.optimizer
    name = {"general": "a model that became float32", "flat": "a model that was cast"}[kind]
    assert_refused("fp16_utils", name, getattr(optimizer, use), *subjects)


def test_groups_added_later() -> None:
    model, optimizer = parts()
    optimizer.optimizer.add_param_group({"params": params(torch.float16)})
    assert_refused("fp16_utils", "a group added later", optimizer.step, model, optimizer)


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
