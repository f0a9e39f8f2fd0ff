# SPDX-License-Identifier: BSD-3-Clause
"""Runs with a fault planted in them, and what the first line of their report has to say.

Each run really trains a small model. A fault is planted in the model, the data, the loss or the
settings, from a known step on; healthy runs have none.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import preamp
from insight import report_changes as changes
from insight import report_scripts as scripts
from insight.score import Score
from preamp.numerics import Record, read_history
from preamp.report.advice import advise, judge
from preamp.report.gather import gather

Change = Callable[[torch.Tensor], torch.Tensor]
WIDTH, CLASSES = 24, 4


class Spot(nn.Module):
    """Hands its input on; where a fault is planted, not unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Change | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, changed where a fault is planted."""
        return x if self.change is None else self.change(x)


class Block(nn.Module):
    """A linear layer or a self-attention, and a spot behind it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, 3 * WIDTH if kind == "attention" else WIDTH)
        self.spot = Spot()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of ``x``: (batch, length, width)."""
        made = self.inner(self.norm(x))
        if self.kind == "attention":
            made = F.scaled_dot_product_attention(*made.chunk(3, dim=-1))
        return x + self.spot(torch.tanh(made))


class Net(nn.Module):
    """A classifier of small sequences: ``mlp``, ``attention``, or ``conv``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        conv = nn.Conv1d(8, WIDTH, 3, padding=1)
        self.stem = conv if kind == "conv" else nn.Linear(8, WIDTH)
        self.blocks = nn.Sequential(*(Block(kind) for _ in range(3)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, classes), of shape (batch, length, 8)."""
        if isinstance(self.stem, nn.Conv1d):
            return self.head(self.blocks(self.stem(x.transpose(1, 2)).transpose(1, 2)).mean(1))
        return self.head(self.blocks(self.stem(x)).mean(1))


class Deep(nn.Module):
    """Sigmoids upon sigmoids: gradients shrink with every layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        del kind
        self.stem = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, classes), of shape (batch, length, 8)."""
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


def steepen(factor: float) -> Change:
    """Return what multiplies gradients by ``factor``."""
    return lambda x: cast("Any", _Steepen).apply(x, factor)


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
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])  # options of the optimizer
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of ``initialize``
    change: Change | None = None  # planted in the spot of the second block
    data: Change | None = None  # planted in the batch
    loss: Change | None = None  # planted in the loss
    rate: Callable[[Any], Any] | None = None  # planted in the learning rate
    at: Callable[[int], bool] = lambda step: True  # the steps of the fault
    scale: float | None = None  # loss scale to begin with, where it is dynamic
    parts: int = 1  # backwards of each step
    script: Callable[[Path], None] | None = None  # what trains in place of all this


def train(case: Case) -> list[Record]:
    """Run a case; returns its records."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        if case.script is None:
            return _train(case, path)
        case.script(path)
        return read_history(path)


def _train(case: Case, path: Path) -> list[Record]:
    torch.manual_seed(0)
    model = case.net(case.kind)
    optimizer = case.optimizer(model.parameters(), lr=case.lr, **case.more)
    options = {"numerics": "light", "numerics_every": 5, "history": path, **case.options}
    preamp.initialize(model, optimizer, opt_level=case.level, verbosity=0, **options)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(case.scale or 2.0**12)
    inputs = torch.randn(64, 6, 8)
    labels = (inputs.mean(1)[:, :CLASSES]).argmax(1)
    with suppress(preamp.LossScaleError):  # the scale fell to nothing: the run is over
        for step in range(1, case.steps + 1):
            is_faulty = case.at(step)
            if case.change is not None:
                spot = cast("Spot", model.get_submodule("blocks.1.spot"))
                spot.change = case.change if is_faulty else None
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
    history = engine.history
    engine.close()
    return [*history]


def since(first: int) -> Callable[[int], bool]:
    """Whether a step comes at or after ``first``."""
    return lambda step: step >= first


def only(*steps: int) -> Callable[[int], bool]:
    """Whether a step is one of ``steps``."""
    return lambda step: step in steps


