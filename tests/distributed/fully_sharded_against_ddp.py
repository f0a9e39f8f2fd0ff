# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of programs under ``fully_shard``: each is the same one under DDP.

Ranks do the same arithmetic and reduce to the same mean, so whole weights are equal bitwise;
with norms, and where a part ends within a vector of the processor, up to the last bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import preamp
from distributed.fully_sharded_checks import Optimize, batch, sgd, shard, whole
from preamp import optimizers
from preamp.parallel.LARC import LARC

STEPS = 3
LEVELS = ("O1", "O2", "O5")
LAST_BIT = 2e-7  # of weights around one, after three steps


class Net(nn.Module):
    """Three layers, the middle one recomputed if asked for, and a layer that nothing uses."""

    def __init__(self, *, recomputes: bool = False, freezes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.middle = nn.Linear(5, 7)
        self.last = nn.Linear(7, 1)
        self.idle = nn.Linear(3, 3)
        self.recomputes = recomputes
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-2, 3, param.shape, generator=generator) / 4)
        if freezes:
            self.first.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.recomputes:
            x = cast("Any", checkpoint)(self.middle, x, use_reentrant=False)
        else:
            x = self.middle(x)
        return self.last(x)


@dataclass
class Run:
    """A model in training on each rank's half of a batch."""

    model: Any
    forward: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self, factor: float = 1.0, **options: Any) -> None:
        loss = self.forward(batch(dist.get_rank())).float().mean() * factor
        with preamp.scale_loss(loss, self.optimizer, **options) as scaled:
            scaled.backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def start(level: str, optimize: Optimize, is_sharded: bool, net: Net, **options: Any) -> Run:
    if is_sharded:
        shard(net)
    optimizer = optimize(net)
    options = {"loss_scale": "dynamic"} | options
    preamp.initialize(net, optimizer, opt_level=level, verbosity=0, **options)
    for scaler in preamp.engine_of(optimizer).scalers:
        if options["loss_scale"] == "dynamic":
            scaler.set_scale(2.0**10)
    forward = net if is_sharded else DistributedDataParallel(net, find_unused_parameters=True)
    return Run(net, forward, optimizer)


def compare(
    program: Callable[[Run, int], None],
    optimize: Optimize,
    *,
    tolerance: float = 0.0,
    make: Callable[[], Net] = Net,
    **options: Any,
) -> None:
    for level in LEVELS:
        found: list[list[torch.Tensor]] = []
        for is_sharded in (True, False):
            run = start(level, optimize, is_sharded, make(), **options)
            for step in range(STEPS):
                program(run, step)
            engine = preamp.engine_of(run.optimizer)
            assert engine.steps_skipped == 0
            found.append([whole(value) for value in run.model.state_dict().values()])
            engine.close()
        for own, wanted in zip(*found, strict=True):
            torch.testing.assert_close(own, wanted, rtol=0, atol=tolerance, msg=level)


def plain(run: Run, step: int) -> None:
    del step
    run.backward()
    run.end()


def all_of(make: Callable[[Any], torch.optim.Optimizer]) -> Optimize:
    return lambda net: make(net.parameters())


def check_several_losses_with_scales_of_their_own() -> None:
    def program(run: Run, step: int) -> None:
        preamp.engine_of(run.optimizer).scaler(1).set_scale(2.0 ** (4 + step))
        run.backward(loss_id=0)
        run.backward(2.0, loss_id=1)
        run.end()

    compare(program, all_of(sgd), num_losses=2)


def check_delayed_unscaling() -> None:
    """Summed scaled: at O5 in bfloat16, where torch's DDP adds up before it averages."""

    def program(run: Run, step: int) -> None:
        del step
        run.backward(delay_unscale=True)
        run.backward()
        run.end()

    compare(program, all_of(sgd), tolerance=2.0**-8)


def check_clipping() -> None:
    def program(run: Run, step: int) -> None:
        del step
        run.backward()
        preamp.clip_grad_norm_(run.optimizer, 0.25)
        run.end()

    compare(program, all_of(sgd), tolerance=LAST_BIT)


def check_frozen_parameters_and_recomputed_layers() -> None:
    compare(plain, all_of(sgd), make=lambda: Net(freezes=True))
    compare(plain, all_of(sgd), make=lambda: Net(recomputes=True))


def check_groups_added_later() -> None:
    def program(run: Run, step: int) -> None:
        if step == 1:
            later = {"params": list(run.model.last.parameters()), "lr": 0.5}
            run.optimizer.add_param_group(later)
        plain(run, step)

    for make in (sgd, lambda params: optimizers.FusedSGD(params, lr=0.25)):
        compare(program, lambda net, make=make: make([*net.first.parameters()]))


def check_every_rule() -> None:
    rules: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adam": lambda p: optimizers.FusedAdam(p, lr=0.1),
        "adagrad": lambda p: optimizers.FusedAdagrad(p, lr=0.1),
        "lamb": lambda p: optimizers.FusedLAMB(p, lr=0.1),
        "mixed lamb": lambda p: optimizers.FusedMixedPrecisionLamb(p, lr=0.1),
        "lars": lambda p: optimizers.FusedLARS(p, lr=0.1, momentum=0.9, trust_coefficient=0.5),
        "novograd": lambda p: optimizers.FusedNovoGrad(p, lr=0.1),
        "larc": lambda p: LARC(torch.optim.SGD(p, lr=0.1)),
        "fused adam of torch": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
        "foreach adam of torch": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    }
    for make in rules.values():
        compare(plain, all_of(make), tolerance=LAST_BIT)
