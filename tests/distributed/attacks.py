# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks run under ``fully_shard`` of which one attacks; spawned processes import it.

A rank attacks in its third step, or before the first. Those that do not end a process follow each
other in one start: after each the ranks leave the process group, and join a new one for the next.
"""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import preamp
from cases.ranks import join_ranks
from distributed.fully_sharded_checks import shard

GROUP_SECONDS = 5
STEPS = 4


class Script:
    """A training of which the second rank does something else than the first."""

    def __init__(self, attack: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.attack = attack if self.rank == 1 else ""
        self.folder = folder
        self.model = shard(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        preamp.initialize(self.model, self.optimizer, opt_level="O2", verbosity=0)
        self.engine = preamp.engine_of(self.model)
        self.engine.scaler(0).set_scale(16.0)

    def run(self) -> str:
        """Train; return what came of it."""
        for step in range(STEPS):
            self.step(self.attack if step == 2 else "")
        dist.barrier()
        return f"finished, {self.engine.steps_applied} steps"

    def step(self, attack: str) -> None:
        """Train a step, the attacked one in the way that ``attack`` says."""
        if attack == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if attack == "saves alone":
            run = preamp.RunState(self.model, self.optimizer)
            dcp.save({"run": run}, checkpoint_id=self.folder / "alone")
        if attack == "loads an engine alone":
            state = {"loss_scale": 4.0, "unskipped": 0}
            preamp.load_state_dict(self.engine, {"loss_scaler0": state})
        loss = self.model(torch.randn(4, 4)).float().square().mean()
        if attack != "skips a block":
            with preamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
                if attack == "raises in a block":
                    raise ValueError("on purpose")
        if attack == "raises in a step":
            self.optimizer.register_step_pre_hook(_fail)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _fail(*args: object) -> None:
    raise ValueError("on purpose")


def run_rank(rank: int, folder: Path, attacks: Sequence[str]) -> None:
    """Run all ``attacks``, and write what came of each, in how many seconds."""
    warnings.simplefilter("ignore")  # those of torch's versions about each other's names
    for attack in attacks:
        place = folder / attack
        place.mkdir(exist_ok=True)
        join_ranks(rank, 2, place, GROUP_SECONDS)
        began, found = time.monotonic(), ""
        if attack.startswith("joins") and rank == 1:
            time.sleep(GROUP_SECONDS * (2 if attack == "joins too late" else 0.5))
        try:
            found = Script(attack, place).run()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        report = json.dumps({"came": found, "seconds": time.monotonic() - began})
        (place / f"rank{rank}").write_text(report)
        dist.destroy_process_group()  # what an error holds keeps connections open: others wait
    os._exit(0)