def times(factor: float) -> Callable[[Any], Any]:
    """Return what multiplies by ``factor``."""
    return lambda x: x * factor


TRACED = {"overflow": "trace"}
STATIC = {"loss_scale": 2.0**28}
ADAM = torch.optim.Adam
GOOD = "Nothing to report"
A_SCALE = r"(smaller|larger|lower|other|higher) (loss )?scale|dynamic"
LEARNING_RATE = "[Ll]ower the learning rate"
BY_A_FORWARD: dict[str, Any] = {
    "first": "The forward of blocks.1.spot makes inf, since step 26",
    "where": "blocks.1.spot",
    "do": "float32",
    "never": f"overflow=.?.trace|{A_SCALE}",
}

# Tables from here on: a case is a few lines, its name, first line and advice before its settings.
# fmt: off
FAULTY = (
    Case("o3-scale-1-all-zero", "All gradients are zero in float16, since step 1", do="dynamic",
        where="12 gradients|14 gradients|16 gradients", level="O3", net=Deep, loss=times(1e-6)),
    Case("o1-scale-1-all-zero", "All gradients are zero in float16, since step 1", do="dynamic",
        level="O1", kind="attention", loss=times(1e-9), options={"loss_scale": 1.0}),
    Case("o2-static-2^28", "A static loss scale of 2²⁸ is too large, since step 1",
        do="smaller|dynamic", options=STATIC),
    Case("o3-static-2^28-no-statistics", "A static loss scale of 2²⁸ is too large, since step 1",
        do="smaller|dynamic", never="No loss scale can help", level="O3", kind="conv",
        options={**STATIC, "numerics": "off"}),
    Case("o2-static-breaks-late", "A static loss scale of 2¹⁴ is too large, since step 16",
        do="smaller|dynamic", options={"loss_scale": 2.0**14}, loss=times(1e5), at=since(16)),
    Case("forward-traced", change=times(3e5), at=since(26), options=TRACED, **BY_A_FORWARD),
    Case("forward-traced-o1-attention", level="O1", kind="attention",
        change=lambda x: x.half() * 3e5, at=since(26), options=TRACED, **BY_A_FORWARD),
    Case("forward-not-traced", "The loss is infinite or nan, since step 26", do='overflow="trace"',
        never=A_SCALE, change=times(3e5), at=since(26)),
    Case("backward-traced", "Gradients become infinite at any scale, since step 20",
        where="blocks.1.spot", never="overflow=.?.trace",
        change=lambda x: steepen(6e4)(steepen(6e4)(x)), at=since(20), options=TRACED),
    Case("backward-not-traced",
        "Overflows keep beginning in the gradient of blocks.1.inner.bias, since step 4",
        do='overflow="trace"', where="blocks.1.inner",
        change=lambda x: steepen(6e4)(steepen(6e4)(x)), at=lambda step: step % 4 == 0),
    Case("nan-at-any-scale-traced", "Gradients become infinite at any scale, since step 20",
        where="blocks.1.spot", never=f"overflow=.?.trace|{A_SCALE}", kind="conv",
        change=root_of_zero, at=since(20), options=TRACED),
    Case("nan-at-any-scale", "Gradients become nan at any scale, since step 20",
        do='overflow="trace"', where="blocks.1.inner", change=root_of_zero, at=since(20)),
    Case("nan-data-dynamic", "The loss is infinite or nan, since step 12", do="data", never=A_SCALE,
        data=times(float("nan")), at=only(12, 24, 36)),
    Case("nan-data-o5", "The loss is infinite or nan, since step 22", do="data", level="O5",
        data=times(float("nan")), at=only(22), options={"numerics": "full"}),
    Case("log-of-zero-in-the-loss", "The loss is infinite or nan, since step 15",
        do="loss function", never=A_SCALE, loss=lambda loss: loss - torch.log(loss.detach() * 0),
        at=since(15), options=TRACED),
    Case("o3-adam-eps", "The eps of Adam turned weights into nan, since step 1", do="eps",
        where="Adam", level="O3", net=Deep, optimizer=ADAM, lr=1e-3),
    Case("o3-adamw-eps-full", "The eps of AdamW turned weights into nan, since step 1", do="eps",
        where="AdamW", level="O3", kind="conv", optimizer=torch.optim.AdamW, lr=1e-3,
        options={"numerics": "full"}),
    Case("diverges-o0", "Training diverges, since step 2", do=LEARNING_RATE, where="1e.04",
        level="O0", net=Deep, lr=1e4),
    Case("diverges-from-30-o5", "Training diverges, since step 31", do=LEARNING_RATE, level="O5",
        rate=lambda lr: lr * 1e5, at=since(30)),
    Case("diverges-o2", "Training diverges, since step 21", do=LEARNING_RATE, optimizer=ADAM,
        lr=1e-3, rate=lambda lr: lr * 1e6, at=since(20)),
    Case("rate-falls-to-nothing", "The learning rate falls to next to nothing, since step 2[01]",
        do="schedule", level="O5", steps=160, lr=1e-3, rate=lambda lr: lr * 1e-6, at=since(20)),
    Case("loss-jumps", "The loss jumps to 1[0-9.]*e.06, at step 80", do="batch|data", level="O5",
        steps=140, loss=times(1e6), at=only(80), lr=1e-9),
    Case("updates-stall", "Updates round to nothing, since step 1", do="masters", where="stem",
        level="O3", lr=1e-4, options={"loss_scale": 1024.0, "numerics": "full"}),
    Case("gradients-underflow-in-early-layers",
        "Gradients vanish below the smallest float16 number, since step 1", do="scale",
        where="stem|layers.0", level="O3", net=Deep, options={"loss_scale": 4.0}, loss=times(1e-4)),
    Case("no-step-taken", "No step was taken, since step 1", do="lower scale", steps=4,
        scale=2.0**40),
)
"""One for each kind of fault and way of recording it."""

