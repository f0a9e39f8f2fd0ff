# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.handle``."""

from preamp.casting import disable_casts as disable_casts
from preamp.compat.amp_state import amp_state as _amp_state
from preamp.compat.amp_state import maybe_print as maybe_print
from preamp.compat.frontend import master_params as master_params
from preamp.compat.frontend import scale_loss as scale_loss
from preamp.compat.handle import AmpHandle as AmpHandle
from preamp.compat.handle import NoOpHandle as NoOpHandle
from preamp.compat.scaler import LossScaler as LossScaler
from preamp.optim import LARC as LARC

__all__ = [
    "LARC",
    "AmpHandle",
    "LossScaler",
    "NoOpHandle",
    "_amp_state",
    "disable_casts",
    "master_params",
    "maybe_print",
    "scale_loss",
]
