# SPDX-License-Identifier: BSD-3-Clause
"""What training in less memory costs in quality: every storage, and optimizers of other packages.

Small models learn for a few hundred steps from the same weights on the same batches: a GPT from
the standard library's source text, judged by bits per held-out byte, and a convolutional
network from scikit-learn's digits, judged by its held-out loss and errors. Every way is run with
several seeds, and compared with float32 of the same seed. Rows are appended to
``benchmarks/results/storage.jsonl``.

With ``--host`` no model learns: measured is the update that the host makes of each run of tensors
with ``Storage(place="host")``, against a copy, and the rows have GB/s of bytes that are counted.
They go into ``host.jsonl``.
"""

# torch leaves these functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preamp
from preamp.optimizers import FusedAdam
from preamp_bench import records
from preamp_bench.gpt import GPT, ModelConfig
from preamp_bench.harness import Effort, Variant, measure, stopwatch
from preamp_bench.options import RESULTS, asked
from preamp_bench.text import held_out_batches, read_text, training_batches

LR = 2e-3
SETTINGS: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.05}
CONTEXT = 64

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How weights, masters and moments are kept."""

    name: str  # in the rows
    make: MakeOptimizer  # makes the optimizer
    level: str | None = None  # the opt level, or ``None`` for bfloat16 weights without an engine
    storage: Any = "full"  # what `preamp.initialize` is given


def _peer(module: str, kind: str, **options: Any) -> MakeOptimizer:
    def make(params: Any) -> torch.optim.Optimizer:
        return getattr(importlib.import_module(module), kind)(params, **SETTINGS, **options)

    return make


_fused = partial(FusedAdam, **SETTINGS)
WAYS = (
    Way(name="float32", level="O0", make=_fused),
    Way(name="O5", level="O5", make=_fused),
    Way(name="O5 split", level="O5", make=_fused, storage="split"),
    Way(
        name="O5 split, bfloat16 moments",
        level="O5",
        make=_fused,
        storage=preamp.Storage(masters="split", moments="bfloat16"),
    ),
    Way(name="O5 compact", level="O5", make=_fused, storage="compact"),
    Way(name="bfloat16, no masters", make=_peer("torch.optim", "AdamW")),
    Way(name="bfloat16, Kahan (optimi)", make=_peer("optimi", "AdamW", kahan_sum=True)),
    Way(
        name="bfloat16, torchao AdamW8bit",
        make=_peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True),
    ),
    Way(name="flashoptim AdamW", make=_peer("flashoptim", "FlashAdamW")),
)


# -- tasks ----------------------------------------------------------------------------------------

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned."""

    name: str  # in the rows
    model: Callable[[int], nn.Module]  # makes the model of a seed, float32
    batches: Callable[[int], Batches]  # training batches of a seed: inputs and targets
    # What the trained model scores on held-out data, by name; less is better.
    judge: Callable[[nn.Module], dict[str, float]]


def gpt(steps: int) -> Task:
    """A GPT over bytes."""
    config = ModelConfig(layers=2, width=128, heads=4, context=CONTEXT)

    def batches(seed: int) -> Batches:
        return training_batches(read_text()[0], steps=steps, batch=16, context=CONTEXT, seed=seed)

    @torch.no_grad()
    def judge(model: nn.Module) -> dict[str, float]:
        held_out = held_out_batches(read_text()[1], count=512, batch=64, context=CONTEXT)
        nats = [loss_of(model, *batch).item() for batch in held_out]
        return {"bits per byte": sum(nats) / len(nats) / math.log(2)}

    make = lambda seed: GPT(config, torch.Generator().manual_seed(seed))  # noqa: E731
    return Task(name="gpt", model=make, batches=batches, judge=judge)


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and classes: a quarter, at equal distances, is held out."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    images = torch.tensor(found.images / 16.0, dtype=torch.float32).unsqueeze(1)
    classes = torch.tensor(found.target)
    held = torch.from_numpy(np.arange(len(classes)) % 4 == 0)
    return images[~held], classes[~held], images[held], classes[held]


def _convnet(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(512, 10))


def convnet(steps: int) -> Task:
    """Digits of 8 × 8 pixels."""

    def batches(seed: int) -> Batches:
        images, classes, _, _ = digits()
        random = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(0, len(classes), (64,), generator=random)
            yield images[chosen], classes[chosen]

    @torch.no_grad()
    def judge(model: nn.Module) -> dict[str, float]:
        _, _, images, classes = digits()
        logits = model(images.to(_dtype_of(model))).float()
        wrong = (logits.argmax(1) != classes).float().mean().item()
        return {"loss": F.cross_entropy(logits, classes).item(), "errors": wrong}

    return Task(name="convnet", model=_convnet, batches=batches, judge=judge)


# -- training -------------------------------------------------------------------------------------


