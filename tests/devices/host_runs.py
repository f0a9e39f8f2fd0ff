# SPDX-License-Identifier: BSD-3-Clause
"""A training that is run with masters and moments on the host and on the device, to be compared.

Both runs take the same back end. The pretended device brings copies late, over garbage, so a value
that was read too early shows. Runs of few bytes make several of a model's few tensors.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVELS
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
EVERY = [*WITH_MASTERS, *[(one.name, "full") for one in LEVELS if not one.has_masters]]
THERE = ("host", "released")
"""Where masters and moments lie on the host; gradients too, as soon as they are made."""
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


with_masters = pytest.mark.parametrize("kept", WITH_MASTERS, ids=ids)
every_level = pytest.mark.parametrize("kept", EVERY, ids=ids)
there = pytest.mark.parametrize("place", THERE)


_empty = torch.empty


def without_pinned_memory(*sizes: Any, **options: Any) -> torch.Tensor:
    """``torch.empty`` of a host that has none."""
    if options.get("pin_memory"):
        raise RuntimeError("out of memory")
    return _empty(*sizes, **options)


class Run:
    """A training of a small model at one place: the device, or one of `THERE`."""

    def __init__(
        self,
        place: str,
        kept: Kept,
        kind: str = "FusedLion",
        *,
        norm: type[nn.Module] = nn.BatchNorm1d,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 256), norm(256), nn.GELU(), nn.Linear(256, 4)).cuda()
        self.optimizer = KINDS[kind](self.net.parameters(), lr=1e-2)
        level, storage = kept
        keeps: Any = {"place": "device" if place == "device" else "host", **STORAGES[storage]}
        keeps["release_gradients"] = place == "released"
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
        group = self.optimizer.param_groups[0]
        if self.engine.policy.is_dynamic and "step" not in group:
            # The device's counter is a tensor then, whose corrections are of float32.
            group["step"] = torch.zeros((), dtype=torch.int32)

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

    def values(self) -> list[torch.Tensor]:
        """All weights, exactly."""
        exact = [(param, self.engine.exact_value(param)) for param in self.net.parameters()]
        return [param if value is None else value for param, value in exact]

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in self.masters()]
        values = [value for entry in entries for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def everything(self) -> list[torch.Tensor]:
        """On the CPU: weights, buffers, masters, state, number of the update and loss scale."""
        numbers = [self.optimizer.param_groups[0].get("step", 0), self.engine.scaler(0).value()]
        found = [*self.net.parameters(), *self.net.buffers(), *self.values(), *self.state()]
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


# -- loops ---------------------------------------------------------------------------------------


def plain(run: Run) -> None:
    run.steps(4)


def clipped(run: Run) -> None:
    for _ in range(4):
        run.backward()
        preamp.clip_grad_norm_(run.optimizer, 0.5)
        run.end()


def overflowing(run: Run) -> None:
    for number in range(5):
        run.backward(float("inf") if number == 2 and run.engine.policy.is_dynamic else 1.0)
        run.end()


def clipped_in_parts(run: Run) -> None:
    """By norms of other orders too, of accumulated gradients."""
    for _ in range(3):
        run.backward()
        run.backward(0.5)
        preamp.clip_grad_norm_(run.net[0].parameters(), 0.1)
        preamp.clip_grad_norm_(run.net.parameters(), 0.3, norm_type=float("inf"))
        preamp.clip_grad_norm_(run.optimizer, 0.2, norm_type=1.0)
        run.end()


def twice_in_a_block(run: Run) -> None:
    for _ in range(3):
        losses = run.loss(), run.loss(0.5)
        with preamp.scale_loss(losses[0], run.optimizer) as scaled:
            scaled.backward()
            (losses[1] * scaled.detach() / losses[0].detach()).backward()
        run.end()


LOOPS = (plain, clipped, overflowing, clipped_in_parts, twice_in_a_block)
"""What else there is, random programs do (`test_programs_on_a_device`)."""
