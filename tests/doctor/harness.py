# SPDX-License-Identifier: BSD-3-Clause
"""Scripts run under the doctor in this process."""

from pathlib import Path
from typing import Any

from preamp.doctor import Examination, Finding, Place, select_rules

HERE = "# <-"
"""Marks the line of a script that a finding must name."""


def examine(
    text: str, folder: Path, *, steps: int | None = None, select: tuple[str, ...] = ()
) -> tuple[Examination, dict[str, Any]]:
    """Run ``text`` as a file in ``folder``; return the examination and the script's globals."""
    path = folder / "script.py"
    path.write_text(text, "utf-8")
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(path)}
    examination = Examination(select_rules(select), steps=steps)
    with examination.watching():
        exec(compile(text, str(path), "exec"), names)
    return examination, names


def marked_line(text: str) -> int:
    """The line that carries the mark."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if HERE in line]
    assert len(lines) == 1
    return lines[0]


def where(finding: Finding) -> tuple[str, int]:
    assert isinstance(finding.where, Place)
    return Path(finding.where.file).name, finding.where.line
