# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of torch's DistributedDataParallel around an initialized model.

Gradients are exact (see ``cases.models``), so runs that round nothing on the way equal one process
with both batches to the bit.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import preamp
from cases.levels import BY_NAME, CASTING_FUNCTIONS, LEVEL_NAMES, WITH_MASTERS
from cases.models import Damage, Exact, Parts, batch, values
from cases.selection import combinations
from cases.tolerances import assert_same
from preamp.parallel import DistributedDataParallel

RANKS = 2
STEPS = 3


def loss_of(model: Any, index: int, **use: Any) -> torch.Tensor:
    x, coefficients = batch(index)
    return (model(x, **use).float() * coefficients).sum()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


class Run:
    """A model on two ranks under a wrapper, and beside it on each rank alone with both batches."""

    def __init__(
        self,
        level: str,
        model: Callable[[int], nn.Module] = Exact,
        *,
        build: Callable[[Any], Any] = sgd,
        wrap: Any = TorchDDP,
        num_losses: int = 1,
        **wrapping: Any,
    ) -> None:
        row = BY_NAME[level]
        self.model = model(dist.get_rank())  # the first rank's weights are those that count
        self.plain = model(0).to(torch.float32 if row.has_masters else row.weight)
        self.optimizer = build(self.model.parameters())
        self.plain_optimizer = build(self.plain.parameters())
        preamp.initialize(
            self.model,
            self.optimizer,
            opt_level=level,
            loss_scale="dynamic",
            num_losses=num_losses,
            verbosity=0,
        )
        self.engine = preamp.engine_of(self.model)
        self.ddp = wrap(self.model, **wrapping)

    def backward(
        self, index: int, loss_id: int = 0, factor: float = 1.0, delay: bool = False, **use: Any
    ) -> None:
        loss = loss_of(self.ddp, RANKS * index + dist.get_rank(), **use) * factor
        with preamp.scale_loss(loss, self.optimizer, loss_id, delay_unscale=delay) as scaled:
            scaled.backward()
            self.reduce()
        dtype = next(self.plain.parameters()).dtype
        with preamp.disable_casts():
            for rank in range(RANKS):
                x, coefficients = batch(RANKS * index + rank)
                out = self.plain(x.to(dtype), **use).float()
                ((out * coefficients).sum() / RANKS).backward()

    def reduce(self) -> None:
        """Nothing is left to do where the wrapper has reduced."""

    def step(self) -> None:
        self.optimizer.step()
        with preamp.disable_casts():
            self.plain_optimizer.step()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def check(self, *, tolerance: float = 0.0, steps: int = STEPS) -> None:
        assert self.engine.steps_applied == steps
        for param, wanted in zip(
            preamp.master_params(self.optimizer), values(self.plain_optimizer), strict=True
        ):
            if tolerance:
                torch.testing.assert_close(param.detach(), wanted, atol=tolerance, rtol=tolerance)
            else:
                assert_same(param.detach(), wanted)
        self.check_ranks()
        self.engine.close()

    def check_ranks(self) -> None:
        """Masters, weights, gradients' outcome and scales are the same to the bit everywhere."""
        own = [*preamp.master_params(self.optimizer), *self.model.parameters()]
        weights = torch.cat([param.detach().float().flatten() for param in own])
        scales = [scaler.value() for scaler in self.engine.scalers]
        counts = [self.engine.steps_applied, self.engine.steps_skipped]
        mine = torch.cat([weights, torch.tensor([*scales, *map(float, counts)])])
        everywhere = [torch.empty_like(mine) for _ in range(RANKS)]
        dist.all_gather(everywhere, mine)
        assert_same(everywhere[0], everywhere[1])


def check_plain_training_with_buckets_and_without() -> None:
    for level, view in combinations(LEVEL_NAMES, (False, True)):
        run = Run(level, gradient_as_bucket_view=view)
        for step in range(STEPS):
            run.backward(step)
            run.step()
        run.check()


def check_masters_are_those_of_the_first_rank_from_the_first_forward_on() -> None:
    """Torch broadcasts the half weights alone; each rank drew masters of its own."""
    for level, wrap in combinations(WITH_MASTERS, (TorchDDP, DistributedDataParallel)):
        run = Run(level, wrap=wrap)
        loss_of(run.ddp, 0)
        for param, wanted in zip(
            preamp.master_params(run.optimizer), Exact(0).parameters(), strict=True
        ):
            assert_same(param.detach(), wanted.detach())
        run.engine.close()


