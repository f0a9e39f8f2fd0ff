# SPDX-License-Identifier: BSD-3-Clause
"""Both FP16_Optimizers train as plain torch does on float32 masters, and resume bitwise."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from cases.models import Exact, values
from cases.optimizers import ALL, MAIN
from fp16_utils.steps import (
    HALVES,
    KINDS,
    EarlyAdam,
    Pair,
    Weights,
    assert_bound,
    gradients,
    masters_of,
    sgd,
    through_a_file,
    wrapped,
)
from kit.refusals import refused
from preamp.compat.amp_state import amp_state
from preamp.core.errors import LossScaleError
from preamp.fp16_utils import FP16_Optimizer, convert_network

BOTH = pytest.mark.parametrize("kind", KINDS)
DYNAMIC: dict[str, Any] = {"dynamic_loss_scale": True}


@pytest.fixture(autouse=True)
def amp_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skipped steps are told at amp's verbosity, which other tests may have left at 0."""
    monkeypatch.setattr(amp_state, "verbosity", 1)


def dynamic(**args: float) -> dict[str, Any]:
    return {"dynamic_loss_scale": True, "dynamic_loss_args": args}


def rows(general: Any) -> pytest.MarkDecorator:
    """Each kind with the optimizers that it can be around."""
    cases = [("general", case.name, case.build) for case in general]
    cases += [("flat", case.name, case.build) for case in MAIN] + [("flat", "early", EarlyAdam)]
    params = [pytest.param((kind, build), id=f"{kind}-{name}") for kind, name, build in cases]
    return pytest.mark.parametrize("row", params)


# -- training ------------------------------------------------------------------------------------


@rows(ALL)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    "scaling", [{}, {"static_loss_scale": 256.0}, DYNAMIC], ids=["none", "static", "dynamic"]
)
def test_steps_are_those_of_plain_torch(
    row: tuple[str, Any], dtype: torch.dtype, scaling: dict[str, Any]
) -> None:
    Pair(*row, dtype, **scaling).train(*range(4))


@pytest.mark.parametrize(
    ("kind", "how"),
    [("general", {}), ("general", {"update_master_grads": False}), ("flat", {})],
    ids=["each updates", "the last updates", "flat"],
)
@pytest.mark.parametrize("window", [1, 2000])
def test_several_backwards_are_summed(kind: str, how: dict[str, Any], window: int) -> None:
    """With a window of 1 the scale doubles after every update, between the backwards too."""
    run = Pair(kind, sgd, **dynamic(scale_window=window, init_scale=2.0**8))
    for step in range(2):
        run.zero(to_none=False)
        for index in (3 * step, 3 * step + 1):
            run.backward(index, **how)
        run.backward(3 * step + 2)
        run.step()


KEYS = {
    "general": {"loss_scaler", "dynamic_loss_scale", "overflow", "first_closure_call_this_step"}
    | {"optimizer_state_dict", "fp32_from_fp16"},
    "flat": {"dynamic_loss_scale", "cur_scale", "cur_iter"}
    | {"optimizer_state_dict", "fp32_groups_flat"},
}
FLAT_DYNAMIC = {"last_overflow_iter", "scale_factor", "scale_window"}


@rows(MAIN)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("scaling", [dynamic(init_scale=64.0, scale_window=3), {}], ids=str)
def test_resuming_is_going_on(
    row: tuple[str, Any], dtype: torch.dtype, scaling: dict[str, Any]
) -> None:
    run = Pair(*row, dtype, static_loss_scale=64.0, **scaling)
    run.train(0, 1)
    state = through_a_file(run.optimizer.state_dict())
    assert state.keys() == KEYS[row[0]] | (FLAT_DYNAMIC if row[0] == "flat" and scaling else set())
    # Another seed, another scale: everything has to come from the file.
    other = Pair(*row, dtype, static_loss_scale=2.0)
    with torch.no_grad():
        for param in other.model.parameters():
            param.add_(1.0)
    if row[0] == "general":  # float32 weights are the model's
        other.model.norm.load_state_dict(run.plain.norm.state_dict())
    other.plain, other.reference = run.plain, run.reference
    other.optimizer.load_state_dict(state)
    for name in state.keys() & {*FLAT_DYNAMIC, "cur_iter"}:
        assert getattr(other.optimizer, name) == state[name], name
    other.check()
    other.train(2, 3, 4)
    # The third clean update, counted from the file on.
    assert scale_of(other.optimizer) == (128.0 if scaling else 64.0)


