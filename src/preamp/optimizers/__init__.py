# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.optimizers``: migrating is ``from preamp.optimizers import FusedAdam``."""

from preamp.compat.flat import FP16_Optimizer as FP16_Optimizer
from preamp.optim.fused.every import *  # noqa: F403 - each is named there once
