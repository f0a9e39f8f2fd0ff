# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of DistributedDataParallel, Reducer and process groups."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import preamp
from distributed.ranks import assert_equal_everywhere, by_rank, everywhere
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel, Reducer, create_syncbn_process_group
from preamp.parallel.distributed import flat_dist_call

RANKS = 2
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Scale(nn.Module):
    """Gradients are what goes in: ``w · x`` with a separate weight for each input."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2, dtype=dtype))
        self.second = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: float, *, only_first: bool = False) -> torch.Tensor:
        out = (self.first * x).sum()
        return out if only_first else out + (self.second * x).sum()


def wrapped(dtype: torch.dtype = torch.float32, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Scale(dtype), **arguments)


def gradients(ddp: Any, mine: float) -> list[float]:
    """The distinct values of all gradients after one backward on this rank's ``mine``."""
    ddp(mine).backward()
    return sorted({value for p in ddp.parameters() for value in p.grad.tolist()})


def check_parameters_come_from_rank_0_and_buffers_do_not() -> None:
    model = Scale()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float(dist.get_rank()))
    ddp = DistributedDataParallel(model)
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert list(ddp.state_dict()) == ["module.first", "module.second", "module.count"]
    ddp(1.0).backward()
    assert [p.unique().tolist() for p in model.parameters()] == [[0.0], [0.0]]
    assert model.count.item() == dist.get_rank()


SUM = {"gradient_average": False}
REDUCED: list[tuple[dict[str, Any], float]] = [  # arguments, and what becomes of 3 and 8
    ({}, 5.5),
    ({"message_size": 0}, 5.5),
    ({"message_size": 3}, 5.5),
    ({"delay_allreduce": True}, 5.5),
    ({"retain_allreduce_buffers": True}, 5.5),
    ({"allreduce_always_fp32": True}, 5.5),
    ({"allreduce_always_fp32": True, "retain_allreduce_buffers": True}, 5.5),
    ({"gradient_predivide_factor": 2.0}, 5.5),
    ({"prof": True, "gradient_average_split_factor": 2.0, "num_allreduce_streams": 2}, 5.5),
    (SUM, 11.0),
    ({**SUM, "gradient_predivide_factor": 2.0}, 5.5),
]


def check_gradients_are_means_or_sums() -> None:
    for dtype in DTYPES:
        for arguments, wanted in REDUCED:
            assert gradients(wrapped(dtype, **arguments), by_rank(3.0, 8.0)) == [wanted]


def check_half_sums_stay_in_range() -> None:
    big = 40000.0  # twice this is infinite in float16
    for factor, wide, wanted in ((2.0, False, big), (0.5, False, torch.inf), (0.5, True, big)):
        arguments = {"allreduce_always_fp32": wide, "gradient_predivide_factor": factor}
        assert gradients(wrapped(torch.float16, **arguments), big) == [wanted]


def check_retained_buffers_are_torchs() -> None:
    for arguments, wanted in (({}, [1.5]), ({"delay_allreduce": True, **SUM}, [3.0])):
        ddp = wrapped(retain_allreduce_buffers=True, **arguments)
        assert gradients(ddp, 1.0 + dist.get_rank()) == wanted
        assert ddp.module.first.grad._base is not None  # a view of the bucket
        assert not hasattr(ddp, "allreduce_buffers")


def check_triggers_and_communicators_reduce() -> None:
    model = Scale()
    ddp = DistributedDataParallel(model, allreduce_trigger_params=[model.first])
    assert gradients(ddp, float(dist.get_rank())) == [0.5]
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ddp = wrapped(num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))
    assert ddp.process_group is groups[0]
    assert gradients(ddp, float(dist.get_rank())) == [0.5]


def check_bucket_sizes() -> None:
    found: list[int] = []

    def note(_, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        found.append(bucket.buffer().numel())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    for size, dtype, wanted in (
        (None, torch.float32, [5]),
        (0, torch.float32, [2, 3]),
        (3, torch.float32, [2, 3]),
        (4, torch.float32, [5]),
        (4, torch.float16, [5]),
    ):
        ddp = wrapped(dtype, **({} if size is None else {"message_size": size}))
        ddp.register_comm_hook(None, note)
        for _ in range(2):  # torch settles its buckets after the first backward
            found.clear()
            ddp(1.0).backward()
        assert sorted(found) == wanted


def check_allreduce_can_be_turned_off() -> None:
    ddp, mine = wrapped(), float(dist.get_rank())
    ddp.disable_allreduce()
    assert gradients(ddp, mine) == [mine]
    ddp.enable_allreduce()
    assert gradients(ddp, mine) == [1.0]  # 0 + 0 and 1 + 1, averaged
    ddp.zero_grad()
    with ddp.no_sync():
        assert gradients(ddp, mine) == [mine]


def check_copies_through_pickle_reduce_as_told() -> None:
    mine = float(dist.get_rank()) + 1
    for arguments, expected in (({}, [1.5]), (SUM, [3.0])):
        ddp = wrapped(**arguments)
        twin = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(ddp))))
        assert gradients(twin, mine) == expected
        assert ddp.module.first.grad is None
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        assert gradients(torch.load(file, weights_only=False), mine) == expected


def check_a01_initialize_comes_before_wrapping() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with refused("distributed", "a wrapped model", ddp):
        preamp.initialize(ddp, opt_level="O2", verbosity=0)
    model = preamp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    assert preamp.engine_of(DistributedDataParallel(model)) is preamp.engine_of(model)


