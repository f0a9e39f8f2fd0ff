# SPDX-License-Identifier: BSD-3-Clause
"""amp.lists: the op table to look at, and an error for every way to change it."""

from collections.abc import Callable
from typing import Any

import pytest

from kit.refusals import refused
from preamp import amp
from preamp.casting import OP_TABLE, namespace_owner
from preamp.compat.lists import RULES

MODULES: dict[str, Any] = {
    "torch.nn.functional": amp.lists.functional_overrides,
    "torch": amp.lists.torch_overrides,
    "torch.Tensor": amp.lists.tensor_overrides,
}
LISTED = amp.lists.functional_overrides.FP32_FUNCS


@pytest.mark.product
@pytest.mark.parametrize("namespace", MODULES)
@pytest.mark.parametrize("name", RULES)
def test_lists_are_the_op_table(namespace: str, name: str) -> None:
    module, owner = MODULES[namespace], namespace_owner(namespace)
    assert owner is module.MODULE
    entries = getattr(module, name)
    listed = {entry if isinstance(entry, str) else entry[0] for entry in entries}
    rows = [row for row in OP_TABLE if row.namespace == namespace and row.rule == RULES[name]]
    assert listed == {row.name for row in rows if hasattr(owner, row.name)}
    assert len(listed) == len(entries)


def add_in_place(names: Any) -> None:
    names += ["relu"]


def delete(names: Any) -> None:
    del names[0]


@pytest.mark.parametrize(
    "edit",
    [
        lambda names: names.append("relu"),
        lambda names: names.extend(["relu"]),
        lambda names: names.insert(0, "relu"),
        lambda names: names.remove("softmax"),
        lambda names: names.pop(),
        lambda names: names.clear(),
        lambda names: names.__setitem__(0, "relu"),
        add_in_place,
        delete,
    ],
)
def test_editing_names_what_to_call(edit: Callable[[Any], Any]) -> None:
    before = [*LISTED]
    with refused("compat", "an edited list"):
        edit(LISTED)
    assert [*LISTED] == before


def test_a_list_in_the_place_of_another_is_refused() -> None:
    with refused("compat", "an edited list"):
        amp.lists.functional_overrides.FP32_FUNCS = [*LISTED, "relu"]
    with refused("compat", "an edited list"):
        del amp.lists.functional_overrides.FP32_FUNCS
    assert amp.lists.functional_overrides.FP32_FUNCS is LISTED
