# SPDX-License-Identifier: BSD-3-Clause
"""Small models really trained with a fault planted from a known step on, and healthy ones."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import preamp
from preamp.numerics import Record

Change = Callable[[Any], Any]
WIDTH, CLASSES = 24, 4


class Spot(nn.Module):
    """Where a fault is planted."""

    change: Change | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.change is None else self.change(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.spot = Spot()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.spot(torch.tanh(self.inner(self.norm(x))))


def net() -> nn.Module:
    """A classifier with three blocks."""
    stem, head = nn.Linear(48, WIDTH), nn.Linear(WIDTH, CLASSES)
    return nn.Sequential(nn.Flatten(), stem, Block(), Block(), Block(), head)


def deep() -> nn.Module:
    """Sigmoids upon sigmoids: gradients shrink with every layer."""
    layers = [layer for _ in range(6) for layer in (nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))]
    return nn.Sequential(nn.Flatten(), nn.Linear(48, WIDTH), *layers, nn.Linear(WIDTH, CLASSES))


def bare() -> nn.Module:
    """Nothing keeps its values small."""
    sizes = (48, WIDTH, WIDTH, CLASSES)
    layers = [layer for two in pairwise(sizes) for layer in (nn.Linear(*two), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


class _Steepen(torch.autograd.Function):
    """Multiplies the gradient, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def steep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(2):
        x = cast("Any", _Steepen).apply(x, 6e4)
    return x


@dataclass(frozen=True)
class Case:
    """One run, and what its report has to say first."""

    name: str
    first: str  # the first line, a pattern that matches all of it
    _: KW_ONLY
    do: str = ""  # pattern of what is to be done
    where: str = ""  # a parameter, module or operation that the first advice has to name
    never: str = ""  # pattern that no advice of the page may have
    level: str = "O2"
    net: Callable[[], nn.Module] = net
    steps: int = 40
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of ``initialize``
    place: str = "spot"  # of the second block, "batch", "loss", "rate" or "weights"
    change: Change | None = None  # the fault that is planted there
    at: Callable[[int], bool] = lambda step: True  # the steps of the fault
    scale: float = 2.0**12  # loss scale to begin with, where it is dynamic
    parts: int = 1  # backwards of each step


