# SPDX-License-Identifier: BSD-3-Clause
"""Constants beyond a half format are clamped to it, under casts and in half models alone."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from casting.probe import casting, held
from preamp.casting.functions import install_function_casts
from preamp.casting.mixed import install_mixed_calls

LOWEST = torch.finfo(torch.float32).min
MASK = torch.tensor([[True, False], [False, True]])
ROWS = torch.tensor([0])

Call = Callable[[torch.Tensor, float], torch.Tensor]

CALLS: dict[str, Call] = {
    "masked_fill": lambda h, low: h.masked_fill(MASK, low),
    "masked_fill by name": lambda h, low: torch.masked_fill(h, mask=MASK, value=low),
    "masked_fill of numpy's": lambda h, low: h.masked_fill(MASK, np.float32(low)),  # type: ignore[arg-type]
    "masked_fill of a tensor": lambda h, low: h.masked_fill(MASK, torch.tensor(low)),
    "masked_fill_": lambda h, low: h.clone().masked_fill_(MASK, low),
    "fill_": lambda h, low: h.clone().fill_(low),
    "full": lambda h, low: torch.full((2, 2), low, dtype=h.dtype),
    "full_like": lambda h, low: torch.full_like(h, low),
    "new_full": lambda h, low: h.new_full((2, 2), low),
    "index_fill": lambda h, low: h.index_fill(0, ROWS, low),
    "scatter": lambda h, low: h.scatter(0, ROWS[:, None], low),
    "pad": lambda h, low: F.pad(h, (1, 1), value=low),
    "clamp": lambda h, low: h.clamp(max=low),
    "threshold": lambda h, low: F.threshold(h, 4.0, low),
    "constant_": lambda h, low: nn.init.constant_(h.clone(), low),
}


@pytest.fixture(params=["O1", "O2", "O4", "O5"])
def half(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Casts of functions, or what half models install; the half dtype of the level."""
    dtype = torch.float16 if request.param in ("O1", "O2") else torch.bfloat16
    if request.param in ("O1", "O4"):
        with casting(dtype):
            yield dtype
    else:
        handle = held(install_mixed_calls)
        yield dtype
        handle.remove()


@pytest.mark.parametrize("kind", CALLS)
def test_a_constant_beyond_the_format_becomes_its_last_finite_value(
    kind: str, half: torch.dtype
) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=half)
    limit = torch.finfo(half).max
    for sign in (1, -1):
        expected = CALLS[kind](values.float(), sign * limit).to(half)
        assert torch.equal(CALLS[kind](values, -sign * LOWEST), expected)


@pytest.mark.parametrize("kind", CALLS)
def test_what_the_format_holds_is_torch_s(kind: str, half: torch.dtype) -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, -4.0]], dtype=half)
    for number in (-0.5, float("-inf"), -60000.0):
        expected = CALLS[kind](values.float(), number).to(half)
        assert torch.equal(CALLS[kind](values, number), expected)
    wide = values.float()
    assert torch.equal(CALLS[kind](wide, LOWEST).double(), CALLS[kind](wide.double(), LOWEST))


def test_other_tensors_are_left_to_torch() -> None:
    values = torch.ones(2, 2, dtype=torch.float16)
    handle = held(install_function_casts)
    with pytest.raises(RuntimeError, match="without overflow"):  # where no casts are active
        values.masked_fill(MASK, LOWEST)
    handle.remove()
    with casting(torch.bfloat16), pytest.raises(RuntimeError, match="without overflow"):
        values.masked_fill(MASK, LOWEST)  # of the other half dtype
    model = preamp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    preamp.engine_of(model).close()
    with pytest.raises(RuntimeError, match="without overflow"):
        values.masked_fill(MASK, LOWEST)


class _Masked(nn.Module):
    def __init__(self, low: float) -> None:
        super().__init__()
        self.layer, self.low = nn.Linear(2, 2), low

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(x)
        scores = (h @ h.mT).masked_fill(MASK, self.low)  # masked
        return scores.softmax(-1) @ h


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O4", "O5"])
@pytest.mark.parametrize("low", [-1e9, LOWEST])
def test_a_mask_in_a_model_and_its_note(level: str, low: float) -> None:
    torch.manual_seed(0)
    model = _Masked(low)
    x = torch.randn(2, 2)
    plain = model(x)
    model = preamp.initialize(model, opt_level=level, verbosity=0)
    with preamp.audit_casts() as casts:
        found = model(x)
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.05)
    found.sum().backward()

    half = torch.float16 if level in ("O1", "O2", "O3") else torch.bfloat16
    lowest = torch.finfo(half).min
    notes = [cast for cast in casts if cast.note]
    if low >= lowest:
        assert notes == []
        return
    (cast,) = notes
    assert (cast.function, cast.calls, cast.bytes) == ("masked_fill", 1, 0)
    assert cast.note == f"{low:g} became {lowest:g}"
    assert "test_constants.py:" in cast.where


def test_rows_that_are_all_masked_are_even_and_not_nan() -> None:
    model = _Masked(LOWEST)
    model = preamp.initialize(model, opt_level="O2", verbosity=0)
    scores = torch.zeros(2, 2, dtype=torch.float16)
    assert scores.masked_fill(MASK | True, LOWEST).softmax(-1).tolist() == [[0.5, 0.5]] * 2
    preamp.engine_of(model).close()


def test_compiled_code_has_the_same_constants() -> None:
    handle = held(install_mixed_calls)
    values = torch.ones(2, 2, dtype=torch.float16)

    def masked(h: torch.Tensor) -> torch.Tensor:
        return h.masked_fill(MASK, LOWEST)

    compiled = torch.compile(masked, backend="eager", fullgraph=True)
    assert torch.equal(compiled(values), masked(values))
    handle.remove()
