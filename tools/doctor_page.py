# SPDX-License-Identifier: BSD-3-Clause
"""Write the rules in ``docs/doctor.md``: ``python tools/doctor_page.py``."""

from __future__ import annotations

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
    return (
        f"#### {rule.id}\n\n**{rule.title}** ({rule.severity.value}). {rule.why}\n\n"
        f"- *How it is seen.* {rule.how}\n- *What to do.* {rule.do}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text("utf-8")), "utf-8")
