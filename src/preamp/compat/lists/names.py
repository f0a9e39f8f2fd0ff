# SPDX-License-Identifier: BSD-3-Clause
"""The names in each of Apex's lists, as the op table has them."""

from __future__ import annotations

import sys
from typing import Any, Final, NoReturn

from preamp.casting import OP_TABLE, Namespace, OpRow, Rule, namespace_owner
from preamp.core.errors import bad_type

RULES: Final[dict[str, Rule]] = {
    "FP16_FUNCS": "half",
    "BFLOAT16_FUNCS": "half",
    "FP32_FUNCS": "float",
    "CASTS": "promote",
    "SEQUENCE_CASTS": "sequence_promote",
    "BANNED_FUNCS": "banned",
}
"""List → rule of the functions in it."""

_FILES: Final = ("functional_overrides", "torch_overrides", "tensor_overrides")
_FOLDERS: Final = ("preamp.compat.lists", "apex.amp.lists")


def _cannot_be_edited() -> TypeError:
    return bad_type(
        "A list of amp.lists was to be changed",
        "The lists show what happens to a function's arguments; all engines share the functions",
        "Call amp.register_half_function(module, name), amp.register_float_function or "
        "amp.register_promote_function before amp.initialize, or put calls that should run as "
        "they are given into amp.disable_casts()",
    )


def _refuse(self: FunctionList, *args: Any, **kwargs: Any) -> NoReturn:
    raise _cannot_be_edited()


class FunctionList(tuple[Any, ...]):
    """Names of functions; whatever changes a list raises `TypeError`."""

    __slots__ = ()
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


def names_of(namespace: Namespace, rule: Rule) -> FunctionList:
    """The functions of ``namespace`` with ``rule`` that this torch has."""
    return FunctionList(row.name for row in _rows(namespace, rule))


def banned_in(namespace: Namespace) -> FunctionList:
    """The banned functions of ``namespace``, each with the reason."""
    return FunctionList((row.name, row.reason) for row in _rows(namespace, "banned"))


def _rows(namespace: Namespace, rule: Rule) -> list[OpRow]:
    owner = namespace_owner(namespace)
    return [
        row
        for row in OP_TABLE
        if row.namespace == namespace and row.rule == rule and hasattr(owner, row.name)
    ]


def check_unchanged() -> None:
    """Raise `TypeError` if a script has put another list in the place of one."""
    modules = [sys.modules.get(f"{folder}.{file}") for folder in _FOLDERS for file in _FILES]
    for module in modules:
        if module is not None and not all(
            isinstance(getattr(module, name, None), FunctionList) for name in RULES
        ):
            raise _cannot_be_edited()
