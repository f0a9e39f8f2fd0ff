# SPDX-License-Identifier: BSD-3-Clause
"""Small models really trained with a fault planted from a known step on, and healthy ones."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import preamp
from preamp.numerics import Record

Change = Callable[[Any], Any]
WIDTH, CLASSES = 24, 4


class Block(nn.Module):
    """A linear layer or a self-attention; its ``spot`` is where a fault is planted."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH if kind == "attention" else WIDTH)
        self.spot = Spot()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.inner(self.norm(x))
        if self.kind == "attention":
            made = F.scaled_dot_product_attention(*made.chunk(3, dim=-1))
        return x + self.spot(torch.tanh(made))


class Spot(nn.Module):
    change: Change | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.change is None else self.change(x)


class Net(nn.Module):
    """A classifier of small sequences: ``mlp``, ``attention``, or ``conv``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        conv = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.stem = conv if kind == "conv" else nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.stem, nn.Conv1d):
            return self.head(self.blocks(self.stem(x.transpose(1, 2)).transpose(1, 2)).mean(1))
        return self.head(self.blocks(self.stem(x)).mean(1))


class Deep(nn.Module):
    """Sigmoids upon sigmoids: gradients shrink with every layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.mean(1))
        for layer in self.layers:
            x = layer(torch.sigmoid(x))
        return self.head(x)


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


def root_of_zero(x: torch.Tensor) -> torch.Tensor:
    """Add nothing, by way of a square root whose gradient at 0 is infinite: nan at any scale."""
    return x + (x - x.detach()).square().sqrt()


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
    kind: str = "mlp"
    net: Callable[[str], nn.Module] = Net
    steps: int = 40
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.05
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of ``initialize``
    change: Change | None = None  # planted in the spot of the second block
    data: Change | None = None  # planted in the batch
    loss: Change | None = None  # planted in the loss
    rate: Change | None = None  # planted in the learning rate
    write: Change | None = None  # planted in the weights
    at: Callable[[int], bool] = lambda step: True  # the steps of the fault
    scale: float = 2.0**12  # loss scale to begin with, where it is dynamic
    parts: int = 1  # backwards of each step


def train(case: Case) -> list[Record]:
    """Run a case; returns its records."""
    torch.manual_seed(0)
    model = case.net(case.kind)
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
            is_faulty = case.at(step)
            if case.change is not None:
                model.get_submodule("blocks.1.spot").change = case.change if is_faulty else None
            if case.write is not None and is_faulty:
                with torch.no_grad():
                    for param in model.parameters():
                        param.copy_(case.write(param))
            rate = case.rate(case.lr) if case.rate and is_faulty else case.lr
            optimizer.param_groups[0]["lr"] = rate
            for _ in range(case.parts):
                x = case.data(inputs) if case.data and is_faulty else inputs
                loss = F.cross_entropy(model(x).float(), labels)
                loss = case.loss(loss) if case.loss and is_faulty else loss
                with preamp.scale_loss(loss / case.parts, optimizer) as scaled:
                    scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    return [*engine.history]


def since(first: int) -> Callable[[int], bool]:
    return lambda step: step >= first


def only(*steps: int) -> Callable[[int], bool]:
    return lambda step: step in steps


def times(factor: float) -> Change:
    return lambda x: x * factor


TRACED = {"overflow": "trace"}
FULL = {"numerics": "full", "numerics_every": 10}
GOOD = "Nothing to report"
A_SCALE = r"(smaller|larger|lower|other|higher) (loss )?scale|dynamic"
LEARNING_RATE = "lower the learning rate"
NAN = float("nan")

