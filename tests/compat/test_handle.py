# SPDX-License-Identifier: BSD-3-Clause
"""The handle of ``amp.initialize``, ``amp.lists``, and what is said of Apex's first interface."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from kit.refusals import assert_approved, refused
from preamp import amp
from preamp.casting import OP_TABLE, namespace_owner
from preamp.casting.functions import FUNCTION_CASTS
from preamp.casting.patches import PATCHES
from preamp.compat.handle import AmpHandle
from preamp.compat.lists import RULES

F32 = torch.float32


KEPT: list[nn.Module] = []  # casts end with the models


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    while KEPT:
        preamp.engine_of(KEPT.pop()).close()
    assert not PATCHES._patched


def started(level: str = "O1") -> AmpHandle:
    KEPT.append(amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0))
    return amp._amp_state.handle


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize(("level", "patch_type"), [("O1", torch.float16), ("O4", torch.bfloat16)])
def test_casts_hold_until_deactivated(level: str, patch_type: torch.dtype) -> None:
    handle = started(level)
    assert isinstance(handle, AmpHandle)
    assert handle.is_active()
    assert product() is patch_type
    assert F.softmax(torch.ones(2, dtype=patch_type), 0).dtype is F32
    for _ in range(2):
        handle._deactivate()
    assert not handle.is_active()
    assert product() is F32


def test_user_functions_are_cast() -> None:
    seen = amp.half_function(lambda x: x.dtype)
    handle = started()
    assert seen(torch.ones(1)) is torch.float16
    with handle._disable_casts():
        assert seen(torch.ones(1)) is F32
    handle._deactivate()
    assert seen(torch.ones(1)) is F32


def test_banned_functions() -> None:
    half, target = torch.full((1,), 0.5, dtype=torch.float16), torch.ones(1)
    started()
    with refused("compat", "a banned function"):
        F.binary_cross_entropy(half, target)


def test_weights_changed_between_forwards_are_seen() -> None:
    handle, weight = started(), nn.Parameter(torch.ones(1, 1))
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        assert F.linear(torch.ones(1, 1), weight).item() == value
        handle._clear_cache()


def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    handle = started()
    with handle._disable_casts():
        with pytest.raises(KeyError), handle._disable_casts():
            raise KeyError
        assert product() is F32
        assert not handle.is_active()
    assert product() is torch.float16
    assert handle.is_active()


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a09_models_at_other_levels_are_not_touched(level: str) -> None:
    seen: list[torch.dtype] = []

    class Net(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(product())
            return super().forward(x)

    handle = started()
    model = amp.initialize(Net(2, 2), opt_level=level, verbosity=0)
    model(torch.ones(1, 2))
    handle._deactivate()
    model(torch.ones(1, 2))
    preamp.engine_of(model).close()
    assert seen == [F32, F32]


def test_a10_deactivation_restores_functions_wrapped_twice() -> None:
    original = torch.mm
    amp.register_float_function(torch, "mm")
    try:
        handle = started()
        assert product() is F32
        handle._deactivate()
    finally:
        FUNCTION_CASTS.extras.pop((id(torch), "mm"))
    assert torch.mm is original
    assert not handle.is_active()


def test_the_first_interface_is_refused_with_the_edited_lines() -> None:
    """Whose handles had ``scale_loss`` and ``wrap_optimizer``, which gave an OptimWrapper."""
    with pytest.raises(preamp.PreampUnavailableError) as got:
        amp.init(enabled=False)
    assert_approved("compat", "amp.init", f"PreampUnavailableError: {got.value}")
    page = (Path(__file__).parents[2] / "docs" / "from-apex.md").read_text(encoding="utf-8")
    lines = [line for line in str(got.value).splitlines() if line[:2] in ("- ", "+ ")]
    assert len(lines) == 5
    assert "\n".join(lines) in page


# -- amp.lists --------------------------------------------------------------------------------

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


EDITS: list[Callable[[Any], object]] = [
    lambda names: names.append("relu"),
    lambda names: names.extend(["relu"]),
    lambda names: names.insert(0, "relu"),
    lambda names: names.remove("softmax"),
    lambda names: names.pop(),
    lambda names: names.clear(),
    lambda names: names.__setitem__(0, "relu"),
    lambda names: names.__delitem__(0),
    lambda names: names.__iadd__(["relu"]),
    lambda names: setattr(amp.lists.functional_overrides, "FP32_FUNCS", [*names, "relu"]),
    lambda names: delattr(amp.lists.functional_overrides, "FP32_FUNCS"),
]


@pytest.mark.parametrize("edit", EDITS)
def test_editing_names_what_to_call(edit: Callable[[Any], object]) -> None:
    before = [*LISTED]
    with refused("compat", "an edited list"):
        edit(LISTED)
    assert [*LISTED] == before
    assert amp.lists.functional_overrides.FP32_FUNCS is LISTED
