# SPDX-License-Identifier: BSD-3-Clause
"""What every rank checks about checkpoints of which each rank writes a part."""

from __future__ import annotations

import errno
import functools
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import preamp
from cases.levels import LEVEL_NAMES
from cases.selection import combinations
from checkpoint.rank_checks import shared_folder
from checkpoint.sharded_runs import Parallel, Run, fused_adam, net, torch_adamw
from engine.harness import same
from preamp.checkpoint import gathering, latest_checkpoint, read_checkpoint
from preamp.core.tensors import local_of

LEVELS = ("O1", "O2", "O5")
WAYS: tuple[Parallel, ...] = ("fsdp", "ddp")


def check_bitwise_resume() -> None:
    """Between steps, after a skipped one, and with gradients there; on as many ranks."""
    builds = (fused_adam, torch_adamw)
    for level, parallel, build in combinations(LEVEL_NAMES, ("fsdp",), builds):
        resume_once(level, parallel, build)


def resume_once(level: str, parallel: Parallel, build: Any) -> None:
    folder, whole = shared_folder(), Run(level, parallel, build=build)
    whole.step()
    whole.step(poison=dist.get_rank() == 1)
    resumed = Run(level, parallel, seed=1, build=build)
    for place in ("between", "pending", "used"):
        if place == "pending":
            whole.backward()
        if place == "used":
            whole.backward()
            whole.optimizer.step()
        whole.save(folder / place)
        before = whole.numbers()
        whole.step()
        assert resumed.load(folder / place) == {"seed": 7}
        assert same(resumed.numbers(), before), (level, parallel, place)
        resumed.step()
        assert same(resumed.numbers(), whole.numbers()), (level, parallel, place)
    whole.close()
    resumed.close()


def check_other_ways_to_share() -> None:
    """Each way loads what each other way has saved, with exact masters and optimizer state."""
    for level, saved, loaded in combinations(LEVELS, WAYS, WAYS, size=2):
        folder, run = shared_folder(), Run(level, saved)
        run.step()
        run.step()
        run.save(folder / saved)
        expected = run.whole()
        run.close()
        assert (folder / saved).is_dir() is (saved != "ddp")
        other = Run(level, loaded, seed=1)
        other.load(folder / saved)
        assert same(other.whole(), expected), (level, saved, loaded)
        other.step()
        other.close()


def check_every_part_is_written_once() -> None:
    """Ranks write what they have; nobody gathers, and nothing is twice on the disk."""
    for parallel in ("fsdp",):
        folder, run = shared_folder(), Run("O2", parallel)
        run.step()
        run.save(folder / "a")
        names = sorted(path.name for path in (folder / "a").iterdir())
        assert names == ["1-rank0-of2.pt", "1-rank1-of2.pt"]
        sizes: dict[str, int] = {}
        for name in names:
            tensors = torch.load(folder / "a" / name, weights_only=True)["tensors"]
            for key, value in tensors.items():
                sizes[key] = sizes.get(key, 0) + value.numel()
        weights = {key: n for key, n in sizes.items() if "models/0/state" in key}
        assert weights == {f"models/0/state/{k}": p.numel() for k, p in net(0).named_parameters()}
        moments = sum(n for key, n in sizes.items() if "exp_avg" in key)
        assert moments == 2 * sum(weights.values())
        run.close()


