# SPDX-License-Identifier: BSD-3-Clause
"""The lines that ``initialize`` prints; the same as Apex's, which scripts and logs know."""

from __future__ import annotations

from preamp.core.log import say
from preamp.policy import APEX_OPTIONS, Policy


def announce(default: Policy, policy: Policy, verbosity: int) -> None:
    """Print the level, its defaults, and what overrides made of them; nothing at verbosity 0."""
    if verbosity <= 0:
        return
    say(f"Selected optimization level {policy.brief}\n")
    say("Defaults for this optimization level are:")
    _say_fields(default)
    say("Processing user overrides (additional kwargs that are not None)...")
    say("After processing overrides, optimization options are:")
    _say_fields(policy)


def _say_fields(policy: Policy) -> None:
    for name in APEX_OPTIONS:
        say(f"{name:26} : {getattr(policy, name)}")
