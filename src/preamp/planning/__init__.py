# SPDX-License-Identifier: BSD-3-Clause
"""Before training: what a level will take, and which one to take."""

from preamp.planning.count import CATEGORIES as CATEGORIES
from preamp.planning.count import count_memory as count_memory
from preamp.planning.memory import MemoryEstimate as MemoryEstimate
from preamp.planning.memory import estimate as estimate
