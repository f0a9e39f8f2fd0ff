# SPDX-License-Identifier: BSD-3-Clause
"""Before training: the memory that it will take; `preamp.estimate` counts it."""

from typing import TYPE_CHECKING

from preamp.core.late import names
from preamp.watch.inventory import CATEGORIES as CATEGORIES

if TYPE_CHECKING:
    from preamp.memory.estimates import MemoryEstimate as MemoryEstimate

# torch's tracing tools would take a part of the time of importing preamp.
__getattr__, __dir__ = names("preamp.memory", MemoryEstimate="estimates")

__all__ = ["CATEGORIES", "MemoryEstimate"]
