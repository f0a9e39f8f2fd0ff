# SPDX-License-Identifier: BSD-3-Clause
"""The names in each of Apex's lists, as the op table has them."""

from __future__ import annotations

from typing import Final

from preamp.casting import OP_TABLE, Namespace, OpRow, Rule, namespace_owner

RULES: Final[dict[str, Rule]] = {
    "FP16_FUNCS": "half",
    "BFLOAT16_FUNCS": "half",
    "FP32_FUNCS": "float",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "sequence_promote",
    "BANNED_FUNCS": "banned",
}
"""List → rule of the functions in it. Of a name that is in several the first list counts."""


def listed_rows(namespace: Namespace) -> dict[str, OpRow]:
    """The rows of the functions of ``namespace`` that have a list and that this torch has."""
    owner = namespace_owner(namespace)
    return {
        row.name: row
        for row in OP_TABLE
        if row.namespace == namespace and row.rule in RULES.values() and hasattr(owner, row.name)
    }


def names_of(namespace: Namespace, rule: Rule) -> list[str]:
    """A new list of the functions of ``namespace`` with ``rule``."""
    return [name for name, row in listed_rows(namespace).items() if row.rule == rule]


def banned_in(namespace: Namespace) -> list[tuple[str, str]]:
    """A new list of the banned functions of ``namespace``, each with the reason."""
    rows = listed_rows(namespace).values()
    return [(row.name, row.reason) for row in rows if row.rule == "banned"]