HEALTHY = tuple(
    Case(f"healthy-{level}-{kind}-{optimizer.__name__}", GOOD, level=level, kind=kind,
        optimizer=optimizer, lr=lr, parts=parts, steps=steps)
    for level, kind, optimizer, lr, parts, steps in (
        ("O0", "mlp", torch.optim.SGD, 0.05, 1, 40),
        ("O1", "mlp", ADAM, 1e-3, 1, 40),
        ("O1", "attention", torch.optim.AdamW, 1e-3, 2, 40),
        ("O2", "mlp", torch.optim.SGD, 0.05, 1, 120),
        ("O2", "conv", ADAM, 3e-3, 1, 60),
        ("O2", "attention", torch.optim.AdamW, 1e-3, 4, 30),
        ("O4", "conv", ADAM, 1e-3, 1, 40),
        ("O4", "mlp", torch.optim.SGD, 0.05, 2, 40),
        ("O5", "attention", ADAM, 1e-3, 1, 120),
        ("O5", "conv", torch.optim.SGD, 0.05, 1, 40),
    )
)

UNSEEN = (
    Case("data-beyond-float16", "The loss is infinite or nan, since step 18", do="data",
        never=A_SCALE, data=times(1e6), at=since(18)),
    Case("nan-in-one-forward-o5", "The loss is infinite or nan, since step 18", do="step 18",
        level="O5", change=lambda x: x * (x.sum() * 0 / 0), at=only(18)),
    Case("log-of-negatives-traced-o1", "The forward of blocks.1.spot makes nan, since step 9",
        where="blocks.1.spot", never=f"float32|bfloat16|{A_SCALE}", level="O1",
        change=lambda x: torch.log(x.float() - 5), at=since(9), options=TRACED),
    Case("thrown-away-at-once-o0", "Training diverges, since step 2", do=LEARNING_RATE, level="O0",
        lr=1e30, options={"numerics_every": 1}),
    Case("diverges-slowly-o4", "Training diverges, since step 5", do=LEARNING_RATE, where="30",
        level="O4", kind="attention", lr=30.0),
    Case("o3-rmsprop-eps", "The eps of RMSprop turned weights into nan, since step 1", do="eps",
        where="RMSprop", level="O3", kind="attention", optimizer=torch.optim.RMSprop, lr=1e-3),
    Case("o3-adam-dynamic", "The eps of Adam turned weights into nan, since step 1", do="eps",
        where="Adam", never=A_SCALE, level="O3", optimizer=ADAM, lr=1e-3,
        options={"loss_scale": "dynamic", **TRACED}),
    Case("o3-partly-zero", "Gradients vanish below the smallest float16 number, since step 1",
        do="scale", level="O3", kind="attention", loss=times(1e-5)),
    Case("o1-static-1e9", "A static loss scale of 1e.09 is too large, since step 1",
        do="smaller|dynamic", level="O1", options={"loss_scale": 1e9}),
    Case("o2-static-steep-at-17", "The backward of a finite loss makes inf or nan, since step 17",
        do="huge", where="blocks.1.inner", options={"loss_scale": 2.0**12, "numerics_every": 1},
        change=lambda x: steepen(6e4)(steepen(6e4)(x)), at=since(17)),
    Case("outlier-batch-o2", "The loss jumps to 4[0-9.]*e.03, at step 120", do="batch", steps=200,
        kind="conv", lr=1e-4, loss=times(3e3), at=only(120)),
    Case("loss-stays-high", "The loss jumps to 2[0-9]*, at step 50", do="on purpose", level="O5",
        steps=120, lr=1e-4, loss=times(200), at=since(50)),
    Case("o5-without-masters-stalls", "Updates round to nothing, since step 1", do="masters",
        level="O5", lr=1e-4, options={"master_weights": False, "numerics": "full"}),
    Case("o4-loss-times-zero", "All gradients are zero, since step 1", do="loss",
        never=f"Pass|{A_SCALE}", level="O4", loss=times(0.0)),
    Case("search-from-2^40", "Many steps in a row were skipped, since step 1", do=r"[Bb]egin",
        steps=60, scale=2.0**40),
    Case("nan-data-from-the-start", "The loss is infinite or nan, since step 1", do="data",
        never=A_SCALE, data=times(float("nan")), steps=20),
    Case("overflows-in-many-batches", "Gradients become infinite at any scale, since step 3",
        where="backward of blocks.1.spot", never="trace", kind="attention", level="O1",
        change=lambda x: steepen(6e4)(steepen(6e4)(x)), at=lambda step: step % 3 == 0,
        options=TRACED),
    Case("loss-inf-once-o4", "The loss is infinite or nan, since step 21", do="step 21", level="O4",
        loss=lambda loss: loss / (loss.detach() * 0), at=only(21)),
    Case("lr-raised-then-high-but-finite", "Training diverges, since step 16", do=LEARNING_RATE,
        where="raised", kind="conv", level="O1", rate=times(300), at=since(15)),
    Case("static-o1-nan-data-late", "The loss is infinite or nan, since step 28", do="step 28",
        level="O1", options={"loss_scale": 256.0}, data=times(float("nan")), at=only(28)),
    Case("healthy-search-from-2^24", GOOD, scale=2.0**24, steps=60),
    Case("healthy-falls-below-zero", GOOD, level="O5", loss=lambda loss: loss - 5, steps=120),
    Case("healthy-o3-dynamic", GOOD, level="O3", options={"loss_scale": "dynamic"}),
    Case("healthy-learns-by-heart", GOOD, level="O0", kind="attention", optimizer=ADAM, lr=1e-2,
        steps=250),
    Case("healthy-dropped-rate", "Nothing to report", level="O2", kind="conv", rate=times(0.1),
        at=since(30), steps=60, parts=3),
    Case("healthy-o3-adam-large-eps", GOOD, level="O3", optimizer=ADAM, lr=1e-3, more={"eps": 1e-4},
        options={"loss_scale": 1024.0}),
)
"""Kinds that the rules were not written with in view."""

