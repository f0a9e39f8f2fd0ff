# SPDX-License-Identifier: BSD-3-Clause
"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from preamp_bench.distributed import COLLECTIVES, WORLDS, derived
from preamp_bench.records import Record

Cells = Mapping[str, Callable[[Record], str]]
"""By the title of a column what it has of a record."""

TIMES: Cells = {
    "best ms": lambda row: f"{row['best']:.2f}",
    "p50": lambda row: f"{row['p50']:.2f}",
    "ratio": lambda row: f"{row['best_ratio']:.2f}",
    "spread": lambda row: f"{row['ratio_p20']:.2f}–{row['ratio_p80']:.2f}",
}


def show(console: Console, title: str, rows: Sequence[Record], cells: Cells) -> None:
    """Print a row for each record that was measured, a line between groups; then the others."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for column in cells:
        table.add_column(column, justify="right", no_wrap=True)
    done = [row for row in rows if row["status"] == "measured"]
    for before, row in zip([*done[:1], *done], done, strict=False):
        if row["group"] != before["group"]:
            table.add_section()
        table.add_row(row["name"], *(cell(row) for cell in cells.values()))
    console.print(table)
    for row in rows:
        if row["status"] != "measured":
            console.print(f"[bold]{row['name']}[/]  not measured: {escape(row['reason'])}")


def show_step(rows: list[Record], console: Console) -> None:
    """Print one case of `preamp_bench.step`."""
    first = rows[0]
    clip = "clipping" if first["clip"] else "no clipping"
    size = f"{first['parameters']:,} parameters in {first['tensors']:,} tensors"
    more: Cells = {
        "B/param": lambda row: f"{row['bytes_per_parameter']:.0f}",
        "of a copy": lambda row: f"{row['share_of_copy']:.1%}",
    }
    show(console, f"{size}, {first['half']}, {clip}", rows, {**TIMES, **more})
    if "copy_gb_s" in first:
        console.print(
            "ratio: best to the best of the group's first row; spread: p20–p80 within a round; of a"
            f" copy: least traffic over best, of the copy's {first['copy_gb_s']:.1f} GB/s",
            style="dim",
            highlight=False,
        )


def _peak(row: Record) -> str:
    return "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}"


def _held(row: Record) -> str:
    parts = ("weights", "masters", "gradients", "optimizer_state")
    return f"{sum(row[part] for part in parts):.1f}"


def show_train(rows: list[Record], console: Console) -> None:
    """Print one level of `preamp_bench.train`."""
    first = rows[0]
    title = f"{first['model']}, width {first['width']}, batch {first['batch']}, {first['level']}"
    more: dict[str, Callable[[Record], str]] = {"peak MB": _peak, "B/param": _held}
    if any("to_autocast" in row for row in rows):
        more["to autocast"] = lambda row: f"{row['to_autocast']:.2f}"
    show(console, title, rows, {**TIMES, **more})


def _on(world: int) -> Callable[[Record], str]:
    return lambda row: f"{derived(row)[world]:.2f}"


def show_distributed(rows: list[Record], console: Console) -> None:
    """Print the rows of `preamp_bench.distributed`."""
    first = rows[0]
    show(console, f"{first['parameters']:,} parameters, {first['ranks']} ranks", rows, TIMES)
    cells = {f"{world:,}": _on(world) for world in WORLDS}
    small = [row for row in rows if row["name"] in COLLECTIVES]
    show(console, "Expected on more ranks, t(2) · log2(n), in ms", small, cells)
