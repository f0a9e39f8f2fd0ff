# SPDX-License-Identifier: BSD-3-Clause
"""Write the rules in ``docs/doctor.md``: ``python tools/doctor_page.py``."""

from __future__ import annotations

import textwrap
from pathlib import Path

from preamp.doctor import RULES, Rule

FAMILIES = {
    "PA1": "Loss scale",
    "PA2": "Half weights",
    "PA3": "Computations in half",
    "PA4": "Parameters and optimizers",
    "PA6": "Destroyed runs",
}

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"
START = "## Rules\n"
"""What stands above this line is written by hand."""


def render(page: str) -> str:
    """Return ``page`` with its rules written anew."""
    head, start, _ = page.partition(START)
    parts = [head + start]
    for first, title in FAMILIES.items():
        parts.append(f"### {title}\n")
        parts += [_section(rule) for key, rule in RULES.items() if key.startswith(first)]
    return "\n".join(parts)


def _section(rule: Rule) -> str:
    lines = (
        _wrapped(f"**{rule.title}** ({rule.severity.value}). {rule.why}"),
        _wrapped(f"- *How it is seen.* {rule.how}", "  "),
        _wrapped(f"- *What to do.* {rule.do}", "  "),
    )
    return f"#### {rule.id}\n\n{lines[0]}\n\n{lines[1]}\n{lines[2]}\n"


def _wrapped(text: str, indent: str = "") -> str:
    """``text`` in lines of a page, which are no longer than 120 characters."""
    return textwrap.fill(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
