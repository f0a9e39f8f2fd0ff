# SPDX-License-Identifier: BSD-3-Clause
"""A rank that dies or hangs: the others raise, with the reason, and what they have is whole."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.ranks import join_ranks, start_ranks

PATIENCE_SECONDS = 60  # of the test, on a machine that others use as well


def reason_of_first(folder: Path, how: str) -> str:
    """Return what the first rank wrote to the file ``reason`` in ``folder`` before it ended."""
    ranks = start_ranks(run_rank, (folder, how), 2).processes
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while not (folder / "reason").exists():
            assert time.monotonic() < deadline, "the first rank still waits for the second"
            assert ranks[0].exitcode in (None, 0)
            time.sleep(0.05)
        ranks[0].join(PATIENCE_SECONDS)
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return (folder / "reason").read_text()


GROUP_SECONDS = 4


def run_rank(rank: int, folder: Path, how: str) -> None:
    """Train; the second of two ranks ``dies`` or ``hangs`` in its third step."""
    join_ranks(rank, 2, folder, GROUP_SECONDS)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    engine = preamp.engine_of(optimizer)
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        if step == 2 and rank == 1:
            (folder / "pid").write_text(str(os.getpid()))
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
def test_the_others_raise_in_time(tmp_path: Path, how: str, reason: str) -> None:
    assert re.search(reason, reason_of_first(tmp_path, how))
