# SPDX-License-Identifier: BSD-3-Clause
"""``apex.parallel.LARC``."""

from preamp.optim import LARC as LARC

__all__ = ["LARC"]
