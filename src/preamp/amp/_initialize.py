# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._initialize``."""

from preamp.casting import disable_casts as disable_casts
from preamp.compat.amp_state import amp_state as _amp_state
from preamp.compat.amp_state import warn_or_err as warn_or_err
from preamp.compat.frontend import applier as applier
from preamp.compat.scaler import LossScaler as LossScaler
from preamp.optim import LARC as LARC

__all__ = ["LARC", "LossScaler", "_amp_state", "applier", "disable_casts", "warn_or_err"]
