# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of optimizers over sharded parameters, which are those of one process.

And four ranks of two-dimensional meshes, and of groups that hold plain tensors.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh

import preamp
from cases import fused
from distributed.ranks import RUNS_ON_CPUS
from kit.refusals import refused
from preamp import optimizers
from preamp.core.tensors import local_of
from preamp.parallel.LARC import LARC

RANKS = 2
SHAPES = ((7, 3), (4, 5), (1, 6), (9,))
"""Uneven, even, and empty on the second rank."""

BITWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    case.name: functools.partial(case.kind, **{**case.needs, **case.variants[2], "lr": 0.1})
    for case in fused.FUSED
    if case.kind.is_elementwise and case is not fused.EARLY_ADAM
}
WITH_NORMS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "lamb": lambda params: optimizers.FusedLAMB(params, lr=0.1, max_grad_norm=0.5),
    "nvlamb": lambda params: optimizers.FusedLAMB(
        params, lr=0.1, weight_decay=0.0, use_nvlamb=True, adam_w_mode=False
    ),
    "mixed lamb": lambda params: optimizers.FusedMixedPrecisionLamb(params, lr=0.1),
    "lars": lambda params: optimizers.FusedLARS(
        params, lr=0.1, momentum=0.9, weight_decay=0.01, trust_coefficient=0.5
    ),
    "novograd": lambda params: optimizers.FusedNovoGrad(params, lr=0.1, weight_decay=0.01),
    "novograd of largest": lambda params: optimizers.FusedNovoGrad(params, lr=0.1, norm_type=0),
    "larc": lambda params: LARC(torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)),
    "larc of fused": lambda params: LARC(optimizers.FusedSGD(params, lr=0.1), clip=False),
}


