# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer through ``initialize``: the numbers of plain float32 training, bitwise."""

import pytest
import torch

import preamp
from cases.fused import MIXED_LAMB, FusedCase, Options, every_kind
from cases.levels import LEVEL_NAMES
from cases.models import Exact, loss_of
from cases.optimizers import clone_state
from cases.tolerances import assert_same
from kit.pair import Pair


def counters(optimizer: torch.optim.Optimizer) -> list[int]:
    return [int(group.get("step", -1)) for group in optimizer.param_groups]


def clip_by_hand(both: Pair) -> None:
    for optimizer in (both.optimizer, both.plain_optimizer):
        torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), 2.0**-8)


@every_kind
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_training(level: str, case: FusedCase, options: Options) -> None:
    """Clipped by hand, overflowed, of two backwards, and resumed from its own state."""
    looks = level != "O3"  # its scale is static by default
    both = Pair(
        level, lambda params: case.kind(params, **options), loss_scale="dynamic" if looks else None
    )
    for step in range(5):
        both.optimizer.load_state_dict(both.optimizer.state_dict())
        if step == 2 and looks:
            both.overflow()
            before = clone_state(both.optimizer)
            both.optimizer.step()
            both.optimizer.zero_grad()
            assert both.engine.state_dict()["loss_scaler0"]["unskipped"] == 0
            for key, value in clone_state(both.optimizer).items():
                assert_same(value, before[key], key)
        both.backward(step)
        if step == 3:
            both.backward(step + 3)
            both.check_grads()
        if step in (1, 3):
            clip_by_hand(both)
        both.step()
        both.zero()
        both.check(f"step {step}")
        assert counters(both.optimizer) == counters(both.plain_optimizer)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@every_kind
def test_state_from_before_initialize(level: str, case: FusedCase, options: Options) -> None:
    """A-11: initialize takes over the state of steps before it, and of none."""
    model = Exact()
    optimizer = case.kind(model.parameters(), **options)
    loss_of([model], 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with preamp.scale_loss(loss_of([model], 1), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert counters(optimizer) in ([2], [-1])
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.isfinite(param).all()
        assert not torch.equal(param.float(), was)
    if level == "O3" and case.wide and case is not MIXED_LAMB:
        for param in model.parameters():
            for key in case.wide:
                assert optimizer.state[param][key].dtype is torch.float32
