# SPDX-License-Identifier: BSD-3-Clause
"""Which fused optimizers can what, for those who choose among them and for messages."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.optim.fused import every
from preamp.optim.fused.base import FusedOptimizer

KINDS: tuple[type[FusedOptimizer], ...] = tuple(
    kind
    for _, kind in sorted(vars(every).items())
    if isinstance(kind, type) and issubclass(kind, FusedOptimizer)
)
"""All of them, by name."""

KEEP_FEWER_BITS = tuple(kind.__name__ for kind in KINDS if kind.moments)
"""Those whose moments may be kept in fewer bits."""

ON_HOST = tuple(kind.__name__ for kind in KINDS if not kind.keeps_copies)
"""Those whose masters and moments may lie on the host."""


def twin_of(name: str) -> str | None:
    """The fused optimizer that makes the update of torch's of this ``name``, if there is one."""
    twin = f"Fused{name.removesuffix('W')}"
    return twin if any(twin == kind.__name__ for kind in KINDS) else None


def closest_first(name: str, kinds: Sequence[str]) -> list[str]:
    """Sort fused optimizers: first the one like torch's of this ``name``, or else FusedAdam."""
    twin = twin_of(name)
    closest = twin if twin in kinds else "FusedAdam"
    return sorted(kinds, key=lambda kind: (kind != closest, kind))
