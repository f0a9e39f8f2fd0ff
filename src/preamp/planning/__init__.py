# SPDX-License-Identifier: BSD-3-Clause
"""Before training: what a level will take, and which one to take."""

from preamp.planning.entry import estimate as estimate
from preamp.planning.entry import plan as plan