def scale_of(optimizer: Any) -> float:
    return optimizer.loss_scale if hasattr(optimizer, "loss_scale") else optimizer.cur_scale


@BOTH
def test_sparse_gradients(kind: str) -> None:
    model = nn.Embedding(4, 2, sparse=True).half()
    before = model.weight.detach().clone()
    optimizer = KINDS[kind](sgd(model.parameters()), dynamic_loss_scale=True, verbose=False)
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


def test_every_field_survives() -> None:
    limits = {"scale_factor": 4.0, "scale_window": 5, "min_loss_scale": 0.5}
    limits |= {"max_loss_scale": 2.0**10}
    model, optimizer = wrapped(**dynamic(init_scale=8.0, **limits))
    for loss in (model.loss(), model.loss(torch.nan), model.wide.sum()):
        optimizer.backward(loss)
    optimizer.overflow, optimizer.first_closure_call_this_step = True, False
    saved = through_a_file(optimizer.state_dict())
    scale = {"dynamic": True, "loss_scale": optimizer.loss_scale, "unskipped": 0}
    assert saved["loss_scaler"] == {**scale, **limits}
    _, other = wrapped()
    other.load_state_dict(saved)
    again = other.state_dict()
    for key in saved.keys() - {"fp32_from_fp16"}:
        assert again[key] == saved[key], key
    assert (other.overflow, other.first_closure_call_this_step) == (True, False)


# -- gradients, act by act -----------------------------------------------------------------------

Acts = list[tuple[str, float]]
SUMS: dict[str, tuple[Acts, list[Any]]] = {
    # act and factor; then the gradients of the half and of the float32 parameter, if any
    "one is unscaled": ([("both", 0.5)], [0.5, 0.5]),
    "a30: no gradient now means none, even if there was one": (
        [("both", 1.0), ("step", 0), ("zero", 0), ("wide", 1.0)],
        [None, 1.0],
    ),
    "left out of the second backward it stays": (
        [("both", 3.0), ("low", 2.0), ("wide", 4.0)],
        [5.0, 7.0],
    ),
    "and so without updates": ([("later", 3.0), ("low", 2.0), ("wide", 4.0)], [5.0, 7.0]),
    "scale set between": (
        [("later", 1.0), ("scale", 16.0), ("later", 2.0), ("scale", 2.0), ("update", 0)],
        [3.0, 3.0],
    ),
    "zeroed between backwards by hand": (
        [("hand", 0.5), ("zero", 0), ("hand", 0.25), ("zero", 0), ("hand", 2.0)],
        [2.0, 2.0],
    ),
    "zeroed in place between backwards by hand": (
        [("hand", 0.5), ("fill", 0), ("hand", 0.25), ("fill", 0), ("hand", 2.0)],
        [2.0, 2.0],
    ),
    "clipped float32 ones are not unscaled again": (
        [("hand", 1.0), ("halve", 0), ("hand low", 1.0)],
        [2.0, 0.5],
    ),
    "nor by the third": (
        [("hand", 1.0), ("halve", 0), ("hand low", 1.0), ("hand", 1.0)],
        [3.0, 1.5],
    ),
    "dropped after a backward by hand they are gone": (
        [("hand", 1.0), ("raw", 1.0), ("zero", 0), ("update", 0)],
        [None, None],
    ),
    "dropped after some": (
        [("both", 8.0), ("raw", 4.0), ("raw", 4.0), ("zero", 0), ("hand", 0.5)],
        [0.5, 0.5],
    ),
    "computed only they add nothing": ([("both", 1.0), ("penalty", 8.0)], [1.0, 1.0]),
    "nor with an update": ([("both", 1.0), ("penalty", 8.0), ("update", 0)], [1.0, 1.0]),
    "and backwards go on": ([("both", 1.0), ("penalty", 8.0), ("both", 2.0)], [3.0, 3.0]),
}


