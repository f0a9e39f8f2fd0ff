# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of DistributedDataParallel, Reducer and process groups."""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import preamp
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel, Reducer, create_syncbn_process_group
from preamp.parallel.distributed import flat_dist_call

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
    ddp(1.0).backward()
    assert [p.unique().tolist() for p in model.parameters()] == [[0.0], [0.0]]
    assert model.count.item() == dist.get_rank()


def _means(dtype: torch.dtype, **arguments: Any) -> None:
    assert gradients(wrapped(dtype, **arguments), (3.0, 8.0)[dist.get_rank()]) == [5.5]


def check_gradients_are_means() -> None:
    for dtype in DTYPES:
        for arguments in (
            {},
            {"message_size": 0},
            {"message_size": 3},
            {"delay_allreduce": True},
            {"retain_allreduce_buffers": True},
            {"allreduce_always_fp32": True},
            {"allreduce_always_fp32": True, "retain_allreduce_buffers": True},
            {"gradient_predivide_factor": 2.0},
            {"prof": True, "gradient_average_split_factor": 2.0, "num_allreduce_streams": 2},
        ):
            _means(dtype, **arguments)


def check_retained_buffers_are_torchs() -> None:
    ddp = wrapped(retain_allreduce_buffers=True)
    assert gradients(ddp, 1.0) == [1.0]
    assert ddp.module.first.grad._base is not None  # a view of the bucket
    assert not hasattr(ddp, "allreduce_buffers")


def check_trigger_params_change_nothing() -> None:
    model = Scale()
    ddp = DistributedDataParallel(model, allreduce_trigger_params=[model.first])
    assert gradients(ddp, float(dist.get_rank())) == [0.5]


def check_communicators_reduce() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    ddp = wrapped(num_allreduce_streams=2, allreduce_communicators=(groups, [None, None]))
    assert ddp.process_group is groups[0]
    assert gradients(ddp, float(dist.get_rank())) == [0.5]


def check_sums_on_request() -> None:
    for dtype in DTYPES:
        mine = (3.0, 8.0)[dist.get_rank()]
        assert gradients(wrapped(dtype, gradient_average=False), mine) == [11.0]
        predivided = wrapped(dtype, gradient_average=False, gradient_predivide_factor=2.0)
        assert gradients(predivided, mine) == [5.5]


def check_half_sums_stay_in_range() -> None:
    big = 40000.0  # twice this is infinite in float16
    half = torch.float16
    assert gradients(wrapped(half, gradient_predivide_factor=2.0), big) == [big]
    assert gradients(wrapped(half, gradient_predivide_factor=0.5), big) == [float("inf")]
    in_float32 = wrapped(half, gradient_predivide_factor=0.5, allreduce_always_fp32=True)
    assert gradients(in_float32, big) == [big]


def check_bucket_sizes() -> None:
    def sizes(**arguments: Any) -> list[int]:
        found: list[int] = []

        def note(_, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
            found.append(bucket.buffer().numel())
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        ddp = wrapped(**arguments)
        ddp.register_comm_hook(None, note)
        for _ in range(2):  # torch settles its buckets after the first backward
            found.clear()
            ddp(1.0).backward()
        return sorted(found)

    assert sizes() == [5]
    assert sizes(message_size=0) == [2, 3]
    assert sizes(message_size=3) == [2, 3]
    assert sizes(message_size=4) == [5]
    assert sizes(message_size=4, dtype=torch.float16) == [5]


def check_allreduce_can_be_turned_off() -> None:
    ddp, mine = wrapped(), float(dist.get_rank())
    ddp.disable_allreduce()
    assert gradients(ddp, mine) == [mine]
    ddp.enable_allreduce()
    assert gradients(ddp, mine) == [1.0]  # 0 + 0 and 1 + 1, averaged
    ddp.zero_grad()
    with ddp.no_sync():
        assert gradients(ddp, mine) == [mine]


def check_delayed_reduction_needs_no_gradient_for_every_parameter() -> None:
    ddp = wrapped(delay_allreduce=True)
    for _ in range(2):
        ddp(float(dist.get_rank()), only_first=True).backward()
    assert ddp.module.first.grad.tolist() == [1.0, 1.0]
    assert ddp.module.second.grad is None


def check_copies_through_pickle_reduce_as_told() -> None:
    mine = float(dist.get_rank()) + 1
    for arguments, expected in (({}, [1.5]), ({"gradient_average": False}, [3.0])):
        ddp = wrapped(**arguments)
        twin = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(ddp))))
        assert gradients(twin, mine) == expected
        assert ddp.module.first.grad is None
        file = io.BytesIO()
        torch.save(ddp, file)
        file.seek(0)
        assert gradients(torch.load(file, weights_only=False), mine) == expected


def check_it_is_torchs_class() -> None:
    ddp = wrapped()
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert isinstance(ddp.module, Scale)
    assert list(ddp.state_dict()) == ["module.first", "module.second", "module.count"]


def check_a01_initialize_refuses_wrapped_models() -> None:
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    with refused("distributed", "a wrapped model", ddp):
        preamp.initialize(ddp, opt_level="O2", verbosity=0)


def check_the_engine_is_found_behind_it() -> None:
    model = preamp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    engine = preamp.engine_of(model)
    assert preamp.engine_of(DistributedDataParallel(model)) is engine
    engine.close()


def check_flat_calls() -> None:
    rank = dist.get_rank()
    tensors = [torch.full((2,), rank + 1.0, dtype=dtype) for dtype in (*DTYPES, torch.float32)]
    tensors.append(torch.arange(6.0).view(2, 3).t() * (rank + 1))  # not contiguous
    tensors.append(torch.zeros(0))
    flat_dist_call(tensors, dist.all_reduce)
    assert [t.tolist() for t in tensors[:5]] == [[1.5, 1.5]] * 5
    assert tensors[5].equal(torch.arange(6.0).view(2, 3).t() * 1.5)
    flat_dist_call(
        mine := [torch.full((2,), float(rank)), torch.ones(1) * rank], dist.broadcast, (1,)
    )
    assert [t.tolist() for t in mine] == [[1.0, 1.0], [1.0]]


def check_reducer_of_a_module() -> None:
    model = Scale()
    model.first.data.fill_(dist.get_rank())
    reducer = Reducer(model)
    assert model.first.tolist() == [0.0, 0.0]
    model(float(dist.get_rank()), only_first=True).backward()
    reducer.reduce()
    assert model.first.grad.tolist() == [0.5, 0.5]
    assert model.second.grad is None


def check_reducer_of_gradients() -> None:
    grads = [torch.full((2,), float(dist.get_rank()), dtype=dtype) for dtype in DTYPES]
    Reducer([grads[0], (grads[1], [grads[2]]), iter(grads[3:])]).reduce()
    assert [g.tolist() for g in grads] == [[0.5, 0.5]] * 4


def check_reducer_refuses_other_things() -> None:
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
