# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.frontend``."""

from preamp.compat.amp_state import Properties as Properties
from preamp.compat.amp_state import amp_state as _amp_state
from preamp.compat.amp_state import maybe_print as maybe_print
from preamp.compat.amp_state import warn_or_err as warn_or_err
from preamp.compat.frontend import initialize as initialize
from preamp.compat.frontend import load_state_dict as load_state_dict
from preamp.compat.frontend import state_dict as state_dict
from preamp.policy import OPT_LEVELS as opt_levels

__all__ = [
    "Properties",
    "_amp_state",
    "initialize",
    "load_state_dict",
    "maybe_print",
    "opt_levels",
    "state_dict",
    "warn_or_err",
]
