# SPDX-License-Identifier: BSD-3-Clause
"""The terminal that commands print to."""

from __future__ import annotations

import sys

from rich.console import Console


def make_console() -> Console:
    """Open the terminal; a file or a pipe, which has no width, gets one that fits the tables.

    Returns:
        A console on standard output.
    """
    return Console() if sys.stdout.isatty() else Console(width=100)
