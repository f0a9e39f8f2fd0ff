# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.frontend``."""

from preamp.compat.amp_state import Properties as Properties
from preamp.compat.frontend import initialize as initialize
from preamp.compat.frontend import load_state_dict as load_state_dict
from preamp.compat.frontend import state_dict as state_dict
from preamp.policy import OPT_LEVELS as opt_levels

__all__ = ["Properties", "initialize", "load_state_dict", "opt_levels", "state_dict"]
