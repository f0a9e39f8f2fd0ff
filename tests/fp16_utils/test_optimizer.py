# SPDX-License-Identifier: BSD-3-Clause
"""FP16_Optimizer trains as plain torch does on the masters, whatever the optimizer."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cases.models import Exact, loss_of, values
from cases.optimizers import ALL, OptimizerCase
from fp16_utils.steps import (
    HALVES,
    Weights,
    assert_agree,
    gradients,
    pair,
    plain_step,
    sgd,
    wrapped,
)
from kit.refusals import refused
from preamp import fp16_utils
from preamp.compat.amp_state import amp_state
from preamp.fp16_utils import FP16_Optimizer, convert_network

DTYPES = pytest.mark.parametrize("dtype", HALVES, ids=str)
SCALES = pytest.mark.parametrize(
    "scaling",
    [{}, {"static_loss_scale": 256.0}, {"dynamic_loss_scale": True}],
    ids=["none", "static", "dynamic"],
)


@pytest.fixture(autouse=True)
def amp_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped steps are told at amp's verbosity, which other tests may have left at 0."""
    monkeypatch.setattr(amp_state, "verbosity", 1)


# -- training ------------------------------------------------------------------------------------


@DTYPES
@SCALES
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.name)
def test_steps_are_those_of_plain_torch(
    dtype: torch.dtype, scaling: dict[str, Any], case: OptimizerCase
) -> None:
    model, optimizer, plain, reference = pair(dtype, case.build, **scaling)
    for index in range(4):
        optimizer.zero_grad(set_grads_to_None=index % 2 == 0)
        optimizer.backward(loss_of([model], index))
        optimizer.step()
        plain_step(plain, reference, index)
        assert_agree(model, optimizer, plain)


@pytest.mark.parametrize("update_each", [True, False])
@pytest.mark.parametrize("window", [1, 2000])
def test_several_backwards_are_summed(update_each: bool, window: int) -> None:
    """With a window of 1 the scale doubles after every update, between the backwards too."""
    options = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": window}}
    options["dynamic_loss_args"]["init_scale"] = 2.0**8
    model, optimizer, plain, reference = pair(torch.float16, sgd, **options)
    for step in range(2):
        optimizer.zero_grad()
        for index in (3 * step, 3 * step + 1):
            optimizer.backward(loss_of([model], index), update_master_grads=update_each)
        optimizer.backward(loss_of([model], 3 * step + 2))
        optimizer.step()
        plain_step(plain, reference, 3 * step, 3 * step + 1, 3 * step + 2)
        assert_agree(model, optimizer, plain)


def test_a30_no_gradient_now_means_none_even_if_there_was_one() -> None:
    model, optimizer = wrapped(static_loss_scale=2.0)
    optimizer.backward(model.loss())
    optimizer.step()
    model.zero_grad()  # only the model
    before = values(model)
    optimizer.backward(model.wide.sum())
    assert gradients(optimizer) == [[], [1.0, 1.0]]
    optimizer.step()
    assert torch.equal(model.low, before[0])


@pytest.mark.parametrize("update_each", [True, False])
def test_a_parameter_left_out_of_the_second_backward_keeps_its_gradient(update_each: bool) -> None:
    model, optimizer = wrapped(static_loss_scale=8.0)
    for _ in range(2):
        for param in model.parameters():
            param.grad = None
        optimizer.backward(model.loss(3.0), update_master_grads=update_each)
        optimizer.backward(model.low.float().sum() * 2)
        assert gradients(optimizer) == [[5.0] * 2, [3.0] * 2]
        optimizer.backward(model.wide.sum() * 4)
        assert gradients(optimizer) == [[5.0] * 2, [7.0] * 2]


def test_an_overflow_is_not_forgotten_over_the_next_backward() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args={"init_scale": 16.0})
    optimizer.backward(model.low.float().sum() + model.wide.sum() * 3e38)
    optimizer.backward(model.loss())

    assert optimizer.overflow
    assert optimizer.loss_scale == 4.0
    optimizer.step()
    assert [param.tolist() for param in model.parameters()] == [[1.0] * 2, [1.0] * 2]


def test_gradients_between_optimizer_and_model() -> None:
    model, optimizer = wrapped(static_loss_scale=8.0)
    optimizer.backward(model.loss(0.5))
    assert model.low.grad.tolist() == [4.0, 4.0]  # scaled, and still half
    assert model.low.grad.dtype is torch.float16
    assert model.wide.grad.tolist() == [0.5, 0.5]
    assert gradients(optimizer) == [[0.5, 0.5]] * 2


