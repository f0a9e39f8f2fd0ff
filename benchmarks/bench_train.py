# SPDX-License-Identifier: BSD-3-Clause
"""Time whole training steps against loops written by hand with the same numerics.

Every loop runs in a process of its own, on one thread; the loops of a level take turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import preamp
from preamp_bench import records, train
from preamp_bench.harness import Effort
from preamp_bench.options import RESULTS, asked, choose_device, chosen, refusing, show
from preamp_bench.tasks import TASKS, TaskConfig


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and append rows."""
    given = asked(
        __doc__,
        arguments,
        levels=(",".join(preamp.OPT_LEVELS), "opt levels"),
        models=(",".join(TASKS), "what to train"),
        width=(256, "size of the models"),
        batch=(8, "windows of text, or images, in a step"),
        seconds=(15.0, "for each comparison; a few rounds always run"),
        device=("auto", "auto (cuda where there is one), cpu, cuda, ..."),
        out=(RESULTS / "train.jsonl", "file that gets the rows"),
    )
    with refusing():
        size = {"width": given.width, "batch": given.batch}
        where = str(choose_device(given.device))
        levels = chosen(given.levels, preamp.OPT_LEVELS, "--levels")
        names = chosen(given.models, TASKS, "--models")
        tasks = [TaskConfig(name=name, device=where, **size) for name in names]
    for task in tasks:
        for level in levels:
            rows = train.run_level(task, level, Effort(seconds=given.seconds))
            show(f"{task.name}, width {task.width}, batch {task.batch}, {level}", rows)
            records.append(given.out, rows)


if __name__ == "__main__":
    main()