LATER = (
    Case("static-nan-by-a-root", "The backward of a finite loss makes inf or nan, since step 12",
        do="root", where="blocks.1.inner", level="O1",
        options={"loss_scale": 1024.0, "numerics_every": 1}, change=root_of_zero, at=since(12)),
    Case("empty-mask", "The loss is infinite or nan, since step 7", do="mask", never=A_SCALE,
        level="O1", loss=lambda loss: loss + loss.new_zeros(0).mean(), at=only(7, 8, 30)),
    Case("o3-nan-data-harmless-eps", "The loss is infinite or nan, since step 21", do="step 21",
        never="eps", level="O3", optimizer=ADAM, lr=1e-3, more={"eps": 1e-4},
        data=times(float("nan")), at=only(21)),
    Case("two-jumps", "The loss jumps to [0-9]+, at step (60|120)", do="batch", where="more",
        level="O4", steps=160, lr=1e-4, loss=times(500), at=only(60, 120)),
    Case("o1-static-2^30-adam-conv", "A static loss scale of 2³⁰ is too large, since step 1",
        do="dynamic", level="O1", kind="conv", optimizer=ADAM, lr=1e-3,
        options={"loss_scale": 2.0**30}),
    Case("ceiling-of-one", "All gradients are zero in float16, since step 1",
        do="raise max_loss_scale", level="O2", net=Deep, loss=times(1e-7), scale=1.0,
        options={"max_loss_scale": 1.0}),
    Case("no-step-in-30", "No step was taken, since step 1", do="lower scale", scale=2.0**60,
        steps=30),
    Case("loss-times-zero-dynamic", "All gradients are zero, since step 11", do="depends",
        never="Pass", loss=times(0.0), at=since(11)),
    Case("unbounded-below", "Training diverges, since step [0-9]+", do="[Ll]ower the learning rate",
        level="O5", loss=times(-1), lr=20.0),
    Case("large-data-o3", "The loss is infinite or nan, since step 1", do="data", level="O3",
        data=times(1e6)),
    Case("output-beyond-float16", "The forward of blocks.1.spot makes inf, since step 13",
        where="blocks.1.spot", never=A_SCALE, change=lambda x: x * 200 * x.new_tensor(4e4),
        kind="attention", at=only(13, 26, 39), options=TRACED),
    Case("steep-in-single-batches-traced",
        "Overflows keep beginning in the backward of blocks.1.spot.*, since step 5",
        where="blocks.1.spot", never="overflow=.?.trace",
        change=lambda x: steepen(6e4)(steepen(40.0)(x)), at=lambda step: step % 5 == 0,
        scale=2.0**16, options=TRACED, steps=35),
    Case("frozen-by-a-product-with-zero", "Nothing to worry about, 1 note", do="used",
        where="blocks.1.norm", level="O5", change=times(0.0)),
    Case("healthy-accumulates-o1", GOOD, level="O1", kind="conv", parts=8),
    Case("healthy-noisy-data", GOOD, level="O2", data=lambda x: x + torch.randn_like(x), steps=150),
    Case("healthy-tiny-loss", GOOD, level="O2", loss=times(1e-4), scale=2.0**16, steps=60),
    Case("healthy-huge-loss", GOOD, level="O5", loss=times(1e4), lr=5e-6, steps=60),
    Case("healthy-warm-up", GOOD, level="O1", lr=1e-3, rate=times(30), at=since(10)),
)
"""Written after the rules had been mended for the ones above."""

