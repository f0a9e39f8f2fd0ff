# SPDX-License-Identifier: BSD-3-Clause
"""Tables that the benchmarks print."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from preamp_bench.distributed import COLLECTIVES, WORLDS, derived
from preamp_bench.records import Record


def show_step(rows: list[Record], console: Console) -> None:
    """Print one case of `preamp_bench.step`."""
    first = rows[0]
    clip = "clipping" if first["clip"] else "no clipping"
    size = f"{first['parameters']:,} parameters in {first['tensors']:,} tensors"
    table = _table(
        f"{size}, {first['half']}, {clip}",
        ("best ms", "p50", "ratio", "spread", "B/param", "of a copy"),
    )
    done = [row for row in rows if row["status"] == "measured"]
    for row in _with_sections(done, table):
        table.add_row(
            row["name"],
            f"{row['best']:.2f}",
            f"{row['p50']:.2f}",
            *_ratio_cells(row),
            f"{row['bytes_per_parameter']:.0f}",
            f"{row['share_of_copy']:.1%}",
        )
    console.print(table)
    _print_failures(rows, console)
    if done:
        console.print(
            "ratio: best to the best of the group's first row; spread: p20–p80 within a round; of a"
            f" copy: least traffic over best, of the copy's {first['copy_gb_s']:.1f} GB/s",
            style="dim",
            highlight=False,
        )


def show_train(rows: list[Record], console: Console) -> None:
    """Print one level of `preamp_bench.train`."""
    first = rows[0]
    title = f"{first['model']}, width {first['width']}, batch {first['batch']}, {first['level']}"
    columns = ["best ms", "p50", "ratio", "spread", "peak MB", "B/param"]
    beats = any("to_autocast" in row for row in rows)
    table = _table(title, [*columns, *(["to autocast"] if beats else [])])
    for row in rows:
        if row["status"] != "measured":
            continue
        parts = ("weights", "masters", "gradients", "optimizer_state")
        peak = row["peak_bytes"]
        table.add_row(
            row["name"],
            f"{row['best']:.1f}",
            f"{row['p50']:.1f}",
            *_ratio_cells(row),
            "–" if peak is None else f"{peak / 1e6:.0f}",
            f"{sum(row[part] for part in parts):.1f}",
            *([f"{row['to_autocast']:.2f}"] if beats else []),
        )
    console.print(table)
    _print_failures(rows, console)


def show_distributed(rows: list[Record], console: Console) -> None:
    """Print the rows of `preamp_bench.distributed`."""
    first = rows[0]
    table = _table(
        f"{first['parameters']:,} parameters, {first['ranks']} ranks",
        ("best ms", "p50", "ratio", "spread"),
    )
    for row in _with_sections(rows, table):
        times = (f"{row['best']:.2f}", f"{row['p50']:.2f}")
        table.add_row(row["name"], *times, *_ratio_cells(row))
    console.print(table)
    more = _table(
        "Expected on more ranks, t(2) · log2(n), in ms", [f"{world:,}" for world in WORLDS]
    )
    for row in rows:
        if row["name"] in COLLECTIVES:
            more.add_row(row["name"], *(f"{time:.2f}" for time in derived(row).values()))
    console.print(more)


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _with_sections(rows: list[Record], table: Table) -> Iterable[Record]:
    """Yield the rows, a line between groups."""
    for before, row in zip([rows[0], *rows] if rows else [], rows, strict=False):
        if row["group"] != before["group"]:
            table.add_section()
        yield row


def _ratio_cells(row: Record) -> tuple[str, str]:
    return f"{row['best_ratio']:.2f}", f"{row['ratio_p20']:.2f}–{row['ratio_p80']:.2f}"


def _print_failures(rows: list[Record], console: Console) -> None:
    for row in rows:
        if row["status"] != "measured":
            console.print(f"[bold]{row['name']}[/]  not measured: {escape(row['reason'])}")
