# SPDX-License-Identifier: BSD-3-Clause
"""What each rank runs of which one dies while it saves; spawned processes import it by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import preamp
from cases.ranks import join_ranks
from preamp.checkpoint import latest_checkpoint, saving

GROUP_SECONDS = 4


def run_rank(rank: int, folder: Path, how: str) -> None:
    """Save twice; in the second save the second of two ranks ``dies`` or ``hangs``."""
    join_ranks(rank, 2, folder, GROUP_SECONDS)
    torch.manual_seed(0)
    wrapped = model = nn.Linear(40, 40)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with preamp.scale_loss(wrapped(torch.ones(2, 40)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()
    preamp.save_checkpoint(folder / "runs/step_1", wrapped, optimizer)

    def end(*args: Any, **options: Any) -> None:
        (folder / "runs/step_2").mkdir(exist_ok=True)
        (folder / "runs/step_2/.1-rank1-of2.pt.abcdefgh.part").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)

    if rank == 1:
        saving.write = end
    try:
        save = preamp.save_checkpoint
        save(folder / "runs/step_2", wrapped, optimizer, asynchronous=how == "hangs").wait()
    except preamp.PreampError as error:
        assert latest_checkpoint(folder / "runs") == folder / "runs/step_1"
        (folder / "reason").write_text(str(error))
        os._exit(0)  # destroying the group would wait for the other once more
