# SPDX-License-Identifier: BSD-3-Clause
"""Progress bars of a demo run."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from preamp.demo.records import LevelResult
from preamp.demo.watch import Progress as Step


class Bars:
    """One bar for each opt level; a :class:`preamp.demo.watch.Watcher`.

    Args:
        levels: The opt levels, in order.
        steps: Steps of each.
        console: Where to draw.
    """

    def __init__(self, levels: tuple[str, ...], steps: int, console: Console) -> None:
        """Make the bars; :attr:`display` draws them while it is entered."""
        self.display = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._steps = steps
        self._tasks: dict[str, TaskID] = {
            level: self.display.add_task(level, total=steps, start=False, news="waiting")
            for level in levels
        }

    def level_started(self, level: str) -> None:
        """Start the clock of a bar."""
        self.display.start_task(self._tasks[level])

    def step_done(self, progress: Step) -> None:
        """Move a bar on."""
        news = (
            f"{progress.loss:.3f} bits/byte  scale {progress.loss_scale:,.6g}"
            f"  {progress.tokens_per_second:,.0f} tokens/s"
        )
        self.display.update(self._tasks[progress.level], completed=progress.step, news=news)

    def level_done(self, result: LevelResult) -> None:
        """Show the result in place of the last step."""
        bits = result.held_out_bits
        news = result.status if bits is None else f"held out: {bits:.3f} bits/byte"
        self.display.update(self._tasks[result.level], news=news)
        self.display.stop_task(self._tasks[result.level])
