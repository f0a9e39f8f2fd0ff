# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.handle``."""

from preamp.casting import disable_casts as disable_casts
from preamp.compat.frontend import scale_loss as scale_loss
from preamp.compat.handle import AmpHandle as AmpHandle

__all__ = ["AmpHandle", "disable_casts", "scale_loss"]