def act(model: Weights, optimizer: Any, name: str, factor: float) -> None:
    scale = optimizer.loss_scale
    losses = {
        "low": lambda: model.low.float().sum() * factor,
        "wide": lambda: model.wide.sum() * factor,
    }
    loss = losses.get(name.split()[-1], lambda: model.loss(factor))
    if name in ("both", "low", "wide"):
        optimizer.backward(loss())
    elif name == "later":
        optimizer.backward(loss(), update_master_grads=False)
    elif name == "raw":
        (loss() * scale).backward()
    elif name.startswith("hand"):
        (loss() * scale).backward()
        optimizer.update_master_grads()
    elif name == "penalty":
        torch.autograd.grad(loss(), [model.wide, model.low])
    elif name == "halve":
        assert model.wide.grad is not None
        model.wide.grad.mul_(0.5)
    elif name == "scale":
        optimizer.loss_scale = factor
    elif name in ("zero", "fill"):
        model.zero_grad(set_to_none=name == "zero")
    else:
        {"step": optimizer.step, "update": optimizer.update_master_grads}[name]()


@pytest.mark.parametrize("name", SUMS)
def test_gradients(name: str) -> None:
    acts, wanted = SUMS[name]
    model, optimizer = wrapped(static_loss_scale=128.0)
    for each in acts:
        act(model, optimizer, *each)
    assert gradients(optimizer) == [[] if value is None else [value] * 2 for value in wanted]


@pytest.mark.parametrize("ways", ["hh", "ho", "oh", "hhh", "hoh", "ohh"])
@pytest.mark.parametrize("window", [None, 1, 2000])
def test_backwards_by_hand_are_summed(ways: str, window: int | None) -> None:
    """With a window of 1 the scale doubles after every update; gradients that lie there follow."""
    scaling: dict[str, Any] = {"static_loss_scale": 128.0}
    if window is not None:
        scaling = dynamic(scale_window=window, init_scale=128.0)
    model, optimizer = wrapped(**scaling)
    for _ in range(2):
        for index, way in enumerate(ways):
            act(model, optimizer, "hand" if way == "h" else "both", 2.0**index)
            assert gradients(optimizer) == [[2.0 ** (index + 1) - 1] * 2] * 2
        optimizer.zero_grad()


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
        act(model, optimizer, "hand", 1.0)
    assert gradients(optimizer) == [[3.0] * 2] * 2
    assert copy.deepcopy(model).wide.grad is None


@pytest.mark.parametrize("how", ["assigned", "in place", "beside the half one"])
def test_a_master_that_a_script_writes_to_counts(how: str) -> None:
    model = Weights()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.0), verbose=False)
    master: Any = optimizer.all_fp32_from_fp16_params[0]
    if how == "in place":
        master.detach().fill_(3.0)
    else:
        master.data = torch.full_like(master, 3.0)
    if how == "beside the half one":  # what was written to last is not known: masters win
        model.low.data.fill_(5.0)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(model.loss())
        optimizer.step()
        assert model.low.tolist() == master.tolist() == [3.0, 3.0]


# -- groups --------------------------------------------------------------------------------------


def test_lists_run_parallel_to_the_groups() -> None:
    model = convert_network(Exact(), torch.float16)
    frozen = model.linear.bias.requires_grad_(False)
    norm = [model.norm.weight, model.norm.bias]
    inner = torch.optim.SGD([{"params": model.linear.parameters()}, {"params": norm}], lr=1.0)
    optimizer = FP16_Optimizer(inner, verbose=False)
    (master,) = optimizer.fp32_from_fp16_groups[0]
    assert optimizer.optimizer is inner
    assert optimizer.fp16_groups == [[model.linear.weight], []]
    assert optimizer.fp32_from_fp32_groups == [[], norm]
    assert inner.param_groups[0]["params"][0] is master
    assert inner.param_groups[0]["params"][1] is frozen
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.all_fp16_params == [model.linear.weight]
    assert optimizer.all_fp32_from_fp16_params == [master]
    assert optimizer.all_fp32_from_fp32_params == norm
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


@BOTH
@pytest.mark.parametrize("how", ["in place", "data", "load_state_dict"])
def test_a32_weights_written_later_reach_the_masters(kind: str, how: str) -> None:
    model, optimizer = wrapped(kind)
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
    assert masters_of(optimizer)[0].tolist() == [1.0 - 2.0**-14, 5.0]
    assert model.low.tolist() == [1.0, 5.0]
    if kind == "flat":
        assert_bound(model, optimizer)


