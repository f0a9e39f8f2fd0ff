# SPDX-License-Identifier: BSD-3-Clause
"""The command line of programs that measure: options by their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

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
