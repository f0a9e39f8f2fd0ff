# SPDX-License-Identifier: BSD-3-Clause
"""Every level × optimizer of torch × accumulation × overflow equals plain torch.

Gradients are exact (see ``cases.models``), so plain torch on float32 copies of the weights, which
leaves out the steps where an overflow was injected, is an oracle to the bit. At O3 the weights
are half themselves and so are the oracle's. Several models, losses and ways to zero gradients are
in ``test_programs``.
"""

import math
from dataclasses import replace

import pytest
import torch

import preamp
from cases.levels import LEVEL_NAMES, LEVELS
from cases.models import Damage, Exact
from cases.optimizers import ALL, NO_ROW
from kit.pair import Pair

ROWS = {row.name: row for row in ALL} | {
    f"{row.name}, {variant}": replace(row, options={**row.options, variant: True})
    for row in ALL
    for variant in row.variants
}
OVERFLOWS: dict[str, tuple[int, int, str, float | None]] = {
    "none": (1, 0, "", None),
    "none of three": (3, 0, "", None),
    "the only backward": (1, 0, "linear.weight", math.inf),
    "the first of three": (3, 0, "norm.weight", math.nan),
    "the second of three": (3, 1, "linear.weight", math.nan),
    "the last of three": (3, 2, "norm.weight", math.inf),
}
"""Backwards to a step, and which one of the second step spoils an element of which gradient."""


@pytest.mark.parametrize("overflow", OVERFLOWS)
@pytest.mark.parametrize("optimizer", ROWS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_training_equals_plain_torch(level: str, optimizer: str, overflow: str) -> None:
    row, (count, place, target, value) = ROWS[optimizer], OVERFLOWS[overflow]
    if level in row.skips:
        pytest.skip(row.skips[level])
    # Static scales do not look.
    pair = Pair(level, row.build, Exact, loss_scale=None if value is None else "dynamic")
    scale = pair.engine.loss_scale()
    damage = None if value is None else Damage(pair.model.get_parameter(target), value)
    for step in range(3):
        for part in range(count):
            if damage is not None:
                damage.armed = (step, part) == (1, place)
            pair.backward(count * step + part)
        skips = step == 1 and damage is not None
        pair.optimizer.step() if skips else pair.step()
        assert pair.engine.last_step_skipped is skips
        pair.check(f"after step {step}")
        pair.zero()
        assert pair.engine.loss_scale() == scale / (2 if step and damage is not None else 1)
    causes = [cause.parameters for cause in pair.engine.overflow_causes]
    assert causes == ([] if damage is None else [(target,)])
    assert pair.engine.steps_applied == 3 - len(causes)
    pair.engine.close()


def test_every_level_has_a_row() -> None:
    assert [row.name for row in LEVELS] == list(preamp.OPT_LEVELS)


def test_every_torch_optimizer_has_a_row() -> None:
    theirs = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert theirs <= {row.kind.__name__ for row in ALL} | set(NO_ROW)  # type: ignore[attr-defined]
