# SPDX-License-Identifier: BSD-3-Clause
"""What the doctor knows about a usage bug, and what it says when it has seen one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Severity(Enum):
    """How much a finding matters; ordered by `rank`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for what only costs time, 2 for what makes the numbers wrong."""
        return list(Severity).index(self)


_ID = re.compile(r"PA\d{3}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One usage bug.

    Attributes:
        id: ``PA`` and three digits, the first of which is the family's; never reused.
        severity: Of its findings, unless a finding says otherwise.
        title: One line without a full stop.
        why: What goes wrong with the numbers, in plain sentences.
        how: How the doctor sees it, and what it does not see.
        do: What to change.
    """

    id: str
    severity: Severity
    title: str
    why: str
    how: str
    do: str

    def __post_init__(self) -> None:
        """Raise `ValueError` for an id of another form."""
        if not _ID.fullmatch(self.id):
            raise ValueError(f"{self.id!r} is not PA and three digits")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the script, or of a library that it calls.

    Attributes:
        file: As it is to be shown.
        line: Counted from 1.
    """

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One usage bug that was seen in a run.

    Attributes:
        rule: Which.
        severity: The rule's, or less where this case matters less.
        what: What was seen, with the numbers that led to the verdict.
        where: The line that did it; ``None`` where no line of the script is to blame.
        numbers: The numbers in ``what``, by name.
    """

    rule: Rule
    severity: Severity
    what: str
    where: Place | None
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "rule": self.rule.id,
            "severity": self.severity.value,
            "title": self.rule.title,
            "what": self.what,
            "file": None if self.where is None else self.where.file,
            "line": None if self.where is None else self.where.line,
            "numbers": self.numbers,
            "do": self.rule.do,
        }
