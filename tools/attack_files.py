# SPDX-License-Identifier: BSD-3-Clause
"""Hand damaged and hostile files to everything that reads files, and look what it does.

    python tools/attack_files.py --cases 5000 --seed 1
    python tools/attack_files.py --kinds pickles,odd

Kinds, of which the first four are tried ``--cases`` times and the others once:

- *damaged*: checkpoints of both formats that were cut, flipped, spliced, swapped, grown, zeroed;
- *crafted*: checkpoints whose manifest was changed somewhere, with checksums that fit, loaded at
  every level, with and without pending gradients, and files of sharded ones;
- *histories*: records of a run with lines that were damaged;
- *mixed*: pieces of the following, put together by chance;
- *pickles*: pickles that call, build and name what they should not, and bombs;
- *odd*: pipes, devices, folders, sockets, links that lead nowhere, files without permission.

Each must load or be refused by an error of preamp, an `OSError` that names the path, or a
`ValueError` or `TypeError`, all in three sentences; within seconds, in memory that goes with the
file's size, without running anything, and what is refused must leave live objects as they were.
What breaks is described, its file is kept, and the exit status is 1; else the counts become a row
in ``benchmarks/results/attacks.jsonl``.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attack_cases import KINDS, Case
from attack_frame import RESULTS, Forks, Report, asked, keep
from attack_targets import Broken, Guard

MOST_BROKEN = 20  # of one kind, then it stops


def attack(kind: str, cases: int, seed: int, folder: Path) -> Iterator[str]:
    """Try the cases of a kind in ``folder``; yield a line about each.

    A case that is found broken is kept in a folder of its own.
    """
    guard, number, broken = Guard(folder / "executed"), 0, 0
    for case in KINDS[kind](folder, random.Random(seed), cases, guard):
        number += 1
        yield f"begin {case.what}"
        try:
            outcomes = {guard.attempt(act, *case.paths) for act in case.acts}
            if case.check is not None and "loaded" in outcomes:
                case.check()
            yield f"end {'loaded' if 'loaded' in outcomes else 'refused'}"
        except Broken as error:
            broken += 1
            yield f"broken {error}"
            yield f"kept {_kept(case, folder.parent / f'{kind}-{number}')}"
            shutil.rmtree(guard.mark, ignore_errors=True)
            if broken == MOST_BROKEN:
                break
    yield f"most {guard.seconds:.3f} {guard.bytes}"


def _kept(case: Case, place: Path) -> Path:
    place.mkdir()
    for path in case.paths:
        if path.is_dir():
            shutil.copytree(path, place / path.name)
        elif path.is_file():
            shutil.copy2(path, place / path.name)
    return place


def counted(kind: str, cases: int, seed: int, folder: Path) -> dict[str, Any]:
    """Attack in another process, which may crash; return counts and what broke."""
    own = folder / kind
    own.mkdir(parents=True)
    begin = time.monotonic()

    def work(_: int, report: Report) -> None:
        for line in attack(kind, cases, seed, own):
            report(line)

    forks = Forks(work)
    counts, broken, last, most = Counter[str](), list[str](), "its start", "0 0"
    for line in forks.lines:
        word, _, rest = line.rstrip("\n").partition(" ")
        if word == "begin":
            last = rest
        elif word == "end":
            counts[rest] += 1
        elif word in ("broken", "kept"):
            broken.append(f"{last}: {rest}" if word == "broken" else f"  kept in {rest}")
        else:
            most = rest
    _, (code,) = forks.wait()
    if code:
        broken.append(f"{last}: the process ended with {code}; its files are in {own}")
    seconds, size = most.split()
    return {
        "refused": counts["refused"],
        "loaded": counts["loaded"],
        "seconds": round(time.monotonic() - begin, 1),
        "longest": float(seconds),
        "most_bytes": int(size),
        "broken": broken,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack in the given ways; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        cases=(5000, "of each kind"),
        seed=(0, "what the cases are drawn from"),
        kinds=(",".join(KINDS), "which kinds"),
        out=(RESULTS / "attacks.jsonl", "file that gets the row"),
    )
    warnings.simplefilter("ignore")
    folder, found = Path(tempfile.mkdtemp(prefix="attacks-")), dict[str, Any]()
    print(f"seed {given.seed}, {given.cases} cases")
    is_broken = False
    for kind in given.kinds.split(","):
        row = found[kind] = counted(kind, given.cases, given.seed, folder)
        broken = row.pop("broken")
        is_broken |= bool(broken)
        print(
            f"{kind}: {row['refused']} refused, {row['loaded']} loaded in {row['seconds']} s, each "
            f"within {row['longest']} s and {row['most_bytes'] / 2**20:.0f} MiB",
            *broken,
            sep="\n",
            flush=True,
        )
        if not broken:
            shutil.rmtree(folder / kind)
    if is_broken:
        return 1
    folder.rmdir()
    keep(given.out, "attacks", [{"seed": given.seed, "cases": given.cases, "kinds": found}])
    return 0


if __name__ == "__main__":
    sys.exit(main())
