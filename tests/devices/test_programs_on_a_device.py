# SPDX-License-Identifier: BSD-3-Clause
"""Random programs with weights on a device: they do what plain torch does there.

With masters and moments on the host they give the bits of the same storage on the device.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from cases.levels import WITH_MASTERS
from engine.programs import Backward, Call, Clip, Iteration, Variant, Zero
from engine.test_programs import FOUND, KEPT, Case, Dice, assert_same_bits
from preamp.kernels import staged

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning"),
]
THERE: dict[str, Any] = {"device": "cuda", "variant": Variant({"backend": "reference"})}


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few tensors be several runs."""
    monkeypatch.setattr(staged, "RUN", 64)


def leaves_gradients_alone(call: Call) -> bool:
    """Whether nobody but preamp looks at gradients, which wait on the host."""
    if isinstance(call, Zero):
        return call.whose in (0, 1, "model") or call.to_none
    if isinstance(call, (Clip, Iteration)):
        return call.by.startswith("preamp")
    return not (isinstance(call, Backward) and call.outside)


def check(case: Case) -> None:
    # Under a dynamic scale a device corrects Adam's bias in float32, and the host in float64.
    if case.optimizer == "FusedAdam" and case.loss_scale in (None, "dynamic"):
        case.run(**THERE)
    else:
        beside = replace(case, storage=case.storage.partition(" on the host")[0])
        assert_same_bits(case, beside, **THERE)


@pytest.mark.parametrize(("level", "storage"), KEPT)
@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("where", [" on the host", " on the host, released"])
def test_programs_give_the_bits_of_the_device(
    level: str, storage: str, part: int, where: str, pytestconfig: pytest.Config
) -> None:
    """Gradients may wait there too. Other programs are tried with ``--hypothesis-seed``."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    for number in range(4 if part == 0 else 60):
        dice = Dice(f"{seed} {level} {part} {number} {storage} on a device")
        case = replace(dice.case(level, storage, is_fused=True), storage=storage + where)
        if where.endswith("released"):
            case = replace(case, program=[*filter(leaves_gradients_alone, case.program)])
        check(case)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("name", FOUND)
def test_programs_that_went_wrong_elsewhere(level: str, name: str) -> None:
    check(Case(FOUND[name], level, "FusedSGD", "dynamic", (), "split on the host"))
