# SPDX-License-Identifier: BSD-3-Clause
"""Entry point of the ``preamp`` command."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys

import torch

import preamp
from preamp.core.errors import message
from preamp.core.extras import how_to_install

NEEDS = ("rich", "typer")


def main() -> None:
    """Run the command line, or exit with status 1 and say what it needs.

    A program that a command runs is run here, outside of what reads the command line: so what it
    raises, and the status that it ends with, stay its own.
    """
    if sys.argv[1:] == ["--version"]:
        python = platform.python_version()
        print(f"preamp {preamp.__version__}, torch {torch.__version__}, Python {python}")
        raise SystemExit(0)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            message(
                f"Cannot import {' and '.join(missing)}",
                f"The preamp command needs {' and '.join(NEEDS)}; the library itself does not",
                how_to_install("cli"),
            ),
            file=sys.stderr,
        )
        raise SystemExit(1)
    # By name and late, so that the check above comes first.
    program = importlib.import_module("preamp.cli.app").parse(sys.argv[1:])
    program()
    raise SystemExit(0)
