# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.scaler``."""

from preamp.compat.scaler import LossScaler as LossScaler

__all__ = ["LossScaler"]