def _dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in float32, of bytes or of images."""
    if inputs.is_floating_point():
        inputs = inputs.to(_dtype_of(model))
    logits = model(inputs).float()
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _rate(step: int, steps: int) -> float:
    warmup = max(1, steps // 20)
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return LR * min((step + 1) / warmup, 0.05 + 0.95 * cosine)


def run(way: Way, task: Task, seed: int, steps: int) -> dict[str, float]:
    """Train once; returns the scores, and the bytes per parameter between backward and step."""
    model = task.model(seed)
    if way.level is None:
        model = model.bfloat16()
        optimizer = way.make(model.parameters())
    else:
        model, optimizer = preamp.initialize(
            model,
            way.make(model.parameters()),
            opt_level=way.level,
            storage=way.storage,
            verbosity=0,
        )
    model.train()
    held = 0
    for step, (inputs, targets) in enumerate(task.batches(seed)):
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(_rate(step, steps))
            else:
                group["lr"] = _rate(step, steps)
        loss = loss_of(model, inputs, targets)
        if way.level is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(optimizer, 1.0)
        if step == 1:
            held = _bytes_held(model, optimizer, with_engine=way.level is not None)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    scores = task.judge(model)
    if way.level is not None:
        preamp.engine_of(optimizer).close()
    count = sum(param.numel() for param in model.parameters())
    return {**scores, "bytes per parameter": held / count}


_TRAINED = ("weights", "masters", "gradients", "optimizer state")


def _bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer, *, with_engine: bool) -> int:
    if with_engine:
        counted = preamp.count_memory(preamp.engine_of(optimizer))
        return sum(size for name, size in counted.items() if name in _TRAINED)
    params = list(model.parameters())
    tensors = [*params, *(param.grad for param in params if param.grad is not None)]
    for entry in optimizer.state.values():
        tensors += _tensors_in(list(entry.values()))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _tensors_in(values: list[Any]) -> list[Tensor]:
    """Tensors of a state, and those that subclasses of tensors are made of."""
    found: list[Tensor] = []
    for value in values:
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            found += _tensors_in([getattr(value, name) for name in names])
        elif isinstance(value, Tensor):
            found.append(value)
    return found


# -- the host's update ----------------------------------------------------------------------------


def _give_gradients(weights: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Stand for a backward."""
    with preamp.scale_loss(torch.ones(()), optimizer):
        for weight in weights.parameters():
            weight.grad = torch.full_like(weight, 2.0**-8)


def _with_threads(run: Callable[[], object], threads: int) -> Callable[[], object]:
    """Run with so many threads; the others have one."""

    def running() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            run()
        finally:
            torch.set_num_threads(before)

    return running


UPDATED = {"full": 28.0, "split": 26.0, "compact": 14.125}
"""Bytes that Adam's update reads and writes for each parameter, by storage."""


def host_updates(parameters: int, threads: int, seconds: float) -> list[records.Record]:
    """Measure updates in runs of the size that travels, and a copy, with one thread and several."""
    size = min(parameters, 1 << 23)  # with weight and gradient a run of 32 MiB
    count = max(parameters // size, 1)
    source = torch.zeros(size * count // 2)
    target = torch.empty_like(source)
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "copy": (lambda: target.copy_(source), lambda: None)
    }
    moved = {"copy": 2.0 * source.nbytes}
    for storage, bytes_each in UPDATED.items():
        shape = (size // 1024, 1024) if size % 1024 == 0 else (size,)
        weights = nn.ParameterList(torch.full(shape, 0.02) for _ in range(count))
        optimizer = _fused(weights.parameters())
        preamp.initialize(weights, optimizer, opt_level="O5", storage=storage, verbosity=0)
        runs[storage] = optimizer.step, partial(_give_gradients, weights, optimizer)
        moved[storage] = bytes_each * size * count
    variants = [
        Variant(name=name, group=group, seconds=stopwatch(_with_threads(run, n), prepare=prepare))
        for n in dict.fromkeys((1, threads))
        for group in [f"{n} thread" + "s" * (n > 1)]
        for name, (run, prepare) in ((f"{name}, {group}", pair) for name, pair in runs.items())
    ]
    return [
        records.measured(row, gb_s=moved[row.name.partition(",")[0]] / row.best / 1e6)
        for row in measure(variants, Effort(seconds=seconds))
    ]


def main() -> None:
    """Train, print, and append rows."""
    given = asked(
        __doc__,
        steps=(400, "of each training"),
        seeds=(5, "how many"),
        tasks=("gpt,convnet", "what is learned"),
        ways=("", "only those with one of these in the name"),
        host=(False, "time the host's update instead"),
        params=(1e8, "of the host's update"),
        threads=(2, "of the host's update, beside one"),
        seconds=(20.0, "of the host's update"),
        out=(RESULTS / "storage.jsonl", "gets the rows; with --host host.jsonl beside it"),
    )
    if given.host:
        facts = {"benchmark": "storage", "task": "host update", "parameters": int(given.params)}
        facts |= records.provenance(torch.device("cpu"))
        rows = host_updates(int(given.params), given.threads, given.seconds)
        for row in rows:
            print(f"{row['name']:20} {row['gb_s']:6.1f} GB/s", flush=True)
        records.append(given.out.with_name("host.jsonl"), [{**row, **facts} for row in rows])
        return
    wanted = [name for name in given.ways.split(",") if name]
    facts = {"benchmark": "storage", "steps": given.steps, "seeds": given.seeds}
    facts |= records.provenance(torch.device("cpu"))
    for make in (gpt, convnet):
        task = make(given.steps)
        if task.name not in given.tasks.split(","):
            continue
        for way in WAYS:
            if wanted and not any(name in way.name for name in wanted):
                continue
            head = {"task": task.name, **facts}
            try:
                runs = [run(way, task, seed, given.steps) for seed in range(given.seeds)]
            except Exception as error:
                rows = [records.not_measured(way.name, task.name, records.reason_of(error), **head)]
            else:
                scores = {name: [one[name] for one in runs] for name in runs[0]}
                rows = [
                    {"name": way.name, "group": task.name, "status": "measured"}
                    | {"scores": scores, **head}
                ]
            print(rows[0].get("scores", rows[0].get("reason")), way.name, flush=True)
            records.append(given.out, rows)


if __name__ == "__main__":
    main()
