# SPDX-License-Identifier: BSD-3-Clause
"""When loss scales react to what was found."""

from __future__ import annotations

from preamp.scaling import LossScaler


class Adjustments:
    """Loss scales that have yet to react, since other ranks do not know of an overflow yet."""

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._late: dict[int, LossScaler] = {}

    def now(self, scaler: LossScaler) -> None:
        """Let ``scaler`` react to what was found since it last did."""
        self._late.pop(id(scaler), None)
        scaler.update()

    def later(self, scaler: LossScaler) -> None:
        """Let ``scaler`` react with the next block that does, at the latest with the next step."""
        self._late[id(scaler)] = scaler

    def is_due(self, scaler: LossScaler) -> bool:
        """Whether ``scaler`` has yet to react."""
        return id(scaler) in self._late

    def catch_up(self) -> None:
        """There is a step: let all react."""
        for scaler in tuple(self._late.values()):
            self.now(scaler)
