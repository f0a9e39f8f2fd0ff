# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.opt``."""

from preamp.compat.handle import OptimWrapper as OptimWrapper

__all__ = ["OptimWrapper"]
