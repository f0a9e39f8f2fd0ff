# SPDX-License-Identifier: BSD-3-Clause
"""Which precision where: opt levels, overrides, and the frozen record of what was decided."""

from preamp.policy.keep import KeepFP32 as KeepFP32
from preamp.policy.levels import OPT_LEVELS as OPT_LEVELS
from preamp.policy.policy import APEX_OPTIONS as APEX_OPTIONS
from preamp.policy.policy import OnOverflow as OnOverflow
from preamp.policy.policy import Policy as Policy
from preamp.policy.policy import Scope as Scope
from preamp.policy.resolve import describe_overrides as describe_overrides
from preamp.policy.resolve import level_defaults as level_defaults
from preamp.policy.resolve import resolve as resolve
from preamp.policy.storage import FULL as FULL
from preamp.policy.storage import STORAGES as STORAGES
from preamp.policy.storage import Storage as Storage
