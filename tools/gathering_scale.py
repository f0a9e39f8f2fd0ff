# SPDX-License-Identifier: BSD-3-Clause
"""What ranks tell each other in a sharded save: bytes and seconds on each of them, simulated.

    python tools/gathering_scale.py --ranks 1024 --tensors 10000

Nothing is communicated. The messages are those that the ranks of a model under ``fully_shard``
would send; what all of them have in common is made once. *Summaries* is what every save exchanges,
*details* what follows where a rank's summary is not as it usually is, and what every save
exchanged before there were summaries. Of details each rank would hold those of all ranks in memory,
so a few ranks are measured and the rest is reckoned, in proportion.
"""

from __future__ import annotations

import argparse
import math
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from preamp.checkpoint.gathering import Summary, are_as_usual, compare_details, fingerprints
from preamp.checkpoint.shards import Box, Frame, Shard

T = TypeVar("T")
MEASURED_RANKS = 8  # of details
ROWS, COLUMNS = 8192, 1024


def pieces_of(rank: int, ranks: int, count: int) -> dict[str, torch.Tensor | Shard]:
    """Rows of weights and of their Adam states, as one rank has them; values do not matter."""
    rows = math.ceil(ROWS / ranks)
    start = min(rank * rows, ROWS)
    box = Box((start, 0), (min(rows, ROWS - start), COLUMNS))
    piece = Shard(torch.empty(0), Frame((ROWS, COLUMNS)), box, is_alone=True)
    found: dict[str, torch.Tensor | Shard] = {}
    for number in range(count // 4):
        found[f"models/0/state/layers.{number}.attention.weight"] = piece
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"optimizers/0/state/state/{number}/{kind}"] = piece
    return found


def whole_tensors(count: int) -> dict[str, torch.Tensor | Shard]:
    """The step counts of the Adam states, which all ranks have, and a random state."""
    steps = {f"optimizers/0/state/state/{n}/step": torch.ones(()) for n in range(count // 4)}
    return {**steps, "rng/torch": torch.get_rng_state()}


def timed(work: Callable[[], T]) -> tuple[T, float]:
    """Return what ``work`` returns, and the seconds that took."""
    begin = time.perf_counter()
    result = work()
    return result, time.perf_counter() - begin


def told(name: str, one: int, ranks: int, seconds: Sequence[float]) -> str:
    """A line about an exchange in which a rank sends ``one`` bytes."""
    words = ("made in", "pickled in", "unpickled in", "compared in")
    times = ", ".join(f"{w} {s:.3g} s" for w, s in zip(words, seconds, strict=True))
    return f"{name}: {one:,} bytes of each rank, {one * ranks / 2**20:,.1f} MiB on each; {times}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate one save; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=10_000)
    given = parser.parse_args(arguments)
    ranks, seconds, summaries = given.ranks, 0.0, list[Summary]()
    whole, printing = timed(lambda: fingerprints(whole_tensors(given.tensors)))
    for rank in range(ranks):
        cut = pieces_of(rank, ranks, given.tensors)
        prints, naming = timed(lambda cut=cut: whole | fingerprints(cut))
        summary, seconds = timed(lambda c=cut, p=prints: Summary.of(c, p, frozenset(), 1))
        summaries.append(summary)
        seconds += printing + naming
    sent, pickling = timed(lambda: pickle.dumps((None, summaries[0])))
    _, unpickling = timed(lambda: [pickle.loads(sent) for _ in range(ranks)])
    is_usual, comparing = timed(lambda: are_as_usual(summaries))
    if not is_usual:
        raise SystemExit("the ranks do not fit together")
    print(told("summaries", len(sent), ranks, (seconds, pickling, unpickling, comparing)))

    some = min(ranks, MEASURED_RANKS)
    details = [whole | fingerprints(pieces_of(rank, some, given.tensors)) for rank in range(some)]
    sent, pickling = timed(lambda: pickle.dumps((None, (details[0], "token", 1))))
    _, unpickling = timed(lambda: [pickle.loads(sent) for _ in range(some)])
    _, comparing = timed(lambda: compare_details(details))
    times = (printing + naming, pickling, unpickling * ranks / some, comparing * ranks / some)
    print(told("details", len(sent), ranks, times))
    return 0


if __name__ == "__main__":
    sys.exit(main())
