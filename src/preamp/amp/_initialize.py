# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._initialize``: what scripts take from it."""

from preamp.compat.frontend import applier as applier

__all__ = ["applier"]
