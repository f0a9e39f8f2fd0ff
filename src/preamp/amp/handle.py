# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.handle``."""

from preamp.casting import disable_casts as disable_casts
from preamp.compat.frontend import scale_loss as scale_loss

__all__ = ["disable_casts", "scale_loss"]