def values(seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def train(
    make: Callable[[Any], Any], mesh: DeviceMesh | None, dtype: torch.dtype, backend: str = "auto"
) -> list[torch.Tensor]:
    def on(tensor: torch.Tensor, place: int) -> torch.Tensor:
        is_copied = place == len(SHAPES) - 1  # the last one, on every rank
        placements = [Replicate() if is_copied else Shard(0)]
        own = tensor.clone()
        return own if mesh is None else distribute_tensor(own, mesh, placements)

    params = [nn.Parameter(on(value, place)) for place, value in enumerate(values(0, dtype))]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    optimizer = make(groups)
    if backend != "auto":
        optimizer.backend = backend
    for step in range(3):
        for place, (param, grad) in enumerate(zip(params, values(1 + step, dtype), strict=True)):
            param.grad = on(grad, place)
        optimizer.step()
    found = [param.detach() for param in params]
    return found if mesh is None else [tensor.full_tensor() for tensor in found]  # type: ignore[attr-defined]


def check_elementwise_rules_are_those_of_one_process() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, make in BITWISE.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            pairs = zip(train(make, mesh, dtype), train(make, None, dtype), strict=True)
            assert all(torch.equal(found, wanted) for found, wanted in pairs), (name, dtype)


def check_rules_with_norms_are_those_of_one_process() -> None:
    """Norms are sums in another order; every back end takes them from outside."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, make in WITH_NORMS.items():
        for dtype, ulps in ((torch.float32, 8), (torch.bfloat16, 1), (torch.float64, 8)):
            wanted, eps = train(make, None, dtype), torch.finfo(dtype).eps * ulps
            for backend in ("auto",) if "larc" in name else ("auto", "reference", "plain"):
                found = train(make, mesh, dtype, backend)
                torch.testing.assert_close(found, wanted, rtol=eps, atol=eps)


# -- meshes and groups of four ranks ---------------------------------------------------------------


FOUR = 4
SIDE = 2


def prepare(params: Any, optimizer: torch.optim.Optimizer | None = None, **options: Any) -> Any:
    """Initialize an optimizer over ``params``, at a level that scales losses."""
    model = nn.ParameterList(params)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if optimizer is None else optimizer
    options = {"opt_level": "O0", "loss_scale": "dynamic", "verbosity": 0} | options
    preamp.initialize(model, optimizer, **options)
    preamp.engine_of(optimizer).scaler(0).set_scale(16.0)
    return optimizer


def backward(optimizer: Any, grads: list[torch.Tensor], *, overflow_on: int | None = None) -> None:
    """What a backward of a loss would leave."""
    with preamp.scale_loss(torch.ones(()), optimizer):
        for param, grad in zip(preamp.master_params(optimizer), grads, strict=True):
            param.grad = grad * 16.0
            if overflow_on == dist.get_rank():
                local_of(param.grad).fill_(math.inf)


def assert_skips(optimizer: Any, grads: list[torch.Tensor], rank: int) -> None:
    """All skip what overflows on a rank, which alone says so."""
    backward(optimizer, grads, overflow_on=rank)
    optimizer.step()
    engine = preamp.engine_of(optimizer)
    assert engine.last_step_skipped
    assert engine.loss_scale() == 8.0
    assert engine.overflow_causes[0].was_elsewhere is (dist.get_rank() != rank)


def grid(*names: str) -> Any:
    return init_device_mesh("cpu", (SIDE, SIDE), mesh_dim_names=names)


def four_two_dimensional_meshes() -> None:
    mesh = grid("a", "b")
    whole = torch.arange(12.0).reshape(4, 3)
    placements: list[list[Any]] = [
        [Replicate(), Shard(0)],
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Replicate()],
    ]
    params = [nn.Parameter(distribute_tensor(whole.clone(), mesh, p)) for p in placements]
    optimizer = prepare(params)
    grads = [distribute_tensor(whole, mesh, p) for p in placements]
    wanted = torch.linalg.vector_norm(whole) * 2
    for _ in range(3):
        backward(optimizer, [grad.clone() for grad in grads])
        torch.testing.assert_close(preamp.clip_grad_norm_(optimizer, 1.0), wanted)
        optimizer.step()
        optimizer.zero_grad()
    assert_skips(optimizer, grads, 3)


def four_gradients_that_are_sums_yet_to_be_added_up() -> None:
    mesh = init_device_mesh("cpu", (FOUR,))
    ones = torch.ones(4)
    param = nn.Parameter(distribute_tensor(ones.clone(), mesh, [Replicate()]))
    optimizer = prepare([param])
    partial = type(param.data).from_local(ones, mesh, [Partial()])
    backward(optimizer, [partial])
    torch.testing.assert_close(local_of(preamp.clip_grad_norm_(optimizer, 100.0)), ones.sum() * 2)
    optimizer.step()
    assert torch.equal(local_of(param.detach()), ones - 0.5 * FOUR)


def four_replicated_groups_of_fully_shard() -> None:
    """HSDP: shards within a row of the mesh, copies along the other dimension."""
    if not RUNS_ON_CPUS:
        return
    torch.manual_seed(0)
    single, model = nn.Linear(5, 3), nn.Linear(5, 3)
    model.load_state_dict(single.state_dict())
    fully_shard(model, mesh=grid("copies", "shards"))
    rows = torch.randn(FOUR, 5, generator=torch.Generator().manual_seed(1))
    norms: list[torch.Tensor] = []
    for one, x in ((model, rows[dist.get_rank()][None]), (single, rows)):
        optimizer = optimizers.FusedLAMB(one.parameters(), lr=0.1)
        preamp.initialize(one, optimizer, opt_level="O5", loss_scale=1.0, verbosity=0)
        with preamp.scale_loss(one(x).square().mean(), optimizer) as scaled:
            scaled.backward()
        norms.append(preamp.clip_grad_norm_(optimizer, 0.5))
        optimizer.step()
    torch.testing.assert_close(*norms, rtol=2e-2, atol=0)
    states = (one.state_dict().values() for one in (model, single))
    for found, wanted in zip(*states, strict=True):
        torch.testing.assert_close(found.full_tensor(), wanted, rtol=2e-2, atol=2e-3)


def four_one_of_four_differs() -> None:
    """All four are told, also those that share no dimension of the mesh with it."""
    if not RUNS_ON_CPUS:
        return
    model = nn.Linear(5, 3)
    fully_shard(model, mesh=grid("copies", "shards"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    level = "O2" if dist.get_rank() == FOUR - 1 else "O5"
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with refused("distributed", "one rank of four", changes=True):
        model(torch.ones(1, 5))


def groups() -> tuple[Any, Any]:
    """The group that shares weights with this rank, and that of its pipeline's stages."""
    mesh = grid("pipeline", "tensor")
    return mesh.get_group("tensor"), mesh.get_group("pipeline")


def four_parts_in_plain_tensors() -> None:
    """Each stage has a weight cut in two and a copied bias; the last one shares a copy."""
    tensor, pipeline = groups()
    stage, part = dist.get_rank() // SIDE, dist.get_rank() % SIDE
    weights = torch.arange(16.0).reshape(2, 2, 4)
    for optimizer_of in (optimizers.FusedSGD, torch.optim.SGD):
        params: list[Any] = [nn.Parameter(torch.zeros(size)) for size in (4, 2, 3)]
        params[0].tensor_model_parallel = True
        params[2].shared = stage == 1
        named = {tensor: "tensor", pipeline: "pipeline"}
        optimizer = prepare(params, optimizer_of(params, lr=0.5), process_groups=named)
        own = [weights[stage, part], torch.full((2,), stage + 1.0), torch.ones(3)]
        backward(optimizer, own)
        wanted = (weights.square().sum() + 2 * 1 + 2 * 4 + 3).sqrt()
        torch.testing.assert_close(preamp.clip_grad_norm_(optimizer, 1e3), wanted)
        largest = preamp.clip_grad_norm_(optimizer, 1e3, math.inf)
        torch.testing.assert_close(largest, weights.max())
        optimizer.step()
        assert torch.equal(params[0].detach(), -0.5 * own[0])
        optimizer.zero_grad()
        assert_skips(optimizer, own, 2)


def four_layer_wise_rates_of_parts_in_plain_tensors() -> None:
    tensor, _ = groups()
    part = dist.get_rank() % SIDE
    # Values of bfloat16: without a wrapper that makes ranks equal, masters start from half weights.
    whole = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    grad = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for make in (
        lambda p: optimizers.FusedLAMB(p, lr=0.1),
        lambda p: optimizers.FusedLARS(p, lr=0.1, momentum=0.9, trust_coefficient=0.5),
        lambda p: optimizers.FusedNovoGrad(p, lr=0.1),
        lambda p: LARC(torch.optim.SGD(p, lr=0.1)),
    ):
        for level in ("O0", "O5"):
            results: list[torch.Tensor] = []
            for is_cut in (True, False):
                param: Any = nn.Parameter((whole[part] if is_cut else whole).clone())
                param.tensor_model_parallel = is_cut
                options: dict[str, Any] = {"process_groups": tensor} if is_cut else {}
                optimizer = make([param])
                prepare([param], optimizer, opt_level=level, loss_scale=1.0, **options)
                (updated,) = preamp.master_params(optimizer)
                updated.grad = (grad[part] if is_cut else grad).clone()
                optimizer.step()
                results.append(updated.detach() if is_cut else updated.detach()[part])
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def four_what_process_groups_may_be() -> None:
    tensor, _ = groups()
    for name, given in {
        "a name for groups": "world",
        "another role of a group": {tensor: "data"},
        "a group of others": [dist.GroupMember.NON_GROUP_MEMBER],
    }.items():
        with refused("distributed", name):
            prepare([nn.Parameter(torch.zeros(1))], process_groups=given)
