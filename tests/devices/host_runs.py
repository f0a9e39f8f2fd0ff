# SPDX-License-Identifier: BSD-3-Clause
"""A training that is run with masters and moments on the host and on the device, to be compared.

Both runs take the same back end. The pretended device brings copies late, over garbage, so a value
that was read too early shows. Runs of few bytes make several of a model's few tensors.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVELS
from kit import run as kit

STORAGES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"masters": "split"},
    "compact": {"masters": "split", "moments": "8bit"},
}
WITH_MASTERS = [*itertools.product(("O2", "O5"), STORAGES)]
EVERY = [*WITH_MASTERS, *[(one.name, "full") for one in LEVELS if not one.has_masters]]
THERE = ("host", "released")
"""Where masters and moments lie on the host; gradients too, as soon as they are made."""
KINDS = ("FusedAdam", "FusedAdagrad", "FusedLAMB", "FusedNovoGrad")
KINDS += ("FusedSGD", "FusedLARS")
Kept = tuple[str, str]  # a level and a storage


def ids(given: Any) -> str:
    return "-".join(given) if isinstance(given, tuple) else str(given)


with_masters = pytest.mark.parametrize("kept", WITH_MASTERS, ids=ids)
every_level = pytest.mark.parametrize("kept", EVERY, ids=ids)
there = pytest.mark.parametrize("place", THERE)
_empty = torch.empty


def without_pinned_memory(*sizes: Any, **options: Any) -> torch.Tensor:
    """``torch.empty`` of a host that has none."""
    if options.get("pin_memory"):
        raise RuntimeError("out of memory")
    return _empty(*sizes, **options)


def small(norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 256), norm(256), nn.GELU(), nn.Linear(256, 4))


class Apart(nn.Module):
    """A layer on each of two devices, or both on one."""

    def __init__(self, first: int = 0, last: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64).to(f"cuda:{first}")
        self.last = nn.Linear(64, 4).to(f"cuda:{last}")

    def cuda(self, device: Any = None) -> Any:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.to(self.first.weight.device))
        return self.last(hidden.to(self.last.weight.device)).to("cuda:0")


class Run(kit.Run):
    """A training at one place: the device, or one of `THERE`; see `kit.run`.

    Its numbers are on the CPU: weights, buffers, exact values, state, number of the update, scale.
    """

    def __init__(
        self,
        place: str,
        kept: Kept,
        kind: str = "FusedAdagrad",
        model: Callable[[], nn.Module] = small,
        **options: Any,
    ) -> None:
        level, storage = kept
        keeps: Any = {"place": "device" if place == "device" else "host", **STORAGES[storage]}
        options["storage"] = preamp.Storage(**keeps, release_gradients=place == "released")
        super().__init__(level, kind, lambda: model().cuda(), backend="reference", **options)
        group = self.optimizer.param_groups[0]
        if self.engine.policy.is_dynamic and "step" not in group:
            # The device's counter is a tensor then, whose corrections are of float32.
            group["step"] = torch.zeros((), dtype=torch.int32)

    def loss(self, index: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        out = self.model(torch.randn(32, 16, generator=generator).cuda()).float()
        return nn.functional.mse_loss(out, torch.randn(out.shape, generator=generator).cuda())

    def play(self, *programs: str) -> Run:
        super().play(*programs)
        return self

    def masters(self) -> list[Any]:
        return list(preamp.master_params(self.optimizer))

    def values(self) -> list[torch.Tensor]:
        """All weights, exactly."""
        exact = [(param, self.engine.exact_value(param)) for param in self.model.parameters()]
        return [param if value is None else value for param, value in exact]

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in self.masters()]
        values = [value for entry in entries for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def everything(self) -> list[torch.Tensor]:
        numbers = [self.optimizer.param_groups[0].get("step", 0), self.engine.scaler(0).value()]
        found = [*self.model.parameters(), *self.model.buffers(), *self.values(), *self.state()]
        return [tensor.detach().cpu().clone() for tensor in found] + [
            torch.tensor([float(number) for number in numbers])
        ]

    def numbers(self) -> dict[str, Any]:
        return {"everything": self.everything()}


def pair(place: str, kept: Kept, kind: str = "FusedAdagrad", **options: Any) -> tuple[Run, Run]:
    """A run on the device, and one at ``place``.

    A batch norm stays float32. Where others' gradients are added up on the host, and its own are
    not, the norm of all is added up in another order than on the device.
    """
    norm = nn.LayerNorm if place == "host" else nn.BatchNorm1d
    options.setdefault("model", functools.partial(small, norm))
    device, there = (Run(one, kept, kind, **options) for one in ("device", place))
    return device, there


LOOP = "iterate 0 | backward 1; clip .5; step; zero | backward 2 inf; step; zero; iterate 3 4"
"""What else there is, random programs do (`test_programs_on_a_device`)."""


def loop_of(run: Run) -> str:
    """At a static scale nothing may overflow."""
    return LOOP if run.engine.policy.is_dynamic else LOOP.replace(" inf", "")
