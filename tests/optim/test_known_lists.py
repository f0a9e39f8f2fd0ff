# SPDX-License-Identifier: BSD-3-Clause
"""What a fused step knows of its lists from the last one hides nothing done in between."""

import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from cases.tolerances import assert_same
from preamp.kernels import dispatch
from preamp.optimizers import FusedAdam

Change = Callable[[list[Any], list[Any], Any], None]


def _assign_twice(param: Any) -> None:
    before = param.data
    param.data = before.clone()
    param.data = torch.full_like(before, 0.25)


CHANGES: dict[str, Change] = {
    "nothing": lambda weights, params, state: None,
    "a weight is written": lambda weights, params, state: weights[1].data.mul_(2),
    "a weight has other memory": lambda weights, params, state: _assign_twice(weights[1]),
    "a master is written": lambda weights, params, state: params[1].detach().mul_(2),
    "a master has other memory": lambda weights, params, state: _assign_twice(params[1]),
    "a gradient is dropped": lambda weights, params, state: setattr(weights[0], "grad", None),
    "a gradient lies otherwise": lambda weights, params, state: setattr(
        weights[0].grad, "data", weights[0].grad.t().contiguous().t()
    ),
    "a moment is another tensor": lambda weights, params, state: state[params[1]].update(
        exp_avg=state[params[1]]["exp_avg"] * 2
    ),
    "a moment has another dtype": lambda weights, params, state: state[params[1]].update(
        exp_avg=state[params[1]]["exp_avg"].half() * 2
    ),
    "a moment has other memory": lambda weights, params, state: setattr(
        state[params[1]]["exp_avg"], "data", state[params[1]]["exp_avg"].data * 3
    ),
    "a moment is transposed": lambda weights, params, state: state[params[0]]["exp_avg"].t_(),
    "a weight is transposed": lambda weights, params, state: setattr(
        weights[0], "data", weights[0].data.t()
    ),
    "a moment is gone": lambda weights, params, state: state[params[1]].pop("exp_avg"),
    "a state is another dict": lambda weights, params, state: state.update(
        {params[1]: {key: value.clone() for key, value in state[params[1]].items()}}
    ),
    "all state is gone": lambda weights, params, state: state.clear(),
}


def _trained(level: str, storage: Any, change: Change, *, forgets: bool) -> list[torch.Tensor]:
    """All that training has left after a change between two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    optimizer = FusedAdam(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level=level, storage=storage, verbosity=0)
    weights, params = list(model.parameters()), optimizer.param_groups[0]["params"]
    for step in range(5):
        with preamp.scale_loss(model(torch.ones(2, 6) * step).float().mean(), optimizer) as loss:
            loss.backward()
        if step == 3:
            with torch.no_grad():
                change(weights, params, optimizer.state)
        if forgets:
            vars(optimizer).pop("_kept_lists", None)
        optimizer.step()
        optimizer.zero_grad()
    return [*weights, *[value for param in params for value in optimizer.state[param].values()]]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("level", "storage"), [("O4", None), ("O2", None), ("O5", None), ("O5", "split")]
)
def test_a_change_between_two_steps_counts(level: str, storage: Any, change: str) -> None:
    if storage == "split" and "master" in change:
        pytest.skip("Split masters have no memory")
    found = _trained(level, storage, CHANGES[change], forgets=False)
    wanted = _trained(level, storage, CHANGES[change], forgets=True)
    for ours, exact in zip(found, wanted, strict=True):
        assert_same(ours, exact)
    if change == "a gradient lies otherwise":
        return  # its squares may be added up in another order
    plain = _trained(level, storage, CHANGES["nothing"], forgets=False)
    changes_no_number = change in ("nothing", "a state is another dict")
    assert all(map(torch.equal, found, plain)) == changes_no_number


def test_lists_are_known_from_the_third_step_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no place is looked at in Python, and no list sorted."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    for step in range(4):
        param.grad = torch.ones(3)
        if step == 2:
            monkeypatch.setattr("preamp.kernels.works.planned", None)
        optimizer.step()


@pytest.mark.skipif(dispatch.lacks_numba() is not None, reason="torch reads what was freed")
def test_a_refused_step_keeps_nothing_alive() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param])
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    moment = weakref.ref(optimizer.state[param]["exp_avg"])
    cast("Any", param.grad).untyped_storage().resize_(0)
    with pytest.raises(preamp.PreampStateError, match="has no memory"):
        optimizer.step()
    optimizer.state.clear()
    assert moment() is None


def test_parameters_on_meta_do_not_stop_a_step_of_others() -> None:
    there, here = nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.ones(2))
    there.grad, here.grad = torch.ones_like(there), torch.ones_like(here)
    FusedAdam([there, here], lr=0.5).step()
    torch.testing.assert_close(here.detach(), torch.full((2,), 0.5))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_quiet_writes_to_a_master_and_to_its_half_weight_count_both(level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    (master,) = preamp.master_params(optimizer)
    master.data[0, 0] = 5.0
    model.weight.data[0, 1] = 7.0
    assert model.state_dict()["weight"].tolist() == [[5.0, 7.0]]
