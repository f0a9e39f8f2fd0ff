# SPDX-License-Identifier: BSD-3-Clause
"""The command line of programs that measure: options by their defaults."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parents[1] / "results"


def asked(
    text: str | None, arguments: Sequence[str] | None = None, **options: tuple[Any, str]
) -> argparse.Namespace:
    """Read a command line, on one thread from here on.

    Args:
        text: What ``--help`` says.
        arguments: The command line; ``None`` is the process's own.
        options: By name the default, whose type the option has, and its help.
    """
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, what) in options.items():
        kind: Callable[[str], Any] = type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=what)
    torch.set_num_threads(1)
    return parser.parse_args(arguments)
