# SPDX-License-Identifier: BSD-3-Clause
"""The report of an engine's run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from preamp.engine.engine import Engine


def write_report(engine: Engine, path: str | Path, *, title: str = "Training report") -> None:
    """Write what is known of the run so far as one HTML page; `preamp report` does it for files.

    What is on the page follows from `initialize`'s ``numerics`` and ``history``; parts that were
    not recorded name what to switch on. Changes nothing; may synchronise.

    Args:
        engine: Open or closed.
        path: The page; replaced as a whole or not at all.
        title: Its heading.

    Raises:
        PreampUnavailableError: jinja2 is missing; it comes with ``preamp[report]``.
        OSError: The page cannot be written.
    """
    # Late: the room is large, and few processes write a report.
    from preamp.report import write

    write(Path(path), engine.history, title=title)
