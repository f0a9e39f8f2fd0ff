# SPDX-License-Identifier: BSD-3-Clause
"""What a script has made of the lists, as rows of the op table."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import BuiltinFunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, Final, cast

import torch

from preamp.casting import OP_TABLE, Edits, Namespace, OpRow, Rule, namespace_owner
from preamp.compat.lists import functional_overrides, tensor_overrides, torch_overrides
from preamp.compat.lists.names import RULES, listed_rows
from preamp.core.errors import bad_type, bad_value

_MODULES: Final[dict[Namespace, ModuleType]] = {
    "torch.nn.functional": functional_overrides,
    "torch": torch_overrides,
    "torch.Tensor": tensor_overrides,
}
_FACADES: Final = ("apex.amp.lists", "preamp.amp.lists")
_C_FUNCTIONS: Final = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_KNOWN: Final = frozenset(
    (row.namespace, row.name) for row in OP_TABLE if row.rule not in ("leave", "banned")
)


def edits_for(half: torch.dtype | None) -> Edits:
    """Return the rows that differ from the op table, for casts to ``half``.

    ``FP16_FUNCS`` counts for float16, ``BFLOAT16_FUNCS`` for bfloat16. A name that was taken out of
    its list runs without casts, and what it calls too; one that was put into a list follows it,
    and what it calls too if it is a function of C's or of the table. As in Apex the in-place form
    of a function follows: it refuses half targets if the function runs in float32.

    Raises:
        TypeError: A list was replaced by something else, or has an entry that is no name.
        ValueError: A name that ``MODULE`` does not have, or an in-place function.
    """
    unused = "BFLOAT16_FUNCS" if half is torch.float16 else "FP16_FUNCS"
    rows: list[OpRow] = []
    for namespace, module in _MODULES.items():
        wanted: dict[str, OpRow] = {}
        for name in RULES:
            if name != unused:
                for row in _rows_in(namespace, module, name):
                    wanted.setdefault(row.name, row)
        table = listed_rows(namespace)
        for name in {**table, **wanted}:
            row = wanted.get(name) or _row(namespace, name, "leave")
            if name not in table or table[name].rule != row.rule:
                rows += [row, *_in_place(row)]
    return tuple(sorted(rows, key=lambda row: (row.namespace, row.name)))


def _rows_in(namespace: Namespace, module: ModuleType, name: str) -> Iterator[OpRow]:
    own = f"amp.lists.{module.__name__.rpartition('.')[2]}.{name}"
    entries = _current(module, name)
    if not isinstance(entries, (list, tuple, set)):
        raise bad_type(
            f"{own} is {entries!r}",
            "Allowed is a list of the names of functions",
            "Edit the list that is there, by append and remove",
        )
    for entry in cast("list[Any]", entries):
        pair: Any = entry if name == "BANNED_FUNCS" else (entry, "")
        function, reason = cast("tuple[Any, Any]", pair) if _is_pair(pair) else (None, None)
        if not (isinstance(function, str) and isinstance(reason, str)):
            raise bad_type(
                f"{own} has the entry {entry!r}",
                "Allowed are names of functions; in BANNED_FUNCS pairs of a name and a reason",
                "Append the name of the function, such as 'softmax'",
            )
        _check(namespace, function, own)
        row = _row(namespace, function, RULES[name])
        yield replace(row, reason=reason) if reason else row


def _is_pair(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(cast("list[Any]", value)) == 2


def _current(module: ModuleType, name: str) -> object:
    """The list as it is, also where a script has put another in its place."""
    original = getattr(module, name)
    for facade in _FACADES:
        shown = sys.modules.get(f"{facade}.{module.__name__.rpartition('.')[2]}")
        if shown is not None and (value := getattr(shown, name, None)) is not original:
            return value
    return original


def _check(namespace: Namespace, name: str, own: str) -> None:
    if not callable(getattr(namespace_owner(namespace), name, None)):
        raise bad_value(
            f"{own} has {name!r}, and {namespace} has no function of that name",
            "A list takes functions that its MODULE has",
            "Check the spelling; functions elsewhere go through amp.register_half_function "
            "and amp.register_float_function",
        )
    if name.endswith("_") and not name.endswith("__"):
        raise bad_value(
            f"{own} has {name!r}, which writes into its argument",
            "Functions that return new tensors can be cast; their in-place forms follow them",
            f"Append {name.rstrip('_')!r}",
        )


def _row(namespace: Namespace, name: str, rule: Rule) -> OpRow:
    """The row of a function that follows its list and not the table."""
    fn = inspect.unwrap(getattr(namespace_owner(namespace), name))
    is_closed = rule == "leave" or (namespace, name) in _KNOWN or isinstance(fn, _C_FUNCTIONS)
    return OpRow(
        namespace=namespace,
        name=name,
        rule=rule,
        reason="The script has edited amp.lists.",
        is_closed=is_closed,
    )


def _in_place(row: OpRow) -> Iterator[OpRow]:
    name = f"{row.name}_"
    if row.name.startswith("__") or not hasattr(namespace_owner(row.namespace), name):
        return
    if row.rule == "float":
        yield replace(row, name=name, rule="no_half_in_place")
    elif row.rule == "half" and row.namespace == "torch.Tensor":
        yield replace(row, name=name, rule="match_self")
    else:
        yield replace(row, name=name, rule="leave", is_closed=False)
