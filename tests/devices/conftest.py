# SPDX-License-Identifier: BSD-3-Clause
"""What tests of storage on the host need of each other."""

import pytest

from preamp.kernels import staged


@pytest.fixture
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few tensors be several runs."""
    monkeypatch.setattr(staged, "RUN", 4096)
