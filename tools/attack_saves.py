# SPDX-License-Identifier: BSD-3-Clause
"""Kill processes while they save checkpoints, and save in several at once while others read.

    python tools/attack_saves.py --kills 500 --saves 5000

*Kills*: a child saves without pause, in turn one checkpoint again and again, a series of which it
keeps two, and in the background. It reports each that is on the disk by a line in a pipe, and is
killed at a random moment. Then the newest one must load, hold what was saved under its number, and
be no older than the last report. This goes on until a kill has hit an unfinished file.

*Saves*: four processes save in turn one file again and again and the next of a series of which two
are kept, while two others read all that. No save may fail, no file that is read may be called
damaged, and no draft may be left at the end.

What passes becomes a row in ``benchmarks/results/attacks.jsonl``.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

import preamp
from attack_frame import RESULTS, Forks, Report, asked, keep
from preamp.checkpoint import latest_checkpoint, read_checkpoint

SIZE = 60_000
ONLY = "only.safetensors"

# -- kills ---------------------------------------------------------------------------------------

LONGEST_WAIT = 0.25  # seconds of saving before the kill, at most, after
MOST_FILES = 3  # so many files: a slow machine may take longer for each
MOST_KILLS = 200  # until one has hit an unfinished file


def content(number: int) -> dict[str, Any]:
    """What checkpoint ``number`` holds."""
    return {"number": number, "values": torch.full((SIZE,), float(number))}


def save_forever(folder: Path, number: int, report: Report) -> NoReturn:
    """Save until killed."""
    way = number % 3
    report("start")
    while True:
        number += 1
        saving = preamp.save_checkpoint(
            folder / (f"step_{number}.safetensors" if way else ONLY),
            extra=content(number),
            keep_last=2 if way else None,
            asynchronous=way == 2,
        )
        saving.wait()
        report(str(number))


def kill_once(folder: Path, number: int, draw: random.Random) -> int:
    """Start a child, kill it while it saves; return the last number reported."""
    files, wait = draw.randint(0, MOST_FILES), draw.uniform(0, LONGEST_WAIT)
    child = Forks(lambda _, report: save_forever(folder, number, report))
    lines = [next(child.lines, "") for _ in range(1 + files)]
    time.sleep(wait)
    child.kill()
    rest, codes = child.wait()
    if codes != [-signal.SIGKILL]:
        raise SystemExit(f"the process ended by itself, with {codes}")
    return max((int(line) for line in [*lines, *rest] if line.isdigit()), default=number)


def check(folder: Path, reported: int) -> int:
    """Load the newest checkpoint and check it; return its number."""
    path = latest_checkpoint(folder)
    if path is None:
        if reported:
            raise SystemExit(f"no checkpoint can be loaded, and {reported} was reported")
        return 0
    extra = preamp.load_checkpoint(path)
    number = extra["number"]
    if not torch.equal(extra["values"], content(number)["values"]):
        raise SystemExit(f"{path} holds other values than those of {number}")
    if number < reported:
        raise SystemExit(f"the newest one is {number}, and {reported} was reported")
    return number


def kill(folder: Path, wanted: int, draw: random.Random) -> dict[str, int]:
    """Kill so often, or until an unfinished file was hit; return what was counted."""
    number, kills, drafts = 0, 0, 0
    while kills < wanted or (wanted and not drafts and kills < MOST_KILLS):
        kills += 1
        reported = kill_once(folder, number, draw)
        drafts += any(folder.glob(".*.part"))
        number = check(folder, reported)
    return {"kills": kills, "unfinished": drafts, "files": number}


# -- several writers -----------------------------------------------------------------------------

WRITERS, READERS, KEPT = 4, 2, 2
FINISHED = "finished"


def saves(folder: Path, writer: int, count: int) -> Iterator[str]:
    """Save so often; yield how each ended."""
    for number in range(writer, count, WRITERS):
        is_series = number // WRITERS % 2 == 1
        path = folder / (f"step_{number}.safetensors" if is_series else ONLY)
        kept = KEPT if is_series else None
        try:
            preamp.save_checkpoint(path, extra=content(number), keep_last=kept)
        except Exception as error:
            yield f"failed: {error!r}"
        else:
            yield "saved"


def reads(folder: Path, *_: int) -> Iterator[str]:
    """Read until the writers have finished, in turn one path and the newest; yield what came."""
    is_there = False
    while not (folder / FINISHED).exists():
        yield _read(folder / ONLY)
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
        times, _, outcome = line.partition(" ")
        told[outcome] += int(times)
    told["failed: a process has died"] += sum(map(bool, codes))
    return +told


def write(folder: Path, count: int) -> tuple[Counter[str], list[str]]:
    """Save ``count`` times while others read; return how often what came, and what is left."""
    readers = start(reads, READERS, folder, 0)
    told = finish(start(saves, WRITERS, folder, count))
    (folder / FINISHED).touch()
    told += finish(readers)
    (folder / FINISHED).unlink()
    return told, sorted(path.name for path in folder.iterdir())


def complaints(told: Counter[str], left: Sequence[str]) -> list[str]:
    """What should not have happened."""
    found = [f"{times} times {outcome}" for outcome, times in told.items() if ":" in outcome]
    found += [f"left: {name}" for name in left if name.startswith(".")]
    most = 1 + KEPT * WRITERS  # a writer keeps two, whatever others have saved meanwhile
    if len(left) > most:
        found.append(f"{len(left)} files are left, at most {most} should be: {left}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        kills=(100, "how many, at least"),
        saves=(5000, "of all writers together"),
        seed=(0, "what the moments of the kills are drawn from"),
        out=(RESULTS / "attacks.jsonl", "file that gets the row"),
    )
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        killed = kill(Path(name), given.kills, random.Random(given.seed))
    print(
        "{kills} kills, {unfinished} times with an unfinished file, {files} saved".format(**killed)
    )
    with tempfile.TemporaryDirectory() as name:
        told, left = write(Path(name), given.saves)
    print(", ".join(f"{times} {outcome}" for outcome, times in sorted(told.items())), left)
    if found := complaints(told, left):
        print(*found, sep="\n")
        return 1
    kinds = {"kills": killed, "writers": dict(told)}
    keep(given.out, "attacks", {"kinds": kinds, "seconds": round(time.monotonic() - begin, 1)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