FURTHER = (
    Case("warm-restarts", GOOD, script=scripts.warm_restarts),
    Case("nan-data-after-a-restart", "The loss is infinite or nan, since step 43", do="step 43",
        never=LEARNING_RATE, script=partial(scripts.warm_restarts, nan_at=43)),
    Case("fine-tuning", GOOD, script=scripts.fine_tuning),
    Case("likelihood", GOOD, script=scripts.likelihood),
    Case("likelihood-nan-data", "The loss is infinite or nan, since step 200", do="step 200",
        never=LEARNING_RATE, script=partial(scripts.likelihood, nan_at=200)),
    Case("likelihood-nan-data-o5", "The loss is infinite or nan, since step 200", do="step 200",
        never=LEARNING_RATE, script=partial(scripts.likelihood, level="O5", nan_at=200)),
    Case("policy-gradient", GOOD, script=scripts.policy_gradient),
    Case("curriculum", "The loss jumps to 2[0-9.]*, at step 101", do="on purpose", never="batch",
        script=scripts.curriculum),
    Case("adversarial", "Nothing to worry about, 1 note", do="critic", where="A loss rises.*loss 1",
        script=scripts.adversarial),
    Case("sparse-looks", GOOD, script=scripts.sparse_looks),
    Case("resumed", GOOD, script=scripts.resumed),
    Case("resumed-without-a-layer", "The loss jumps to [0-9]+, at step 61", do="did not bring back",
        where="went on from a checkpoint at step 60", never="batch",
        script=partial(scripts.resumed, is_lost=True)),
    Case("a-good-run-after-a-bad-one", GOOD, script=partial(scripts.two_runs, bad=1)),
    Case("a-bad-run-after-a-good-one", "The loss is infinite or nan, since step 41", do="data",
        never=A_SCALE, script=partial(scripts.two_runs, bad=2)),
    Case("one-step", GOOD, script=scripts.one_step),
    Case("hinge", GOOD, script=scripts.hinge),
    Case("overshooting", "Training diverges, since step 2[1-9]", do=LEARNING_RATE, where="raised",
        script=scripts.overshooting),
)
"""Runs whose course is their own: schedules, kinds of losses, several parts or losses."""



