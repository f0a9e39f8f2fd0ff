# SPDX-License-Identifier: BSD-3-Clause
"""Write ``docs/op-table.md`` from the op table: ``python tools/op_table.py``."""

from __future__ import annotations

from pathlib import Path

from preamp.casting.op_lists import OP_TABLE, OpRow

TITLES = {
    "half": "Run in half precision",
    "float": "Run in float32",
    "promote": "Promote half mixed with float32",
    "sequence_promote": "Promote the items of a sequence",
    "banned": "Refused with half arguments",
    "no_half_in_place": "In place, refused for a half target",
    "match_self": "In place, other arguments cast to the target",
}

HEADER = """\
# Which function runs in which precision at O1

Generated from `preamp/casting/op_lists.py` by `python tools/op_table.py`. The table holds on every
device, for float16 and bfloat16, while an engine at O1 or O4 lives: in its models, outside of them
with `scope="thread"`, and in `torch.autocast` blocks. float64 is never cast. "By autocast" names
the device types on which `torch.autocast` does it; elsewhere preamp does.
`register_half_function`, `register_float_function` and `register_promote_function` override a row.

Others are left to torch. Pointwise ones that are bounded or linear (`relu`, `tanh`), pools,
`dropout` and look-ups run in the dtype of their input. `mean` and batch norms accumulate in float32
inside. In-place ones (`add_`) compute in the wider dtype and round once into the target.
"""


def _section(title: str, rows: list[OpRow]) -> list[str]:
    groups: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        native = ", ".join(sorted(row.native)) or "–"
        groups.setdefault((row.namespace, row.reason, native), []).append(row.name)
    lines = ["", f"## {title}", "", "| in | functions | by autocast | why |", "|---|---|---|---|"]
    for (namespace, reason, native), names in groups.items():
        listed = " ".join(f"`{name}`" for name in names)
        lines.append(f"| `{namespace}` | {listed} | {native} | {reason} |")
    return lines


def render() -> str:
    """The whole page."""
    lines = [HEADER.rstrip("\n")]
    for rule, title in TITLES.items():
        lines += _section(title, [row for row in OP_TABLE if row.rule == rule])
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).parents[1].joinpath("docs", "op-table.md").write_text(render(), encoding="utf-8")
