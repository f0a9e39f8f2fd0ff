# SPDX-License-Identifier: BSD-3-Clause
"""Random programs with masters and moments on the host and weights on a device.

Each does what plain torch does, and gives the bits of the same storage on the device.
"""

from typing import Any

import pytest
import torch

from cases.levels import WITH_MASTERS
from engine.test_programs import FOUND, KEPT, Case, Dice, assert_same_at_both_places
from preamp.kernels import staged

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning"),
]
THERE: dict[str, Any] = {"device": "cuda", "backend": "reference"}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few tensors be several runs."""
    monkeypatch.setattr(staged, "RUN", 64)


def check(case: Case) -> None:
    # Under a dynamic scale a device corrects Adam's bias in float32, and the host in float64.
    if case.optimizer == "FusedAdam" and case.loss_scale in (None, "dynamic"):
        case.run(**THERE)
    else:
        assert_same_at_both_places(case, **THERE)


@pytest.mark.parametrize(("level", "storage"), KEPT)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
def test_programs_give_the_bits_of_the_device(
    level: str, storage: str, part: int, pytestconfig: pytest.Config
) -> None:
    """Other programs are tried with ``--hypothesis-seed``."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    for number in range(6 if part == 0 else 60):
        dice = Dice(f"{seed} {level} {part} {number} {storage} on a device")
        check(dice.case(level, f"{storage} on the host"))


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_went_wrong_elsewhere(level: str, name: str) -> None:
    check(Case(FOUND[name], level, "FusedSGD", "dynamic", (), "split on the host"))
