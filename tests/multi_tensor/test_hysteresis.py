# SPDX-License-Identifier: BSD-3-Clause
"""``update_scale_hysteresis`` against the rule in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preamp.compat.multi_tensor import amp_C

LARGE = 2.0**127


def model(
    state: tuple[float, int, int], found_inf: float, interval: int, hysteresis: int
) -> tuple[float, int, int]:
    """What one update makes of scale, growth tracker and hysteresis tracker."""
    scale, clean, tolerated = state
    if found_inf > 0:
        tolerated -= 1
        return (scale if tolerated > 0 else scale * 0.5), 0, tolerated
    clean += 1
    if clean >= interval:
        return (scale * 2.0 if scale * 2.0 < 2.0**128 else scale), 0, hysteresis
    return scale, clean, hysteresis


@pytest.mark.apex("8 update_scale_hysteresis")
@given(
    st.sampled_from([1.0, 65536.0, LARGE]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from([0.0, 1.0, 3.0]), max_size=20),
)
def test_a_run_follows_the_rule(
    start: float, interval: int, hysteresis: int, overflows: list[float]
) -> None:
    state = (start, 0, hysteresis)
    scale = torch.tensor([start])
    clean, tolerated = (torch.tensor([n], dtype=torch.int32) for n in (0, hysteresis))
    for found_inf in overflows:
        state = model(state, found_inf, interval, hysteresis)
        returned = amp_C.update_scale_hysteresis(
            scale, clean, tolerated, torch.tensor([found_inf]), 2.0, 0.5, interval, hysteresis
        )
        assert returned is scale
        assert (scale.item(), clean.item(), tolerated.item()) == state


@pytest.mark.apex("8 update_scale_hysteresis")
def test_the_scale_has_no_floor() -> None:
    scale, counts = torch.tensor([2.0**-149]), torch.ones(2, 1, dtype=torch.int32)
    amp_C.update_scale_hysteresis(scale, counts[0], counts[1], torch.ones(1), 2.0, 0.5, 1, 1)
    assert scale.item() == 0.0


@pytest.mark.parametrize(
    "name", ["current_scale", "growth_tracker", "hysteresis_tracker", "found_inf"]
)
def test_wrong_tensors_are_refused(name: str) -> None:
    tensors = {
        "current_scale": torch.ones(1),
        "growth_tracker": torch.ones(1, dtype=torch.int32),
        "hysteresis_tracker": torch.ones(1, dtype=torch.int32),
        "found_inf": torch.ones(1),
    }
    kind = str(tensors[name].dtype).removeprefix("torch.")
    tensors[name] = torch.ones(1, dtype=torch.float64)
    text = f"^update_scale_hysteresis: {name} is float64 of .* is a contiguous {kind} tensor "
    with pytest.raises(RuntimeError, match=text):
        amp_C.update_scale_hysteresis(*tensors.values(), 2.0, 0.5, 1, 1)
    assert all(tensor.item() == 1 for tensor in tensors.values())
