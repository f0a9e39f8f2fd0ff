# SPDX-License-Identifier: BSD-3-Clause
"""Take the Python blocks out of a Markdown file and run them, as a program of its own.

Blocks of one file share their names, as a reader who types them in would have it. A block is left
out if the line above it is ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>.+?) -->\n)?^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One block: its text, the line it starts on, and why it is not run (or nothing)."""

    code: str
    line: int
    reason: str


def blocks_of(text: str) -> list[Block]:
    """Return all Python blocks of a Markdown text."""
    return [
        Block(
            code=match["code"],
            line=text.count("\n", 0, match.start("code")) + 1,
            reason=match["reason"] or "",
        )
        for match in _BLOCK.finditer(text)
    ]


def run_file(path: Path) -> int:
    """Run the blocks of ``path`` in order; return how many ran."""
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = [block for block in blocks_of(path.read_text(encoding="utf-8")) if not block.reason]
    for block in blocks:
        # Blank lines in front make a traceback show the line of the Markdown file.
        source = "\n" * (block.line - 1) + block.code
        exec(compile(source, str(path), "exec"), names)
    return len(blocks)


if __name__ == "__main__":
    print(f"ran {run_file(Path(sys.argv[1]))} blocks")
