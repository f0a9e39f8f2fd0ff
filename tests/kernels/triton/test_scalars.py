# SPDX-License-Identifier: BSD-3-Clause
"""Numbers that kernels compute from what lies on the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from preamp.kernels import Update
from preamp.kernels.rules import AdamRule, BiasCorrection

STEPS = (1, 2, 5, 6, 52, 60, 509, 700, 10**4, 10**6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99, 0.999])
def test_bias_corrections_of_a_step_on_the_device(
    ops: Any, device: torch.device, beta: float, dtype: torch.dtype
) -> None:
    """Without a second moment a step from zero is ``-1 / (1 - beta**step)``, with a moment of 1."""
    rule = AdamRule(
        lr=1.0,
        beta1=beta,
        beta2=0.0,
        eps=0.0,
        weight_decay=0.0,
        decoupled=False,
        bias_correction=BiasCorrection.MOMENTS,
    )
    for step in STEPS:
        p, g, m, v = (torch.full((1,), x, dtype=dtype, device=device) for x in (0.0, 1, 1, 1))
        update = Update(step=torch.tensor(step).to(device))
        ops.update_([p], [g], [m], [v], rule=rule, update=update)
        # The logarithm is rounded once, and then multiplied by the step.
        log = torch.tensor(math.log(beta) if beta else -math.inf, dtype=dtype)
        wanted = 1 / math.expm1((log * step).double().item())
        eps = torch.finfo(dtype).eps
        assert p.item() == pytest.approx(wanted, rel=3 * eps), step
