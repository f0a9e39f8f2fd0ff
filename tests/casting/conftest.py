# SPDX-License-Identifier: BSD-3-Clause
"""The op table installed, and a check that a test left the thread's state as it found it."""

from collections.abc import Iterator

import pytest

from casting.probe import held
from preamp.casting.autocast_state import AutocastState, nesting
from preamp.casting.functions import install_function_casts


@pytest.fixture
def function_casts() -> Iterator[None]:
    before = AutocastState.capture()
    handle = held(install_function_casts)
    yield
    handle.remove()
    assert AutocastState.capture() == before
    assert nesting() == 0
