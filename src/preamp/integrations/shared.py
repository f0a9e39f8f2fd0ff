# SPDX-License-Identifier: BSD-3-Clause
"""What all integrations share: the framework's package, the engine, and its state in one place."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from preamp.core.errors import bad_state, unavailable
from preamp.engine import Engine, GradScaler, initialize

Options = Mapping[str, Any] | None
"""Further arguments of ``preamp.initialize``, by name."""


def framework(module: str, package: str) -> Any:
    """Import ``module`` of a framework, which pip installs as ``package``.

    Raises:
        PreampUnavailableError: It is not installed, or importing it failed.
    """
    root = module.partition(".")[0]
    try:
        importlib.import_module(root)  # by itself, so that the error names it where it is missing
        return importlib.import_module(module)
    except ImportError as error:
        names = {root, *package.split()}
        if not (isinstance(error, ModuleNotFoundError) and error.name in names):
            raise unavailable(
                f"Importing {module} failed ({error})",
                "This part of preamp works inside that framework, which must be imported first",
                f'Mend the installation until python -c "import {module}" ends without an error',
            ) from error
        raise unavailable(
            f"Cannot import {module} ({error})",
            f"This part of preamp works inside that framework, which is the package {package}",
            f"Run pip install {package}",
        ) from error


class EngineScaler(GradScaler):
    """A `GradScaler` for frameworks, whose state has that of the whole engine with it.

    Frameworks save one state of a scaler, and nothing else that belongs to an engine.
    """

    @property
    def engine(self) -> Engine:
        """The engine behind it."""
        return self._engine

    def state_dict(self) -> dict[str, Any]:
        """The state of a ``torch.amp.GradScaler``, and under ``"preamp"`` scales and counters."""
        state = super().state_dict()
        return {**state, "preamp": self._engine.state_dict()} if state else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or a state of torch's scaler.

        Raises:
            RuntimeError: ``state_dict`` is empty, and this one is enabled.
            ValueError: It cannot be read; nothing was taken over.
        """
        super().load_state_dict(state_dict)
        if self.is_enabled() and "preamp" in state_dict:
            self._engine.load_state_dict(state_dict["preamp"])


def start(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    opt_level: str,
    options: Options,
) -> EngineScaler:
    """Initialize models with their optimizers; returns the scaler for the framework's loop."""
    initialize(list(models), list(optimizers), opt_level=opt_level, **(options or {}))
    return EngineScaler(optimizers)


def refuse_other_precision(what: str) -> None:
    """Raise `PreampStateError`: ``what`` asks the framework for a precision of its own."""
    raise bad_state(
        f"{what} was asked for, and an opt level of preamp",
        "Only one of the two can decide about dtypes and scale losses",
        "Leave the framework's precision at float32, and choose opt_level: O1 and O2 are float16, "
        "O4 and O5 bfloat16",
    )
