# SPDX-License-Identifier: BSD-3-Clause
"""Two engines in one process: half dtypes side by side, and layers that they share.

That each trains as alone, `test_programs` shows.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import HALF_WEIGHTS, LEVEL_NAMES
from kit.refusals import refused
from preamp import amp

Run = tuple[Any, Any]


# -- half dtypes side by side ----------------------------------------------------------------


class WithScores(nn.Module):
    """Has scores in a half dtype of its own, and notes what float functions make of them."""

    def __init__(self, half: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kind = half
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = float_functions(self.kind)
        return self.linear(x)


def float_functions(half: torch.dtype) -> set[torch.dtype]:
    x = torch.rand(2, 4).to(half)
    made = [x.softmax(-1), nn.functional.softmax(x, -1), x.pow(2), torch.pow(x, 2), x**2, x.sum()]
    made += [torch.exp(x), x.norm(), nn.functional.layer_norm(x, [4]), amp.float_function(abs)(x)]
    return {result.dtype for result in made}


def elsewhere(run: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(
    ("level", "other"), [("O1", torch.bfloat16), ("O4", torch.float16)], ids=["O1", "O4"]
)
@pytest.mark.parametrize("scope", ["thread", "model"])
def test_float_functions_of_the_other_half_dtype(
    scope: str, level: str, other: torch.dtype
) -> None:
    """In float32 wherever an engine casts, and nowhere else."""
    model = WithScores(other)
    preamp.initialize(model, opt_level=level, scope=scope, verbosity=0)
    for run in (lambda run: run(), elsewhere):  # on another thread too
        run(lambda: model(torch.rand(2, 4)))
        assert model.seen == {torch.float32}
    assert float_functions(other) == {torch.float32 if scope == "thread" else other}
    with preamp.disable_casts():
        assert float_functions(other) == {other}
    half = WithScores(other)
    preamp.initialize(half, opt_level="O2" if level == "O4" else "O5", verbosity=0)
    half(torch.rand(2, 4))
    assert half.seen == {other}


# -- shared sub-modules -------------------------------------------------------------------------


def pair() -> tuple[Run, Run]:
    """Two models around the same layer, each with an optimizer of its own weights."""
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    models = [nn.Sequential(shared, nn.Linear(4, 3)) for _ in range(2)]
    one, two = [(model, torch.optim.SGD(model[1].parameters(), lr=0.125)) for model in models]
    return one, two


@pytest.mark.each
@pytest.mark.parametrize("half", HALF_WEIGHTS)
@pytest.mark.parametrize("other", LEVEL_NAMES)
@pytest.mark.parametrize("half_first", [True, False])
@pytest.mark.parametrize("part", ["model", "layer"])
def test_a_shared_layer_is_refused_where_one_engine_has_it_half(
    half: str, other: str, half_first: bool, part: str
) -> None:
    levels = (half, other) if half_first else (other, half)
    one, two = pair()
    model, optimizer = two
    preamp.initialize(*one, opt_level=levels[0], verbosity=0)
    second: nn.Module = model if part == "model" else model[0]
    words = {"part": "0.weight" if part == "model" else "weight", "here": levels[1]}
    for allow in (False, True):
        options: Any = {"opt_level": levels[1], "verbosity": 0, "allow_half_model": allow}
        with refused("engine", "a layer of two engines", *one, *two, there=levels[0], **words):
            preamp.initialize(second, optimizer, **options)

    preamp.engine_of(one[0]).close()
    preamp.initialize(second, optimizer, opt_level=levels[1], verbosity=0)
    assert preamp.engine_of(second).policy.opt_level == levels[1]


def test_a_layer_shared_with_a_model_that_has_changed_over_is_refused() -> None:
    (model, optimizer), two = pair()
    preamp.initialize(model, opt_level="O0", verbosity=0)
    preamp.initialize(model, optimizer, opt_level="O1", verbosity=0)  # which alone has it now
    with pytest.raises(preamp.PreampStateError, match="at 'O1' in another call"):
        preamp.initialize(*two, opt_level="O2", verbosity=0)
    preamp.initialize(model, opt_level="O2", verbosity=0)  # the same model may change over
    assert model[0].weight.dtype is torch.float16
