# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of an overflow on one of them: both name the same parameters."""

import io
import math
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import preamp
from cases.models import Damage
from preamp.parallel import DistributedDataParallel

NAMES = ("last.weight", "middle.weight", "first.weight")
"""In the order of a backward."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Run:
    def __init__(self, level: str, wrap: Any, **options: Any) -> None:
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        preamp.initialize(
            self.model,
            self.optimizer,
            opt_level=level,
            loss_scale="dynamic",
            verbosity=0,
            **options,
        )
        self.engine = preamp.engine_of(self.model)
        self.engine.scaler(0).set_scale(16.0)
        self.ddp = wrap(self.model)

    def step(self) -> None:
        loss = self.ddp(torch.ones(2, 4)).float().sum()
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


WRAPS = (DistributedDataParallel, nn.parallel.DistributedDataParallel)


def check_a_gradient_on_one_rank_is_named_on_both() -> None:
    for level in ("O1", "O2", "O4", "O5"):
        for wrap in WRAPS:
            run = Run(level, wrap)
            run.step()
            if dist.get_rank() == 1:
                for name in (NAMES[2], NAMES[1]):
                    Damage(run.model.get_parameter(name), math.inf).armed = True
            run.step()
            (cause,) = run.engine.overflow_causes
            assert cause.parameters == NAMES[1:], (level, wrap, cause)
            assert cause.loss_was_finite
            run.engine.close()


def printed_by(step: Callable[[], None]) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        step()
    return out.getvalue()


def check_a_forward_on_one_rank_is_traced_there() -> None:
    """The other rank gets the values by the reduction; each of both prints what it has seen."""
    for level in ("O1", "O2", "O4", "O5"):
        for wrap in WRAPS:
            run = Run(level, wrap, overflow="trace")
            run.step()
            handle = None
            if dist.get_rank() == 1:
                handle = run.model.middle.register_forward_hook(
                    lambda module, args, output: output * math.inf, prepend=True
                )
            lines = printed_by(run.step)
            again = printed_by(run.step)
            if handle is not None:
                handle.remove()
            cause, _ = run.engine.overflow_causes
            assert cause.parameters == NAMES, (level, wrap, cause)
            assert cause.was_watched
            if dist.get_rank() == 1:
                assert cause.trace is not None
                assert (cause.trace.module, cause.trace.phase) == ("middle", "forward")
                assert lines.startswith("Rank 1: Gradient overflow.")
                assert "the forward of 'middle' (Linear)" in lines
                assert again == ""  # once is enough from each rank
            else:
                assert cause.trace is None
                assert "a rank that has seen where it was made prints it" in lines
                assert "Gradient overflow." in again
            run.engine.close()
