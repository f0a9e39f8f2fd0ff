# SPDX-License-Identifier: BSD-3-Clause
"""How often an answer was right."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Score:
    """The outcome of all cases of one kind."""

    kind: str  # what was asked, such as "attribution, parameter"
    right: int = 0
    unknown: int = 0  # the tool said that it does not know
    wrong: list[str] = field(default_factory=list)  # which cases, and what was said of them

    @classmethod
    def of(cls, kind: str, judged: Iterable[str]) -> Score:
        """Count cases: of each what is wrong with it, or an empty text."""
        found = cls(kind)
        for wrong in judged:
            found.wrong += [wrong] if wrong else []
            found.right += not wrong
        return found

    @property
    def cases(self) -> int:
        """All of them."""
        return self.right + self.unknown + len(self.wrong)