def check_failures_are_everybodys() -> None:
    """One rank's disk is full: all raise, what was there stays, and the next save clears up."""
    folder, run = shared_folder(), Run("O2", "fsdp")
    path = folder / "a"
    run.save(path)
    expected = read_checkpoint(path)["models"]
    run.step()

    def full_disk(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for asynchronous in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(os, "fsync", full_disk)
            error = OSError if dist.get_rank() == 1 else preamp.PreampError
            with pytest.raises(error, match=r"rank1-of2\.pt cannot be written: No space"):
                run.save(path, asynchronous=asynchronous).wait()
        assert same(read_checkpoint(path)["models"], expected)
        dist.barrier()
    names = {name.name for name in path.iterdir()}
    assert {"1-rank0-of2.pt", "1-rank1-of2.pt", "3-rank0-of2.pt"} <= names
    run.save(path)
    dist.barrier()
    assert sorted(name.name for name in path.iterdir()) == ["4-rank0-of2.pt", "4-rank1-of2.pt"]
    dist.barrier()
    run.close()


def check_a_save_in_the_background_waits_for_one_exchange() -> None:
    """Of the ranks' facts; errors travel with them."""
    for parallel in ("fsdp",):
        folder, run, calls = shared_folder(), Run("O2", parallel), list[str]()
        run.step()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_gather_object", "gather_object", "all_reduce", "barrier"):
                original = getattr(dist, name)

                def counted(original: Any, told: list[str], *args: Any, **kwargs: Any) -> Any:
                    told.append(original.__name__)
                    return original(*args, **kwargs)

                patch.setattr(dist, name, functools.partial(counted, original, calls))
            saving = run.save(folder / "a", asynchronous=True)
        assert calls == ["all_gather_object"]
        saving.wait()
        run.close()


def check_ranks_write_into_one_folder() -> None:
    """Each into its own would be saved without an error, and could never be loaded."""
    folder, run = shared_folder(), Run("O2", "fsdp")
    rank = dist.get_rank()
    error = "Rank 1 does not find .*, which rank 0 has made"
    for place in ("", "deeper/"):
        path = folder / f"{place}disk_{rank}"
        for asynchronous in (False, True):
            with pytest.raises(preamp.PreampError, match=error):
                run.save(path, asynchronous=asynchronous).wait()
        dist.barrier()
        assert path.exists() is (rank == 0)
    (folder / "file").touch()
    with pytest.raises((OSError, preamp.PreampError), match="file cannot be written: File"):
        run.save(folder / "file")
    run.close()


def check_a_copy_that_fails_is_everybodys() -> None:
    """No memory on one rank: nobody is left waiting, and the next save works."""
    folder, run = shared_folder(), Run("O2", "fsdp")

    def no_memory(*args: Any, **options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    for asynchronous in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == 1:
                patch.setattr(gathering, "store", no_memory)
            if asynchronous:
                run.save(folder / "a", asynchronous=True)  # the next call raises
            with pytest.raises(RuntimeError, match="can't allocate memory"):
                run.save(folder / "b")
    run.save(folder / "a")
    dist.barrier()
    assert latest_checkpoint(folder) == folder / "a"
    run.close()


def check_unreduced_gradients_are_refused() -> None:
    folder, run = shared_folder(), Run("O2", "fsdp")
    run.inner.set_requires_gradient_sync(False)
    run.backward()
    with pytest.raises(preamp.PreampStateError, match="unreduced inside of fully_shard"):
        run.save(folder / "a")
    run.inner.set_requires_gradient_sync(True)
    run.backward()
    run.save(folder / "a")
    run.update()
    with torch.no_grad():
        run.inner(torch.ones(1, 5))  # the whole weights stay gathered after this one
    run.save(folder / "a")
    run.load(folder / "a")
    run.close()


def check_series_in_the_background() -> None:
    folder, run = shared_folder(), Run("O5", "fsdp")
    (folder / "step_0").mkdir(exist_ok=True)
    (folder / "step_0" / "1-rank1-of2.pt").touch()  # of a save that was cut short
    (folder / "logs_1").mkdir(exist_ok=True)
    dist.barrier()
    for step in range(1, 4):
        run.step()
        run.save(folder / f"step_{step}", asynchronous=True, keep_last=2)
    values = run.numbers()
    run.step()  # the copies were made before
    run.save(folder / "last.safetensors").wait()
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["last.safetensors", "logs_1", "step_2", "step_3"]
    assert latest_checkpoint(folder) == folder / "last.safetensors"
    files = sorted(path.name for path in (folder / "last.safetensors").iterdir())
    assert files == [f"1-rank{rank}-of2.safetensors" for rank in range(2)]
    dist.barrier()
    other = Run("O5", "fsdp", seed=1)
    other.load(folder / "step_3")
    assert same(other.numbers(), values)
    run.close()
    other.close()


# -- between numbers of ranks --------------------------------------------------------------------


def saved_folder() -> Path:
    return Path(os.environ["PREAMP_TEST_FOLDER"]) / "saved"


def save_for_others() -> None:
    """Leave checkpoints, and what is in them, for other numbers of ranks."""
    folder = saved_folder()
    folder.mkdir(exist_ok=True)
    for level, way in itertools.product(LEVELS, WAYS):
        run = Run(level, way)
        run.step()
        run.step(poison=True)
        run.step()
        run.backward()
        run.save(folder / f"{level}-{way}")
        expected = run.whole()
        if dist.get_rank() == 0:
            torch.save(expected, folder / f"{level}-{way}.expected")
        run.close()
    run = Run("O2", "fsdp")
    with preamp.scale_loss(run.model(torch.ones(1, 5)).float().sum(), run.optimizer) as scaled:
        scaled.backward()
        if dist.get_rank() == 1:  # each rank knows something else about where it was
            local_of(run.inner[1].weight.grad).fill_(float("inf"))
    run.save(folder / "overflow")
    run.close()


def check_loading_from_two_ranks() -> None:
    """Into any number of ranks, in each way to share; gradients and counters with it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    ways: tuple[Parallel, ...] = WAYS if ranks > 1 else ("none",)
    for level, saved, way in combinations(LEVELS, WAYS, ways, size=2):
        expected = torch.load(saved_folder() / f"{level}-{saved}.expected", weights_only=False)
        run = Run(level, way, seed=1)
        run.load(saved_folder() / f"{level}-{saved}")
        assert same(run.whole(), expected), (level, saved, way)
        assert (run.engine.steps_applied, run.engine.steps_skipped) == (2, 1)
        run.update()
        assert not run.engine.last_step_skipped
        run.step()
        run.close()
    run = Run("O2", "fsdp" if ranks > 1 else "none")
    run.load(saved_folder() / "overflow")
    before = run.whole()["weights"]
    run.update()
    assert run.engine.last_step_skipped
    assert same(run.whole()["weights"], before)
    run.close()
