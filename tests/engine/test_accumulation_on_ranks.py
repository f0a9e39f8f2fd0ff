# SPDX-License-Identifier: BSD-3-Clause
"""Accumulation under DistributedDataParallel: every rank sees the mean over all ranks."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.ranks import run_ranks
from cases.selection import combinations
from cases.tolerances import assert_same

LEVELS = ("O0", "O1", "O2", "O5")
MODES = ("sync", "no_sync", "delay")
STEPS = 3  # DistributedDataParallel rebuilds its buckets, and moves gradients, in the second


def inputs(rank: int, step: int, part: int) -> torch.Tensor:
    """Small whole numbers: sums and means of their products are exact in half precision."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randint(-4, 5, (2, 2), generator=generator).float()


class Inner(nn.Module):
    """A model that is not wrapped itself, but its part."""

    def __init__(self) -> None:
        super().__init__()
        self.part: Any = nn.Linear(2, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)


class Run:
    """A one-layer model and its optimizer at a level, wrapped around or inside."""

    def __init__(self, level: str, scale: Any, *, view: bool = False, inside: bool = False) -> None:
        self.model: Any = Inner()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        other = nn.Linear(2, 1)
        self.other = torch.optim.SGD(other.parameters(), lr=0.5)
        preamp.initialize(
            [self.model, other],
            [self.optimizer, self.other],
            opt_level=level,
            loss_scale=scale,
            num_losses=2,
            verbosity=0,
        )
        self.engine = preamp.engine_of(self.model)
        self._other_model = other
        wrap: Any = DistributedDataParallel
        if inside:
            self.wrapper = self.model.part = wrap(self.model.part, gradient_as_bucket_view=view)
        else:
            self.wrapper = wrap(self.model, gradient_as_bucket_view=view)
        self._forward = self.model if inside else self.wrapper

    def no_sync(self, on: bool) -> Any:
        return self.wrapper.no_sync() if on else nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x).float()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sum() / 64

    def backward(
        self, loss: torch.Tensor, loss_id: int = 0, *, delay: bool = False, retain: bool = False
    ) -> None:
        with preamp.scale_loss(loss, self.optimizer, loss_id, delay_unscale=delay) as scaled:
            scaled.backward(retain_graph=retain)

    def elsewhere(self) -> None:
        """A whole block of the other optimizer, with the same loss scaler."""
        with preamp.scale_loss(self._other_model(torch.ones(1, 2)).sum(), self.other) as scaled:
            scaled.backward()

    def gradient(self) -> torch.Tensor:
        (param,) = preamp.master_params(self.optimizer)
        assert param.grad is not None
        return param.grad.clone()

    def step(self, *, set_to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=set_to_none)


def accumulate(rank: int) -> dict[str, list[torch.Tensor]]:
    """For every case the unscaled gradients after each step's last backward."""
    found = {
        f"{level}-{mode}-{view}-{scale}": _gradients(rank, level, mode, view, scale)
        for level, mode, view, scale in combinations(
            LEVELS, MODES, (False, True), (128.0, "dynamic"), size=3
        )
    }
    for level, (name, case) in combinations(LEVELS, CASES.items()):
        run = Run(level, 128.0, inside=name == "wrapped inside")
        found[f"{level}-{name}"] = [_one_step(case, run, rank, step) for step in range(STEPS)]
        run.engine.close()
    return found


def _gradients(rank: int, level: str, mode: str, view: bool, scale: Any) -> list[torch.Tensor]:
    run = Run(level, scale, view=view)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        for part in range(2):
            is_last = part == 1
            # Without delay_unscale every block unscales, gradients of this rank alone included.
            with run.no_sync(mode != "sync" and not is_last):
                loss = run.loss(inputs(rank, step, part))
                run.backward(loss, delay=mode == "delay" and not is_last)
        found.append(run.gradient())
        # Zeroed in place the gradients go on lying in the buckets; dropped they do not.
        run.step(set_to_none=step % 2 == 0)
    run.engine.close()
    return found


def _one_step(case: Any, run: Run, rank: int, step: int) -> torch.Tensor:
    case(run, inputs(rank, step, 0), inputs(rank, step, 1))
    grad = run.gradient()
    run.step()
    return grad


