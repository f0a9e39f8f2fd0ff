# SPDX-License-Identifier: BSD-3-Clause
"""What every rank checks about checkpoints; run by ``test_ranks.py``."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import preamp
from checkpoint.runs import Net
from checkpoint.sharded_runs import Run
from engine.harness import same
from preamp.checkpoint import stop_on_signal


def shared_folder() -> Path:
    """A folder that all ranks know; each check has its own."""
    names: list[Any] = [None]
    if dist.get_rank() == 0:
        names = [os.fspath(Path(os.environ["PREAMP_TEST_FOLDER"]) / str(time.monotonic_ns()))]
        os.mkdir(names[0])
    dist.broadcast_object_list(names)
    return Path(names[0])


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.0625, eps=1e-4)


def seeded(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


class Ranks(Run):
    """A model with buffers, whose ranks see other batches and random numbers."""

    make = staticmethod(seeded)
    batch = (4, 2, 4, 4)

    def __init__(self, level: str, seed: int = 0) -> None:
        super().__init__(level, "ddp", seed, adam)

    def local(self, *, poison: bool = False) -> None:
        with self.model.no_sync():
            self.backward(poison=poison)


def check_bitwise_resume_within_an_accumulation() -> None:
    """Each rank goes on with its own gradients, buffers and random numbers."""
    for level in ("O1", "O2"):
        folder, whole = shared_folder(), Ranks(level)
        whole.step()
        whole.local(poison=dist.get_rank() == 1)
        whole.save(folder / "a.pt")
        before = whole.numbers()
        whole.step()
        resumed = Ranks(level, seed=1)
        resumed.load(folder / "a.pt")
        assert same(resumed.numbers(), before)
        resumed.step()
        assert same(resumed.numbers(), whole.numbers())
        assert preamp.engine_of(whole.inner).last_step_skipped
        whole.close()
        resumed.close()


def check_a_file_has_one_copy_of_what_is_shared() -> None:
    folder, run = shared_folder(), Ranks("O2")
    run.step()
    run.save(folder / "a.pt")
    names = list(torch.load(folder / "a.pt", weights_only=True)["tensors"])
    own = [name for name in names if name.startswith("ranks/")]
    assert own
    assert all("/bn.running" in name or "/rng/" in name for name in own)
    assert len(list(folder.iterdir())) == 1


def check_failures_are_everybodys() -> None:
    """A rank that fails alone, before, while and after writing; the old file stays good."""
    folder, run = shared_folder(), Ranks("O1")
    path, rank = folder / "a.pt", dist.get_rank()
    run.save(path)
    extra = {"bad": object()} if rank == 1 else None
    with pytest.raises(TypeError if rank == 1 else preamp.PreampError, match="object"):
        run.save(path, extra=extra)
    for asynchronous in (False, True):
        (folder / "file").touch()
        error = OSError if rank == 0 else preamp.PreampError
        with pytest.raises(error, match=r"file/b\.pt cannot be written"):
            run.save(folder / "file" / "b.pt", asynchronous=asynchronous).wait()
    other = torch.nn.Linear(1, 1) if rank == 1 else run.model
    before = run.numbers()
    there = path if rank == 0 else folder / "nowhere.pt"
    error = FileNotFoundError if rank == 1 else preamp.PreampError
    with pytest.raises(error, match="nowhere"):
        run.load(there)
    with pytest.raises(ValueError if rank == 1 else preamp.PreampError, match="lacks"):
        preamp.load_checkpoint(path, other, run.optimizer)
    assert same(run.numbers(), before)
    run.load(path)


def check_different_files_are_refused() -> None:
    """Each good by itself, as ranks may find that look for the newest at different times."""
    folder = shared_folder()
    for run, end in ((Ranks("O2"), ".pt"), (Run("O2", "fsdp"), "")):  # a file, then a folder
        run.save(folder / f"step_1{end}")
        run.step()
        run.save(folder / f"step_2{end}")
        before, mine = run.numbers(), folder / f"step_{dist.get_rank() + 1}{end}"
        text = rf"Rank 1 would load .*step_2{re.escape(end)}, and rank 0"
        with pytest.raises(preamp.PreampStateError, match=text):
            run.load(mine)
        assert same(run.numbers(), before)
        if end == ".pt":
            if dist.get_rank() == 0:
                (folder / "copy.pt").write_bytes((folder / "step_2.pt").read_bytes())
            dist.barrier()
            # The same file may be read in two places.
            run.load(folder / ("step_2.pt", "copy.pt")[dist.get_rank()])
        run.close()


def check_different_weights_are_refused() -> None:
    folder, run = shared_folder(), Ranks("O2")
    with torch.no_grad():
        if dist.get_rank() == 1:
            run.inner.last.weight[0, 0] += 1
    with pytest.raises(preamp.PreampStateError, match="Rank 1 has other values than rank 0 in 1"):
        run.save(folder / "a.pt")
    assert list(folder.iterdir()) == []


def check_asynchronous_saving() -> None:
    folder, run = shared_folder(), Ranks("O2")
    first = run.save(folder / "step_1.pt", asynchronous=True, keep_last=1)
    run.step()
    run.save(folder / "step_2.pt", asynchronous=True, keep_last=1)  # waits for the first
    assert first.done
    run.save(folder / "step_3.pt", keep_last=1)
    assert [path.name for path in folder.iterdir()] == ["step_3.pt"]


def check_a_signal_to_one_rank_stops_all() -> None:
    with stop_on_signal() as stop:
        assert not stop.requested
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(SystemExit) as exit_:
            stop.exit()
    assert exit_.value.code == 143


def save_from_two_ranks() -> None:
    """Leave two files for a single process: with each rank's own gradients, and without."""
    run = Ranks("O1")
    folder = shared_folder().parent
    run.backward()
    run.save(folder / "reduced.pt")
    run.update()
    run.local()
    run.save(folder / "local.pt")
