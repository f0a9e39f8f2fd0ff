# SPDX-License-Identifier: BSD-3-Clause
"""The flat FP16_Optimizer: one buffer for each group, both protocols, every odd gradient."""

import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.models import Parts, loss_of, values
from flat.early_adam import EarlyAdam
from kit.compare import same
from kit.refusals import assert_refused, refused
from preamp.compat.flat import FP16_Optimizer
from preamp.optim import LARC
from preamp.optim.fused.every import FusedMixedPrecisionLamb

HALVES = (torch.float16, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)

Build = Callable[[Any], torch.optim.Optimizer]

ELEMENTWISE: dict[str, Build] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5, weight_decay=0.25),
    "adam": lambda params: torch.optim.Adam(params, lr=0.125, eps=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.125, eps=1e-4, weight_decay=0.25),
}
BUILDS: dict[str, Build] = {**ELEMENTWISE, "early": lambda params: EarlyAdam(params)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(part.parameters())} for part in model.children()]


def wrapped(
    build: Build = sgd, dtype: torch.dtype = torch.float16, **arguments: Any
) -> tuple[Parts, FP16_Optimizer]:
    model = Parts().to(dtype)
    return model, FP16_Optimizer(build(groups_of(model)), **arguments)


def reference_steps(build: Build, model: nn.Module, steps: int) -> list[list[torch.Tensor]]:
    """Masters after each step: the same in float32, one parameter per tensor."""
    plain = copy.deepcopy(model).float()
    optimizer = build(groups_of(plain))
    after = []
    for index in range(steps):
        optimizer.zero_grad()
        loss_of([plain], index).backward()
        if isinstance(optimizer, EarlyAdam):
            optimizer.step(
                grads=[[p.grad for p in group["params"]] for group in optimizer.param_groups],
                output_params=[
                    [torch.empty_like(p) for p in group["params"]]
                    for group in optimizer.param_groups
                ],
                grad_norms=[0.0] * len(optimizer.param_groups),
            )
        else:
            optimizer.step()
        after.append(values(plain))
    return after


def master_values(optimizer: FP16_Optimizer) -> torch.Tensor:
    return torch.cat([master.detach() for master in optimizer.fp32_groups_flat])


def assert_bound(model: nn.Module, optimizer: FP16_Optimizer) -> None:
    """Parameters are views of the buffers, and the buffers are the rounded masters."""
    buffers = optimizer.fp16_groups_flat
    for flat, master in zip(buffers, optimizer.fp32_groups_flat, strict=True):
        assert torch.equal(flat, master.detach().to(flat.dtype))
    ranges = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in buffers]
    for param in model.parameters():
        assert any(start <= param.data_ptr() < stop for start, stop in ranges)
    together = torch.cat([param.detach().flatten() for param in model.parameters()])
    assert torch.equal(together, torch.cat(buffers))


# -- training ------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize(
    "scaling",
    [{"static_loss_scale": 64.0}, {"dynamic_loss_scale": True}],
    ids=["static", "dynamic"],
)
def test_steps_are_those_of_separate_float32_parameters(
    dtype: torch.dtype, name: str, scaling: dict[str, Any]
) -> None:
    model, optimizer = wrapped(BUILDS[name], dtype, **scaling)
    wanted = reference_steps(BUILDS[name], model, 3)
    for index in range(3):
        optimizer.zero_grad()
        optimizer.backward(loss_of([model], index))
        assert optimizer.step() is None
        flat = torch.cat([value.flatten() for value in wanted[index]])
        assert torch.equal(master_values(optimizer), flat)
        assert_bound(model, optimizer)


def test_backwards_are_summed() -> None:
    model, optimizer = wrapped(static_loss_scale=16.0)
    before = master_values(optimizer)
    for _ in range(3):
        optimizer.backward(sum(p.float().sum() for p in model.parameters()))
    optimizer.step()
    assert torch.equal(master_values(optimizer), before - 3.0)


def test_the_early_protocol_gets_scaled_norms_and_clips_per_group() -> None:
    model, optimizer = wrapped(
        lambda params: EarlyAdam(params, max_grad_norm=0.5), static_loss_scale=8.0
    )
    a, b = model.a.weight, model.b.weight
    optimizer.backward(a.float().sum() * 3.0 + b.float().sum() * 0.125)
    optimizer.step()
    (call,) = optimizer.optimizer.calls
    assert call["scale"] == 8.0
    norms = [8.0 * 3.0 * 6**0.5, 8.0 * 0.125 * 6**0.5]
    assert call["grad_norms"] == pytest.approx(norms, rel=1e-6)
    moments = [optimizer.state[m]["exp_avg"][0].item() for m in optimizer.fp32_groups_flat]
    clip = 0.5 / (3.0 * 6**0.5 + 1e-6)  # the first group is above 0.5, the second below
    assert moments == pytest.approx([0.5 * 3.0 * clip, 0.5 * 0.125], rel=1e-5)


