# SPDX-License-Identifier: BSD-3-Clause
"""A rank that fails, dies or hangs, or does under ``fully_shard`` what the others do not do.

All ranks end within the timeout of their process group, with the reason. Other levels, other
parameters and an overflow on one rank alone end no rank; `agreement_checks` and
`fully_sharded_checks` have them. A rank attacks in its third step, or before the first. Attacks
that do not end a process follow each other in one start: after each the ranks leave the process
group, and join a new one for the next.
"""

import json
import os
import re
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import preamp
from cases.ranks import join_ranks, start_ranks
from distributed.ranks import needs_fully_shard, shard

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
            self.engine.load_state_dict({"loss_scaler0": state})
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


@needs_fully_shard
@pytest.mark.full
@pytest.mark.parametrize("attack", ["is killed", "skips a block"])
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
    assert codes[1] != 0 or attack != "is killed"


def _exit_codes(folder: Path, attacks: Sequence[str]) -> list[int]:
    ranks = start_ranks(run_rank, (folder, attacks), 2).processes
    deadline = time.monotonic() + PATIENCE_SECONDS + 4 * GROUP_SECONDS * len(attacks)
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, "a rank still waits"
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()


# -- under DistributedDataParallel ----------------------------------------------------------------


def train_under_ddp(rank: int, folder: Path, how: str) -> None:
    """The second of two ranks ``dies`` or ``hangs`` in its third step; the first one raises."""
    join_ranks(rank, 2, folder, GROUP_SECONDS)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    engine = preamp.engine_of(optimizer)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for step in range(3):
        if step == 2 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scale, taken = engine.loss_scale(), engine.steps_applied
        loss = wrapped(torch.ones(2, 4)).sum()
        try:
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
        except RuntimeError as error:
            after = model.state_dict()
            assert all(torch.equal(value, after[name]) for name, value in before.items())
            assert (engine.loss_scale(), engine.steps_applied) == (scale, taken)
            assert all(param.grad is None for param in model.parameters())
            (folder / "reason").write_text(str(error))
            os._exit(0)  # destroying the group would wait for the other once more
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("how", "reason"), [("dies", "closed by peer|reset by peer"), ("hangs", "[Tt]imed out")]
)
def test_the_others_raise_in_time_and_what_they_have_is_whole(
    tmp_path: Path, how: str, reason: str
) -> None:
    ranks = start_ranks(train_under_ddp, (tmp_path, how), 2).processes
    try:
        ranks[0].join(PATIENCE_SECONDS)
        assert ranks[0].exitcode == 0, "the first rank still waits for the second"
    finally:
        for process in ranks:
            process.kill()
            process.join()
    assert re.search(reason, (tmp_path / "reason").read_text())
