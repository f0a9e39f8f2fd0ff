# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of DistributedDataParallel with ``delay_allreduce=True``."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import preamp
from cases.tolerances import assert_same
from kit.refusals import assert_refused
from preamp.parallel import DistributedDataParallel

RANKS = 2


class Parts(nn.Module):
    """Two layers that a forward may use both, or one of."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        for param in self.parameters():
            param.data.normal_(generator=generator)

    def forward(self, x: torch.Tensor, use: str = "both") -> torch.Tensor:
        if use != "both":
            return getattr(self, use)(x)
        return self.second(checkpoint(self.first, x, use_reentrant=True))


def batch(rank: int, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(4, 3, generator=generator, requires_grad=True)


Use = Callable[[Any, int], None]


def _twice_through_one_forward(model: Any, rank: int) -> None:
    out = model(batch(rank))
    out.sum().backward(retain_graph=True)
    out.square().sum().backward()


def _two_forwards_two_backwards(model: Any, rank: int) -> None:
    first, second = model(batch(rank)), model(batch(rank, 1))
    first.sum().backward()
    second.square().sum().backward()


def _two_forwards_through_different_parts(model: Any, rank: int) -> None:
    out = model(batch(rank), "first").sum() + model(batch(rank, 1), "second").square().sum()
    out.backward()


def _one_part_by_each_rank(model: Any, rank: int) -> None:
    model(batch(rank), ("first", "second")[rank]).square().sum().backward()


def _after_a_backward_that_failed(model: Any, rank: int) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    x = batch(rank)
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(x, "first").sum().backward()
    model.zero_grad()
    model(batch(rank)).sum().backward()


def _both_batches_through_the_first(model: Any, rank: int) -> None:
    for number in range(2):
        model(batch(rank, number), "first").square().sum().backward()


USES: tuple[Use, ...] = (
    lambda model, rank: model(batch(rank)).square().sum().backward(),  # reentrant checkpoint
    _twice_through_one_forward,
    _two_forwards_two_backwards,
    _two_forwards_through_different_parts,
    _one_part_by_each_rank,
    _after_a_backward_that_failed,
)


def _mean_over_ranks(use: Use) -> list[torch.Tensor]:
    sums: list[Any] = [0.0] * len(list(Parts().parameters()))
    for rank in range(RANKS):
        model = Parts().double()
        use(_Widened(model), rank)
        for index, param in enumerate(model.parameters()):
            sums[index] = sums[index] + (0.0 if param.grad is None else param.grad)
    return [total / RANKS for total in sums]


class _Widened(nn.Module):
    """Takes float32 batches into a float64 model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, *use: str) -> torch.Tensor:
        return self.model(x.double(), *use)


def check_every_backward_is_reduced() -> None:
    for use in USES:
        for arguments in ({}, {"gradient_predivide_factor": 2.0}, {"allreduce_always_fp32": True}):
            model = Parts()
            ddp = DistributedDataParallel(model, delay_allreduce=True, **arguments)
            use(ddp, dist.get_rank())
            for param, wanted in zip(model.parameters(), _mean_over_ranks(use), strict=True):
                torch.testing.assert_close(param.grad, wanted.float(), atol=1e-5, rtol=1e-5)


def check_the_moment_of_the_backward_counts() -> None:
    """Turned off and on between forward and backward, as scripts of Apex may."""
    rank, model = dist.get_rank(), Parts()
    ddp = DistributedDataParallel(model, delay_allreduce=True)
    outs = [ddp(batch(rank, number), "first").square().sum() for number in range(2)]
    ddp.disable_allreduce()
    outs[0].backward()
    local = [param.grad.clone() for param in model.first.parameters()]
    everywhere = [torch.empty_like(local[0]) for _ in range(RANKS)]
    dist.all_gather(everywhere, local[0])
    assert not everywhere[0].equal(everywhere[1])
    ddp.enable_allreduce()
    outs[1].backward()
    wanted = _mean_over_ranks(_both_batches_through_the_first)
    for param, mean in zip(model.first.parameters(), wanted, strict=False):
        torch.testing.assert_close(param.grad, mean.float(), atol=1e-5, rtol=1e-5)
    assert model.second.weight.grad is None


def check_local_gradients_wait_for_a_parameter_left_out_later() -> None:
    """What one part got under `no_sync` is reduced by a backward through the other part."""
    rank, model = dist.get_rank(), Parts()
    ddp = DistributedDataParallel(model, delay_allreduce=True)
    with ddp.no_sync():
        ddp(batch(rank), "first").sum().backward()
    ddp(batch(rank), "second").sum().backward()
    for param in model.parameters():
        everywhere = [torch.empty_like(param) for _ in range(RANKS)]
        dist.all_gather(everywhere, param.grad)
        assert_same(everywhere[0], everywhere[1])


def check_sums_and_views() -> None:
    model = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(
        model, delay_allreduce=True, gradient_average=False, retain_allreduce_buffers=True
    )
    ddp(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    assert model.weight.grad.tolist() == [[3.0, 3.0]]
    assert model.weight.grad._base is not None


def check_sparse_gradients() -> None:
    model = nn.Embedding(3, 2, sparse=True)
    ddp = DistributedDataParallel(model, delay_allreduce=True)
    ddp(torch.tensor([dist.get_rank()])).sum().backward()
    assert model.weight.grad.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


def check_wrapping_again_reduces_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    for _ in range(2):
        ddp = DistributedDataParallel(model, delay_allreduce=True, gradient_average=False)
    twin = pickle.loads(pickle.dumps(ddp))
    for wrapper in (ddp, twin):
        wrapper(torch.ones(1, 1)).sum().backward()
        assert wrapper.module.weight.grad.tolist() == [[2.0]]


def check_what_belongs_to_torchs_reducer_is_refused() -> None:
    ddp = DistributedDataParallel(nn.Linear(1, 1), delay_allreduce=True)
    calls: dict[str, Callable[[], Any]] = {
        "register_comm_hook": lambda: ddp.register_comm_hook(None, print),
        "join": ddp.join,
    }
    for method, call in calls.items():
        assert_refused("distributed", "a method of torch's reducer", call, ddp, method=method)


def check_several_backwards_in_a_block_at_every_level() -> None:
    """Ranks stay equal, and get what one process with both batches gets."""
    for level in ("O0", "O1", "O2", "O5"):
        weights = []
        for accumulates in (False, True):
            model = Parts()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
            model, optimizer = preamp.initialize(
                model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0
            )
            ddp = DistributedDataParallel(model, delay_allreduce=True)
            for step in range(2):
                out = ddp(batch(dist.get_rank(), step), "first").float()
                if accumulates:
                    ddp.disable_allreduce()
                    with preamp.scale_loss(out.sum(), optimizer) as scaled:
                        scaled.backward(retain_graph=True)
                    ddp.enable_allreduce()
                    with preamp.scale_loss(out.square().sum(), optimizer) as scaled:
                        scaled.backward()
                else:
                    with preamp.scale_loss(out.sum(), optimizer) as scaled:
                        scaled.backward(retain_graph=True)
                        (out.square().sum() * 4.0).backward()
                optimizer.step()
                optimizer.zero_grad()
            mine = next(iter(preamp.master_params(optimizer))).detach().float()
            everywhere = [torch.empty_like(mine) for _ in range(RANKS)]
            dist.all_gather(everywhere, mine)
            assert_same(everywhere[0], everywhere[1])
            weights.append(mine)
            preamp.engine_of(model).close()
        torch.testing.assert_close(weights[0], weights[1], atol=0.05, rtol=0.05)