@pytest.mark.parametrize("ways", ["hh", "ho", "oh", "hhh", "hoh", "ohh"])
@pytest.mark.parametrize("window", [None, 1, 2000])
def test_backwards_by_hand_are_summed(ways: str, window: int | None) -> None:
    """With a window of 1 the scale doubles after every update; gradients that lie there follow."""
    scaling: dict[str, Any] = {"static_loss_scale": 128.0}
    if window is not None:
        options = {"scale_window": window, "init_scale": 128.0}
        scaling = {"dynamic_loss_scale": True, "dynamic_loss_args": options}
    model, optimizer = wrapped(**scaling)
    for _ in range(2):
        for index, way in enumerate(ways):
            if way == "h":
                (model.loss(2.0**index) * optimizer.loss_scale).backward()
                optimizer.update_master_grads()
            else:
                optimizer.backward(model.loss(2.0**index))
            assert gradients(optimizer) == [[2.0 ** (index + 1) - 1] * 2] * 2
        optimizer.zero_grad()


@pytest.mark.parametrize("to_none", [True, False])
def test_a_model_s_gradients_zeroed_between_backwards_by_hand(to_none: bool) -> None:
    """In place it is the same tensor, with scaled gradients added to zeros."""
    model, optimizer = wrapped(static_loss_scale=128.0)
    for factor in (0.5, 0.25, 2.0):
        (model.loss(factor) * 128.0).backward()
        optimizer.update_master_grads()
        assert gradients(optimizer) == [[factor] * 2] * 2
        model.zero_grad(set_to_none=to_none)


def test_float32_gradients_written_to_are_not_unscaled_again() -> None:
    """As clipping does; the second backward does not reach them, and the third does."""
    model, optimizer = wrapped(static_loss_scale=128.0)
    (model.loss() * 128.0).backward()
    optimizer.update_master_grads()
    assert model.wide.grad is not None
    model.wide.grad.mul_(0.5)
    (model.low.float().sum() * 128.0).backward()
    optimizer.update_master_grads()
    assert gradients(optimizer) == [[2.0] * 2, [0.5] * 2]
    (model.loss() * 128.0).backward()
    optimizer.update_master_grads()
    assert gradients(optimizer) == [[3.0] * 2, [1.5] * 2]


def test_gradients_dropped_after_a_backward_by_hand_are_gone() -> None:
    model, optimizer = wrapped(static_loss_scale=128.0)
    (model.loss() * 128.0).backward()
    optimizer.update_master_grads()
    (model.loss() * 128.0).backward()  # of a batch that turns out to be useless
    model.zero_grad()
    optimizer.update_master_grads()
    assert gradients(optimizer) == [[], []]
    optimizer.backward(model.loss(8.0))
    (model.loss(4.0) * 128.0).backward()
    (model.loss(4.0) * 128.0).backward()
    model.zero_grad()
    (model.loss(0.5) * 128.0).backward()
    optimizer.update_master_grads()
    assert gradients(optimizer) == [[0.5] * 2] * 2


@pytest.mark.parametrize("finishes", [True, False])
def test_gradients_that_are_only_computed_change_none(finishes: bool) -> None:
    """A gradient penalty by `torch.autograd.grad` adds to nothing, and takes nothing away."""
    model, optimizer = wrapped(static_loss_scale=128.0)
    optimizer.backward(model.loss())
    torch.autograd.grad(model.loss(8.0), [model.wide, model.low])
    if finishes:
        optimizer.update_master_grads()
    assert gradients(optimizer) == [[1.0] * 2] * 2
    optimizer.backward(model.loss(2.0))
    assert gradients(optimizer) == [[3.0] * 2] * 2


@pytest.mark.parametrize("keeps", [True, False])
def test_a_second_optimizer_of_the_same_weights_sums_too(keeps: bool) -> None:
    """As when a cell of a notebook runs again; hooks of the first one do nothing any more."""
    model, first = wrapped(static_loss_scale=128.0)
    first.backward(model.loss())
    first.step()
    optimizer = FP16_Optimizer(sgd(model.parameters()), static_loss_scale=128.0, verbose=False)
    if not keeps:
        del first
    optimizer.zero_grad()
    for _ in range(3):
        (model.loss() * 128.0).backward()
        optimizer.update_master_grads()
    assert gradients(optimizer) == [[3.0] * 2] * 2
    assert copy.deepcopy(model).wide.grad is None


