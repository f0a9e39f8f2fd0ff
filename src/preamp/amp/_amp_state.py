# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._amp_state``: importable, although the package's attribute is the object."""

from preamp.compat.amp_state import AmpState as AmpState
from preamp.compat.amp_state import amp_state as _amp_state

__all__ = ["AmpState", "_amp_state"]