def changed(
    name: str, first: str, *, do: str = "", where: str = "", never: str = "", **options: Any
) -> Case:
    """A case of `report_changes`."""
    script = partial(changes.trained, **options)
    return Case(name, first, do=do, where=where, never=never, script=script)


REWRITTEN: dict[str, Any] = {
    "first": "Weights change by more than updates can, since step 71", "do": "writes",
    "never": "keep_fp32",
}
RAISED: dict[str, Any] = {
    "first": "Training diverges, since step 61", "do": "back towards 0.05",
    "where": "Step 60 raised the learning rate", "never": f"keep_fp32|small number|{A_SCALE}",
}
QUICK = {"kind": ADAM, "lr": 1e-2}

CHANGED = (
    changed("raised-500-fold", changes={60: changes.setting(lr=25.0)}, **RAISED),
    changed("raised-500-fold-traced", changes={60: changes.setting(lr=25.0)}, **TRACED, **RAISED),
    changed("raised-500-fold-o5", level="O5", changes={60: changes.setting(lr=25.0)}, **RAISED),
    changed("raised-5000-fold-o1", level="O1", changes={60: changes.setting(lr=250.0)}, **RAISED),
    changed("raised-5000-fold-o0", level="O0", changes={60: changes.setting(lr=250.0)}, **RAISED),
    changed("raised-500-fold-looked-at-often", level="O0", numerics="full", numerics_every=3,
        changes={60: changes.setting(lr=25.0)}, **RAISED),
    changed("raised-500-fold-and-recovered", "The loss jumps to 7[0-9.]*, at step 61",
        do=LEARNING_RATE, where="Step 60 raised the learning rate from 0.001 to 0.5", kind=ADAM,
        lr=1e-3, changes={60: changes.setting(lr=0.5)}),
    changed("warm-up-ends-too-high", "The loss jumps to 1.03e.03, at step 106",
        do="end its warm-up at 0", where="The learning rate grew from 0.000112 to 8.35", kind=ADAM,
        rate=changes.rate_of_warm_up),
    changed("rate-jumps-at-a-resume", "Training diverges, since step 62", do="schedule",
        where="Step 61 raised.*went on from a checkpoint at step 60",
        rate=changes.rate_after_resuming, resumed_at=60),
    changed("weights-replaced", numerics="full", changes={71: lambda scene: scene.rewrite(10.0)},
        **REWRITTEN),
    changed("weights-replaced-o5-traced", level="O5", numerics="full",
        changes={71: lambda scene: scene.rewrite(3e4)}, **TRACED, **REWRITTEN),
    changed("weights-replaced-not-looked-at", "The loss is infinite or nan, since step 71",
        do="the script wrote", never=A_SCALE, changes={71: lambda scene: scene.rewrite(100.0)}),
    changed("weights-replaced-traced", "The loss jumps to 7.59e.03, at step 71",
        do="the script wrote", never=f"keep_fp32|small number|{A_SCALE}",
        changes={71: lambda scene: scene.rewrite(10.0)}, **TRACED),
    changed("layer-made-anew", "The loss jumps to 14[0-9.]*, at step 80",
        do="weights that the script wrote",
        changes={80: lambda scene: scene.rewrite(1.0, "head.weight")}, **QUICK),
    changed("decay-of-60", "The weight decay of SGD is too large, since step 1", do="0.02 or less",
        more={"weight_decay": 60.0}),
    changed("decay-of-30-adamw", "The weight decay of AdamW is too large, since step 1",
        do="0.1 or less", kind=torch.optim.AdamW, lr=1e-2, more={"weight_decay": 30.0}),
    changed("decay-of-10-adam", "The loss stays where it began, since step 1",
        do="weight decay is 10", more={"weight_decay": 10.0}, **QUICK),
    changed("momentum-of-1", "The momentum of SGD is 1, since step 1", do="0.9", lr=1.0,
        more={"momentum": 1.0}),
    changed("batch-of-zeros", "The loss jumps to 3[0-9.]*, at step 80", do="the batch of step 80",
        changes={80: lambda scene: changes.setting(kept=scene.x, x=scene.x * 0)(scene),
            81: lambda scene: changes.setting(x=scene.kept)(scene)},
        **QUICK),
    changed("zeros-from-80-on", "The loss jumps to 3[0-9.]*, at step 80", do="the data",
        never="batch", changes={80: changes.larger(0.0)}, **QUICK),
    changed("labels-permuted", "The loss jumps to 1[0-9.]*, at step 80", do="the labels",
        never="batch", changes={80: changes.permuted}, **QUICK),
    changed("inputs-1000-times-larger", "The loss jumps to 57[0-9.]*, at step 80",
        do="the scale of the data", where="weight of stem is [0-9]+ times",
        never="^Lower the learning rate", norm=nn.Identity(), changes={80: changes.larger(1e3)}),
    changed("batch-norm-over-one", "No gradient reaches stem.weight, since step 1",
        do="norm over a single value", norm=changes.OwnBatchNorm(),
        changes={1: changes.setting(keep=slice(0, 1))}),
    changed("clip-far-too-small", "The loss stays where it began, since step 1", do="clipped to",
        clip=1e-6),
    changed("dead-relu", "No gradient reaches stem.weight, since step 1", do="relu",
        norm=nn.Identity(), changes={1: changes.dead}),
    changed("relu-that-dies", "No gradient reaches stem.weight, since step 51", do="relu",
        changes={50: changes.dead}),
    changed("loss-not-divided-by-16", "The loss jumps to 14.9, at step 80", do="divided by",
        never="batch of", changes={80: changes.setting(factor=16.0)}),
    changed("loss-divided-by-64-twice", "The loss stays where it began, since step 1",
        do="divided by", changes={1: changes.setting(factor=1 / 64)}),
)
"""Runs that something is changed in at some step, and settings that are wrong from the first."""