def test_scale_set_by_hand_between_backwards() -> None:
    model, optimizer = wrapped(static_loss_scale=4.0)
    optimizer.backward(model.loss(), update_master_grads=False)
    optimizer.loss_scale = 16.0
    optimizer.backward(model.loss(2.0), update_master_grads=False)
    optimizer.loss_scale = 2.0
    optimizer.update_master_grads()
    assert gradients(optimizer) == [[3.0, 3.0]] * 2
    assert optimizer.loss_scale == 2.0


def test_sparse_gradients() -> None:
    model = nn.Embedding(4, 2, sparse=True).half()
    before = model.weight.detach().clone()
    optimizer = FP16_Optimizer(sgd(model.parameters()), dynamic_loss_scale=True, verbose=False)
    optimizer.backward(model(torch.tensor([1, 1])).float().sum() * 0.25)
    optimizer.step()
    change = before.float() - model.weight.float()
    torch.testing.assert_close(change[1], torch.tensor([0.5, 0.5]), rtol=0.0, atol=2e-3)
    assert change.abs().sum(dim=1).count_nonzero() == 1


def test_float64_parameters_are_the_optimizer_s_own() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    before = model.weight.detach().clone()
    optimizer = FP16_Optimizer(sgd(model.parameters()), static_loss_scale=8.0, verbose=False)
    optimizer.backward(model.weight.sum())
    optimizer.step()
    assert torch.equal(model.weight, before - 1.0)


def test_retain_graph() -> None:
    model, optimizer = wrapped()
    loss = (model.low.float() * model.wide).sum()
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    assert gradients(optimizer) == [[2.0, 2.0]] * 2


# -- groups --------------------------------------------------------------------------------------


def test_lists_run_parallel_to_the_groups() -> None:
    model = convert_network(Exact(), torch.float16)
    frozen = model.linear.bias.requires_grad_(False)
    inner = torch.optim.SGD(
        [{"params": model.linear.parameters()}, {"params": model.norm.parameters(), "lr": 0.5}],
        lr=1.0,
    )
    optimizer = FP16_Optimizer(inner, verbose=False)
    assert optimizer.optimizer is inner
    assert optimizer.fp16_groups == [[model.linear.weight], []]
    assert optimizer.fp32_from_fp32_groups == [[], [model.norm.weight, model.norm.bias]]
    (master,) = optimizer.fp32_from_fp16_groups[0]
    assert inner.param_groups[0]["params"][0] is master
    assert inner.param_groups[0]["params"][1] is frozen
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.all_fp16_params == [model.linear.weight]
    assert optimizer.all_fp32_from_fp16_params == [master]
    assert optimizer.all_fp32_from_fp32_params == [model.norm.weight, model.norm.bias]
    optimizer.param_groups = inner.param_groups[:1]
    optimizer.state = {}
    assert (len(inner.param_groups), inner.state) == (1, {})


def test_state_made_before_moves_to_the_masters() -> None:
    model = Weights()
    inner = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    model.loss().backward()
    inner.step()
    optimizer = FP16_Optimizer(inner, verbose=False)
    (master,) = optimizer.all_fp32_from_fp16_params
    assert inner.state.keys() == {master, model.wide}
    assert inner.state[master]["momentum_buffer"].dtype is torch.float32


@pytest.mark.parametrize("late", ["unfrozen", "added"])
def test_late_parameters_get_masters(late: str) -> None:
    model = Weights()
    first = [model.wide, model.low] if late == "unfrozen" else [model.wide]
    model.low.requires_grad_(late == "added")
    optimizer = FP16_Optimizer(sgd(first), static_loss_scale=64.0, verbose=False)
    assert optimizer.all_fp16_params == []
    if late == "unfrozen":
        model.low.requires_grad_()
    else:
        optimizer.optimizer.add_param_group({"params": [model.low]})
    optimizer.backward(model.loss(0.25))
    optimizer.step()
    assert optimizer.all_fp16_params == [model.low]
    assert model.low.tolist() == model.wide.tolist() == [0.75, 0.75]


