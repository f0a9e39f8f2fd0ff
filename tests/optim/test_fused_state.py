# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints, copies, groups added later, schedules, zeroing: what scripts do around the step."""

import copy
import io
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.fused import (
    FUSED,
    HALVES,
    MIXED_LAMB,
    FusedCase,
    Options,
    every_dtype,
    every_kind,
    gradients,
    parameters,
    variant_id,
    wide,
)
from cases.tolerances import assert_same
from kit.refusals import assert_refused
from preamp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

SHAPES = ((3, 2), (4,), ())


def step(params: Any, optimizer: torch.optim.Optimizer, number: int, **arguments: Any) -> None:
    shapes = [tuple(param.shape) for param in params]
    for param, grad in zip(params, gradients(shapes, number, params[0].dtype), strict=True):
        param.grad = grad
    optimizer.step(**arguments)


def assert_same_training(a: Any, b: Any) -> None:
    for x, y in zip(a, b, strict=True):
        assert_same(x.detach(), y.detach())


def saved(thing: Any) -> Any:
    """Through a file, as plain data only."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@every_dtype
@pytest.mark.parametrize("before", [0, 1, 3])
@every_kind
def test_resuming_continues_bitwise(
    case: FusedCase, options: Options, dtype: torch.dtype, before: int
) -> None:
    params = parameters(SHAPES, dtype)
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.25}]
    optimizer = case.kind(groups, **options)
    for number in range(before):
        step(params, optimizer, number)
    state = saved(optimizer.state_dict())

    again = [nn.Parameter(param.detach().clone()) for param in params]
    groups = [{"params": again[:1]}, {"params": again[1:]}]
    resumed = case.kind(groups, **options)
    if before == 1:  # its own state is replaced, not mixed
        step(again, resumed, 99)
        for param, value in zip(again, params, strict=True):
            param.data.copy_(value.detach())
    resumed.load_state_dict(state)
    for number in range(before, before + 2):
        step(params, optimizer, number)
        step(again, resumed, number)
    assert_same_training(params, again)
    for a, b in zip(params, again, strict=True):
        assert optimizer.state[a].keys() == resumed.state[b].keys()
        for key, value in optimizer.state[a].items():
            assert_same(value, resumed.state[b][key], key)


def test_what_hooks_make_of_a_checkpoint_counts() -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = FusedAdam(params)
    step(params, optimizer, 0)
    state = optimizer.state_dict()

    def double(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        moments = {
            number: {key: 2 * value for key, value in entry.items()}
            for number, entry in given["state"].items()
        }
        return {**given, "state": moments}

    seen: list[torch.dtype] = []
    before = [optimizer.state[param]["exp_avg"].clone() for param in params]
    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(
        lambda o: seen.append(o.state[params[0]]["exp_avg"].dtype)
    )
    optimizer.load_state_dict(state)
    assert seen == [torch.float32]
    for param, was in zip(params, before, strict=True):
        assert_same(optimizer.state[param]["exp_avg"], 2 * was)


def test_a_refused_checkpoint_changes_nothing() -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = FusedAdam(params)
    step(params, optimizer, 0)
    before = copy.deepcopy(optimizer.state_dict())
    other = FusedAdam([nn.Parameter(torch.ones(2))]).state_dict()
    act = partial(optimizer.load_state_dict, other)
    assert_refused("optim", "groups of another size", act, optimizer)
    optimizer.load_state_dict(before)  # and no hook is left behind


@every_kind
def test_an_older_checkpoint_lacks_an_option(case: FusedCase, options: Options) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = case.kind(params, **options)
    state = optimizer.state_dict()
    state["param_groups"] = [{"params": group["params"]} for group in state["param_groups"]]
    optimizer.load_state_dict(state)
    twin = parameters(SHAPES, torch.float32)
    fresh = case.kind(twin, **options)
    step(params, optimizer, 0)
    step(twin, fresh, 0)
    assert_same_training(params, twin)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@every_kind
def test_copies_train_on_alone(case: FusedCase, options: Options, copied: Any) -> None:
    params = parameters(SHAPES, torch.float16)
    optimizer = case.kind(params, **options)
    step(params, optimizer, 0)
    optimizer.backend = "reference"
    twins, other = copied((params, optimizer))
    assert other.backend == "reference"
    assert vars(other).keys() >= set(type(optimizer)._settings)
    before = [param.detach().clone() for param in params]
    step(twins, other, 1)
    assert_same_training(params, before)
    step(params, optimizer, 1)
    assert_same_training(params, twins)


@every_dtype
@every_kind
def test_a_group_added_later(case: FusedCase, options: Options, dtype: torch.dtype) -> None:
    """A-12, and a parameter's first step is its own."""
    params = parameters(SHAPES, dtype)
    optimizer = case.kind(params[:1], **options)
    step(params[:1], optimizer, 0)
    optimizer.add_param_group({"params": params[1:]})
    alone = parameters(SHAPES, dtype)[1:]
    clips = case.norm == "all"  # there the other group's gradients count
    fresh = case.kind(alone, **options)
    for number in range(3):
        step(params, optimizer, number)
        for param, full in zip(alone, params[1:], strict=True):
            param.grad = full.grad.clone()
        fresh.step()
    if not clips:
        assert_same_training(params[1:], alone)
    assert not torch.equal(params[1], parameters(SHAPES, dtype)[1])
    for param in params:  # where it keeps a copy
        master = optimizer.state[param].get("master_param")
        if master is not None:
            assert master.dtype is wide(dtype)
            assert_same(param.detach(), master.detach().to(dtype))