def check_flat_calls() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((2,), rank + 1.0, dtype=dtype) for dtype in (*DTYPES, torch.float32)]
    tensors.append(torch.arange(6.0).view(2, 3).t() * (rank + 1))  # not contiguous
    tensors.append(torch.zeros(0))
    flat_dist_call(tensors, dist.all_reduce)
    assert [t.tolist() for t in tensors[:5]] == [[1.5, 1.5]] * 5
    assert tensors[5].equal(torch.arange(6.0).view(2, 3).t() * 1.5)
    mine = [torch.full((2,), float(rank)), torch.ones(1) * rank]
    flat_dist_call(mine, dist.broadcast, (1,))
    assert [t.tolist() for t in mine] == [[1.0, 1.0], [1.0]]


def check_reducers() -> None:
    model = Scale()
    model.first.data.fill_(dist.get_rank())
    reducer = Reducer(model)
    assert model.first.tolist() == [0.0, 0.0]
    model(float(dist.get_rank()), only_first=True).backward()
    reducer.reduce()
    assert model.first.grad.tolist() == [0.5, 0.5]
    assert model.second.grad is None
    grads = [torch.full((2,), float(dist.get_rank()), dtype=dtype) for dtype in DTYPES]
    Reducer([grads[0], (grads[1], [grads[2]]), iter(grads[3:])]).reduce()
    assert [g.tolist() for g in grads] == [[0.5, 0.5]] * 4
    with refused("distributed", "no gradient for a Reducer"):
        Reducer([torch.zeros(1), None])


def check_syncbn_groups() -> None:
    assert create_syncbn_process_group(0) is None
    both, alone = create_syncbn_process_group(2), create_syncbn_process_group(1)
    assert dist.get_process_group_ranks(both) == [0, 1]
    assert dist.get_process_group_ranks(alone) == [dist.get_rank()]
    for size in (3, -1):
        with refused("distributed", "a group of another size", size=size):
            create_syncbn_process_group(size)


# -- delay_allreduce=True -------------------------------------------------------------------------


class Parts(nn.Module):
    """Two layers that a forward may use both, or one of."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        for param in self.parameters():
            param.data.normal_(generator=generator)

    def forward(self, x: torch.Tensor, use: str = "both") -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
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


def _after_a_backward_that_failed(model: Any, rank: int) -> None:
    x = batch(rank)
    x.register_hook(lambda grad: 1 / 0)
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
    lambda model, rank: (  # two forwards through different parts
        model(batch(rank), "first").sum() + model(batch(rank, 1), "second").square().sum()
    ).backward(),
    lambda model, rank: model(batch(rank), ("first", "second")[rank]).square().sum().backward(),
    _after_a_backward_that_failed,
    _both_batches_through_the_first,  # the second part has no gradient
)


def assert_means(model: nn.Module, use: Use) -> None:
    """Gradients are the means over ranks, as float64 has them."""
    exact = [Parts().double() for _ in range(RANKS)]
    for rank, each_model in enumerate(exact):
        use(each_model, rank)
    for ours, *wanted in zip(model.parameters(), *(m.parameters() for m in exact), strict=True):
        grads = [p.grad for p in wanted if p.grad is not None]
        if not grads:
            assert ours.grad is None
            continue
        mean = torch.stack(grads).sum(0) / RANKS
        torch.testing.assert_close(ours.grad, mean.float(), atol=1e-5, rtol=1e-5)


def delayed(model: nn.Module, **arguments: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, delay_allreduce=True, **arguments)


def check_every_backward_is_reduced() -> None:
    for use in USES:
        for arguments in ({}, {"gradient_predivide_factor": 2.0}, {"allreduce_always_fp32": True}):
            model = Parts()
            use(delayed(model, **arguments), dist.get_rank())
            assert_means(model, use)


def check_the_moment_of_the_backward_counts() -> None:
    """Turned off and on between forward and backward, as scripts of Apex may."""
    rank, model = dist.get_rank(), Parts()
    ddp = delayed(model)
    outs = [ddp(batch(rank, number), "first").square().sum() for number in range(2)]
    ddp.disable_allreduce()
    outs[0].backward()
    one, other = everywhere(model.first.weight.grad)
    assert not one.equal(other)
    ddp.enable_allreduce()
    outs[1].backward()
    assert_means(model, _both_batches_through_the_first)


def check_local_gradients_wait_for_a_parameter_left_out_later() -> None:
    """What one part got under `no_sync` is reduced by a backward through the other part."""
    rank, model = dist.get_rank(), Parts()
    ddp = delayed(model)
    with ddp.no_sync():
        ddp(batch(rank), "first").sum().backward()
    ddp(batch(rank), "second").sum().backward()
    assert_equal_everywhere(*[param.grad for param in model.parameters()])


def check_sparse_gradients() -> None:
    model = nn.Embedding(3, 2, sparse=True)
    ddp = delayed(model)
    ddp(torch.tensor([dist.get_rank()])).sum().backward()
    assert model.weight.grad.to_dense().tolist() == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]]


def check_wrapping_again_reduces_once() -> None:
    model = nn.Linear(1, 1, bias=False)
    for _ in range(2):
        ddp = delayed(model, gradient_average=False)
    for wrapper in (ddp, pickle.loads(pickle.dumps(ddp))):
        wrapper(torch.ones(1, 1)).sum().backward()
        assert wrapper.module.weight.grad.tolist() == [[2.0]]


def check_what_belongs_to_torchs_reducer_is_refused() -> None:
    ddp = delayed(nn.Linear(1, 1))
    for method, arguments in (("register_comm_hook", (None, print)), ("join", ())):
        with refused("distributed", "a method of torch's reducer", ddp, method=method):
            getattr(ddp, method)(*arguments)
