# SPDX-License-Identifier: BSD-3-Clause
"""What ranks have together: accumulated gradients, scales of losses, and ``GradScaler``."""

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.levels import EXACT, WITH_MASTERS
from cases.models import Damage, Exact, batch
from cases.ranks import one_rank, run_ranks
from cases.selection import combinations
from cases.tolerances import assert_same
from distributed.ranks import RUNS_ON_CPUS
from kit.loops import scaled_backward
from kit.run import Run

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


class Ranked(Run):
    """A one-layer model of this rank, wrapped around or inside, and another one beside it."""

    def __init__(self, level: str, scale: Any, *, view: bool = False, inside: bool = False) -> None:
        super().__init__(level, "SGD", Inner, count=2, loss_scale=scale, num_losses=2)
        wrap: Any = functools.partial(DistributedDataParallel, gradient_as_bucket_view=view)
        if inside:
            self.wrapper = self.model.part = wrap(self.model.part)
        else:
            self.wrapper = wrap(self.model)
        self._forward = self.model if inside else self.wrapper

    def no_sync(self, on: bool) -> Any:
        return self.wrapper.no_sync() if on else nullcontext()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(x).float()

    def loss_of(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x).sum() / 64

    def block(
        self, loss: torch.Tensor, loss_id: int = 0, *, delay: bool = False, retain: bool = False
    ) -> None:
        with preamp.scale_loss(loss, self.optimizer, loss_id, delay_unscale=delay) as scaled:
            scaled.backward(retain_graph=retain)

    def elsewhere(self) -> None:
        """A whole block of the other optimizer, with the same loss scaler."""
        scaled_backward(self.models[1](torch.ones(1, 2)).sum(), self.optimizers[1])

    def gradient(self) -> torch.Tensor:
        (param,) = preamp.master_params(self.optimizer)
        assert param.grad is not None
        return param.grad.clone()


def accumulate(rank: int) -> dict[str, list[torch.Tensor]]:
    """For every case the unscaled gradients after each step's last backward."""
    found = {
        f"{level}-{mode}-{view}-{scale}": _gradients(rank, level, mode, view, scale)
        for level, mode, view, scale in combinations(
            LEVELS, MODES, (False, True), (128.0, "dynamic"), size=3
        )
    }
    for level, (name, case) in combinations(LEVELS, CASES.items()):
        run = Ranked(level, 128.0, inside=name == "wrapped inside")
        found[f"{level}-{name}"] = [_one_step(case, run, rank, step) for step in range(STEPS)]
        run.engine.close()
    return found


def _gradients(rank: int, level: str, mode: str, view: bool, scale: Any) -> list[torch.Tensor]:
    run = Ranked(level, scale, view=view)
    found: list[torch.Tensor] = []
    for step in range(STEPS):
        for part in range(2):
            is_last = part == 1
            # Without delay_unscale every block unscales, gradients of this rank alone included.
            with run.no_sync(mode != "sync" and not is_last):
                loss = run.loss_of(inputs(rank, step, part))
                run.block(loss, delay=mode == "delay" and not is_last)
        found.append(run.gradient())
        # Zeroed in place the gradients go on lying in the buckets; dropped they do not.
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=step % 2 == 0)
    run.engine.close()
    return found


def _one_step(case: Any, run: Ranked, rank: int, step: int) -> torch.Tensor:
    case(run, inputs(rank, step, 0), inputs(rank, step, 1))
    grad = run.gradient()
    run.optimizer.step()
    run.optimizer.zero_grad()
    return grad


