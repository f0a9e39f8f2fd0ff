# SPDX-License-Identifier: BSD-3-Clause
"""Half gradients written to after scale_loss: each sentence of the page on clipping."""

from typing import Any, Literal

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from kit.refusals import refused
from kit.run import Run, act
from preamp import amp


class Even(nn.Module):
    """All weights are 32, and all gradients 8 in a step of one backward or two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 32.0))

    def forward(self, parts: int) -> torch.Tensor:
        return self.weight.float().sum() * (8 / parts)


@act
def change_gradient(run: Run, how: Literal["halved", "replaced", "clipped", "not"]) -> None:
    """As a script does after the block."""
    grad = run.model.weight.grad
    if how == "halved":
        grad.mul_(0.5)
    if how == "replaced":
        run.model.weight.grad = grad * 0.5
    if how == "clipped":
        nn.utils.clip_grad_norm_(run.model.parameters(), 8.0)


@act
def changed_step(run: Run, parts: int, how: str) -> None:
    run.zero()
    for _ in range(parts):
        run.back(run.model(parts))
    change_gradient(run, how)  # type: ignore[arg-type]
    run.step()


HALF = {"O2": "float16", "O5": "bfloat16"}


@pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
@pytest.mark.parametrize("how", ["halved", "replaced", "clipped"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("before", [0, 12], ids=["at once", "late"])
@pytest.mark.parametrize("loss_scale", [1.0, 64.0])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_what_becomes_of_a_change(
    level: str, loss_scale: float, before: int, parts: int, how: str, door: Any
) -> None:
    """It counts, or would reach a part of the sum, or what is scaled."""
    run = Run(level, "SGD", Even, door=door, loss_scale=loss_scale)
    run.optimizer.param_groups[0].update(lr=0.0, momentum=0.0)
    run.play(*before * [f"changed_step {parts} not"])
    run.optimizer.param_groups[0]["lr"] = 1.0
    if level in HALF and (loss_scale > 1 or parts == 2):
        name = "a change of a scaled gradient" if loss_scale > 1 else "a change of a part"
        with refused("compat", name, changes=True, half=HALF[level]):
            changed_step(run, parts, how)
        return
    changed_step(run, parts, how)
    taken = 32.0 - next(iter(amp.master_params(run.optimizer))).flatten()[0].item()
    assert taken == pytest.approx(4.0, rel=1e-2 if how == "clipped" else 0.0)