# A case is a few lines, its name, first line and advice before its settings.
# fmt: off
FAULTY = (
    # skips
    Case("backward-traced", "Gradients become infinite at any scale, since step 20",
        where="blocks.1.spot", never="overflow=.?.trace", change=steep, at=since(20),
        options=TRACED),
    Case("backward-not-traced",
        "Overflows keep beginning in the gradient of blocks.1.inner.bias, since step 4",
        do='overflow="trace"', where="blocks.1.inner", change=steep, at=lambda step: step % 4 == 0),
    Case("nan-at-any-scale-traced", "Gradients become infinite at any scale, since step 20",
        where="blocks.1.spot", never=f"overflow=.?.trace|{A_SCALE}", kind="conv",
        change=root_of_zero, at=since(20), options=TRACED),
    Case("nan-at-any-scale", "Gradients become nan at any scale, since step 20",
        do='overflow="trace"', where="blocks.1.inner", change=root_of_zero, at=since(20)),
    Case("no-step-taken", "No step was taken, since step 1", do="lower scale", steps=4,
        scale=2.0**40),
    Case("search-from-2^40", "Many steps in a row were skipped, since step 1", do=r"[Bb]egin",
        steps=60, scale=2.0**40, options={"max_loss_scale": 2.0**40}),
    # losses that are infinite or nan
    Case("forward-traced", "The forward of blocks.1.spot makes inf, since step 26",
        where="blocks.1.spot", do="float32", never=f"overflow=.?.trace|{A_SCALE}",
        change=times(3e5), at=since(26), options=TRACED),
    Case("log-of-negatives-traced-o1", "The forward of blocks.1.spot makes nan, since step 9",
        where="blocks.1.spot", never=f"float32|bfloat16|{A_SCALE}", level="O1",
        change=lambda x: torch.log(x.float() - 5), at=since(9), options=TRACED),
    Case("forward-not-traced", "The loss is infinite or nan, since step 26", do='overflow="trace"',
        never=A_SCALE, change=times(3e5), at=since(26)),
    Case("nan-data-o5", "The loss is infinite or nan, since step 22", do="data", level="O5",
        data=times(NAN), at=only(22), options={"numerics": "full"}),
    Case("log-of-zero-in-the-loss", "The loss is infinite or nan, since step 15",
        do="loss function", never=A_SCALE, loss=lambda loss: loss - torch.log(loss.detach() * 0),
        at=since(15), options=TRACED),
    # scales
    Case("o3-scale-1-all-zero", "All gradients are zero in float16, since step 1", do="dynamic",
        where="16 gradients", level="O3", net=Deep, loss=times(1e-6)),
    Case("loss-times-zero", "All gradients are zero, since step 11", do="depends",
        never="Pass", loss=times(0.0), at=since(11)),
    Case("o3-static-2^28-no-statistics", "A static loss scale of 2²⁸ is too large, since step 2",
        do="smaller|dynamic", never="No loss scale", level="O3", kind="conv",
        options={"loss_scale": 2.0**28, "numerics": "off", "history": "run.jsonl"}),
    Case("o2-static-steep", "The backward of a finite loss makes inf or nan, since step 17",
        do="huge", where="blocks.1.inner", options={"loss_scale": 2.0**12, "numerics_every": 1},
        change=steep, at=since(17)),
    # layers
    Case("updates-stall", "Updates round to nothing, since step 1", do="masters", where="stem",
        level="O3", lr=1e-4, options={"loss_scale": 1024.0, "numerics": "full"}),
    Case("early-layers-underflow",
        "Gradients vanish below the smallest float16 number, since step 1", do="scale",
        where="stem|layers.0", level="O3", net=Deep, options={"loss_scale": 4.0}, loss=times(1e-4)),
    # a rate that is too high is neither the scale's fault nor a layer's
    Case("rate-of-30", "Training diverges, since step [0-9]+", do=LEARNING_RATE,
        where="weights grew|is not finite", never=f"zero|norm|{A_SCALE}", lr=30.0,
        net=lambda kind: nn.Sequential(nn.Flatten(), nn.Linear(48, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES)), options=FULL),
    Case("rate-raised", "Training diverges, since step 21", do=LEARNING_RATE, where="1e.03",
        optimizer=torch.optim.Adam, lr=1e-3, rate=times(1e6), at=since(20), options=FULL),
    Case("weights-written", "Training diverges, since step (22|31)", do="wrote to weights",
        level="O5", write=times(1e4), at=only(22), options=FULL),
)

HEALTHY = (
    *(Case(f"healthy-{level}-{kind}-{optimizer.__name__}", GOOD, level=level, kind=kind,
        optimizer=optimizer, lr=lr, parts=parts, steps=steps, options=options)
      for level, kind, optimizer, lr, parts, steps, options in (
        ("O0", "mlp", torch.optim.SGD, 0.05, 1, 40, FULL),
        ("O1", "attention", torch.optim.AdamW, 1e-3, 2, 40, {}),
        ("O2", "conv", torch.optim.Adam, 3e-3, 1, 60, FULL),
        ("O5", "attention", torch.optim.Adam, 1e-3, 1, 120, FULL),
    )),
    Case("healthy-search-from-2^24", GOOD, scale=2.0**24, steps=60),
    Case("healthy-falls-below-zero", GOOD, level="O5", loss=lambda loss: loss - 5, steps=120),
    Case("healthy-noisy-data", GOOD, data=lambda x: x + torch.randn_like(x), steps=150),
    Case("healthy-tiny-loss", GOOD, loss=times(1e-4), scale=2.0**16, steps=60),
)
# fmt: on
