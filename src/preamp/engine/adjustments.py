# SPDX-License-Identifier: BSD-3-Clause
"""When loss scales react."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from preamp.scaling import LossScaler


@dataclass(slots=True, eq=False)
class _Late:
    """What this rank alone has found, while the gradients wait to be reduced.

    Attributes:
        scaler: By whose scale they were multiplied.
        waits_for: ``id`` of the sessions whose gradients have not been reduced since.
        found_inf: Found in these; ``None`` once the reduction has shown it to all ranks.
        is_due: Whether the scale has to react, and not only to remember.
    """

    scaler: LossScaler
    waits_for: set[int] = field(default_factory=set[int])
    found_inf: torch.Tensor | None = None
    is_due: bool = False

    def settle(self, sessions: Iterable[object]) -> None:
        """The gradients of ``sessions`` are no longer those of this rank alone."""
        self.waits_for.difference_update(map(id, sessions))
        if not self.waits_for:
            self.found_inf = None


class Adjustments:
    """Loss scales that have yet to react, since other ranks do not know of an overflow yet.

    Ranks keep one scale because each reacts to what all have seen. What one has found in
    gradients that nobody has reduced stays out of its scaler: the reduction shows it to all, in
    whichever loss's backward that comes, or the script drops it with the gradients.
    """

    def __init__(self) -> None:
        """Start with nothing to do."""
        self._late: dict[int, _Late] = {}

    def now(self, scaler: LossScaler) -> None:
        """Let ``scaler`` react to what was found since it last did."""
        late = self._late.get(id(scaler))
        if late is not None and not late.waits_for:
            del self._late[id(scaler)]
        scaler.update()

    def later(
        self,
        scaler: LossScaler,
        sessions: Sequence[object],
        found_inf: torch.Tensor | None,
        *,
        is_due: bool = True,
    ) -> None:
        """Let ``scaler`` react with a later block, at the latest with the next step.

        Args:
            scaler: Of the block.
            sessions: Whose gradients it has left on this rank.
            found_inf: What was found in them.
            is_due: Whether to react at all, or to remember only.
        """
        late = self._late.setdefault(id(scaler), _Late(scaler))
        late.waits_for.update(map(id, sessions))
        late.is_due |= is_due
        if found_inf is not None and late.found_inf is not None:
            found_inf = torch.maximum(late.found_inf, found_inf.to(late.found_inf.device))
        late.found_inf = late.found_inf if found_inf is None else found_inf

    def reduced(self, sessions: Sequence[object], found_inf: torch.Tensor | None) -> None:
        """All that ranks held of ``sessions`` has been reduced; all have found ``found_inf``."""
        own = set(map(id, sessions))
        for late in self._late.values():
            if own & late.waits_for:
                late.settle(sessions)
                if found_inf is not None:
                    late.scaler.record(found_inf)

    def dropped(self, sessions: Sequence[object]) -> None:
        """The script has dropped the gradients of ``sessions``; other ranks never know of them."""
        for late in self._late.values():
            late.settle(sessions)

    def catch_up(self, session: object) -> None:
        """``session`` takes a step: let all react that wait for it, or for nobody any more."""
        for late in tuple(self._late.values()):
            if not late.waits_for or id(session) in late.waits_for:
                del self._late[id(late.scaler)]
                if late.found_inf is not None:
                    late.scaler.record(late.found_inf)
                if late.is_due:
                    late.scaler.update()

    # -- checkpoints -------------------------------------------------------------------------

    def state_of(self, scaler: LossScaler, sessions: Sequence[object]) -> dict[str, Any] | None:
        """What waits for ``scaler`` as plain data; ``sessions`` are all there are."""
        late = self._late.get(id(scaler))
        if late is None:
            return None
        waits_for = [place for place, one in enumerate(sessions) if id(one) in late.waits_for]
        found = None if late.found_inf is None else float(late.found_inf)
        return {"waits_for": waits_for, "found_inf": found, "is_due": late.is_due}

    def prepared(
        self, scaler: LossScaler, sessions: Sequence[object], state: Mapping[str, Any] | None
    ) -> Callable[[], None]:
        """Read what `state_of` returned, and return what applies it.

        Raises:
            KeyError, TypeError, ValueError, IndexError: It cannot be read.
        """
        late = None
        if state is not None:
            found = state["found_inf"]
            late = _Late(
                scaler,
                {id(sessions[int(place)]) for place in state["waits_for"]},
                None if found is None else torch.tensor(float(found), device=scaler.device),
                bool(state["is_due"]),
            )

        def apply() -> None:
            self._late.pop(id(scaler), None)
            if late is not None:
                self._late[id(scaler)] = late

        return apply