# fmt: on

KINDS = {
    "faulty runs": FAULTY,
    "healthy runs": HEALTHY,
    "unseen": UNSEEN,
    "later": LATER,
    "further": FURTHER,
    "changed": CHANGED,
}
CASES = (*CHANGED, *FAULTY, *HEALTHY, *UNSEEN, *LATER, *FURTHER)


def judge_case(case: Case) -> str:
    """Train a case; returns what is wrong with its report, or nothing."""
    run = gather(train(case))
    findings = advise(run)
    first = judge(run, findings).title
    told = " ".join(f"{f.title} {f.where} {f.number}" for f in findings[:1])
    do = findings[0].do if findings else ""
    checks = {
        "first line": re.fullmatch(case.first, first),
        "where": re.search(case.where, told),
        "do": re.search(case.do, do),
        "never": not case.never or not re.search(case.never, " ".join(f.do for f in findings)),
    }
    wrong = ", ".join(what for what, is_right in checks.items() if not is_right)
    return f"{case.name}: {wrong}; got {first!r}; {told}; {do}" if wrong else ""


def scores(every: int, offset: int) -> list[Score]:
    """Train each ``every``-th case, and count the reports whose first advice is right."""
    return [
        Score.of(f"report, {kind}", map(judge_case, cases[offset::every]))
        for kind, cases in KINDS.items()
    ]