def train(case: Case) -> list[Record]:
    """Run a case; returns its records."""
    torch.manual_seed(0)
    model = case.net()
    optimizer = case.optimizer(model.parameters(), lr=case.lr)
    options = {"numerics": "light", "numerics_every": 5, **case.options}
    preamp.initialize(model, optimizer, opt_level=case.level, verbosity=0, **options)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(case.scale)
    inputs = torch.randn(64, 6, 8)
    labels = (inputs.mean(1)[:, :CLASSES]).argmax(1)
    with suppress(preamp.LossScaleError):  # the scale fell to nothing: the run is over
        for step in range(1, case.steps + 1):
            planted = case.change if case.change and case.at(step) else None
            at = defaultdict[str, Change](lambda: lambda x: x)
            if planted:
                at[case.place] = planted
            for spot in [m for m in model.modules() if isinstance(m, Spot)][1:2]:
                spot.change = at["spot"]
            if case.place == "weights" and planted:
                with torch.no_grad():
                    for param in model.parameters():
                        param.copy_(planted(param))
            optimizer.param_groups[0]["lr"] = at["rate"](case.lr)
            for _ in range(case.parts):
                loss = F.cross_entropy(model(at["batch"](inputs)).float(), labels)
                with preamp.scale_loss(at["loss"](loss) / case.parts, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    return [*engine.history]


def since(first: int) -> Callable[[int], bool]:
    return lambda step: step >= first


def times(factor: float) -> Change:
    return lambda x: x * factor


TRACED = {"overflow": "trace"}
FULL = {"numerics": "full", "numerics_every": 10}
GOOD = "Nothing to report"
A_SCALE = r"(smaller|larger|lower|other|higher) (loss )?scale|dynamic"

# A case is a few lines, its name, first line and advice before its settings.
# fmt: off
FAULTY = (
    # skips
    Case("backward-traced", "Gradients become infinite at any scale, since step 20",
        where="3.spot", never="overflow=.?.trace", change=steep, at=since(20), options=TRACED),
    Case("backward-not-traced",
        "Overflows keep beginning in the gradient of 3.inner.bias, since step 4",
        do='overflow="trace"', where="3.inner", change=steep, at=lambda step: step % 4 == 0),
    Case("nan-at-any-scale", "Gradients become nan at any scale, since step 20",
        do='overflow="trace"', where="3.inner", at=since(20),
        # It adds nothing, by way of a square root whose gradient at 0 is infinite.
        change=lambda x: x + (x - x.detach()).square().sqrt()),
    Case("search-from-2^40", "Many steps in a row were skipped, since step 1", do=r"[Bb]egin",
        steps=60, scale=2.0**40, options={"max_loss_scale": 2.0**40}),
    # losses that are infinite or nan
    Case("forward-traced", "The forward of 3.spot makes inf, since step 26",
        where="3.spot", do="float32", never=f"overflow=.?.trace|{A_SCALE}",
        change=times(3e5), at=since(26), options=TRACED),
    Case("log-of-negatives-traced-o1", "The forward of 3.spot makes nan, since step 9",
        where="3.spot", never=f"float32|bfloat16|{A_SCALE}", level="O1",
        change=lambda x: torch.log(x.float() - 5), at=since(9), options=TRACED),
    Case("log-of-zero-in-the-loss", "The loss is infinite or nan, since step 15",
        do="loss function", never=A_SCALE, place="loss",
        change=lambda loss: loss - torch.log(loss.detach() * 0), at=since(15), options=TRACED),
    Case("nan-data-o5", "The loss is infinite or nan, since step 22", do="data", level="O5",
        place="batch", change=times(float("nan")), at=lambda step: step == 22,
        options={"numerics": "full"}),
    # scales
    Case("o3-scale-1-all-zero", "All gradients are zero in float16, since step 1", do="dynamic",
        where="16 gradients", level="O3", net=deep, place="loss", change=times(1e-6)),
    Case("o3-static-2^28-no-statistics", "A static loss scale of 2²⁸ is too large, since step 2",
        do="smaller|dynamic", never="No loss scale", level="O3",
        options={"loss_scale": 2.0**28, "numerics": "off", "history": "run.jsonl"}),
    # layers
    Case("updates-stall", "Updates round to nothing, since step 1", do="masters", where="inner",
        level="O3", lr=1e-4, options={"loss_scale": 1024.0, "numerics": "full"}),
    Case("early-layers-underflow",
        "Gradients vanish below the smallest float16 number, since step 1", do="scale",
        where="[13]", level="O3", net=deep, options={"loss_scale": 4.0}, place="loss",
        change=times(1e-4)),
    # a rate that is too high is neither the scale's fault nor a layer's
    Case("rate-of-30", "Training diverges, since step [0-9]+", do="lower the learning rate",
        where="weights grew|is not finite", never=f"zero|norm|{A_SCALE}", lr=30.0, net=bare,
        options=FULL),
    Case("weights-written", "Training diverges, since step (22|31)", do="wrote to weights",
        level="O5", place="weights", change=times(1e4), at=lambda step: step == 22, options=FULL),
)

HEALTHY = (
    Case("healthy-search-from-2^24", GOOD, scale=2.0**24, steps=60),
    Case("healthy-falls-below-zero", GOOD, level="O5", place="loss", change=lambda loss: loss - 5,
        steps=120),
    Case("healthy-noisy-data", GOOD, place="batch", change=lambda x: x + torch.randn_like(x),
        steps=150),
    Case("healthy-in-two-parts-at-O1", GOOD, level="O1", optimizer=torch.optim.AdamW, lr=1e-3,
        parts=2, options=FULL),
)
# fmt: on
