# SPDX-License-Identifier: BSD-3-Clause
"""A load that fails half-way puts back all that it has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint.runs import Backward, Run, Step, Zero
from engine.harness import same


class Scheduler:
    """One that is interrupted while it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps"] == 1:
            state["steps"] = 2
            raise KeyboardInterrupt


def trained(level: str, storage: str, seed: int) -> Run:
    run = Run(level, ("FusedAdam",), seed, {"storage": storage})
    # It cannot be written to, since its elements share memory.
    run.models[0].register_buffer("mask", torch.ones(1, 4).expand(4, 4), persistent=False)
    run.play([Backward(), Step(), Zero()] * 2)
    run.schedulers = [Scheduler()]
    return run


@pytest.mark.parametrize(("level", "storage"), [("O0", "full"), ("O2", "full"), ("O5", "split")])
def test_an_interrupted_scheduler_leaves_models_and_optimizers(
    level: str, storage: str, tmp_path: Path
) -> None:
    trained(level, storage, 0).save(tmp_path / "a.safetensors")
    run = trained(level, storage, 1)
    before = run.numbers()
    with pytest.raises(KeyboardInterrupt):
        run.load(tmp_path / "a.safetensors")
    assert same(run.numbers(), before)
