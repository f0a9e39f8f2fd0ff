# SPDX-License-Identifier: BSD-3-Clause
"""``preamp demo``: options in, progress and one table out."""

from __future__ import annotations

from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID, TextColumn
from rich.text import Text

from preamp.cli.console import make_console, print_table, refusing
from preamp.cli.options import (
    DeviceName,
    PlaceName,
    Releases,
    StorageName,
    choose_device,
    split_levels,
    storage_of,
)
from preamp.demo.config import DEFAULT_LEVELS, SMALL, DemoConfig
from preamp.demo.data import read_corpus
from preamp.demo.parallel import choose_parallel, require_sharding
from preamp.demo.records import DemoResult, LevelResult
from preamp.demo.report import require_folder, require_packages, write
from preamp.demo.run import Setting, prepare, run
from preamp.demo.table import Cell, columns_of, note_of, remarks_of
from preamp.demo.train import Progress as Step
from preamp.demo.train import Watcher
from preamp.distributed.groups import joined, launched_ranks, own_device, own_rank
from preamp.policy.storage import storage_name

_HEADING = 12  # a line of a heading in the table, so that all of it fits 80 columns
INTERRUPTED = 130  # exit status after Ctrl-C, as shells count it: 128 + SIGINT

_CONFIG = DemoConfig()


def demo(
    levels: Annotated[
        str, typer.Option(help="Opt levels to train, separated by commas, in this order.")
    ] = ",".join(DEFAULT_LEVELS),
    steps: Annotated[int, typer.Option(help="Optimizer steps for each level.")] = _CONFIG.steps,
    small: Annotated[bool, typer.Option("--small", help="A tiny model, to try it out.")] = False,
    storage: StorageName = _CONFIG.storage,
    place: PlaceName = _CONFIG.place,
    releases: Releases = False,
    device: DeviceName = "auto",
    parallel: Annotated[
        str, typer.Option(help="What ranks of torchrun share: auto (ddp), ddp, fsdp.")
    ] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for report.html and results.json.")] = Path(
        "preamp-demo"
    ),
) -> None:
    """Train a small GPT once for each opt level and compare them.

    The text is the Python standard library's source code; nothing is downloaded. Ctrl-C stops
    the run, reports what was measured until then, and exits with status 130. On several GPUs or
    CPUs: torchrun --nproc-per-node 2 -m preamp demo.
    """
    console = make_console()
    with refusing():
        require_packages()
        storage_of(storage, place, releases)  # refused in the words of the command line
        config = DemoConfig(
            levels=tuple(split_levels(levels)),
            steps=steps,
            storage=storage,
            place=place,
            release_gradients=releases,
            device=str(own_device(choose_device(device))),
            parallel=choose_parallel(parallel),
            ranks=launched_ranks(),
            model=SMALL if small else _CONFIG.model,
        )
        setting = prepare(config, read_corpus())
        require_sharding(config.parallel, setting.device)
        require_folder(out)
    with joined(setting.device):
        result = run_watched(setting, console)
    finish(result, console, out)


def finish(result: DemoResult, console: Console, out: Path) -> None:
    """Print and write the result, where this is the first rank, which tells for all."""
    if own_rank() == 0:
        show(result, console)
        page, data = write(result, out)
        console.print(f"Report: {page}\nData:   {data}", soft_wrap=True, highlight=False)
    if result.interrupted:
        raise typer.Exit(INTERRUPTED)


def run_watched(setting: Setting, console: Console) -> DemoResult:
    """Run the demo behind progress bars, which the first rank shows."""
    if own_rank() > 0:
        return run(setting, Watcher())
    bars = Bars(setting.config.levels, setting.config.steps, console)
    with bars.display:
        return run(setting, bars)


def show(result: DemoResult, console: Console) -> None:
    """Print the table and its notes."""
    columns = columns_of(result)
    title = f"{result.parameters:,} parameters on {result.device}"
    storage = storage_name(result.config.kept)
    if storage != "full":
        title += f", storage {storage}"
    console.print(f"[italic]{escape(title)}[/]\n", highlight=False)
    headings = ["\n".join([*wrap(column.title, _HEADING), column.unit]) for column in columns]
    rows = [
        [_text_of(column.cell(row, result.baseline)) for column in columns] for row in result.levels
    ]
    left = sum(not column.is_number for column in columns)
    print_table(console, [heading.strip() for heading in headings], rows, left=left)
    for row in result.levels:
        console.print(f"[bold]{row.level}[/]  {escape(note_of(row, result))}", highlight=False)
    for remark in remarks_of(result):
        console.print(remark, style="dim", highlight=False)


def _text_of(cell: Cell) -> Text:
    return Text.assemble(cell.value, "\n", (cell.detail, "dim"))


class Bars(Watcher):
    """One bar for each opt level, in order."""

    def __init__(self, levels: tuple[str, ...], steps: int, console: Console) -> None:
        """Make the bars; :attr:`display` draws them while it is entered."""
        columns = *Progress.get_default_columns(), TextColumn("{task.fields[news]}")
        self.display = Progress(*columns, console=console, expand=True)
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
