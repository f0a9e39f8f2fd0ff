# SPDX-License-Identifier: BSD-3-Clause
"""What depends on the names by which an engine was asked for: preamp's own, or Apex's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from preamp.engine.recording import Recording
from preamp.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """The differences; the defaults are those of ``preamp.initialize``."""

    allow_half_model: bool = False  # accept models that are half already
    # Whether ``model.forward`` casts too where it is called by hand
    casts_forward: bool = False
    # Whether writing to a scaled half gradient has no effect, as in Apex, or is refused
    ignores_rewriting: bool = False


OWN = Entrance()
"""That of ``preamp.initialize``."""

Enter = Callable[[Policy, Recording], Entrance]
"""Called once the decisions are made, before a model is looked at."""
