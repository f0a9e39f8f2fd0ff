# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp._amp_state``: importable, although the package's attribute is the object."""

from preamp.compat.amp_state import AmpState as AmpState
from preamp.compat.amp_state import amp_state as _amp_state
from preamp.compat.amp_state import maybe_print as maybe_print
from preamp.compat.amp_state import warn_or_err as warn_or_err
from preamp.compat.frontend import master_params as master_params

__all__ = ["AmpState", "_amp_state", "master_params", "maybe_print", "warn_or_err"]
