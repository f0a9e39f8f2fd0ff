# SPDX-License-Identifier: BSD-3-Clause
"""amp.lists: what scripts write into the lists before initialize is what functions do."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import preamp
from preamp import amp
from preamp.casting import OP_TABLE, namespace_owner
from preamp.compat.lists import edits_for
from preamp.compat.lists.names import RULES
from preamp.core.errors import PreampStateError

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
MODULES: dict[str, Any] = {
    "torch.nn.functional": amp.lists.functional_overrides,
    "torch": amp.lists.torch_overrides,
    "torch.Tensor": amp.lists.tensor_overrides,
}
FUNCTIONAL, TORCH, TENSOR = MODULES.values()
HALF = torch.ones(2, 2, dtype=F16)
WIDE = torch.ones(2, 2)


@pytest.fixture(autouse=True)
def lists() -> Iterator[None]:
    """Leave the lists as they were found, edited or replaced."""
    before = [
        (m, name, getattr(m, name), [*getattr(m, name)]) for m in MODULES.values() for name in RULES
    ]
    yield
    KEPT.clear()
    for module, name, own, entries in before:
        own[:] = entries
        setattr(module, name, own)


KEPT: list[Any] = []  # casts end with the engine, and that with its model


def started(level: str = "O1", verbosity: int = 0) -> Any:
    KEPT.append(torch.nn.Linear(2, 2))
    return amp.initialize(KEPT[-1], opt_level=level, verbosity=verbosity)


@pytest.mark.apex("4.2 amp.lists", "0 apex.amp.lists", "0 apex.amp.amp")
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


def test_untouched_lists_are_no_edits() -> None:
    assert edits_for(F16) == edits_for(BF16) == ()


@pytest.mark.apex("4.2 amp.lists")
def test_a_name_taken_out_runs_as_it_is_given() -> None:
    FUNCTIONAL.FP32_FUNCS.remove("softmax")
    FUNCTIONAL.FP16_FUNCS.remove("linear")
    started()
    assert F.softmax(HALF, 1).dtype is F16
    assert F.linear(WIDE, WIDE).dtype is F32
    assert F.softplus(HALF).dtype is F32  # the others follow the table
    assert torch.mm(WIDE, WIDE).dtype is F16


@pytest.mark.apex("4.2 amp.lists")
def test_a_name_put_into_a_list_follows_it() -> None:
    TORCH.FP32_FUNCS.append("sigmoid")
    TORCH.FP16_FUNCS.append("cumsum")
    TORCH.FP32_FUNCS.remove("cumsum")
    TORCH.CASTS.append("maximum")
    TORCH.SEQUENCE_CASTS.append("column_stack")
    FUNCTIONAL.FP16_FUNCS.append("relu")
    FUNCTIONAL.FP32_FUNCS.append("mish")
    started()
    assert torch.sigmoid(HALF).dtype is F32
    assert torch.cumsum(WIDE, 0).dtype is F16
    assert torch.maximum(HALF, WIDE).dtype is F32
    assert torch.column_stack([HALF, WIDE]).dtype is F32
    assert F.relu(WIDE).dtype is F16
    assert F.mish(HALF).dtype is F32


def test_rules_end_with_the_engine() -> None:
    FUNCTIONAL.FP32_FUNCS.append("relu")
    original = F.relu
    model = started()
    assert F.relu(HALF).dtype is F32
    preamp.engine_of(model).close()
    assert F.relu is original
    FUNCTIONAL.FP32_FUNCS.remove("relu")
    started()
    assert F.relu(HALF).dtype is F16


@pytest.mark.apex("4.2 edits while an engine of before casts functions")
def test_edits_do_not_reach_earlier_engines() -> None:
    earlier = started()
    FUNCTIONAL.FP32_FUNCS.remove("softmax")
    assert F.softmax(HALF, 1).dtype is F32
    text = "Functions are cast by other rules for softmax already than this engine is to have."
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}"):
        started()
    assert F.softmax(HALF, 1).dtype is F32
    started("O2")  # casts no functions
    preamp.engine_of(earlier).close()
    started()
    started()  # the same lists
    assert F.softmax(HALF, 1).dtype is F16


def test_preamps_own_engines_have_the_table() -> None:
    FUNCTIONAL.FP32_FUNCS.remove("softmax")
    options = {"opt_level": "O1", "scope": "thread", "verbosity": 0}
    own = preamp.initialize(torch.nn.Linear(2, 2), **options)
    assert F.softmax(HALF, 1).dtype is F32
    preamp.engine_of(own).close()
    started()
    with pytest.raises(PreampStateError, match="other rules for softmax"):
        preamp.initialize(torch.nn.Linear(2, 2), opt_level="O1", verbosity=0)


@pytest.mark.apex("4.2 BFLOAT16_FUNCS")
def test_each_half_dtype_has_its_list() -> None:
    FUNCTIONAL.BFLOAT16_FUNCS.append("relu")
    FUNCTIONAL.FP16_FUNCS.append("mish")
    model = started("O4")
    assert F.relu(WIDE).dtype is BF16
    assert F.mish(WIDE).dtype is F32
    preamp.engine_of(model).close()
    started()
    assert F.relu(WIDE).dtype is F32
    assert F.mish(WIDE).dtype is F16


@pytest.mark.apex("4.2 BANNED_FUNCS")
def test_bans() -> None:
    del FUNCTIONAL.BANNED_FUNCS[0]
    FUNCTIONAL.BANNED_FUNCS.append(("relu", "not in this house"))
    started()
    with pytest.raises(NotImplementedError, match=r"^relu got a float16 .*not in this house"):
        F.relu(HALF)
    assert F.relu(WIDE).dtype is F32
    assert F.binary_cross_entropy(HALF.float() / 2, WIDE).dtype is F32


def test_of_several_lists_the_first_counts() -> None:
    """As in Apex, whose casts lay on one another with the one to half innermost."""
    TORCH.FP16_FUNCS.append("exp")
    assert "exp" in TORCH.FP32_FUNCS
    started()
    assert torch.exp(WIDE).dtype is F16


def test_in_place_forms_follow() -> None:
    TENSOR.FP32_FUNCS += ["sigmoid"]
    TENSOR.FP32_FUNCS.remove("exp")
    started()
    with pytest.raises(NotImplementedError, match=r"^sigmoid_ got a float16 target"):
        HALF.clone().sigmoid_()
    x = HALF.clone()
    assert x.exp_() is x
    assert x.dtype is F16


@pytest.mark.parametrize("kind", [list, tuple, set])
def test_a_list_put_in_the_place_of_another_counts(kind: Any) -> None:
    FUNCTIONAL.FP32_FUNCS = kind([*FUNCTIONAL.FP32_FUNCS, "relu"])
    started()
    assert F.relu(HALF).dtype is F32


@pytest.mark.usefixtures("apex_alias")
def test_under_the_alias() -> None:
    module = importlib.import_module("apex.amp").lists.functional_overrides
    assert module.FP32_FUNCS is FUNCTIONAL.FP32_FUNCS
    module.FP32_FUNCS = [name for name in module.FP32_FUNCS if name != "softmax"]
    started()
    assert F.softmax(HALF, 1).dtype is F16


@pytest.fixture
def apex_alias() -> Iterator[None]:
    preamp.install_apex_alias()
    yield
    preamp.remove_apex_alias()


def test_init_follows_too() -> None:
    FUNCTIONAL.FP32_FUNCS.append("relu")
    handle = amp.init()
    assert F.relu(HALF).dtype is F32
    handle._deactivate()


def test_casts_of_edited_functions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    FUNCTIONAL.FP32_FUNCS.append("relu")
    FUNCTIONAL.FP32_FUNCS.remove("softplus")
    started(verbosity=2)
    capsys.readouterr()
    F.relu(HALF)
    F.softplus(HALF)
    assert capsys.readouterr().out == "Half->Float (relu)\n"


@pytest.mark.apex("4.2 edits that cannot be followed")
@pytest.mark.parametrize(
    ("entry", "error", "text"),
    [
        ("foo", ValueError, "amp.lists.functional_overrides.FP32_FUNCS has 'foo', and "),
        ("relu_", ValueError, "amp.lists.functional_overrides.FP32_FUNCS has 'relu_', which "),
        (F.relu, TypeError, "amp.lists.functional_overrides.FP32_FUNCS has the entry <function"),
    ],
)
def test_what_cannot_be_followed_is_named(entry: Any, error: type[Exception], text: str) -> None:
    FUNCTIONAL.FP32_FUNCS.append(entry)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        amp.initialize(model, opt_level="O1", verbosity=0)
    with pytest.raises(PreampStateError):
        preamp.engine_of(model)
    amp.initialize(model, opt_level="O0", verbosity=0)


def test_lists_that_are_none() -> None:
    TORCH.CASTS = None
    with pytest.raises(TypeError, match=r"^amp\.lists\.torch_overrides\.CASTS is None\."):
        started()
    TORCH.CASTS = []
    FUNCTIONAL.BANNED_FUNCS.append("relu")
    with pytest.raises(TypeError, match="BANNED_FUNCS has the entry 'relu'"):
        started()
