# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.opt``."""

from preamp.compat.frontend import master_params as master_params
from preamp.compat.handle import OptimWrapper as OptimWrapper
from preamp.compat.scaler import LossScaler as LossScaler

__all__ = ["LossScaler", "OptimWrapper", "master_params"]
