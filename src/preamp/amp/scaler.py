# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.scaler``."""

from preamp.compat.amp_state import amp_state as _amp_state
from preamp.compat.amp_state import maybe_print as maybe_print
from preamp.compat.frontend import master_params as master_params
from preamp.compat.scaler import LossScaler as LossScaler

__all__ = ["LossScaler", "_amp_state", "master_params", "maybe_print"]