def _plain(run: Ranked, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.block(run.loss_of(first))
    run.block(run.loss_of(second))


def _another_block_between(run: Ranked, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.block(run.loss_of(first), delay=True)
    loss = run.loss_of(second)
    run.elsewhere()  # ends a block of the engine, and may change the scale
    run.block(loss)


def _another_loss_after_delay(run: Ranked, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.block(run.loss_of(first), delay=True)
    run.block(run.loss_of(second), 1)


def _plain_then_delayed(run: Ranked, first: torch.Tensor, second: torch.Tensor) -> None:
    with run.no_sync(True):
        run.block(run.loss_of(first))
        run.block(run.loss_of(second) * 0, delay=True)
    run.block(run.loss_of(second))


def _forward_inside_the_block(run: Ranked, first: torch.Tensor, second: torch.Tensor) -> None:
    for x, is_last in ((first, False), (second, True)):
        with run.no_sync(not is_last):
            one = torch.ones((), requires_grad=True)
            with preamp.scale_loss(one, run.optimizer) as scale:
                (run.loss_of(x) * scale).backward()


CASES = {
    "wrapped inside": _plain,
    "another block between": _another_block_between,
    "another loss after delay": _another_loss_after_delay,
    "plain, then delayed": _plain_then_delayed,
    "forward inside the block": _forward_inside_the_block,
}


def _all_of_it(run: Ranked, x: torch.Tensor, factor: float, **options: bool) -> None:
    with run.no_sync(True):
        run.block(run.loss_of(x) * factor, **options)


def _forward_alone(run: Ranked, x: torch.Tensor, factor: float) -> None:
    """It is the forward that tells `DistributedDataParallel` whether to reduce."""
    with run.no_sync(True):
        loss = run.loss_of(x)
    run.block(loss * factor)


def _two_losses_of_a_forward(run: Ranked, x: torch.Tensor, factor: float) -> None:
    with run.no_sync(True):
        output = run.forward(x)
    run.block((output / 64).sum(), retain=True)
    run.block((output / 64).sum() * factor)


def _forward_alone_inside_the_block(run: Ranked, x: torch.Tensor, factor: float) -> None:
    one = torch.ones((), requires_grad=True)
    with preamp.scale_loss(one, run.optimizer) as scale:
        with run.no_sync(True):
            loss = run.loss_of(x)
        (loss * factor * scale).backward()


UNREDUCED = {
    "no_sync": _all_of_it,
    "delay": functools.partial(_all_of_it, delay=True),
    "forward alone": _forward_alone,
    "forward alone, inside the block": _forward_alone_inside_the_block,
    "two losses of a forward": _two_losses_of_a_forward,
}


def overflow_alone(rank: int) -> dict[str, list[float]]:
    """Scale, skips and weight after a step in which rank 0 alone overflows under ``no_sync``."""
    found: dict[str, list[float]] = {}
    cases = combinations(("O1", "O2"), (False, True), UNREDUCED.items(), size=2)
    for level, inside, (mode, backward) in cases:
        run = Ranked(level, "dynamic", inside=inside)
        for step in range(3):
            factor = torch.inf if step == 1 and rank == 0 else 1.0
            backward(run, inputs(rank, step, 0), factor)
            run.block(run.loss_of(inputs(rank, step, 1)))
            run.optimizer.step()
            run.optimizer.zero_grad()
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


@pytest.mark.product
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("how", ["two losses", "one loss", "a block", "GradScaler"])
def test_scales_hear_of_what_nobody_reduces_by_the_steps(bad: int, how: str) -> None:
    """The scale of a loss by those of its own optimizers, and by all of them, once."""
    with one_rank():
        run = Run("O2", "SGD", Inner, count=2, loss_scale="dynamic", num_losses=2)
        wrappers = [DistributedDataParallel(model) for model in run.models]
        before, amp = run.engine.loss_scale(), preamp.GradScaler(run.optimizers)
        with wrappers[0].no_sync(), wrappers[1].no_sync():
            losses = [wrapper(torch.ones(1, 2)).float().sum() / 64 for wrapper in wrappers]
            losses[bad] = losses[bad] * torch.inf
            if how == "GradScaler":
                amp.scale(losses[0] + losses[1]).backward()
            elif how == "a block":
                scaled_backward(losses[0] + losses[1], run.optimizers)
            else:
                for number in range(2):
                    loss_id = number if how == "two losses" else 0
                    scaled_backward(losses[number], run.optimizers[number], loss_id)
        if how == "GradScaler":
            for optimizer in run.optimizers:
                amp.unscale_(optimizer)
            for optimizer in run.optimizers:
                amp.step(optimizer)
            amp.update()
        else:
            for optimizer in run.optimizers:
                optimizer.step()
        wanted = [before, before]
        wanted[bad if how == "two losses" else 0] /= 2
        assert [scaler.value() for scaler in run.engine.scalers] == wanted
        run.engine.close()


ITERATIONS = 4


def _step(model: Any, loss_of: Any, scaler: Any, optimizer: Any, *, clips: bool) -> None:
    for part in range(2):
        is_last = part == 1
        with nullcontext() if is_last else model.no_sync():
            scaler.scale(loss_of(part)).backward()
    if clips:
        scaler.unscale_(optimizer)
        for param in model.parameters():
            param.grad.mul_(0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def _train(level: str | None, rank: int, *, view: bool, clips: bool) -> list[Any]:
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    if level is None:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    else:
        options: Any = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
        preamp.initialize(model, optimizer, **options)
        scaler = preamp.GradScaler(optimizer, init_scale=2.0**10)
    wrap: Any = DistributedDataParallel
    wrapped = wrap(model, gradient_as_bucket_view=view)
    damage = Damage(model.linear.weight, float("inf"))
    for step in range(ITERATIONS):
        damage.armed = step == 2 and rank == 1  # before it is reduced: all ranks get it

        def loss_of(part: int, step: int = step) -> torch.Tensor:
            x, coefficients = batch(10 * step + 2 * part + rank)
            return (wrapped(x).float() * coefficients).sum()

        _step(wrapped, loss_of, scaler, optimizer, clips=clips)
    found = [value.float().clone() for value in model.state_dict().values()]
    if level is not None:
        preamp.engine_of(optimizer).close()
    return [*found, scaler.get_scale()]


def under_ddp(rank: int) -> dict[str, list[Any]]:
    """The weights and the loss scale of every case, with torch's scaler first."""
    found: dict[str, list[Any]] = {}
    for view, clips, level in combinations([False, True], [False, True], EXACT):
        if f"torch {clips}" not in found:
            found[f"torch {clips}"] = _train(None, rank, view=view, clips=clips)
        found[f"{level}, {view=} {clips}"] = _train(level, rank, view=view, clips=clips)
    return found


def _sharded(level: str, rank: int, change: Any) -> list[Any]:
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 2, bias=False))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(number)
            param.copy_(torch.randint(-2, 3, param.shape, generator=generator).float())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    scaler = preamp.GradScaler(optimizer, init_scale=4.0)
    x = torch.randint(-2, 3, (2, 4), generator=torch.Generator().manual_seed(rank)).float()
    # The second rank alone overflows in the second step.
    for factor in (1.0, float("inf") if rank == 1 else 1.0, 1.0):
        scaler.scale(model(x).float().sum() * factor).backward()
        scaler.unscale_(optimizer)
        change(list(model.parameters()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    found = [value.full_tensor() for value in model.state_dict().values()]
    skipped = preamp.engine_of(optimizer).steps_skipped
    preamp.engine_of(optimizer).close()
    return [*found, scaler.get_scale(), skipped]


def _halve(params: list[Any]) -> None:
    for param in params:
        param.grad.mul_(0.5)


def under_fully_shard(rank: int) -> dict[str, list[Any]]:
    """The weights and the loss scale of every case."""
    clip = functools.partial(torch.nn.utils.clip_grad_norm_, max_norm=0.25)
    changes = {"halve": _halve, "clip": clip, "nothing": lambda params: None}
    return {
        f"{level} {name}": _sharded(level, rank, change)
        for level in (*WITH_MASTERS, "O0")
        for name, change in changes.items()
    }


def test_under_ddp_it_does_what_torchs_does(tmp_path: Path) -> None:
    """With accumulation under ``no_sync``, changed gradients, and an overflow of one rank."""
    first, second = run_ranks(under_ddp, tmp_path)
    for name, found in first.items():
        _compare(second[name], found, name)
        _compare(found, first[f"torch {name.rpartition(' ')[2]}"], name)


@pytest.mark.skipif(not RUNS_ON_CPUS, reason="fully_shard of this torch needs GPUs")
def test_under_fully_shard_all_parts_get_one_factor(tmp_path: Path) -> None:
    """Every rank has other values to tell a clip from; all take the same."""
    first, second = run_ranks(under_fully_shard, tmp_path)
    for name, found in first.items():
        assert found[-2:] == [2.0, 1], name
        _compare(second[name], found, name)
        wanted = first["O0 " + name.partition(" ")[2]]
        for mine, exact in zip(found[:-2], wanted[:-2], strict=True):
            # Weights are rounded for the forward; the updates add up to 2**-5, clipped, or to 1.
            atol = 2.0**-11 if "clip" in name else 2.0**-7
            torch.testing.assert_close(mine, exact, rtol=0, atol=atol)


def _compare(some: list[Any], others: list[Any], name: str) -> None:
    for mine, its in zip(some, others, strict=True):
        assert_same(mine, its, name)