def check_accumulation() -> None:
    for level, view in combinations(LEVEL_NAMES, (False, True)):
        run = Run(level, gradient_as_bucket_view=view)
        for step in range(STEPS):
            for part in range(3):
                with run.ddp.no_sync() if part < 2 else nullcontext():
                    run.backward(3 * step + part)
            run.step()
        run.check()


def check_losses_with_scalers_of_their_own() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, num_losses=2)
        run.engine.scaler(1).set_scale(2.0)
        for step in range(STEPS):
            run.backward(2 * step, 0)
            run.backward(2 * step + 1, 1, factor=math.inf if _is_second() and step == 1 else 1.0)
            run.step()
        assert run.engine.steps_skipped == 1
        assert run.engine.loss_scale(0) == 2.0**16
        assert run.engine.loss_scale(1) == 1.0
        run.check_ranks()
        run.engine.close()


def _bf16(state: Any, bucket: Any) -> Any:
    """Torch's hook, which it refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


_bf16.__annotations__.clear()  # torch reads them, and wants its own


def check_compression() -> None:
    for level, hook in combinations(LEVEL_NAMES, (_bf16, default_hooks.fp16_compress_hook)):
        run = Run(level)
        run.engine.scaler(0).set_scale(8.0)  # float32 gradients fit float16 on the way
        run.ddp.register_comm_hook(None, hook)
        for step in range(STEPS):
            run.backward(step)
            run.step()
        run.check(tolerance=0.01)


def check_a_graph_that_is_static() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, static_graph=True)
        for step in range(STEPS):
            run.backward(step)
            run.step()
        run.check()


def check_parameters_that_are_not_used() -> None:
    for level in LEVEL_NAMES:
        run = Run(level, Parts, find_unused_parameters=True)
        for step in range(STEPS):
            run.backward(step, parts="ab"[step % 2])
            run.step()
        run.check_ranks()
        assert run.engine.steps_applied == STEPS
        run.engine.close()


def check_a_step_adds_no_communication() -> None:
    """Ranks agree by the gradients that the wrapper has reduced; it does so without Python."""
    names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "send"))]
    for level, wrap in combinations(LEVEL_NAMES, (TorchDDP, DistributedDataParallel)):
        run = Run(level, wrap=wrap)
        run.backward(0)
        run.step()
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(dist, name, None)  # whoever calls it fails
            run.backward(1)
            preamp.clip_grad_norm_(run.optimizer, 1.0)
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.engine.close()


def _is_second() -> bool:
    return dist.get_rank() == 1


def _in_loss(run: Run) -> None:
    run.backward(1, factor=math.inf if _is_second() else 1.0)


def _in_gradient(run: Run) -> None:
    if _is_second():
        Damage(run.model.get_parameter("linear.weight"), math.inf).armed = True
    run.backward(1)


def _in_activation(run: Run) -> None:
    handle = None
    if _is_second():
        handle = run.model.get_submodule("linear").register_forward_hook(
            lambda module, args, output: output * math.nan, prepend=True
        )
    run.backward(1)
    if handle is not None:
        handle.remove()


def check_an_overflow_that_one_rank_alone_sees() -> None:
    places = (_in_loss, _in_gradient, _in_activation)
    wraps = (TorchDDP, DistributedDataParallel)
    for level, place, wrap in combinations(LEVEL_NAMES, places, wraps, size=2):
        run = Run(level, wrap=wrap)
        run.backward(0)
        run.step()
        before = values(run.optimizer)
        place(run)
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.plain_optimizer.zero_grad()
        assert run.engine.steps_skipped == 1, (level, place)
        assert run.engine.loss_scale() == 2.0**15
        for now, wanted in zip(values(run.optimizer), before, strict=True):
            assert_same(now, wanted, f"{level}, {place}")
        run.backward(2)
        run.step()
        run.check(steps=2)


def _by_hand(level: str, *, inside: bool) -> tuple[int, bool]:
    """A step whose gradients overflow on the second rank; reduced without a wrapper."""
    model = Exact(0)
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    engine = preamp.engine_of(model)
    loss = loss_of(model, dist.get_rank()) * (math.inf if _is_second() else 1.0)
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        if inside:
            _reduce(model)
    if not inside:
        _reduce(model)
    optimizer.step()
    finite = all(bool(torch.isfinite(param).all()) for param in model.parameters())
    found = engine.steps_skipped, finite
    engine.close()
    return found


def _reduce(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= RANKS


def check_reducing_by_hand_belongs_into_the_block() -> None:
    """Looked for is what the block ends with: after it, the other rank does not know."""
    for level in CASTING_FUNCTIONS:
        assert _by_hand(level, inside=True) == (1, True)
        assert _by_hand(level, inside=False) == ((1, True) if _is_second() else (0, False))
