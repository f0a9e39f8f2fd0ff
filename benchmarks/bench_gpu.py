# SPDX-License-Identifier: BSD-3-Clause
"""What only a GPU can show, for ``tools/gpu.sh``: whole steps of a GPT, graphs, checkpoints.

``python benchmarks/bench_gpu.py {gpt,graphs,checkpoint} --out rows.jsonl [--small]``. Every row is
appended when it is measured, so that what fails, or takes too long, leaves those before it.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import preamp
from preamp.optimizers import FusedAdam
from preamp_bench.gpt import GPT, ModelConfig
from preamp_bench.harness import stopwatch
from preamp_bench.records import append, provenance, reason_of

Row = dict[str, Any]
WARM_UP = 4

SIZES = {
    False: (ModelConfig(layers=17, width=768, heads=12, context=1024), 8, 20),
    True: (ModelConfig(layers=1, width=32, heads=2, context=8), 2, 2),
}
"""Of the model (122 million parameters, or few), windows in a batch, and steps that are timed."""


class Training:
    """A GPT on one random batch, through preamp's public names."""

    def __init__(
        self, level: str, *, small: bool, storage: str = "full", capturable: bool = False
    ) -> None:
        config, batch, self.steps = SIZES[small]
        random = torch.Generator().manual_seed(0)
        self.batch = torch.randint(256, (batch, config.context + 1), generator=random).cuda()
        self.model = GPT(config, random).cuda()
        self.optimizer = FusedAdam(self.model.parameters(), lr=1e-4, capturable=capturable)
        preamp.initialize(self.model, self.optimizer, opt_level=level, storage=storage, verbosity=0)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> None:
        """Take one whole step."""
        with preamp.scale_loss(loss_of(self.model, self.batch), self.optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Predict each byte of a batch from those before it."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def estimate_of(level: str, storage: str, *, small: bool) -> int | None:
    """The peak that `preamp.estimate` tells for the same training, from a model on the device."""
    config, batch, _ = SIZES[small]
    policy = preamp.OPT_LEVELS[level].replace(storage=storage)
    windows = torch.zeros(batch, config.context + 1, dtype=torch.int64, device="cuda")
    model = GPT(config, torch.Generator()).cuda()
    return preamp.estimate(model, policy, "FusedAdam", loss_fn=loss_of, batch=windows).peak


def milliseconds(run: Callable[[], object], times: int) -> float:
    """The median of some runs, until the device is done."""
    seconds = stopwatch(run, synchronize=torch.cuda.synchronize)
    return 1e3 * median(seconds() for _ in range(times))


def gpt(small: bool) -> Iterator[Callable[[], Row]]:
    """Whole steps, and peaks of memory beside `preamp.estimate`'s."""
    ways = [(level, "full") for level in preamp.OPT_LEVELS]
    ways += [("O5", "split"), ("O5", "compact"), ("O2", "compact")]

    def row(level: str, storage: str) -> Row:
        estimated = estimate_of(level, storage, small=small)
        gc.collect()
        before = torch.cuda.memory_allocated()
        training = Training(level, small=small, storage=storage)
        for _ in range(WARM_UP):
            training.step()
        torch.cuda.reset_peak_memory_stats()
        step = milliseconds(training.step, training.steps)
        return {
            "name": f"{level}, {storage}",
            "parameters": training.parameters,
            "step_ms": step,
            "tokens_per_second": training.batch[:, 1:].numel() / step * 1e3,
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "estimated_peak_bytes": estimated,
            "loss": loss_of(training.model, training.batch).item(),
        }

    for level, storage in ways:
        yield lambda level=level, storage=storage: row(level, storage)


def graphs(small: bool) -> Iterator[Callable[[], Row]]:
    """Whole steps in a CUDA graph, beside the same without; and whether both agree to the bit."""

    def row(level: str) -> Row:
        eager, graphed = (Training(level, small=small, capturable=True) for _ in range(2))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for training in (eager, graphed):
                for _ in range(WARM_UP):
                    training.step()
        torch.cuda.synchronize()
        counted = preamp.engine_of(graphed.model).steps_applied  # lets go of earlier steps' graphs
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            graphed.step()
        eager_ms = milliseconds(eager.step, eager.steps)
        graphed_ms = milliseconds(graph.replay, eager.steps)
        pairs = zip(eager.model.parameters(), graphed.model.parameters(), strict=True)
        return {
            "name": f"{level}, graph",
            "step_ms": graphed_ms,
            "eager_ms": eager_ms,
            "steps_before": counted,
            "equal": all(torch.equal(one, other) for one, other in pairs),
        }

    for level in ("O5", "O2", "O1"):
        yield lambda level=level: row(level)


def checkpoint(small: bool) -> Iterator[Callable[[], Row]]:
    """Saving and loading a whole run, in GB/s of the file."""

    def row(asynchronous: bool) -> Row:
        training = Training("O5", small=small)
        training.step()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.safetensors"
            told: Row = {"asynchronous": True} if asynchronous else {}
            pending: list[Any] = []
            given = training.model, training.optimizer

            def save() -> None:
                pending.append(preamp.save_checkpoint(path, *given, **told))

            returned = milliseconds(save, 1)
            if asynchronous:
                pending[0].wait()
            size = path.stat().st_size
            # Not the random states, which the pretended device has not.
            loaded = milliseconds(lambda: preamp.load_checkpoint(path, *given, rng=False), 1)
        name = "checkpoint, asynchronous" if asynchronous else "checkpoint"
        speeds = {"save_gb_s": size / returned / 1e6, "load_gb_s": size / loaded / 1e6}
        return {"name": name, "bytes": size, "save_returns_ms": returned, **speeds}

    for asynchronous in (False, True):
        yield lambda asynchronous=asynchronous: row(asynchronous)


PARTS = {part.__name__: part for part in (gpt, graphs, checkpoint)}


def main() -> None:
    """Measure a part; the exit status is 1 if a row of it could not be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true", help="a model of few parameters, to try")
    given = parser.parse_args()
    failed = False
    for measure in PARTS[given.part](given.small):
        facts = {"benchmark": given.part, **provenance(torch.device("cuda"))}
        try:
            row = {**facts, "status": "measured", **measure()}
        except Exception as error:
            row = {**facts, "status": "not measured", "reason": reason_of(error)}
            failed = True
        append(given.out, [row])
        print({key: value for key, value in row.items() if key not in facts}, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
