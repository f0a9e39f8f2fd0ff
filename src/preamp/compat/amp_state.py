# SPDX-License-Identifier: BSD-3-Clause
"""The current engine, which Apex's argument-free functions mean. The only process-wide state."""

from __future__ import annotations

import weakref
from typing import Any

from preamp.compat.scaler import LossScaler
from preamp.core.errors import PreampPolicyError
from preamp.core.log import say
from preamp.engine import Engine
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


class AmpState:
    """What scripts read and write as ``amp._amp_state``."""

    handle: Any  # of the latest ``amp.initialize`` at O1 or O4, or ``amp.init``; not there before

    def __init__(self) -> None:
        self.hard_override = False  # warn instead of refusing contradictory overrides
        self.allow_incoming_model_not_fp32 = False  # accept models that are half already
        # whether the latest ``amp.initialize`` was called with ``enabled=False``
        self.is_off = False
        self._engine: weakref.ref[Engine] | None = None
        self.opt_properties = Properties()  # its policy as Apex showed it
        self.loss_scalers: list[LossScaler] = []  # its scalers under Apex's names
        self.min_loss_scale: float | None = None  # as passed to ``initialize``
        self.max_loss_scale: float | None = None  # as passed to ``initialize``
        self._verbosity = 1

    @property
    def engine(self) -> Engine | None:
        """The latest engine made through ``amp.initialize`` that is still in use, or ``None``.

        Held weakly: models and optimizers keep it alive, not the other way round.
        """
        return None if self._engine is None else self._engine()

    @property
    def verbosity(self) -> int:
        """0 prints nothing, 1 decisions and skipped steps; writing reaches the current engine."""
        return self._verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._verbosity = value
        if self.engine is not None:
            self.engine.verbosity = value

    def make_current(self, engine: Engine | None, *, is_off: bool = False) -> None:
        """Let the argument-free functions mean ``engine`` from now on, or none."""
        self.is_off = is_off
        self._engine = None if engine is None else weakref.ref(engine)
        self.opt_properties = Properties(None if engine is None else engine.policy)
        if engine is None or is_off:
            return
        self.loss_scalers = [LossScaler.of(scaler) for scaler in engine.scalers]
        self.min_loss_scale = engine.policy.min_loss_scale
        self.max_loss_scale = engine.policy.max_loss_scale


amp_state = AmpState()
"""The one instance; ``preamp.amp._amp_state``."""


def maybe_print(msg: object, rank0: bool = False) -> None:
    """Print ``msg`` unless ``verbosity`` is 0; with ``rank0`` on the first rank only."""
    if amp_state.verbosity > 0:
        say(str(msg), every_rank=not rank0)


def warn_or_err(msg: str) -> None:
    """Raise `PreampPolicyError` with ``msg``, or print it where ``hard_override`` is set."""
    if not amp_state.hard_override:
        raise PreampPolicyError(msg)
    say(f"Warning:  {msg}", every_rank=True)
