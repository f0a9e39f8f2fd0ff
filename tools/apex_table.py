# SPDX-License-Identifier: BSD-3-Clause
"""Write ``docs/from-apex.md`` from the contract's rows: ``python tools/apex_table.py``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

HEADER = """\
# What of Apex works, and how

Generated from `tests/contract/rows` by `python tools/apex_table.py`. There every row names the
tests that prove it, and the suite fails when one of them is gone.

- **supported**: does what it did in Apex.
- **differs**: works, but not as in Apex; the last column says what differs, and why.
- **refused**: raises an error that says what to do instead.

How to migrate, with or without changing a line, is in [Coming from Apex](coming-from-apex.md); what
is cast at O1, in [Precision of each function](op-table.md); old checkpoints, in
[Files of Apex](api/apex-checkpoints.md).
"""


def render(rows: Iterable[Any], sections: Mapping[str, str]) -> str:
    """The whole page.

    Args:
        rows: Rows of the contract.
        sections: Their sections in order, with the headings.
    """
    rows = list(rows)
    lines = [HEADER.rstrip("\n"), "", *_summary(rows)]
    for section, title in sections.items():
        lines += ["", f"## {title}", "", "| name | verdict | why |", "|---|---|---|"]
        lines += [
            f"| {_cell(row.name)} | {row.verdict} | {_cell(row.why)} |"
            for row in rows
            if row.section == section
        ]
    return "\n".join(lines) + "\n"


def _summary(rows: list[Any]) -> list[str]:
    counts = {
        verdict: sum(row.verdict == verdict for row in rows)
        for verdict in ("supported", "differs", "refused")
    }
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return [f"{len(rows)} rows: {told}."]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    contract = importlib.import_module("contract.rows")
    page = render(contract.ROWS, contract.SECTIONS)
    ROOT.joinpath("docs", "from-apex.md").write_text(page, encoding="utf-8")