@pytest.mark.parametrize("how", ["in place", "data", "load_state_dict"])
def test_writes_to_half_weights_reach_the_masters(how: str) -> None:
    model, optimizer = wrapped()
    optimizer.backward(model.loss(2.0**-14))
    optimizer.step()  # rounded away in half, kept by the master
    with torch.no_grad():
        if how == "in place":
            model.low[1] = 5.0
        elif how == "data":
            model.low.data = torch.tensor([1.0, 5.0], dtype=torch.float16)
        else:
            model.load_state_dict({**model.state_dict(), "low": torch.tensor([1.0, 5.0])})
    optimizer.zero_grad()
    optimizer.backward(model.loss(0.0))
    optimizer.step()
    assert optimizer.all_fp32_from_fp16_params[0].tolist() == [1.0 - 2.0**-14, 5.0]
    assert model.low.tolist() == [1.0, 5.0]


# -- overflow ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["low", "wide"])
def test_an_overflow_skips_the_step_and_halves_the_scale(
    bad: float, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    before = values(model)
    optimizer.backward(model.loss() + getattr(model, where).float()[1] * bad)
    assert optimizer.overflow
    assert optimizer.clip_master_grads(1.0) == -1
    assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    printed = capsys.readouterr().out
    assert "Warning: the gradients overflowed" in printed
    assert f"reducing loss scale to {optimizer.loss_scale}" in printed
    assert all(map(torch.equal, values(model), before))
    assert optimizer.loss_scale < 2.0**16
    optimizer.zero_grad()
    optimizer.backward(model.loss())
    assert not optimizer.overflow
    optimizer.step()
    assert model.low.tolist() == model.wide.tolist() == [0.0, 0.0]


def test_a_static_scale_does_not_look() -> None:
    model, optimizer = wrapped(static_loss_scale=2.0)
    optimizer.backward(model.loss() * torch.inf)
    assert not optimizer.overflow
    optimizer.step()
    assert not torch.isfinite(model.low).any()


def test_the_dynamic_scale_grows_and_stops_at_its_limits() -> None:
    limits = {"init_scale": 8, "scale_factor": 4, "scale_window": 2}
    limits |= {"min_loss_scale": 4.0, "max_loss_scale": 64.0}
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args=limits)
    seen = []
    for bad in (False,) * 6 + (True,) * 3:
        optimizer.zero_grad()
        optimizer.backward(model.loss(torch.nan if bad else 1.0))
        optimizer.step()
        seen.append(optimizer.loss_scale)
    assert seen == [8, 32, 32, 64, 64, 64, 16, 4, 4]


def test_a_first_skipped_step_does_not_upset_schedulers() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    optimizer.backward(model.loss(torch.nan))
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("overflows down to the least scale", {}, 40),
        ("overflows at scale 1", {"min_loss_scale": 1.0}, 50),
    ],
)
@pytest.mark.parametrize("closure", [False, True])
def test_overflows_without_end_are_an_error(
    name: str, options: dict[str, Any], steps: int, closure: bool
) -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True, dynamic_loss_args=options)
    calls = []

    def evaluate() -> torch.Tensor:
        calls.append(None)
        optimizer.zero_grad()
        loss = model.loss(torch.nan)
        optimizer.backward(loss)
        return loss

    with refused("fp16_utils", name):
        while True:
            if not closure:
                evaluate()
            optimizer.step(evaluate if closure else None)
    assert len(calls) == steps


def test_the_parameter_that_overflows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    optimizer.backward(model.loss(2.0**10))  # 2**26: beyond float16, not beyond float32
    optimizer.step()
    assert "inf first in 'optimizers[0].param_groups[0][0]'" in capsys.readouterr().out


@pytest.mark.parametrize("convert", [fp16_utils.network_to_half, fp16_utils.FP16Model])
def test_the_parameter_is_called_as_in_its_model(
    convert: Callable[[nn.Module], nn.Module], capsys: pytest.CaptureFixture[str]
) -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = convert(inner)
    optimizer = FP16_Optimizer(torch.optim.SGD(inner.parameters(), lr=0.1), dynamic_loss_scale=True)
    capsys.readouterr()
    loss = model(torch.ones(1, 2)).float().sum() * 2.0**12
    optimizer.backward(loss)
    optimizer.step()
    assert "first in '1.bias'" in (out := capsys.readouterr().out)
    assert out.count("\n") == 1


def test_other_ranks_do_not_tell_of_skipped_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    monkeypatch.setattr("preamp.core.log.is_first_rank", lambda: False)
    optimizer.backward(model.loss(2.0**10))
    optimizer.step()
    assert optimizer.overflow
    assert capsys.readouterr().out == ""


# -- clipping ------------------------------------------------------------------------------------


