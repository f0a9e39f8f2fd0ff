# SPDX-License-Identifier: BSD-3-Clause
"""Every fused optimizer through ``initialize``: the numbers of plain float32 training, bitwise."""

from typing import Any

import pytest
import torch

import preamp
from cases.fused import ADAM, FUSED, MIXED_LAMB, SGD, FusedCase, Options, variant_id
from cases.levels import LEVEL_NAMES
from cases.models import Exact, Parts, loss_of
from cases.optimizers import clone_state
from cases.tolerances import assert_same
from kit.pair import Pair
from preamp.optimizers import FusedNovoGrad, FusedSGD

KINDS: list[tuple[FusedCase, Options]] = [
    *((case, {**case.variants[-1], "lr": 0.125}) for case in FUSED),
    (ADAM, {"lr": 0.125}),
    (ADAM, {"lr": 0.125, "capturable": True, "master_weights": True}),
    (SGD, {"lr": 0.5, "momentum": 0.9, "dampening": 0.5}),
    (MIXED_LAMB, {"lr": 0.125, "reduced_precision_dtype": torch.float16}),
]
every_kind = pytest.mark.parametrize(("case", "options"), KINDS, ids=variant_id)
every_level = pytest.mark.parametrize("level", LEVEL_NAMES)


def pair(level: str, case: FusedCase, options: Options, **arguments: Any) -> Pair:
    return Pair(level, lambda params: case.kind(params, **options), **arguments)


def counters(optimizer: torch.optim.Optimizer) -> list[int]:
    return [int(group.get("step", -1)) for group in optimizer.param_groups]


@every_level
@every_kind
def test_training_with_an_overflow(level: str, case: FusedCase, options: Options) -> None:
    both = pair(level, case, options, loss_scale="dynamic" if level != "O3" else None)
    for step in range(4):
        if step == 2 and level != "O3":  # its scale is static by default, and does not look
            both.overflow()
            before = clone_state(both.optimizer)
            both.optimizer.step()
            both.optimizer.zero_grad()
            assert both.engine.state_dict()["loss_scaler0"]["unskipped"] == 0
            for key, value in clone_state(both.optimizer).items():
                assert_same(value, before[key], key)
        both.train(step)
        both.check(f"step {step}")
        assert counters(both.optimizer) == counters(both.plain_optimizer)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@every_kind
def test_clipping_by_hand_reaches_the_update(level: str, case: FusedCase, options: Options) -> None:
    both = pair(level, case, options)
    for step in range(3):
        both.backward(step)
        for optimizer in (both.optimizer, both.plain_optimizer):
            torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), 2.0**-8)
        both.step()
        both.zero()
        both.check(f"step {step}")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@every_kind
def test_a_group_added_after_initialize(level: str, case: FusedCase, options: Options) -> None:
    model = Parts()
    optimizer = case.kind(model.a.parameters(), **options)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    plain = Parts()  # of the same values
    reference = case.kind(plain.a.parameters(), **options)
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": list(model.b.parameters())})
            with torch.no_grad():  # masters made this late start from the half weights
                for theirs, ours in zip(plain.b.parameters(), model.b.parameters(), strict=True):
                    theirs.copy_(ours)
            reference.add_param_group({"params": list(plain.b.parameters())})
        with preamp.scale_loss(loss_of([model], step), optimizer) as scaled:
            scaled.backward()
        with preamp.disable_casts():
            loss_of([plain], step).backward()
            reference.step()
        optimizer.step()
        model.zero_grad()
        plain.zero_grad()
    for a, b in zip(preamp.master_params(optimizer), plain.parameters(), strict=True):
        assert_same(a.detach(), b.detach())


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


@pytest.mark.parametrize("materialize", [True, False])
def test_sgd_has_the_fields_of_apex_under_amp(materialize: bool) -> None:
    """2.8: without materialized master gradients the numbers are the same; they are lazy here."""
    both = Pair(
        "O2", lambda p: FusedSGD(p, lr=0.5, momentum=0.9, materialize_master_grads=materialize)
    )
    for step in range(3):
        both.backward(step)
        both.backward(step + 3)
        assert both.optimizer.most_recent_scale == 1.0
        assert not both.optimizer.scale_set_by_backward
        both.check_grads()
        both.step()
        both.zero()
        both.check()


def test_novograd_resumes_under_amp() -> None:
    both = Pair("O2", lambda p: FusedNovoGrad(p, lr=0.125))
    both.optimizer.load_state_dict(both.optimizer.state_dict())  # before the first step
    for step in range(3):
        both.train(step)
        both.optimizer.load_state_dict(both.optimizer.state_dict())
        both.check(f"step {step}")
