# SPDX-License-Identifier: BSD-3-Clause
"""Run a function on several processes joined by gloo, or a block in a group of one."""

import faulthandler
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing
from torch.distributed import distributed_c10d

_SECONDS = 300
"""Until a rank that waits for a dead one gives up."""

_LONGEST = 500
"""Seconds until a rank that has not ended says where it is, and ends."""

_LEFT: list[dist.ProcessGroup] = []
"""Groups that have ended in this process."""

_PRELOADED = ["pytest", "torch.distributed.fsdp", "torch.distributed.tensor"]
_PRELOADED += ["preamp.checkpoint", "preamp.optimizers", "preamp.parallel"]
# What the first steps would import and do
_PRELOADED += ["torch._dynamo", "cases.warm"]
_DEVICE = "devices.pretended.plugin"  # stands for CUDA, if it does so here, from before torch


def start_ranks(work: Callable[..., None], arguments: tuple[Any, ...], world: int) -> Any:
    """Start ``work(rank, *arguments)`` for each rank, and return torch's context of them.

    They are forks of one process that has imported torch, which costs seconds for each otherwise.
    """
    preloaded = [_DEVICE, *_PRELOADED] if _DEVICE in sys.modules else _PRELOADED
    multiprocessing.get_context("forkserver").set_forkserver_preload(preloaded)
    _run_server()
    return multiprocessing.start_processes(
        _begin, (dict(os.environ), work, arguments), world, join=False, start_method="forkserver"
    )


def _run_server() -> None:
    """Start the process that ranks are forked from, unless it is there.

    It looks for what it has to import where this process would, but not where ``sys.path`` says.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        forkserver.ensure_running()


def _begin(
    rank: int, environment: Mapping[str, str], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ.clear()  # of when the first ranks of all were started
    os.environ.update(environment)
    faulthandler.dump_traceback_later(_LONGEST, exit=True)
    work(rank, *arguments)


def run_ranks(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return ``[work(0), work(1)]``, each called in a process of its own.

    Args:
        work: A function of a module that child processes can import; returns plain data and
            tensors.
        folder: Empty folder for the rendezvous and the results.
    """
    ranks = start_ranks(_start, (work, str(folder), 2), 2)
    while not ranks.join():
        pass
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@contextmanager
def one_rank() -> Iterator[None]:
    """Let this process be the only one of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _start(rank: int, work: Callable[[int], Any], folder: str, world: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    join_ranks(rank, world, Path(folder), _SECONDS)
    try:
        torch.save(work(rank), f"{folder}/{rank}.pt")
        wait_for_others()
    finally:
        leave_ranks()


def join_ranks(rank: int, world: int, folder: Path, seconds: float) -> None:
    """Join the others on one thread; whoever waits longer than ``seconds`` for one gives up."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meet'}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=seconds),
    )


def wait_for_others() -> None:
    """Return when all ranks have come here, or one has died.

    A rank whose work is done may not leave while another still connects to it: making a group is
    over for each rank by itself.
    """
    with suppress(RuntimeError):
        dist.barrier()


def leave_ranks() -> None:
    """End all groups, and keep their objects until the process ends.

    To free one, torch before 2.8 waits for its threads while these may wait for Python's lock
    (pytorch/pytorch#154976).
    """
    _LEFT.extend(distributed_c10d._world.pg_map)
    dist.destroy_process_group()
