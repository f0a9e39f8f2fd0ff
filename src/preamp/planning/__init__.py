# SPDX-License-Identifier: BSD-3-Clause
"""Before training: what a level will take, and which one to take."""

from typing import TYPE_CHECKING

from preamp.core.late import names

if TYPE_CHECKING:
    from preamp.planning.memory import estimate as estimate
    from preamp.planning.planner import plan as plan

# Dozens of records and torch's tracing tools would be a quarter of the time of importing preamp.
__getattr__, __dir__ = names("preamp.planning", estimate="memory", plan="planner")

__all__ = ["estimate", "plan"]
