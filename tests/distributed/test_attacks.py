# SPDX-License-Identifier: BSD-3-Clause
"""A rank that fails, dies or hangs, or does under ``fully_shard`` what the others do not do.

All ranks end within the timeout of their process group, with the reason. Other levels, other
parameters and an overflow on one rank alone end no rank; `agreement_checks` and
`fully_sharded_checks` have them. A rank attacks in its third step, or before the first. Attacks
that do not end a process follow each other in one start: after each the ranks leave the process
group, and join a new one for the next.
"""

import copy
import json
import os
import re
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import preamp
from cases.ranks import join_ranks, start_ranks
from distributed.ranks import needs_fully_shard, shard
from kit.compare import same

PATIENCE_SECONDS = 60  # of a test, on a machine that others use as well
GROUP_SECONDS = 5
STEPS = 4


class Script:
    """A training of which the second rank does something else than the first."""

    def __init__(self, attack: str, folder: Path) -> None:
        torch.manual_seed(0)
        self.rank = dist.get_rank()
        self.attack = attack if self.rank == 1 else ""
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 2))
        self.is_whole = attack.endswith("under DDP")
        if not self.is_whole:
            shard(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        preamp.initialize(self.model, self.optimizer, opt_level="O2", verbosity=0)
        self.engine = preamp.engine_of(self.model)
        self.engine.scaler(0).set_scale(16.0)
        ddp = nn.parallel.DistributedDataParallel
        self.forward = ddp(self.model) if self.is_whole else self.model

    def run(self) -> str:
        """Train; return what came of it."""
        for step in range(STEPS):
            before = self.numbers()
            try:
                self.step(self.attack if step == 2 else "")
            except RuntimeError:
                assert not self.is_whole or same(self.numbers(), before)
                raise
        dist.barrier()
        return f"finished, {self.engine.steps_applied} steps"

    def numbers(self) -> Any:
        """Copies of what each rank has as a whole."""
        weights = copy.deepcopy(self.model.state_dict()) if self.is_whole else {}
        grads = [param.grad for param in self.model.parameters()]
        return weights, self.engine.state_dict(), [grad is None for grad in grads]

    def step(self, attack: str) -> None:
        """Train a step, the attacked one in the way that ``attack`` says."""
        if attack.startswith(("is killed", "hangs")):
            os.kill(os.getpid(), signal.SIGKILL if "killed" in attack else signal.SIGSTOP)
        if attack == "saves alone":
            run = preamp.RunState(self.model, self.optimizer)
            dcp.save({"run": run}, checkpoint_id=self.folder / "alone")
        if attack == "loads an engine alone":
            state = {"loss_scale": 4.0, "unskipped": 0}
            self.engine.load_state_dict({"loss_scaler0": state})
        loss = self.forward(torch.randn(4, 4)).float().square().mean()
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
        if attack.startswith("hangs"):
            break  # destroying the group would wait for the other once more
        dist.destroy_process_group()  # what an error holds keeps connections open: others wait
    os._exit(0)


LOST = "RuntimeError: .*(closed by peer|reset by peer|[Tt]imed out)"
ON_PURPOSE = "ValueError: on purpose"
SAVING = "PreampError: Another rank did not answer while a checkpoint was saved"
COMPARING = "PreampError: Another rank did not answer while the ranks were compared"
FINISHED = f"finished, {STEPS} steps"

# What comes of an attack by the second rank on the first rank, and on the second.
ENDS = {
    "saves alone": (LOST, SAVING),
    "raises in a block": (LOST, ON_PURPOSE),
    "raises in a step": (LOST, ON_PURPOSE),
    "loads an engine alone": (LOST, COMPARING),
    "joins late": (FINISHED, FINISHED),
    "joins too late": (COMPARING, COMPARING),
}
QUICK = ("saves alone", "raises in a block")


@needs_fully_shard
@pytest.mark.parametrize(
    "attacks",
    [QUICK, pytest.param([name for name in ENDS if name not in QUICK], marks=pytest.mark.full)],
    ids=["quick", "rest"],
)
def test_every_rank_has_the_reason_in_time(tmp_path: Path, attacks: Sequence[str]) -> None:
    assert _exit_codes(tmp_path, attacks) == [0, 0]
    for attack in attacks:
        for rank, wanted in enumerate(ENDS[attack]):
            found = json.loads((tmp_path / attack / f"rank{rank}").read_text())
            assert re.match(wanted, found["came"], re.DOTALL), (attack, rank, found)
            assert found["seconds"] < PATIENCE_SECONDS / 2, (attack, rank)


IN_FULL = [pytest.mark.full, needs_fully_shard]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param("is killed", marks=IN_FULL),
        pytest.param("skips a block", marks=IN_FULL),
        "is killed under DDP",
        "hangs under DDP",
    ],
)
def test_nobody_trains_on(tmp_path: Path, attack: str) -> None:
    """A block that one rank skips is followed by collectives that do not fit each other.

    gloo notices by their kinds, and the ranks wait until the timeout, or by their sizes, and ends
    one process: the other has its connection closed.
    """
    codes = _exit_codes(tmp_path, [attack])
    told = [json.loads(path.read_text())["came"] for path in (tmp_path / attack).glob("rank?")]
    assert told
    assert all(re.match(LOST, came, re.DOTALL) for came in told)
    assert sum(code == 0 for code in codes) == len(told)
    assert codes[1] != 0 or attack == "skips a block"


def _exit_codes(folder: Path, attacks: Sequence[str]) -> list[int]:
    ranks = start_ranks(run_rank, (folder, attacks), 2).processes
    deadline = time.monotonic() + PATIENCE_SECONDS + 4 * GROUP_SECONDS * len(attacks)
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if attacks[0].startswith("hangs"):
                ranks[1].kill()
            assert process.exitcode is not None, "a rank still waits"
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
