# SPDX-License-Identifier: BSD-3-Clause
"""What an engine prints, measures and records, as ``initialize`` was told."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from preamp.core.errors import bad_type, bad_value

Numerics = Literal["off", "light", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The decisions about what is told of a run."""

    verbosity: int = 0  # 0 prints nothing, 1 also each skipped step, 2 also each cast
    numerics: Numerics = "off"
    every: int = 100  # they are taken at the first step and every so many steps after it
    path: Path | None = None  # file that records go to, or ``None``

    @property
    def takes_steps(self) -> bool:
        """Whether every step leaves a record; otherwise only skipped ones do."""
        return self.numerics != "off" or self.path is not None

    def measures(self, step: int) -> bool:
        """Whether statistics are taken at step number ``step``, counted from 1."""
        return self.numerics != "off" and (step - 1) % self.every == 0


OFF = Recording()
"""Nothing is printed, measured or written."""


def make_recording(verbosity: Any, numerics: Any, every: Any, history: Any) -> Recording:
    """Check the arguments of ``initialize``; ``verbosity`` may be the text of a number."""
    try:
        told = int(verbosity)
    except (TypeError, ValueError):
        raise bad_type(
            f"verbosity={verbosity!r} cannot be used",
            "Allowed are 0, 1 and 2, also as a string such as '1'",
            "Pass 0 to have nothing printed",
        ) from None
    if numerics not in get_args(Numerics):
        raise bad_value(
            f"numerics={numerics!r} is not known",
            "Choose one of 'off', 'light', 'full'",
            "Pass 'light' for statistics of gradients, 'full' for histograms and weights too",
        )
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise bad_value(
            f"numerics_every={every!r} cannot be used",
            "Allowed is a whole number from 1",
            "Pass after how many optimizer steps statistics are taken again, such as 100",
        )
    if history is not None:
        is_path = isinstance(history, (str, os.PathLike)) and history != ""
        if not is_path or Path(cast("Any", history)).is_dir():
            raise bad_type(
                f"history={history!r} is no path of a file",
                "Allowed are the path of a file, which need not exist, and None",
                "Pass for example history='run.jsonl'; the records themselves are in "
                "preamp.engine_of(optimizer).history",
            )
        history = Path(cast("Any", history))
    return Recording(verbosity=told, numerics=numerics, every=every, path=history)
