# SPDX-License-Identifier: BSD-3-Clause
"""Several ranks on the pretended device: their collectives go through gloo on the host.

torch's own groups of a build without CUDA take no tensors of it.
"""

import importlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.futures import Future

from cases.ranks import leave_ranks, start_ranks, wait_for_others

_c10d: Any = torch._C._distributed_c10d
_MINUTE = timedelta(seconds=60)


def _done(result: Any) -> Any:
    future: Any = Future()
    future.set_result(result)
    return _c10d._create_work_from_future(future)


def _copy(targets: Any, sources: Any) -> Any:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
    return _done(targets)


class _ThroughTheHost(_c10d.ProcessGroup):
    """What the tests need of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = _c10d.ProcessGroupGloo(store, rank, size, timeout)
        self._name = "0"

    def getBackendName(self) -> str:
        return "through_the_host"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _reduced(self, tensors: Any, op: Any) -> list[torch.Tensor]:
        here = [tensor.cpu() for tensor in tensors]
        options = _c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op
        self._gloo.allreduce(here, options).wait()
        return [h / self.size() for h in here] if op == dist.ReduceOp.AVG else here

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return _copy(tensors, self._reduced(tensors, opts.reduceOp if opts else dist.ReduceOp.SUM))

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        here = [tensor.cpu() for tensor in tensors]
        self._gloo.broadcast(here, opts).wait()
        return _copy(tensors, here)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        here = [tensor.cpu() for tensor in tensors]
        self._gloo.reduce(here, opts).wait()
        return _copy(tensors, here)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        here = [tensor.cpu() for tensor in inputs]
        found = [[torch.empty_like(h) for _ in range(self.size())] for h in here]
        self._gloo.allgather(found, here).wait()
        for output, parts in zip(outputs, found, strict=True):
            _copy(output, parts)
        return _done(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        here = [tensor.cpu() for tensor in inputs]
        found = [[torch.empty_like(one, device="cpu") for one in output] for output in outputs]
        self._gloo.gather(found, here, opts).wait()
        for output, parts in zip(outputs, found, strict=True):
            _copy(output, parts)
        return _done(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        here = [torch.empty_like(tensor, device="cpu") for tensor in outputs]
        self._gloo.scatter(here, [[part.cpu() for part in parts] for parts in inputs], opts).wait()
        return _copy(outputs, here)

    def all_gather_single(self, output: Any, part: Any, opts: Any = None) -> Any:
        return self.allgather([output.view(self.size(), -1).unbind()], [part.view(-1)])

    _allgather_base = all_gather_into_tensor = all_gather_single

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> Any:
        op = opts.reduceOp if opts else dist.ReduceOp.SUM
        (total,) = self._reduced([whole.float()], op)
        return _copy([output], [total.view(self.size(), *output.shape)[self.rank()]])

    _reduce_scatter_base = reduce_scatter_tensor = reduce_scatter_single

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def _keep(tensor: Any) -> None:
    """Neither free nor take memory."""


def _join(rank: int, ranks: int, store: Path) -> None:
    dist.Backend.register_backend("through_the_host", _ThroughTheHost, devices=["cuda"])
    # What torch asks of CUDA itself: to time a backward, and to resize what was gathered.
    _c10d.Logger.set_runtime_stats_and_log = lambda logger: None
    _fsdp_param.free_storage = _fsdp_param.alloc_storage = _keep
    dist.init_process_group(
        "cpu:gloo,cuda:through_the_host",
        init_method=store.as_uri(),
        rank=rank,
        world_size=ranks,
        timeout=_MINUTE,
    )


def on_ranks(
    work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, folder: Path
) -> None:
    """Call ``work(rank, *arguments)`` in a process of each rank; all must return.

    ``work`` is a function of a module. The processes are forks of one that has had no backward,
    after which torch allows none in a fork.
    """
    started = start_ranks(_begin, (work, arguments, ranks, str(folder)), ranks)
    while not started.join():
        pass


def _begin(
    rank: int, work: Callable[..., None], arguments: tuple[Any, ...], ranks: int, folder: str
) -> None:
    # It is there already where there is a pretended device, and cannot be had elsewhere.
    importlib.import_module("devices.pretended.plugin").pytest_configure()
    _join(rank, ranks, Path(folder) / "store")
    try:
        work(rank, *arguments)
        wait_for_others()
    finally:
        leave_ranks()
