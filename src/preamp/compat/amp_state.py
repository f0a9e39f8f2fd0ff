# SPDX-License-Identifier: BSD-3-Clause
"""The engines that Apex's argument-free functions mean. The only process-wide state."""

from __future__ import annotations

import gc
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
        raise AttributeError(
            f"opt_properties has no option {name!r}. It has {', '.join(APEX_OPTIONS)}. Others are "
            "in preamp.engine_of(optimizer).policy."
        )


class AmpState:
    """What scripts read and write as ``amp._amp_state``.

    Apex had one list of loss scalers, which each call replaced. Here it is those of all engines in
    training that were made through ``amp.initialize``, the latest call's first, so that a number
    that Apex had means the same whatever an earlier call has left alive.
    """

    handle: Any  # of the latest ``amp.initialize`` at O1 or O4; not there before

    def __init__(self) -> None:
        self.hard_override = False  # warn instead of refusing contradictory overrides
        self.allow_incoming_model_not_fp32 = False  # accept models that are half already
        # Every open engine with Apex's faces of its scalers, the latest first. Held weakly: models
        # and optimizers keep an engine alive, not the other way round.
        self._made: list[tuple[weakref.ref[Engine], list[LossScaler]]] = []
        self._has_looked = True  # for engines that were dropped, since the latest call
        self._latest_is_off = False  # whether that call said ``enabled=False``
        self._verbosity = 1

    def _current(self) -> list[tuple[Engine, list[LossScaler]]]:
        if not self._has_looked and len(self._made) > 1:
            gc.collect()  # what the latest call replaced may be in reference cycles
            self._has_looked = True
        living = [(engine, faces) for ref, faces in self._made if (engine := ref()) is not None]
        trained = [made for made in living if made[0].policy.enabled and made[0].optimizers]
        as_asked = [made for made in living if made[0].policy.enabled is not self._latest_is_off]
        return trained or as_asked[:1]

    @property
    def engines(self) -> list[Engine]:
        """All open engines that have optimizers, the latest first; where none has, the latest."""
        return [engine for engine, _ in self._current()]

    @property
    def engine(self) -> Engine | None:
        """The latest of `engines`, or ``None``."""
        return next(iter(self.engines), None)

    @property
    def is_off(self) -> bool:
        """Whether the latest call said ``enabled=False``, and no optimizer has amp."""
        return self._latest_is_off and not any(one.policy.enabled for one in self.engines)

    @property
    def loss_scalers(self) -> list[LossScaler]:
        """The scalers of `engines` under Apex's names, in a list of its own."""
        return [
            face for engine, faces in self._current() if engine.policy.enabled for face in faces
        ]

    @property
    def opt_properties(self) -> Properties:
        """The policy of `engine` as Apex showed it."""
        return Properties(None if self.engine is None else self.engine.policy)

    @property
    def min_loss_scale(self) -> float | None:
        """What `engine` was given."""
        return None if self.engine is None else self.engine.policy.min_loss_scale

    @property
    def max_loss_scale(self) -> float | None:
        """What `engine` was given."""
        return None if self.engine is None else self.engine.policy.max_loss_scale

    @property
    def verbosity(self) -> int:
        """0 prints nothing, 1 decisions and skipped steps; writing reaches `engines`."""
        return self._verbosity

    @verbosity.setter
    def verbosity(self, value: int) -> None:
        self._verbosity = value
        for engine in self.engines:
            engine.verbosity = value

    def made(self, engine: Engine, verbosity: int) -> None:
        """Take note of the engine of an ``amp.initialize`` that was called with ``verbosity``."""
        faces = [LossScaler.of(scaler) for scaler in engine.scalers]
        alive = [pair for pair in self._made if pair[0]() is not None]
        self._made = [(weakref.ref(engine), faces), *alive]
        self._has_looked = False
        self._latest_is_off = not engine.policy.enabled
        self._verbosity = verbosity

    def closed(self, engine: weakref.ref[Engine]) -> None:
        """Forget an engine."""
        self._made = [pair for pair in self._made if pair[0] != engine]


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
