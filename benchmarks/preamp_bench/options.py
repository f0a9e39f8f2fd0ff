# SPDX-License-Identifier: BSD-3-Clause
"""The command line of programs that measure: options by their defaults, rows as lines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from preamp.core.errors import PreampError, bad_value
from preamp_bench.records import Record

RESULTS = Path(__file__).parents[1] / "results"
Option = tuple[str | float | Path, str]
"""Its default, whose type it has, and its help. Of the default ``False`` comes a flag."""


def asked(
    text: str | None, arguments: Sequence[str] | None = None, **options: Option
) -> argparse.Namespace:
    """Read a command line, on one thread from here on.

    Args:
        text: What ``--help`` says.
        arguments: The command line; ``None`` is the process's own.
        options: By name.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, what) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true", help=what)
        else:
            parser.add_argument(flag, type=type(default), default=default, help=what)
    torch.set_num_threads(1)
    return parser.parse_args(arguments)


@contextmanager
def refusing() -> Generator[None]:
    """Say why, and exit with status 2, where what was asked for cannot be measured."""
    try:
        yield
    except (ValueError, PreampError) as error:
        print(f"Error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def choose_device(name: str) -> torch.device:
    """Turn ``auto``, or a device as torch spells it, into one."""
    best = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(best if name == "auto" else name)


def numbers(text: str) -> list[int]:
    """Read whole numbers above zero, separated by commas, such as ``"1e6,2000"``."""
    return [int(float(part)) for part in text.split(",")]


def chosen(text: str, known: Iterable[str], option: str) -> list[str]:
    """Read some of the names that are known, separated by commas."""
    names, allowed = [part.strip() for part in text.split(",")], list(known)
    for name in names:
        if name not in allowed:
            raise bad_value(
                f"{option} got {name!r}",
                f"Choose from {', '.join(allowed)}",
                f"Pass for example {option} {allowed[0]}",
            )
    return names


def show(title: str, rows: Iterable[Record]) -> None:
    """Print rows: the best time, its ratio to the group's first, and the share of a copy."""
    print(title)
    for row in rows:
        if row["status"] != "measured":
            print(f"  {row['name']}: not measured, {row['reason']}", flush=True)
            continue
        share = f", {row['share_of_copy']:.1%} of a copy" if "share_of_copy" in row else ""
        spread = f"{row['best_ratio']:.2f} ({row['ratio_p20']:.2f} to {row['ratio_p80']:.2f})"
        print(f"  {row['name']:32} {row['best']:9.2f} ms, {spread}{share}", flush=True)
