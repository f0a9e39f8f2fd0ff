# SPDX-License-Identifier: BSD-3-Clause
"""Choose the back end of the op table. The only place that loads one, on first use."""

from __future__ import annotations

import importlib
from typing import cast

from preamp.core.errors import PreampUnavailableError, message
from preamp.kernels.ops import Ops

BACKENDS = ("reference",)
"""Back ends that exist, fastest first as far as ``"auto"`` is concerned."""


def backend(name: str = "auto") -> Ops:
    """Return the back end called ``name``.

    Args:
        name: ``"auto"`` for the fastest one that runs here, or one of `BACKENDS`, which then is
            used or refused, never replaced.

    Raises:
        PreampUnavailableError: There is no such back end.
    """
    chosen = BACKENDS[0] if name == "auto" else name
    if chosen not in BACKENDS:
        raise PreampUnavailableError(
            message(
                f"backend={name!r} is not known",
                f"Choose 'auto' or one of {', '.join(map(repr, BACKENDS))}",
                "Leave the argument out to let preamp choose",
            )
        )
    return cast("Ops", importlib.import_module(f"preamp.kernels.{chosen}"))


def explain(name: str = "auto") -> str:
    """Say in one line which back end ``name`` stands for here, and why."""
    ops = backend(name)
    why = "asked for by name" if name != "auto" else "plain torch operations run on every device"
    return f"kernels: {ops.name} ({why})"