def test_clipping_takes_everything_the_optimizer_updates() -> None:
    model, optimizer = wrapped(static_loss_scale=4.0)
    optimizer.backward(model.loss(3.0))
    norm = optimizer.clip_master_grads(0.5)
    torch.testing.assert_close(norm, torch.tensor(6.0))  # four elements of 3
    clipped = torch.tensor(gradients(optimizer)).flatten()
    torch.testing.assert_close(clipped.norm(), torch.tensor(0.5))
    optimizer.zero_grad()
    optimizer.backward(model.loss(-3.0))
    assert optimizer.clip_master_grads(1.0, norm_type=float("inf")) == 3.0


# -- closures ------------------------------------------------------------------------------------


def quadratic(weight: torch.Tensor) -> torch.Tensor:
    return ((weight.float() - torch.tensor([0.25, -3.0])) ** 2 * torch.tensor([1.0, 4.0])).sum()


@DTYPES
def test_lbfgs_with_a_closure(dtype: torch.dtype) -> None:
    """The oracle is LBFGS on f(p.to(half)) with float32 p: autograd does the casts."""
    model = Weights(dtype)
    plain = torch.ones(2, requires_grad=True)

    def make(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(params, lr=0.5, max_iter=6)

    optimizer = FP16_Optimizer(make([model.low]), static_loss_scale=16.0, verbose=False)
    reference = make([plain])
    firsts = []

    def ours() -> torch.Tensor:
        firsts.append(optimizer.first_closure_call_this_step)
        optimizer.zero_grad()
        loss = quadratic(model.low)
        optimizer.backward(loss)
        return loss

    def theirs() -> torch.Tensor:
        reference.zero_grad()
        loss = quadratic(plain.to(dtype))
        loss.backward()
        return loss

    for _ in range(2):
        assert torch.equal(optimizer.step(ours), reference.step(theirs))
        assert torch.equal(optimizer.all_fp32_from_fp16_params[0], plain)
        assert torch.equal(model.low, plain.to(dtype))
        assert optimizer.first_closure_call_this_step
    assert len(firsts) > 4
    assert not any(firsts)


def test_a_closure_runs_again_until_it_does_not_overflow() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    factors = iter([torch.nan, torch.nan, 1.0])
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss(next(factors))
        calls.append(optimizer.loss_scale)
        optimizer.backward(loss)
        return loss

    assert optimizer.step(closure) == 4.0
    assert calls == [2.0**16, 2.0**15, 2.0**14]
    assert model.low.tolist() == [0.0, 0.0]


def test_a_closure_after_an_overflow_starts_afresh() -> None:
    model, optimizer = wrapped(dynamic_loss_scale=True)
    optimizer.backward(model.loss(torch.nan))
    assert optimizer.overflow

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model.loss()
        optimizer.backward(loss)
        return loss

    optimizer.step(closure)
    assert model.low.tolist() == [0.0, 0.0]


def test_a_closure_that_raises_leaves_a_usable_optimizer() -> None:
    _, optimizer = wrapped()

    def broken() -> torch.Tensor:
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(broken)
    assert optimizer.first_closure_call_this_step


# -- what scripts look at ------------------------------------------------------------------------


def test_signatures() -> None:
    def names(method: Any) -> dict[str, Any]:
        found = inspect.signature(method).parameters.values()
        return {p.name: p.default for p in found if p.name != "self"}

    assert names(FP16_Optimizer.backward) == {
        "loss": inspect.Parameter.empty,
        "update_master_grads": True,
        "retain_graph": False,
    }
    assert names(FP16_Optimizer.zero_grad) == {"set_grads_to_None": False}
    assert names(FP16_Optimizer) == {
        "init_optimizer": inspect.Parameter.empty,
        "static_loss_scale": 1.0,
        "dynamic_loss_scale": False,
        "dynamic_loss_args": None,
        "verbose": True,
    }


def test_the_scaler_is_the_one_of_amp() -> None:
    _, optimizer = wrapped(dynamic_loss_scale=True)
    assert optimizer.dynamic_loss_scale
    assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scale == 2.0**16
    optimizer.loss_scaler._loss_scale = 32.0
    assert optimizer.loss_scale == 32.0


def test_parameters_are_told_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    FP16_Optimizer(sgd(Weights().parameters()))
    assert capsys.readouterr().out.splitlines() == [
        "FP16_Optimizer processing param group 0:",
        "FP16_Optimizer received torch.float32 with (2,)",
        "FP16_Optimizer received torch.float32 with (2,)",
    ]
    wrapped()
    assert capsys.readouterr().out == ""
