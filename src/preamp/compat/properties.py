# SPDX-License-Identifier: BSD-3-Clause
"""``_amp_state.opt_properties``: a policy as Apex showed it."""

from __future__ import annotations

from typing import Any

from preamp.policy import APEX_OPTIONS, Policy


class Properties:
    """Read-only view: each option is an attribute and an entry of ``options``.

    Attributes:
        options: The options by name; a dict of its own.
    """

    def __init__(self, policy: Policy | None = None) -> None:
        """Show ``policy``, or Apex's state before ``initialize``: everything off."""
        self.options: dict[str, Any]
        if policy is None or not policy.enabled:
            self.options = dict.fromkeys(APEX_OPTIONS)
            self.options |= {"enabled": False, "patch_torch_functions": False, "loss_scale": 1.0}
        else:
            self.options = {name: getattr(policy, name) for name in APEX_OPTIONS}

    def __getattr__(self, name: str) -> Any:
        """Return an option by name."""
        options: dict[str, Any] = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"opt_properties has no option {name!r}; it has {list(APEX_OPTIONS)}")
