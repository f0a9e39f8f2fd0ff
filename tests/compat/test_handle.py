# SPDX-License-Identifier: BSD-3-Clause
"""The handle of ``amp.initialize``, and what is said of Apex's first interface."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import preamp
from kit.refusals import assert_approved
from preamp import amp
from preamp.casting.functions import FUNCTION_CASTS
from preamp.casting.patches import PATCHES
from preamp.compat.handle import AmpHandle

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


def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    handle = started()
    with handle._disable_casts():
        with pytest.raises(KeyError), handle._disable_casts():
            raise KeyError
        assert product() is F32
        assert not handle.is_active()
    handle._clear_cache()
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
        FUNCTION_CASTS.discard((id(torch), "mm"))
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