def _plain(run: Run, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.backward(run.loss(first))
    run.backward(run.loss(second))


def _another_block_between(run: Run, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.backward(run.loss(first), delay=True)
    loss = run.loss(second)
    run.elsewhere()  # ends a block of the engine, and may change the scale
    run.backward(loss)


def _another_loss_after_delay(run: Run, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.backward(run.loss(first), delay=True)
    run.backward(run.loss(second), 1)


def _plain_then_delayed(run: Run, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.backward(run.loss(first))
        run.backward(run.loss(second) * 0, delay=True)
    run.backward(run.loss(second))


def _forward_inside_the_block(run: Run, first: torch.Tensor, second: torch.Tensor) -> None:
    for x, is_last in ((first, False), (second, True)):
        with run.no_sync(not is_last):
            one = torch.ones((), requires_grad=True)
            with preamp.scale_loss(one, run.optimizer) as scale:
                (run.loss(x) * scale).backward()


CASES = {
    "wrapped inside": _plain,
    "another block between": _another_block_between,
    "another loss after delay": _another_loss_after_delay,
    "plain, then delayed": _plain_then_delayed,
    "forward inside the block": _forward_inside_the_block,
}


def _all_of_it(run: Run, x: torch.Tensor, factor: float) -> None:
    with run.no_sync(True):
        run.backward(run.loss(x) * factor)


def _left_scaled(run: Run, x: torch.Tensor, factor: float) -> None:
    with run.no_sync(True):
        run.backward(run.loss(x) * factor, delay=True)


def _forward_alone(run: Run, x: torch.Tensor, factor: float) -> None:
    """It is the forward that tells `DistributedDataParallel` whether to reduce."""
    with run.no_sync(True):
        loss = run.loss(x)
    run.backward(loss * factor)


def _two_losses_of_a_forward(run: Run, x: torch.Tensor, factor: float) -> None:
    with run.no_sync(True):
        output = run.forward(x)
    run.backward((output / 64).sum(), retain=True)
    run.backward((output / 64).sum() * factor)


def _forward_alone_inside_the_block(run: Run, x: torch.Tensor, factor: float) -> None:
    one = torch.ones((), requires_grad=True)
    with preamp.scale_loss(one, run.optimizer) as scale:
        with run.no_sync(True):
            loss = run.loss(x)
        (loss * factor * scale).backward()


UNREDUCED = {
    "no_sync": _all_of_it,
    "delay": _left_scaled,
    "forward alone": _forward_alone,
    "forward alone, inside the block": _forward_alone_inside_the_block,
    "two losses of a forward": _two_losses_of_a_forward,
}


def overflow_alone(rank: int) -> dict[str, list[float]]:
    """Scale, skips and weight after a step in which rank 0 alone overflows under ``no_sync``."""
    found: dict[str, list[float]] = {}
    cases = combinations(("O1", "O2"), (False, True), UNREDUCED.items(), size=2)
    for level, inside, (mode, backward) in cases:
        torch.manual_seed(0)
        run = Run(level, "dynamic", inside=inside)
        for step in range(3):
            factor = torch.inf if step == 1 and rank == 0 else 1.0
            backward(run, inputs(rank, step, 0), factor)
            run.backward(run.loss(inputs(rank, step, 1)))
            run.step()
        (param,) = preamp.master_params(run.optimizer)
        found[f"{level}-{mode}-{inside}"] = [
            run.engine.loss_scale(),
            float(run.engine.steps_skipped),
            *param.detach().flatten().tolist(),
        ]
        run.engine.close()
    return found


pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch has no distributed"),
]


def test_every_rank_has_the_mean_of_all_micro_batches(tmp_path: Path) -> None:
    """With ``no_sync``, with buckets that gradients lie in, and with both, exactly."""
    ranks = run_ranks(accumulate, tmp_path)
    wanted = [
        sum(inputs(rank, step, part).sum(0, keepdim=True) for rank in range(2) for part in range(2))
        / 64
        / 2
        for step in range(STEPS)
    ]
    for rank, cases in enumerate(ranks):
        for name, found in cases.items():
            for step, grad in enumerate(found):
                assert_same(grad, wanted[step], f"rank {rank}, {name}, step {step}")


def test_an_overflow_of_one_rank_skips_the_step_of_all(tmp_path: Path) -> None:
    """It shows in the reduced gradient; until then the scale of that rank does not move."""
    first, second = run_ranks(overflow_alone, tmp_path)
    assert first == second
    assert all(values[:2] == [2.0**15, 1.0] for values in first.values())
