# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of optimizers over sharded parameters: they are those of one process."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from cases import fused
from preamp import optimizers
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


def placed(tensor: torch.Tensor, mesh: DeviceMesh, place: int) -> torch.Tensor:
    """The last one is a copy on every rank."""
    replicated = place == len(SHAPES) - 1
    return distribute_tensor(tensor.clone(), mesh, [Replicate() if replicated else Shard(0)])


def train(
    make: Callable[[Any], torch.optim.Optimizer], mesh: DeviceMesh | None, dtype: torch.dtype
) -> list[torch.Tensor]:
    def on(tensor: torch.Tensor, place: int) -> torch.Tensor:
        return tensor.clone() if mesh is None else placed(tensor, mesh, place)

    params = [nn.Parameter(on(value, place)) for place, value in enumerate(values(0, dtype))]
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.05}]
    optimizer = make(groups)
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
    """Norms are sums in another order."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for make in WITH_NORMS.values():
        for dtype, ulps in ((torch.float32, 8), (torch.bfloat16, 1), (torch.float64, 8)):
            pairs = zip(train(make, mesh, dtype), train(make, None, dtype), strict=True)
            for found, wanted in pairs:
                eps = torch.finfo(dtype).eps * ulps
                torch.testing.assert_close(found, wanted, rtol=eps, atol=eps)


def check_every_back_end_takes_norms_from_outside() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    for name, make in WITH_NORMS.items():
        if "larc" in name:
            continue

        def on(params: Any, backend: str, make: Callable[[Any], Any] = make) -> Any:
            optimizer: Any = make(params)
            optimizer.backend = backend
            return optimizer

        wanted = train(functools.partial(on, backend="reference"), None, torch.float32)
        for backend in ("reference", "plain"):
            found = train(functools.partial(on, backend=backend), mesh, torch.float32)
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def check_copies_stay_equal_and_state_is_sharded() -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    param = nn.Parameter(placed(values(0, torch.float32)[0], mesh, 0))
    optimizer = optimizers.FusedNovoGrad([param], lr=0.1)
    param.grad = placed(values(1, torch.float32)[0], mesh, 0)
    optimizer.step()
    state = optimizer.state[param]
    assert type(state["exp_avg"]) is type(param.grad)
    wanted = torch.linalg.vector_norm(values(1, torch.float32)[0])
    torch.testing.assert_close(state["exp_avg_sq"], wanted)
