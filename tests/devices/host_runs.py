# SPDX-License-Identifier: BSD-3-Clause
"""A training that is run with masters and moments on the host and on the device, to be compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import preamp
from preamp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedADOPT,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
)

STORAGES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"masters": "split"},
    "compact": {"masters": "split", "moments": "8bit"},
}
WITH_MASTERS = [*itertools.product(("O2", "O5"), STORAGES)]
KINDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind
    for kind in (FusedAdam, FusedADOPT, FusedAdagrad, FusedLAMB, FusedLion, FusedNovoGrad)
}
KINDS |= {
    "FusedSGD": lambda params, lr: FusedSGD(params, lr=lr, momentum=0.9),
    "FusedLARS": lambda params, lr: FusedLARS(params, lr=lr, momentum=0.9),
}
Kept = tuple[str, str]  # a level and a storage


def ids(given: Any) -> str:
    return "-".join(given) if isinstance(given, tuple) else str(given)


class Run:
    """A training of a small model at one place."""

    def __init__(
        self,
        place: str,
        kept: Kept,
        kind: str = "FusedLion",
        *,
        norm: type[nn.Module] = nn.LayerNorm,
        releases: bool = False,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 256), norm(256), nn.GELU(), nn.Linear(256, 4)).cuda()
        self.optimizer = KINDS[kind](self.net.parameters(), lr=1e-2)
        level, storage = kept
        keeps: Any = {"place": place, "release_gradients": releases, **STORAGES[storage]}
        preamp.initialize(
            self.net,
            self.optimizer,
            opt_level=level,
            storage=preamp.Storage(**keeps),
            backend="reference",
            verbosity=0,
            **options,
        )
        self.engine = preamp.engine_of(self.net)
        self.number = 0

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        inputs = torch.randn(32, 16, generator=generator).cuda()
        targets = torch.randn(32, 4, generator=generator).cuda()
        return nn.functional.mse_loss(self.net(inputs).float(), targets) * factor

    def backward(self, factor: float = 1.0) -> None:
        with preamp.scale_loss(self.loss(factor), self.optimizer) as scaled:
            scaled.backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.backward()
            self.end()

    def masters(self) -> list[Any]:
        return list(preamp.master_params(self.optimizer))

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in self.masters()]
        values = [value for entry in entries for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def everything(self) -> list[torch.Tensor]:
        """On the CPU: weights, buffers, masters, state, number of the update and loss scale."""
        numbers = [self.optimizer.param_groups[0].get("step", 0), self.engine.scaler(0).value()]
        found = [*self.net.parameters(), *self.net.buffers(), *self.masters(), *self.state()]
        return [tensor.detach().cpu().clone() for tensor in found] + [
            torch.tensor([float(number) for number in numbers])
        ]


def assert_same(some: Run, other: Run) -> None:
    pairs = zip(some.everything(), other.everything(), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [True] * len(some.everything())


def carry_over(first: Run, second: Run, folder: Path) -> None:
    """Go on with ``second`` where ``first`` is, by a checkpoint."""
    preamp.save_checkpoint(folder / "run", first.net, first.optimizer)
    preamp.load_checkpoint(folder / "run", second.net, second.optimizer, rng=False)
    second.number = first.number


def count_on_device(run: Run) -> None:
    """Under a dynamic scale the device's counter is a tensor, whose corrections are of float32."""
    if run.engine.policy.is_dynamic and "step" not in run.optimizer.param_groups[0]:
        run.optimizer.param_groups[0]["step"] = torch.zeros((), dtype=torch.int32)
