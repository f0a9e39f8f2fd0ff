# SPDX-License-Identifier: BSD-3-Clause
"""What every test starts from and leaves behind: seeds, default dtype, casts, open engines."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch

from preamp.engine import Engine

torch.set_num_threads(1)

# The same examples in every run, and no deadline: the first call of a torch op is slow. "full" has
# more of them; for a search with new examples: pytest --hypothesis-profile=explore.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True)
hypothesis.settings.register_profile("full", deadline=None, derandomize=True, max_examples=300)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("quick")

_CASTABLE = ("cpu", "cuda")


def _autocast_state() -> tuple[object, ...]:
    devices = ((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _CASTABLE)
    return (*devices, torch.is_autocast_cache_enabled())


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seed everything; afterwards close the engines left open and check what they leave.

    An engine that a test does not close would cast functions in the tests that come after it.
    """
    engines: list[weakref.ref[Engine]] = []
    make = Engine.__init__

    def make_and_note(self: Engine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        engines.append(weakref.ref(self))

    monkeypatch.setattr(Engine, "__init__", make_and_note)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dtype, grad, casts = torch.get_default_dtype(), torch.is_grad_enabled(), _autocast_state()
    yield
    for engine in [ref() for ref in reversed(engines)]:
        if engine is not None:
            engine.close()
    left = _autocast_state()
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(grad)
    for device, (enabled, half) in zip(_CASTABLE, casts, strict=False):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, half)
    torch.set_autocast_cache_enabled(casts[-1])
    assert left == casts, "a test left autocast in another state"