@every_kind
def test_state_and_groups_have_apex_keys(case: FusedCase, options: Options) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = case.kind(params, **options)
    step(params, optimizer, 0)
    step(params, optimizer, 1)
    group = optimizer.param_groups[0]
    if "step" in group:
        assert group["step"] == 2
    counts = {"FusedSGD", "FusedAdagrad", "FusedLARS"}
    is_early = "step" in optimizer.state[params[0]]
    assert ("step" in group) == (case.name not in counts and not is_early)


@every_kind
def test_a_learning_rate_with_one_element_is_a_number(case: FusedCase, options: Options) -> None:
    """Torch takes such tensors too; ``SHAPES`` has a parameter with fewer dimensions."""
    given = {**options, "lr": torch.tensor([options["lr"]])}
    runs = [parameters(SHAPES, torch.float32) for _ in range(2)]
    for params, values in zip(runs, (options, given), strict=True):
        step(params, case.kind(params, **values), 0)
    assert_same_training(*runs)


def test_parameters_may_join_an_empty_group() -> None:
    late, params = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    optimizer = FusedAdam([{"params": []}, {"params": params}], capturable=True)
    optimizer.param_groups[0]["params"].extend(late)
    step(late, optimizer, 0)
    reference = FusedAdam(same := parameters(SHAPES, torch.float32), capturable=True)
    step(same, reference, 0)
    assert_same_training(late, same)


def test_the_step_counter_advances_for_every_group_with_parameters() -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = FusedAdam([{"params": params}, {"params": []}])
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1
    assert "step" not in optimizer.param_groups[1]
    assert not optimizer.state


@pytest.mark.parametrize("argument", [None, True, False])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("case", [c for c in FUSED if c is not MIXED_LAMB], ids=variant_id)
def test_zero_grad(case: FusedCase, own: bool, argument: bool | None) -> None:
    """A-5: set_to_none is accepted and wins over set_grad_none."""
    params = parameters(SHAPES, torch.float16)
    optimizer = case.kind(params, set_grad_none=own, **case.needs)
    for param in params[1:]:
        param.grad = torch.ones_like(param)
    optimizer.zero_grad(**({} if argument is None else {"set_to_none": argument}))
    assert params[0].grad is None
    drops = own if argument is None else argument
    for param in params[1:]:
        assert param.grad is None if drops else not param.grad.any()


@every_kind
def test_closures_run_with_gradients(case: FusedCase, options: Options) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = case.kind(params, **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params)
        loss.backward()
        return loss

    before = sum(float(param.detach().square().sum()) for param in params)
    with torch.no_grad():
        assert optimizer.step(closure).item() == pytest.approx(before)
        optimizer.step(closure)  # some begin with a step that moves nothing
    for param, start in zip(params, parameters(SHAPES, torch.float32), strict=True):
        assert not torch.equal(param, start)
        assert param.requires_grad
        assert param.is_leaf


def test_sgd_divides_by_the_scale_it_is_told() -> None:
    param = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    optimizer = FusedSGD([param], lr=1.0, materialize_master_grads=False)
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)
    param.grad = torch.full((2,), 8.0, dtype=torch.float16)
    optimizer.most_recent_scale, optimizer.scale_set_by_backward = 4.0, True
    optimizer.step()
    assert param.tolist() == [-2.0, -2.0]
    assert (optimizer.most_recent_scale, optimizer.scale_set_by_backward) == (1.0, False)


# -- the FusedAdam of early 2019 ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "is_early"),
    [
        ({}, False),
        ({"adam_w_mode": False}, False),
        ({"eps_inside_sqrt": False}, True),
        ({"max_grad_norm": 1.0}, True),
        ({"use_mt": True}, True),
        ({"amp_scale_adjustment": 1.0}, True),
    ],
)
def test_old_keywords_select_it(options: dict[str, Any], is_early: bool) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param], **options)
    optimizer.step()
    (group,) = optimizer.param_groups
    assert ("step" in optimizer.state[param]) == is_early
    assert ("step" in group) == (not is_early)
    assert ("max_grad_norm" in group) == is_early


