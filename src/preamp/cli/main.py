# SPDX-License-Identifier: BSD-3-Clause
"""Entry point of the ``preamp`` command."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys

import torch

import preamp
from preamp.cli.doctor import run_doctor
from preamp.cli.run import run
from preamp.core.errors import message

NEEDS = ("rich", "typer")


def versions() -> str:
    """What ``preamp --version`` prints, which a report of a bug begins with."""
    return (
        f"preamp {preamp.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def main() -> None:
    """Run the command line, or exit with status 1 and say what it needs."""
    if sys.argv[1:] == ["--version"]:
        print(versions())
        raise SystemExit(0)
    # These need neither, and end as the program ends that they run.
    for name, command in (("run", run), ("doctor", run_doctor)):
        if sys.argv[1:2] == [name]:
            command(sys.argv[2:])
            raise SystemExit(0)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            message(
                f"Cannot import {' and '.join(missing)}",
                f"The preamp command needs {' and '.join(NEEDS)}; the library itself does not",
                'Install them with: pip install "preamp[cli]"',
            ),
            file=sys.stderr,
        )
        raise SystemExit(1)
    # By name and late, so that the check above comes first.
    importlib.import_module("preamp.cli.app").app()
    raise SystemExit(0)
