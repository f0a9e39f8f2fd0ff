# SPDX-License-Identifier: BSD-3-Clause
"""Save checkpoints in several processes at once, on one path and in one series, and read them.

    python tools/attack_writers.py --saves 5000

Four processes save in turn one file again and again and the next of a series of which two are
kept, in both formats, while two others read all that. No save may fail, no file that is read may be
called damaged, and no draft may be left at the end. What passes becomes a row in
``benchmarks/results/attacks.jsonl``.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

import preamp
from attack_frame import RESULTS, Forks, Report, asked, keep
from preamp.checkpoint import latest_checkpoint, read_checkpoint

WRITERS, READERS, KEPT = 4, 2, 2
SUFFIXES = (".pt", ".safetensors")
SIZE = 20_000
FINISHED = "finished"


def saves(folder: Path, writer: int, count: int) -> Iterator[str]:
    """Save so often; yield how each ended."""
    for number in range(count):
        suffix = SUFFIXES[number // 2 % 2]
        is_series = number % 2 == 1
        step = number * WRITERS + writer
        path = folder / (f"step_{step}{suffix}" if is_series else f"only{suffix}")
        extra = {"number": step, "values": torch.full((SIZE,), float(step))}
        try:
            preamp.save_checkpoint(path, extra=extra, keep_last=KEPT if is_series else None)
        except Exception as error:
            yield f"failed: {error!r}"
        else:
            yield "saved"


def reads(folder: Path, *_: int) -> Iterator[str]:
    """Read until the writers have finished, in turn one path and the newest; yield what came."""
    is_there = False
    while not (folder / FINISHED).exists():
        for suffix in SUFFIXES:
            yield _read(folder / f"only{suffix}")
        newest = latest_checkpoint(folder)
        if newest is None and is_there:
            yield "failed: there was a checkpoint, and none is found any more"
        yield "nothing there" if newest is None else _read(newest)
        is_there = is_there or newest is not None


def _read(path: Path) -> str:
    try:
        extra = read_checkpoint(path)["extra"]
    except FileNotFoundError:
        return "not there"  # not yet, or no longer
    except Exception as error:
        return f"failed: {error!r}"
    is_one = bool((extra["values"] == extra["number"]).all())
    return "read" if is_one else f"failed: {path} is of two"


def start(
    lines: Callable[[Path, int, int], Iterator[str]], processes: int, folder: Path, count: int
) -> Forks:
    """Run something in processes of their own, each of which reports how often what came."""

    def work(number: int, report: Report) -> None:
        for outcome, times in Counter(lines(folder, number, count)).items():
            report(f"{times} {outcome}")

    return Forks(work, processes)


def finish(started: Forks) -> Counter[str]:
    """Wait for processes to end; count what they told."""
    told = Counter[str]()
    lines, codes = started.wait()
    for line in lines:
        times, _, outcome = line.rstrip("\n").partition(" ")
        told[outcome] += int(times)
    told["failed: a process has died"] += sum(map(bool, codes))
    return +told


def attack(folder: Path, count: int) -> tuple[Counter[str], list[str]]:
    """Save ``count`` times while others read; return how often what came, and what is left."""
    readers = start(reads, READERS, folder, 0)
    told = finish(start(saves, WRITERS, folder, count // WRITERS))
    (folder / FINISHED).touch()
    told += finish(readers)
    (folder / FINISHED).unlink()
    return told, sorted(path.name for path in folder.iterdir())


def complaints(told: Counter[str], left: Sequence[str]) -> list[str]:
    """What should not have happened."""
    found = [f"{times} times {outcome}" for outcome, times in told.items() if ":" in outcome]
    found += [f"left: {name}" for name in left if name.startswith(".")]
    # A writer keeps two of its own format, whatever others have saved meanwhile.
    most = len(SUFFIXES) * (1 + KEPT * WRITERS)
    if len(left) > most:
        found.append(f"{len(left)} files are left, at most {most} should be: {left}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        saves=(5000, "of all writers together"),
        out=(RESULTS / "attacks.jsonl", "file that gets the row"),
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        told, left = attack(Path(name), given.saves)
    print(", ".join(f"{times} {outcome}" for outcome, times in sorted(told.items())), left)
    found = complaints(told, left)
    print(*found, sep="\n", end="\n" * bool(found))
    if found:
        return 1
    row = {"kinds": {"writers": dict(told)}, "seconds": round(time.monotonic() - begin, 1)}
    keep(given.out, "attacks", [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