def test_a_nan_stays_where_it_is() -> None:
    """A clip by a norm that is nan clips nothing."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.5, max_grad_norm=1.0)
    param.grad = torch.tensor([2.0, torch.nan, -2.0])
    optimizer.step()
    assert param.isnan().tolist() == [False, True, False]
    assert param[0] < 1.0 < param[2]


# -- NovoGrad's norms ------------------------------------------------------------------------


def apex_checkpoint(params: list[nn.Parameter], *norms: list[float]) -> dict[str, Any]:
    """A checkpoint as Apex writes it: norms in the group, per dtype."""
    state = {n: {"exp_avg": torch.ones_like(param.detach())} for n, param in enumerate(params)}
    group = FusedNovoGrad(params).state_dict()["param_groups"][0]
    group |= {"step": 3, "exp_avg_sq": [torch.tensor(values) for values in norms]}
    return {"state": state, "param_groups": [group]}


def test_novograd_reads_apex_checkpoints_and_refuses_norms_that_do_not_fit() -> None:
    mixed = (torch.float32, torch.float16, torch.float32)
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in mixed]
    optimizer = FusedNovoGrad(params)
    refused = partial(optimizer.load_state_dict, apex_checkpoint(params, [2.5], [1.5]))
    assert_refused("optim", "norms that do not fit", refused, optimizer)
    state = saved(apex_checkpoint(params, [2.5], [1.5, 3.5]))
    optimizer.load_state_dict(state)
    assert [optimizer.state[param]["exp_avg_sq"].item() for param in params] == [1.5, 2.5, 3.5]
    assert "exp_avg_sq" not in optimizer.param_groups[0]
    assert "exp_avg_sq" in state["param_groups"][0]  # what was given is not changed
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 4
    norm = (0.999 * 1.5**2 + 0.001 * 2) ** 0.5
    assert optimizer.state[params[0]]["exp_avg_sq"].item() == pytest.approx(norm, rel=1e-6)


# -- full-precision copies -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=variant_id)
def test_copies_follow_what_is_written_to_the_parameters(dtype: torch.dtype) -> None:
    """Weights loaded after the first step are not overwritten by the old ones."""
    params = parameters(SHAPES, dtype)
    optimizer = FusedAdam(params, lr=2.0**-14, capturable=True, master_weights=True)
    with torch.no_grad():
        params[1].fill_(5.0)  # before copies are made
    step(params, optimizer, 0)
    masters = [optimizer.state[param]["master_param"].clone() for param in params]
    assert (masters[1] > 4.0).all()
    with torch.no_grad():
        params[0][0] = 3.0
    step(params, optimizer, 1)
    after = optimizer.state[params[0]]["master_param"]
    assert ((after[0] - 3.0).abs() <= 2.0**-13).all()
    assert ((after[1:] - masters[0][1:]).abs() <= 2.0**-13).all()


@pytest.mark.parametrize("dtype", HALVES, ids=variant_id)
def test_copies_follow_weights_that_come_to_lie_where_the_old_ones_did(dtype: torch.dtype) -> None:
    """Assigned twice, ``p.data`` may get its first address back, and its version does not rise."""
    params = parameters(((1024,),), dtype)
    optimizer = FusedAdam(params, lr=2.0**-14, capturable=True, master_weights=True)
    address = params[0].data_ptr()
    step(params, optimizer, 0)
    for _ in range(32):  # until the allocator hands the freed memory out again
        params[0].data = torch.full_like(params[0], 5.0)
        if params[0].data_ptr() == address:
            break
    step(params, optimizer, 1)
    assert ((optimizer.state[params[0]]["master_param"] - 5.0).abs() <= 2.0**-13).all()


def test_lamb_takes_groups_of_mixed_dtype() -> None:
    """A-36: a float32 group, or parameter, beside reduced ones."""
    params = [nn.Parameter(torch.ones(2).half()), nn.Parameter(torch.ones(2))]
    options = {"lr": 0.1, "weight_decay": 0.1, "max_grad_norm": 1.0}
    ours = MIXED_LAMB.kind(params, reduced_precision_dtype=torch.float16, **options)
    wide_params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    plain = FusedLAMB(wide_params, **options)
    for number in range(3):
        grads = gradients([(2,), (2,)], number, torch.float16)
        for param, reference, grad in zip(params, wide_params, grads, strict=True):
            param.grad, reference.grad = grad.to(param.dtype), grad.float()
        ours.step()
        plain.step()
    assert "master_param" not in ours.state[params[1]]
    masters = [ours.state[params[0]]["master_param"], params[1].detach()]
    for master, reference in zip(masters, wide_params, strict=True):
        assert torch.allclose(master, reference, rtol=1e-6)


@pytest.mark.parametrize("saves_capturable", [True, False])
def test_checkpoints_cross_between_host_and_device_counters(saves_capturable: bool) -> None:
    params, again = parameters(SHAPES, torch.float32), parameters(SHAPES, torch.float32)
    first = FusedAdam(params, lr=0.125, capturable=saves_capturable)
    second = FusedAdam(again, lr=0.125, capturable=not saves_capturable)
    step(params, first, 0)
    for param, value in zip(again, params, strict=True):
        param.data.copy_(value.detach())
    second.load_state_dict(saved(first.state_dict()))
    assert isinstance(second.param_groups[0]["lr"], torch.Tensor) or saves_capturable
    step(params, first, 1)
    step(again, second, 1)
    assert int(second.param_groups[0]["step"]) == 2
    for a, b in zip(params, again, strict=True):
        assert torch.allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("kind", [lambda p: FusedAdam(p, capturable=True), MIXED_LAMB.kind])
def test_a_step_counter_of_another_form_goes_on_from_there(kind: Any) -> None:
    """Apex wrote it with one dimension; scripts that start anew set a number."""
    params = parameters(SHAPES, torch.float32)
    optimizer = kind(params)
    state = optimizer.state_dict()
    state["param_groups"][0]["step"] = torch.tensor([7], dtype=torch.int32)
    optimizer.load_state_dict(state)
    step(params, optimizer, 0)
    (group,) = optimizer.param_groups
    assert (group["step"].shape, int(group["step"])) == ((), 8)
    group["step"] = 10
    for number in range(3):
        step(params, optimizer, number)
    assert int(group["step"]) == 13


@pytest.mark.parametrize("lr", [1e-3, torch.tensor(1e-3)], ids=["float", "tensor"])
@pytest.mark.parametrize(
    "make", [lambda p, lr: FusedAdam(p, lr, capturable=True), lambda p, lr: MIXED_LAMB.kind(p, lr)]
)
def test_groups_own_their_counters(make: Any, lr: Any) -> None:
    params = parameters(SHAPES, torch.float32)
    optimizer = make([{"params": params[:1]}, {"params": params[1:2]}], lr)
    optimizer.add_param_group({"params": params[2:]})
    first, *others = optimizer.param_groups
    for group in optimizer.param_groups:
        assert group["lr"].dtype is torch.float32
        assert group["step"].dtype is torch.int32
    first["lr"].fill_(1.0)
    first["step"] += 1
    for group in others:
        assert group["lr"] == torch.tensor(1e-3)
        assert group["step"] == 0


@pytest.mark.parametrize("what", ["parameters of two groups", "a moment"])
def test_what_a_script_exchanges_between_steps_counts(what: str) -> None:
    """Each parameter goes on with its own state, which is float32 again."""
    params = parameters([(4,)] * 4, torch.float32)
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}], lr=0.5)
    for number in range(3):
        step(params, optimizer, number)
    twins = [param.detach().clone().requires_grad_() for param in params]
    first, second = (group["params"] for group in optimizer.param_groups)
    if what == "a moment":
        moment = optimizer.state[params[1]]["exp_avg"]
        optimizer.state[params[1]]["exp_avg"] = moment.half()
        moment.copy_(moment.half())
    else:
        first[1], second[1] = second[1], first[1]
    order = [0, 1, 2, 3] if what == "a moment" else [0, 3, 2, 1]
    twin = FusedAdam([{"params": [twins[n] for n in order]}], lr=0.5)
    twin.param_groups[0]["step"] = 3
    for param, other in zip(params, twins, strict=True):
        twin.state[other] = copy.deepcopy(optimizer.state[param])
    step(params, optimizer, 5)
    step(twins, twin, 5)
    assert_same_training(params, twins)
    assert optimizer.state[params[1]]["exp_avg"].dtype is torch.float32


def test_lamb_clips_what_a_factor_unscales() -> None:
    model = nn.Linear(4, 1, bias=False)
    optimizer = FusedLAMB(model.parameters(), lr=0.1, max_grad_norm=1.0)
    preamp.initialize(model, optimizer, opt_level="O2", loss_scale=8.0, verbosity=0)
    with preamp.scale_loss(model.weight.float().sum() * 16, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    (state,) = optimizer.state.values()
    torch.testing.assert_close(state["exp_avg"], torch.full((1, 4), 0.05))
