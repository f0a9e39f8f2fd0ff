# SPDX-License-Identifier: BSD-3-Clause
"""A small GPT trained at several opt levels from the same start: loss, time and bytes of each.

It learns the source of Python's standard library, so nothing is downloaded. ``autocast`` is torch's
own bfloat16 autocast by hand. Levels take turns, since a machine is not equally fast all the time,
in processes of their own, since functions that preamp wraps are wrapped for a whole process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import preamp

BY_HAND = "autocast"
LEVELS = ("O0", BY_HAND, "O5", "O2")
CONTEXT, BATCH = 64, 8  # bytes that the model sees at once, and windows of text in a step
TURN = 10  # steps that a level takes before the next one has its turn
SLOW = 5  # a level whose steps take so many times the first one's is not trained by default
BYTES = "weights", "masters", "gradients", "optimizer state"  # as preamp.count_memory names them
NOT_TEXT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings"}
# The table: a name in the results, its heading, its format, and whether it is compared.
COLUMNS = (
    ("held_out", "held-out\nbits/byte", ".3f", True),
    ("ms", "best\nms", ".1f", True),
    *zip(BYTES, ("weights", "masters", "grads", "state"), [".1f"] * 4, [False] * 4, strict=True),
    ("sum", "sum", ".1f", True),
    ("kept", "kept\nMiB", ".1f", True),
    ("skipped", "skips", ".0f", False),
)
NOTE = f"""Held-out: loss on files that no step has seen; 8.0 knows nothing. Best: the fastest step.
Weights to sum: bytes a parameter, between a backward and its step. Kept: by a forward for its
backward. ×: compared with the first level. –: stopped after {TURN} steps, since they take more than
{SLOW} times as long; --levels trains it all the same. Where a CPU has no units for a half dtype,
products run in float32: that saves no time, and keeps float32 copies beside halves."""
Batch = tuple[Tensor, Tensor]
Results = dict[str, Any]  # of a level, by the names of COLUMNS; "losses" are bits per byte


def read_text() -> tuple[Tensor, Tensor]:
    """The library's source as bytes, uint8: what is learnt, and one file in ten held out."""
    folder = Path(sysconfig.get_path("stdlib"))
    parts = bytearray(), bytearray()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if not NOT_TEXT & set(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % 10 == 0
            parts[is_held_out].extend(path.read_bytes())
    if min(map(len, parts)) < 100_000:
        raise RuntimeError(f"There is no source of the standard library to learn in {folder}")
    return tuple(torch.frombuffer(part, dtype=torch.uint8) for part in parts)


def windows(text: Tensor, starts: Tensor, device: torch.device) -> Batch:
    """Windows of text, and the byte after each position: (windows, CONTEXT), int64."""
    cut = text[starts[:, None] + torch.arange(CONTEXT + 1)].long().to(device)
    return cut[:, :-1], cut[:, 1:]


class Block(nn.Module):
    """Attention to earlier positions, then an MLP, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        count, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(count, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = (q * q.size(-1) ** -0.5) @ k.transpose(-2, -1)
        mixed = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """A transformer over bytes, (windows, CONTEXT), to logits of the next byte."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.8 * width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        x = self.tokens(tokens) + self.positions.weight
        return self.head(self.norm(self.blocks(x)))


def rate_at(step: int, steps: int) -> float:
    """The learning rate: a linear warm-up, then half a cosine."""
    warmup = max(1, steps // 20)
    cosine = 0.5 * (1 + math.cos(math.pi * max(0, step - warmup) / max(1, steps - warmup)))
    return 2e-3 * min((step + 1) / warmup, 0.1 + 0.9 * cosine)


class Training:
    """A model at a level, and what was measured of it."""

    def __init__(self, level: str, device: str, *, small: bool) -> None:
        self.device, self.text = torch.device(device), read_text()
        self.by_hand = torch.autocast(device, torch.bfloat16) if level == BY_HAND else None
        torch.manual_seed(0)
        self.model = (GPT(1, 32, 2) if small else GPT(4, 256, 4)).to(device)
        # Moments in fp16 (O3) underflow, and with an eps below 1e-5 it diverges.
        settings = {"betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1, "fused": True}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **settings)
        if self.by_hand is None:
            preamp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0)
        self.results: Results = {"losses": [], "ms": math.inf}

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the next byte, in nats."""
        with self.by_hand or contextlib.nullcontext():
            logits = self.model(batch[0])
        return F.cross_entropy(logits.float().flatten(0, 1), batch[1].flatten())

    def step(self, batch: Batch, rate: float) -> None:
        """Take one step, and time it."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(batch)
        if self.by_hand is None:
            with preamp.scale_loss(loss, self.optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(self.optimizer, 1.0)
        else:
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if "sum" not in self.results and self.optimizer.state:  # which the first step has made
            self.results |= self.count_bytes()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        took = 1e3 * (time.perf_counter() - started)
        self.results["ms"] = min(took, self.results["ms"])  # which other work disturbs the least
        self.results["losses"].append(loss.item() / math.log(2))

    def count_bytes(self) -> dict[str, float]:
        """Bytes a parameter, between a backward and its step."""
        params = list(self.model.parameters())
        if self.by_hand is None:
            held = preamp.count_memory(preamp.engine_of(self.optimizer))
        else:
            state = [value for entry in self.optimizer.state.values() for value in entry.values()]
            parts = params, [], [param.grad for param in params if param.grad is not None], state
            held = {n: sum(t.nbytes for t in part) for n, part in zip(BYTES, parts, strict=True)}
        count = sum(param.numel() for param in params)
        each = {name: held.get(name, 0) / count for name in BYTES}
        return {**each, "sum": sum(each.values())}

    def turn(self, first: int, steps: int) -> Results:
        """Take TURN of all ``steps``, from the ``first`` on."""
        random = torch.Generator().manual_seed(first)
        for step in range(first, min(first + TURN, steps)):
            starts = torch.randint(len(self.text[0]) - CONTEXT, (BATCH,), generator=random)
            self.step(windows(self.text[0], starts, self.device), rate_at(step, steps))
        return self.results

    def finish(self) -> Results:
        """Measure held-out loss and what a forward keeps for its backward."""
        last = len(self.text[1]) - CONTEXT - 1
        starts = torch.linspace(0, last, 512, dtype=torch.float64).long().split(BATCH)
        batches = [windows(self.text[1], some, self.device) for some in starts]
        kept: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.loss(batches[0])
        for tensor in (*self.model.parameters(), *batches[0]):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        del loss  # not earlier: until here no address could be used twice
        with torch.no_grad():
            bits = [self.loss(batch).item() / math.log(2) for batch in batches]
        skips = 0 if self.by_hand else preamp.engine_of(self.optimizer).steps_skipped
        self.results |= {"held_out": sum(bits) / len(bits), "skipped": skips}
        return {**self.results, "kept": sum(kept.values()) / 2**20}


def begin(level: str, device: str, small: bool) -> None:
    global training  # of this process
    training = Training(level, device, small=small)


def call(method: str, *arguments: int) -> Results:
    return getattr(training, method)(*arguments)


def measure(given: argparse.Namespace) -> dict[str, Results]:
    """Let all levels take their turns, told by bars or, without a terminal, in lines."""
    levels, results, tasks, running = given.levels or LEVELS, {}, {}, {}
    spawn, slow = multiprocessing.get_context("spawn"), math.inf if given.levels else SLOW
    with Progress(disable=not sys.stdout.isatty()) as bars, contextlib.ExitStack() as stack:
        for level in levels:
            pool = ProcessPoolExecutor(1, spawn, begin, (level, given.device, given.small))
            running[level] = stack.enter_context(pool)
            tasks[level] = bars.add_task(level, total=given.steps)
        for first in range(0, given.steps, TURN):
            for level, process in running.items():
                results[level] = process.submit(call, "turn", first, given.steps).result()
                bars.advance(tasks[level], TURN)
            base = results[levels[0]]
            if bars.disable:
                told = ", ".join(f"{level} {results[level]['losses'][-1]:.3f}" for level in running)
                print(f"step {len(base['losses'])} of {given.steps}: {told}", flush=True)
            limit = slow * base["ms"]
            running = {n: process for n, process in running.items() if results[n]["ms"] <= limit}
        for level, process in running.items():
            results[level] = process.submit(call, "finish").result()
            print(f"{level}: {results[level]['held_out']:.3f} bits per held-out byte", flush=True)
    return results


def table_of(results: dict[str, Results]) -> Table:
    table = Table("level", box=SIMPLE_HEAVY, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for _, heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right")
    base = next(iter(results.values()))
    for level, found in results.items():
        cells = [level]
        for name, _, form, is_compared in COLUMNS:
            cells.append(f"{found[name]:{form}}" if name in found else "–")
            if is_compared and {name} <= found.keys() & base.keys():
                cells[-1] += f"\n[dim]×{found[name] / base[name]:.2f}[/]"
        table.add_row(*cells)
    return table


def draw(results: dict[str, Results], file: Path) -> None:
    """Draw the loss by step, and bars of what differs."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    curves, times, kept = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for level, found in results.items():
        losses = torch.tensor(found["losses"])
        curves.plot(losses.unfold(0, min(TURN, len(losses)), 1).mean(1), label=level)
    curves.set(title=f"loss over {TURN} steps, bits per byte", xlabel="step")
    curves.legend(frameon=False)
    for axes, name, title in ((times, "ms", "fastest step, ms"), (kept, "kept", "kept, MiB")):
        values = [found.get(name, 0) for found in results.values()]
        colours = [f"C{number}" for number in range(len(results))]
        axes.bar_label(axes.barh(list(results), values, color=colours), fmt="%.1f")
        axes.set(title=title, xticks=[], xmargin=0.3)
        axes.invert_yaxis()
    figure.savefig(file)


def main() -> None:
    known = [*preamp.OPT_LEVELS, BY_HAND]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", choices=known, help=f"default: {' '.join(LEVELS)}")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--small", action="store_true", help="a tiny model: does it run here?")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, default=Path("preamp-demo.png"))
    parser.add_argument("--json", type=Path, help="a file for the results")
    given = parser.parse_args()
    began, results = time.perf_counter(), measure(given)
    draw(results, given.picture)
    if given.json:
        given.json.write_text(json.dumps(results) + "\n", encoding="utf-8")
    took = f"All took {time.perf_counter() - began:.0f} seconds on {given.device}."
    lines = NOTE.replace("\n", " "), f"{took} The picture is {given.picture}."
    Console().print("", table_of(results), *lines, sep="\n", highlight=False)


if __name__ == "__main__":
    main()
