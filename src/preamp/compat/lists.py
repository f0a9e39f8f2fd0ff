# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists``: the op table of O1 and O4 under the names of Apex's lists, to look at."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from preamp.casting import OP_TABLE, Namespace, Rule, namespace_owner
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


def _refuse(self: object, *args: Any, **kwargs: Any) -> NoReturn:
    raise bad_type(
        "A list of amp.lists was to be changed",
        "The lists show what happens to a function's arguments; all engines share the functions",
        "Call amp.register_half_function(module, name), amp.register_float_function or "
        "amp.register_promote_function before amp.initialize, or put calls that should run as "
        "they are given into amp.disable_casts()",
    )


class FunctionList(tuple[Any, ...]):
    """Names of functions; whatever changes a list raises `TypeError`."""

    __slots__ = ()
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse


class FunctionLists:
    """The functions of ``MODULE`` that this torch has, in a list for each of `RULES`.

    ``FP16_FUNCS`` is of O1, ``BFLOAT16_FUNCS`` of O4; ``BANNED_FUNCS`` has pairs of a name and the
    reason. Another list in the place of one raises `TypeError`.
    """

    def __init__(self, namespace: Namespace) -> None:
        owner = namespace_owner(namespace)
        rows = [row for row in OP_TABLE if row.namespace == namespace and hasattr(owner, row.name)]
        vars(self)["MODULE"] = owner
        for name, rule in RULES.items():
            vars(self)[name] = FunctionList(
                (row.name, row.reason) if rule == "banned" else row.name
                for row in rows
                if row.rule == rule
            )

    __setattr__ = __delattr__ = _refuse


functional_overrides = FunctionLists("torch.nn.functional")
tensor_overrides = FunctionLists("torch.Tensor")
torch_overrides = FunctionLists("torch")
