# SPDX-License-Identifier: BSD-3-Clause
"""``amp.init`` and ``amp.lists``: the casts of Apex's first interface, and what is gone of it."""

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
from preamp.compat.handle import AmpHandle, NoOpHandle
from preamp.compat.lists import RULES

F32 = torch.float32


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    handle = getattr(amp._amp_state, "handle", None)
    if handle is not None:
        handle.deactivate()
    assert not PATCHES._patched


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


@pytest.mark.parametrize("patch_type", [torch.float16, torch.bfloat16])
def test_casts_hold_until_deactivated(patch_type: torch.dtype) -> None:
    handle = amp.init(patch_type=patch_type)
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
    handle = amp.init()
    assert seen(torch.ones(1)) is torch.float16
    with handle._disable_casts():
        assert seen(torch.ones(1)) is F32
    handle._deactivate()
    assert seen(torch.ones(1)) is F32


def test_banned_functions() -> None:
    half, target = torch.full((1,), 0.5, dtype=torch.float16), torch.ones(1)
    amp.init()
    with refused("compat", "a banned function"):
        F.binary_cross_entropy(half, target)
    amp.init(allow_banned=True)
    assert F.binary_cross_entropy(half, target).dtype is F32


def test_weights_changed_between_forwards_are_seen() -> None:
    handle, weight = amp.init(), nn.Parameter(torch.ones(1, 1))
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        assert F.linear(torch.ones(1, 1), weight).item() == value
        handle._clear_cache()


def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    handle = amp.init()
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

    handle = amp.init()
    model = amp.initialize(Net(2, 2), opt_level=level, verbosity=0)
    model(torch.ones(1, 2))
    handle._deactivate()
    model(torch.ones(1, 2))
    preamp.engine_of(model).close()
    assert seen == [F32, F32]


def test_a09_a_second_init_replaces_the_first() -> None:
    original = torch.exp
    first, second = amp.init(), amp.init(patch_type=torch.bfloat16)
    assert not first.is_active()
    assert product() is torch.bfloat16
    assert torch.exp.__wrapped__ is original
    second._deactivate()
    assert torch.exp is original


def test_a10_deactivation_restores_functions_wrapped_twice() -> None:
    original = torch.mm
    amp.register_float_function(torch, "mm")
    try:
        handle = amp.init()
        assert product() is F32
        handle._deactivate()
    finally:
        FUNCTION_CASTS.discard((id(torch), "mm"))
    assert torch.mm is original
    assert not handle.is_active()


def test_disabled_init_changes_nothing() -> None:
    original = torch.mm
    amp.init()
    handle = amp.init(enabled=False)
    assert isinstance(handle, NoOpHandle)
    assert torch.mm is original
    assert not handle.is_active()
    handle._deactivate()
    with handle._disable_casts():
        assert product() is F32


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("name", ["scale_loss", "wrap_optimizer"])
def test_losses_are_no_longer_scaled_and_the_error_has_the_edited_lines(
    name: str, enabled: bool
) -> None:
    handle, weight = amp.init(enabled), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    arguments = (weight.sum(), optimizer) if name == "scale_loss" else (optimizer, 2)
    with pytest.raises(preamp.PreampUnavailableError) as got:
        getattr(handle, name)(*arguments)
    said = f"PreampUnavailableError: {got.value}"
    assert_approved("compat", "losses of a handle", said, method=name)
    page = (Path(__file__).parents[2] / "docs" / "from-apex.md").read_text(encoding="utf-8")
    lines = [line for line in str(got.value).splitlines() if line[:2] in ("- ", "+ ")]
    assert len(lines) == 5
    assert "\n".join(lines) in page


def test_another_dtype_is_refused_and_the_earlier_handle_stays() -> None:
    handle = amp.init()
    with refused("compat", "patch_type=torch.float32"):
        amp.init(patch_type=F32)
    assert handle.is_active()


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