def test_a_closure_is_called_once_before_the_step() -> None:
    model, optimizer = wrapped(static_loss_scale=4.0)
    before = master_values(optimizer)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.float().sum() for p in model.parameters())
        optimizer.backward(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    torch.testing.assert_close(loss, before.half().float().sum())
    assert torch.equal(master_values(optimizer), before - 1.0)


# -- odd gradients (A-32) ------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDS)
def test_a32_parameters_without_a_gradient_do_not_move(name: str) -> None:
    model, optimizer = wrapped(BUILDS[name], static_loss_scale=4.0)
    optimizer.backward(loss_of([model], 0))
    optimizer.step()  # momentum and moments exist now
    optimizer.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.backward(model.a.weight.float().sum())
    optimizer.step()
    changed = {n for n, param in model.named_parameters() if not torch.equal(param, before[n])}
    assert changed == {"a.weight"}
    assert_bound(model, optimizer)


@pytest.mark.parametrize("name", BUILDS)
def test_a32_no_gradient_at_all(name: str) -> None:
    model, optimizer = wrapped(BUILDS[name])
    before = values(model)
    optimizer.step()
    assert all(map(torch.equal, values(model), before))
    assert optimizer.cur_iter == 1


@pytest.mark.parametrize("name", BUILDS)
def test_a32_empty_groups_and_empty_parameters(name: str) -> None:
    param = nn.Parameter(torch.ones(3).half())
    nothing = nn.Parameter(torch.ones(0).half())
    inner = BUILDS[name]([{"params": []}, {"params": [nothing, param]}])
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward((param.float() ** 2).sum())
        optimizer.step()
    assert (param < 1).all()
    assert [master.numel() for master in optimizer.fp32_groups_flat] == [0, 3]


def test_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True).half()
    before = model.weight.detach().clone()
    optimizer = FP16_Optimizer(sgd(model.parameters()), static_loss_scale=4.0)
    optimizer.backward(model(torch.tensor([1, 1])).float().sum())
    optimizer.step()
    change = (before.float() - model.weight.float()).round()
    assert change.tolist() == [[0, 0], [2, 2], [0, 0], [0, 0]]


def test_frozen_parameters_stay_and_may_be_unfrozen() -> None:
    model = Parts().half()
    model.b.requires_grad_(False)
    optimizer = FP16_Optimizer(ELEMENTWISE["adamw"](model.parameters()))
    frozen = model.b.weight.detach().clone()
    optimizer.backward(loss_of([model], 0))
    optimizer.step()
    assert torch.equal(model.b.weight, frozen)
    model.b.requires_grad_()
    optimizer.backward(loss_of([model], 1))
    optimizer.step()
    assert not torch.equal(model.b.weight, frozen)


# -- writes from outside (A-32) ------------------------------------------------------------------


@pytest.mark.parametrize("how", ["data", "in place", "load_state_dict", "model.to"])
def test_a32_weights_written_later_count(how: str) -> None:
    model, optimizer = wrapped()
    optimizer.backward(model.a.weight.float().sum() * 2.0**-14)
    optimizer.step()  # too small for the half weight, kept by the master
    exact = optimizer.fp32_groups_flat[0].detach()[0].item()
    with torch.no_grad():
        if how == "data":
            model.a.bias.data = torch.full((2,), 5.0, dtype=torch.float16)
        elif how == "in place":
            model.a.bias.fill_(5.0)
        elif how == "load_state_dict":
            model.load_state_dict({**model.state_dict(), "a.bias": torch.full((2,), 5.0)})
        else:
            model.a.bias.data = model.a.bias.data.to("cpu", copy=True).fill_(5.0)
    optimizer.zero_grad()
    optimizer.step()
    assert model.a.bias.tolist() == [5.0, 5.0]
    assert optimizer.fp32_groups_flat[0].tolist()[-2:] == [5.0, 5.0]
    assert optimizer.fp32_groups_flat[0][0].item() == exact
    assert_bound(model, optimizer)


@pytest.mark.parametrize("use", [FP16_Optimizer.step, FP16_Optimizer.state_dict])
def test_a32_models_cast_later_are_refused(use: Callable[[FP16_Optimizer], Any]) -> None:
    model, optimizer = wrapped()
    model.float()
    assert_refused("flat", "a model that was cast", lambda: use(optimizer), model, optimizer)


