# SPDX-License-Identifier: BSD-3-Clause
"""What each rank runs of which one dies; spawned processes import it by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.ranks import join_ranks

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
