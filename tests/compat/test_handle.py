# SPDX-License-Identifier: BSD-3-Clause
"""``amp.init``: the casts of Apex's first interface, its known bugs, and what it no longer has."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from kit.refusals import assert_approved, refused
from preamp import amp
from preamp.casting.functions import FUNCTION_CASTS
from preamp.casting.patches import PATCHES
from preamp.compat.handle import AmpHandle, NoOpHandle

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    handle = getattr(amp._amp_state, "handle", None)
    if handle is not None:
        handle.deactivate()
    assert not PATCHES._patched


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


# -- casts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("patch_type", HALVES)
def test_casts_hold_until_deactivated(patch_type: torch.dtype) -> None:
    handle = amp.init(patch_type=patch_type)

    during = [product(), F.softmax(torch.ones(2, dtype=patch_type), 0).dtype]
    active = handle.is_active()
    handle._deactivate()
    handle._deactivate()

    assert isinstance(handle, AmpHandle)
    assert during == [patch_type, torch.float32]
    assert active
    assert not handle.is_active()
    assert product() is torch.float32


def test_user_functions_are_cast() -> None:
    seen = amp.half_function(lambda x: x.dtype)
    handle = amp.init()
    inside = seen(torch.ones(1))
    with handle._disable_casts():
        disabled = seen(torch.ones(1))
    handle._deactivate()

    assert [inside, disabled, seen(torch.ones(1))] == [torch.float16, torch.float32, torch.float32]


def test_banned_functions() -> None:
    half, target = torch.full((1,), 0.5, dtype=torch.float16), torch.ones(1)
    amp.init()
    with refused("compat", "a banned function"):
        F.binary_cross_entropy(half, target)

    amp.init(allow_banned=True)

    assert F.binary_cross_entropy(half, target).dtype is torch.float32


def test_weights_changed_between_forwards_are_seen() -> None:
    handle = amp.init()
    weight = nn.Parameter(torch.ones(1, 1))
    outputs = []
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        outputs.append(F.linear(torch.ones(1, 1), weight).item())
        handle._clear_cache()

    assert outputs == [1.0, 2.0]


def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    handle = amp.init()
    seen = []
    with handle._disable_casts():
        with pytest.raises(KeyError), handle._disable_casts():
            raise KeyError
        seen += [product(), handle.is_active()]
    seen += [product(), handle.is_active()]

    assert seen == [torch.float32, False, torch.float16, True]


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a09_models_at_other_levels_are_not_touched(level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(product())
            return self.linear(x)

    seen: list[torch.dtype] = []
    handle = amp.init()
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    model(torch.ones(1, 2))
    handle._deactivate()
    model(torch.ones(1, 2))
    preamp.engine_of(model).close()

    assert seen == [torch.float32, torch.float32]


def test_a09_a_second_init_replaces_the_first() -> None:
    original = torch.exp
    first = amp.init()
    second = amp.init(patch_type=torch.bfloat16)

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
        dtype = product()
        handle._deactivate()
    finally:
        FUNCTION_CASTS.discard((id(torch), "mm"))

    assert dtype is torch.float32
    assert torch.mm is original
    assert not handle.is_active()


# -- turned off, and refused ------------------------------------------------------------------


def test_disabled_init_changes_nothing() -> None:
    original = torch.mm
    amp.init()
    handle = amp.init(enabled=False)

    assert isinstance(handle, NoOpHandle)
    assert torch.mm is original
    assert product() is torch.float32
    assert not handle.is_active()
    handle._deactivate()
    with handle._disable_casts():
        assert torch.mm is original


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


def test_the_edited_lines_train() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = model.weight.clone()
    model, optimizer = amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    with amp.scale_loss(model(torch.ones(1, 2)).sum() / 8, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert torch.equal(model.weight, before - 0.5 / 8)
    preamp.engine_of(model).close()


def test_another_dtype_is_refused_and_the_earlier_handle_stays() -> None:
    handle = amp.init()
    with refused("compat", "patch_type=torch.float32"):
        amp.init(patch_type=torch.float32)
    assert handle.is_active()