# -- overflow and the scale ----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_overflows_skip_the_step_with_either_kind_of_scale(
    kind: str, bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = wrapped(static_loss_scale=32.0, dynamic_loss_scale=kind == "dynamic")
    scale = optimizer.cur_scale
    before = values(model)
    optimizer.backward(model.b.weight.float()[1, 2] * bad)
    assert optimizer.step() is None
    assert all(map(torch.equal, values(model), before))
    printed = capsys.readouterr().out
    assert printed == f"\nGrad overflow on iteration 0\nUsing {kind} loss scale of {scale}\n"
    assert optimizer.cur_scale == (scale / 2 if kind == "dynamic" else scale)
    assert optimizer.cur_iter == 1


def test_a_quiet_dynamic_scale_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=False)
    optimizer.backward(model.a.weight.float().sum() * torch.nan)
    optimizer.step()
    assert capsys.readouterr().out == ""


def test_the_dynamic_rule() -> None:
    options = {"init_scale": 4.0, "scale_window": 2}
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args=options, verbose=False)
    seen = []
    for bad in (False, False, False, True, False, False, True, True, True, True):
        optimizer.zero_grad()
        optimizer.backward(model.a.bias.float().sum() * (torch.nan if bad else 1.0))
        optimizer.step()
        seen.append(optimizer.cur_scale)
    assert seen == [4, 8, 8, 4, 4, 8, 4, 2, 1, 1]
    assert (optimizer.cur_iter, optimizer.last_overflow_iter) == (10, 9)


def test_fields() -> None:
    _, optimizer = wrapped(dynamic_loss_scale=True)
    assert (optimizer.cur_scale, optimizer.cur_iter) == (2.0**16, 0)
    assert (optimizer.last_overflow_iter, optimizer.scale_factor) == (-1, 2.0)
    assert (optimizer.scale_window, optimizer.dynamic_loss_scale) == (1000, True)
    _, optimizer = wrapped(static_loss_scale=8)
    assert (optimizer.cur_scale, optimizer.dynamic_loss_scale) == (8.0, False)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state


def test_signatures() -> None:
    def names(method: Any) -> list[str]:
        return [name for name in inspect.signature(method).parameters if name != "self"]

    assert names(FP16_Optimizer.backward) == ["loss"]
    assert names(FP16_Optimizer.step) == ["closure"]
    defaults = inspect.signature(FP16_Optimizer.zero_grad).parameters
    assert defaults["set_grads_to_None"].default is True


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(to_none: bool) -> None:
    model, optimizer = wrapped()
    optimizer.backward(model.a.weight.float().sum())
    optimizer.zero_grad(set_grads_to_None=to_none)
    grad = model.a.weight.grad
    assert grad is None if to_none else not grad.any()


def test_a_first_skipped_step_does_not_upset_schedulers() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    optimizer.backward(model.a.weight.float().sum() * torch.nan)
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_overflows_without_end_are_an_error() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True, verbose=False)
    steps = []

    with refused("flat", "overflows without end"):
        while True:
            optimizer.zero_grad()
            optimizer.backward(model.b.weight.float().sum() * torch.nan)
            steps.append(None)
            optimizer.step()
    assert len(steps) == 50


# -- refusals ------------------------------------------------------------------------------------


def params(*dtypes: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]


def groups(*dtypes: torch.dtype) -> torch.optim.Optimizer:
    """The second group has one parameter of each dtype."""
    return sgd([{"params": params(torch.float16)}, {"params": params(*dtypes)}])


def stepped() -> torch.optim.Optimizer:
    (param,) = params(torch.float32)
    param.grad = torch.ones(2)
    inner = torch.optim.Adam([param])
    inner.step()
    return inner