# -- overflow ------------------------------------------------------------------------------------

SKIPPED = {
    "general": "Warning: the gradients overflowed",
    "flat": "\nGrad overflow on iteration 0\nUsing {} loss scale of {}\n",
}


@BOTH
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("where", ["low", "wide"])
def test_an_overflow_skips_the_step_and_halves_the_scale(
    kind: str, bad: float, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = wrapped(kind, verbose=True, **DYNAMIC)
    capsys.readouterr()
    before = values(model)
    optimizer.backward(model.loss() + getattr(model, where).float()[1] * bad)
    if kind == "general":
        assert optimizer.overflow
        assert optimizer.loss_scaler.loss_scale() == optimizer.loss_scale  # it is that of amp
        assert optimizer.clip_master_grads(1.0) == -1
        assert optimizer.inspect_master_grad_data() is None
    assert optimizer.step() is None
    printed = capsys.readouterr().out
    assert SKIPPED[kind].format("dynamic", 2.0**16) in printed
    assert kind == "flat" or f"reducing loss scale to {optimizer.loss_scale}\n" in printed
    assert all(map(torch.equal, values(model), before))
    assert scale_of(optimizer) < 2.0**16
    optimizer.zero_grad()
    optimizer.backward(model.loss())
    optimizer.step()
    assert model.low.tolist() == model.wide.tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_overflows_at_a_static_scale(
    kind: str, bad: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """The general one does not look, the flat one skips, as in Apex."""
    model, optimizer = wrapped(kind, static_loss_scale=2.0, verbose=True)
    capsys.readouterr()
    optimizer.backward(model.loss() * bad)
    assert not getattr(optimizer, "overflow", False)
    optimizer.step()
    assert torch.isfinite(model.low).any() == (kind == "flat")
    told = SKIPPED["flat"].format("static", 2.0) if kind == "flat" else ""
    assert capsys.readouterr().out == told


@pytest.mark.parametrize(
    ("kind", "args", "bad", "seen"),
    [
        (
            "general",
            {"init_scale": 8, "scale_factor": 4, "scale_window": 2}
            | {"min_loss_scale": 4.0, "max_loss_scale": 64.0},
            "000000111",
            [8, 32, 32, 64, 64, 64, 16, 4, 4],
        ),
        (
            "flat",
            {"init_scale": 4.0, "scale_window": 2},
            "0001001111",
            [4, 8, 8, 4, 4, 8, 4, 2, 1, 1],
        ),
        ("flat", {"init_scale": "128", "scale_window": "2"}, "0", [128.0]),  # numbers as text
    ],
)
def test_the_dynamic_rule(kind: str, args: Any, bad: str, seen: list[float]) -> None:
    model, optimizer = wrapped(kind, **dynamic(**args))
    found = []
    for each in bad:
        optimizer.zero_grad()
        optimizer.backward(model.loss(torch.nan if each == "1" else 1.0))
        optimizer.step()
        found.append(scale_of(optimizer))
    assert found == seen
    if kind == "flat":
        assert (optimizer.cur_iter, optimizer.last_overflow_iter) == (len(bad), bad.rfind("1"))


@BOTH
def test_a_first_skipped_step_does_not_upset_schedulers(kind: str) -> None:
    model, optimizer = wrapped(kind, **DYNAMIC)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
    optimizer.backward(model.loss(torch.nan))
    optimizer.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


@pytest.mark.parametrize(
    ("kind", "options", "scale"),
    [("general", {}, 2.0**-24), ("general", {"min_loss_scale": 1.0}, 1.0), ("flat", {}, 1.0)],
)
@pytest.mark.parametrize("closure", [False, True])
def test_overflows_without_end_are_an_error(
    kind: str, options: dict[str, Any], scale: float, closure: bool
) -> None:
    model, optimizer = wrapped(kind, **dynamic(**options))
    calls = list[None]()

    def evaluate() -> torch.Tensor:
        calls.append(None)
        optimizer.zero_grad()
        loss = model.loss(torch.nan)
        optimizer.backward(loss)
        return loss

    with refused("fp16_utils", "overflows without end", scale=scale):
        while True:
            if not closure:
                evaluate()
            optimizer.step(evaluate if closure else None)
    assert len(calls) == 50


def test_the_error_numbers_parameters_as_groups_do() -> None:
    params = [nn.Parameter(torch.ones(size)) for size in (2, 3)]
    params[1].data = params[1].data.half()
    optimizer = FP16_Optimizer(torch.optim.SGD(params, lr=0.1), dynamic_loss_scale=True)

    def closure() -> torch.Tensor:
        loss = params[0].sum() + params[1].float().sum() * torch.inf
        optimizer.backward(loss)
        return loss

    with pytest.raises(LossScaleError, match=r"parameter 1 of group 0, of shape \(3,\)"):
        optimizer.step(closure)  # calls it until it does not overflow


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


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_lbfgs_with_a_closure(dtype: torch.dtype) -> None:
    """The oracle is LBFGS on f(p.to(half)) with float32 p: autograd does the casts."""
    model, plain = Weights(dtype), torch.ones(2, requires_grad=True)
    ours = torch.optim.LBFGS([model.low], lr=0.5, max_iter=6)
    optimizer = FP16_Optimizer(ours, static_loss_scale=16.0, verbose=False)
    reference = torch.optim.LBFGS([plain], lr=0.5, max_iter=6)
    firsts = []

    def closure(half: bool) -> torch.Tensor:
        weight = (model.low if half else plain.to(dtype)).float()
        (optimizer if half else reference).zero_grad()
        loss = ((weight - torch.tensor([0.25, -3.0])) ** 2 * torch.tensor([1.0, 4.0])).sum()
        if half:
            firsts.append(optimizer.first_closure_call_this_step)
        optimizer.backward(loss) if half else loss.backward()
        return loss

    for _ in range(2):
        theirs: Any = reference.step(lambda: closure(False))  # type: ignore[arg-type]
        assert torch.equal(optimizer.step(lambda: closure(True)), theirs)
        assert torch.equal(optimizer.all_fp32_from_fp16_params[0], plain)
        assert torch.equal(model.low, plain.to(dtype))
        assert optimizer.first_closure_call_this_step
    assert len(firsts) > 4
    assert not any(firsts)


def test_a_closure_after_an_overflow_or_an_exception_starts_afresh() -> None:
    model, optimizer = wrapped(**DYNAMIC)
    optimizer.backward(model.loss(torch.nan))
    assert optimizer.overflow

    def broken() -> torch.Tensor:
        raise KeyError("data")

    with pytest.raises(KeyError):
        optimizer.step(broken)
    assert optimizer.first_closure_call_this_step

    def whole() -> torch.Tensor:
        optimizer.zero_grad()
        optimizer.backward(loss := model.loss())
        return loss

    optimizer.step(whole)
    assert model.low.tolist() == [0.0, 0.0]


# -- what scripts look at ------------------------------------------------------------------------

EMPTY = inspect.Parameter.empty
SIGNATURES: dict[Any, dict[str, Any]] = {
    FP16_Optimizer.backward: {"loss": EMPTY, "update_master_grads": True, "retain_graph": False},
    FP16_Optimizer.zero_grad: {"set_grads_to_None": False},
    FP16_Optimizer: {"init_optimizer": EMPTY, "static_loss_scale": 1.0}
    | {"dynamic_loss_scale": False, "dynamic_loss_args": None, "verbose": True},
    KINDS["flat"].backward: {"loss": EMPTY},
    KINDS["flat"].step: {"closure": None},
    KINDS["flat"].zero_grad: {"set_grads_to_None": True},
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_signatures(method: Any) -> None:
    found = inspect.signature(method).parameters.values()
    assert {p.name: p.default for p in found if p.name != "self"} == SIGNATURES[method]


def test_parameters_are_told_if_asked(capsys: pytest.CaptureFixture[str]) -> None:
    FP16_Optimizer(sgd(Weights().parameters()))
    assert capsys.readouterr().out.splitlines() == [
        "FP16_Optimizer processing param group 0:",
        "FP16_Optimizer received torch.float32 with (2,)",
        "FP16_Optimizer received torch.float32 with (2,)",
    ]
    wrapped()
    assert capsys.readouterr().out == ""
