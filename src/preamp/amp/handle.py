# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.handle``."""

from preamp.casting import disable_casts as disable_casts
from preamp.compat.frontend import scale_loss as scale_loss
from preamp.compat.handle import AmpHandle as AmpHandle
from preamp.compat.handle import NoOpHandle as NoOpHandle

__all__ = ["AmpHandle", "NoOpHandle", "disable_casts", "scale_loss"]