UNFIT: dict[str, Callable[[], torch.optim.Optimizer]] = {
    "a group of two half dtypes": lambda: groups(*HALVES),
    "a group of half and float32": lambda: groups(torch.float16, torch.float32),
    "a group of float64": lambda: groups(torch.float64),
    "LBFGS": lambda: torch.optim.LBFGS(params(torch.float16)),
    "Adafactor": lambda: torch.optim.Adafactor(params(torch.float16)),
    "FusedLAMB": lambda: preamp.optimizers.FusedLAMB(params(torch.float16), lr=0.1),
    "FusedLARS": lambda: preamp.optimizers.FusedLARS(params(torch.float16), lr=0.1),
    "FusedNovoGrad": lambda: preamp.optimizers.FusedNovoGrad(params(torch.float16), lr=0.1),
    "FusedMixedPrecisionLamb": lambda: FusedMixedPrecisionLamb(params(torch.float16)),
    "LARC": lambda: LARC(sgd(params(torch.float16))),  # type: ignore[dict-item]
    "an optimizer that has stepped": stepped,
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_flat(name: str) -> None:
    inner = UNFIT[name]()
    places = [param.data_ptr() for group in inner.param_groups for param in group["params"]]
    assert_refused("flat", name, lambda: FP16_Optimizer(inner), inner)
    kept = [param.data_ptr() for group in inner.param_groups for param in group["params"]]
    assert kept == places


def test_groups_of_different_dtypes() -> None:
    half, brain = params(*HALVES)
    optimizer = FP16_Optimizer(sgd([{"params": [half]}, {"params": [brain]}]))
    optimizer.backward(half.float().sum() + brain.float().sum())
    optimizer.step()
    assert half.tolist() == brain.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scale", [0, -1.0, torch.nan, torch.inf, "big", None])
def test_unusable_scales(scale: Any) -> None:
    inner = sgd(params(torch.float16))
    with refused("flat", "an unusable static scale", inner, scale=repr(scale)):
        FP16_Optimizer(inner, static_loss_scale=scale)


OPTIONS = {
    "a scale_factor below 1": {"scale_factor": 0.5},
    "a scale_window of 0": {"scale_window": 0},
    "an unknown dynamic_loss_args": {"min_loss_scale": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_unusable_options(name: str) -> None:
    inner, options = sgd(params(torch.float16)), OPTIONS[name]
    with refused("flat", name, inner):
        FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=options)
    FP16_Optimizer(inner, dynamic_loss_args=options)  # not dynamic: ignored, as in Apex


@pytest.mark.parametrize("scale", [0, None])
def test_a_dynamic_scale_does_not_ask_for_the_static_one(scale: Any) -> None:
    inner = sgd(params(torch.float16))
    optimizer = FP16_Optimizer(inner, static_loss_scale=scale, dynamic_loss_scale=True)
    assert optimizer.cur_scale == 2.0**16


def test_numbers_given_as_text_are_numbers() -> None:
    inner = sgd(params(torch.float16))
    options = {"init_scale": "128", "scale_window": "2"}
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, dynamic_loss_args=options)
    optimizer.backward(optimizer.fp16_groups[0][0].float().sum())
    optimizer.step()
    assert (optimizer.cur_scale, optimizer.scale_window) == (128.0, 2.0)


def test_groups_added_later() -> None:
    model, optimizer = wrapped()
    optimizer.optimizer.add_param_group({"params": params(torch.float16)})
    assert_refused("flat", "a group added later", optimizer.step, model, optimizer)


# -- checkpoints: Apex's keys, exact, refused as a whole --------------------------------------


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


def test_loading_binds_parameters_that_were_given_other_data() -> None:
    model, optimizer = wrapped()
    state = copy.deepcopy(optimizer.state_dict())
    model.a.weight.data = torch.zeros(2, 3, dtype=torch.float16)
    optimizer.load_state_dict(state)
    assert_bound(model, optimizer)
    assert model.a.weight.any()


def load(*left_out: str, **changes: Any) -> Callable[[FP16_Optimizer], object]:
    """Load the state of another optimizer with changes."""

    def act(optimizer: FP16_Optimizer) -> None:
        state = wrapped(BUILDS["adam"], static_loss_scale=2.0)[1].state_dict() | changes
        optimizer.load_state_dict({k: v for k, v in state.items() if k not in left_out})

    return act


STATES: dict[str, Callable[[FP16_Optimizer], object]] = {
    "an incomplete state": load("cur_iter", "fp32_groups_flat"),
    "a dynamic state of a static scale": load(dynamic_loss_scale=True),
    "masters of other sizes": load(fp32_groups_flat=[torch.zeros(8), torch.zeros(7)]),
    "a group of masters too few": load(fp32_groups_flat=[torch.zeros(8)]),
    "a negative scale": load(cur_scale=-2.0),
}
NUMBERS: dict[str, tuple[Any, ...]] = {
    "cur_scale": (-2.0, torch.inf, "big", None),
    "scale_factor": (0.0,),
    "scale_window": (0,),
    "cur_iter": ("1",),
    "last_overflow_iter": (None,),
}


@pytest.mark.parametrize(
    ("name", "words"),
    [(name, {}) for name in STATES]
    + [("an unusable number", {k: v}) for k, values in NUMBERS.items() for v in values],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_states_are_refused_as_a_whole(name: str, words: dict[str, Any], dynamic: bool) -> None:
    model, optimizer = wrapped(
        BUILDS["adam"], static_loss_scale=4.0, dynamic_loss_scale=dynamic, verbose=False
    )
    train(model, optimizer, 0)
    before = {**copy.deepcopy(optimizer.state_dict()), "model": values(model)}
    other = wrapped(BUILDS["adam"], dynamic_loss_scale=True)[1].state_dict()
    act = STATES.get(name) or load(**other | words)
    shown = "".join(f"{key}={value!r}" for key, value in words.items())
    with refused("flat", name, model, optimizer, optimizer.optimizer, number=shown):
        act(optimizer)
    assert same({**optimizer.state_dict(), "model": values(model)}, before)
