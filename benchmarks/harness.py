# SPDX-License-Identifier: BSD-3-Clause
"""Compare variants of the same work so that the machine's moods hit all of them alike.

All variants run in one process and one thread. A round runs each of them once, in an order that
rotates from round to round. The best of many rounds is what the code can do; p20, p50 and p80 are
what the machine let it do; ratios are taken within a round before they are summarised.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import quantiles
from time import perf_counter

import torch

RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to do the work.

    Attributes:
        name: Name in the rows.
        group: Variants of one group do the same work; ratios are to the group's first.
        run: The timed call.
        prepare: Restores what ``run`` changes; called before every ``run``, not timed.
    """

    name: str
    group: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one variant, in milliseconds.

    Attributes:
        name: The variant.
        group: Its group.
        baseline: The group's first variant, to which the ratios are.
        best: Shortest round.
        p20: A fifth of the rounds was shorter.
        p50: Median.
        p80: A fifth of the rounds was longer.
        best_ratio: Best over the baseline's best.
        ratio_p20: Of the ratios within a round, lower end of the spread.
        ratio_p50: Median ratio within a round.
        ratio_p80: Upper end of the spread.
        rounds: Number of rounds.
    """

    name: str
    group: str
    baseline: str
    best: float
    p20: float
    p50: float
    p80: float
    best_ratio: float
    ratio_p20: float
    ratio_p50: float
    ratio_p80: float
    rounds: int


def measure(
    variants: Sequence[Variant],
    *,
    rounds: int,
    warmup: int = 3,
    synchronize: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Time all variants, interleaved.

    Args:
        variants: What to compare; names are unique.
        rounds: How often each of them runs, at least 5.
        warmup: Rounds before, which are not counted.
        synchronize: Waits for the device; called before the clock is read.

    Returns:
        One row for each variant, in the order given.
    """
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    if len(seconds) != len(variants) or rounds < 5:
        raise ValueError("variants need names of their own, and at least 5 rounds")
    for number in range(-warmup, rounds):
        first = number % len(variants)
        for variant in (*variants[first:], *variants[:first]):
            variant.prepare()
            synchronize()
            start = perf_counter()
            variant.run()
            synchronize()
            if number >= 0:
                seconds[variant.name].append(perf_counter() - start)
    baselines = {variant.group: variant.name for variant in reversed(variants)}
    return [_row(variant, baselines[variant.group], seconds) for variant in variants]


def _row(variant: Variant, baseline: str, seconds: dict[str, list[float]]) -> Row:
    own, base = seconds[variant.name], seconds[baseline]
    p20, p50, p80 = _spread([1e3 * value for value in own])
    ratio_p20, ratio_p50, ratio_p80 = _spread([a / b for a, b in zip(own, base, strict=True)])
    return Row(
        name=variant.name,
        group=variant.group,
        baseline=baseline,
        best=1e3 * min(own),
        p20=p20,
        p50=p50,
        p80=p80,
        best_ratio=min(own) / min(base),
        ratio_p20=ratio_p20,
        ratio_p50=ratio_p50,
        ratio_p80=ratio_p80,
        rounds=len(own),
    )


def _spread(values: list[float]) -> tuple[float, float, float]:
    """The 20th, 50th and 80th percentile."""
    cuts = quantiles(values, n=10, method="inclusive")
    return cuts[1], cuts[4], cuts[7]


def provenance(device: str) -> dict[str, object]:
    """Return where and with what a measurement was made; part of every stored row."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_model(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "preamp": version("preamp"),
        "commit": _commit(),
    }


def cpu_model() -> str:
    """Name of the processor, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """The commit that is checked out, marked if the tree differs from it."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def store(benchmark: str, rows: Sequence[Row], facts: dict[str, object]) -> Path:
    """Append rows to ``results/<benchmark>.jsonl``, one JSON object a line.

    Args:
        benchmark: Name of the file.
        rows: What `measure` returned.
        facts: Provenance, and whatever else is true of all rows.

    Returns:
        The file.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{benchmark}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"benchmark": benchmark, **asdict(row), **facts}) + "\n")
    return path
