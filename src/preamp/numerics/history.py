# SPDX-License-Identifier: BSD-3-Clause
"""The records of a run: a bounded number in memory, all of them on disk if asked for."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from preamp.core.errors import message
from preamp.numerics.lines import from_json, to_json
from preamp.numerics.records import Record, ResumeRecord

Listener = Callable[[Record], None]
R = TypeVar("R")

KEPT = 100_000
"""Records of each kind that stay in memory."""


class History:
    """The records of a run, oldest first.

    Attributes:
        path: The file that all records go to, or ``None``.
    """

    def __init__(self, path: Path | None = None, *, kept: int = KEPT) -> None:
        """Start, or go on with the file of an earlier run.

        Args:
            path: JSON lines are appended here; its folder is made where it does not exist. What
                is in it already is read, and a half-written last line is removed.
            kept: Records of each kind that stay in memory.

        Raises:
            ValueError: The file holds something else than such lines; it is left as it was.
            OSError: The file cannot be written.
        """
        self.path = path
        self._kept = kept
        self._records: dict[str, deque[Record]] = {}
        self._listeners: list[Listener] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                for record in read_history(path):
                    self._keep(record)
                _drop_partial_line(path)

    def add(self, record: Record) -> None:
        """Keep ``record``, write it, and hand it to the listeners.

        Raises:
            OSError: It could not be written.
        """
        self._keep(record)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(to_json(record), allow_nan=False) + "\n")
        for listener in tuple(self._listeners):
            listener(record)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every coming record.

        Returns:
            A function that ends this.
        """
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of one class, oldest first."""
        return [r for r in self._records.get(_kind_of(kind), ()) if isinstance(r, kind)]

    def __iter__(self) -> Iterator[Record]:
        """All records in memory, by kind."""
        for records in self._records.values():
            yield from records

    def __len__(self) -> int:
        """How many records are in memory."""
        return sum(map(len, self._records.values()))

    def _keep(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._forget_after(record.step)
        kept: deque[Record] = deque(maxlen=self._kept)
        self._records.setdefault(record.kind, kept).append(record)

    def _forget_after(self, step: int) -> None:
        for kind, records in self._records.items():
            lasting = (r for r in records if getattr(r, "step", 0) <= step)
            self._records[kind] = deque(lasting, maxlen=self._kept)


def _kind_of(kind: type[Any]) -> str:
    return str(kind.kind)


def read_history(path: Path) -> list[Record]:
    """Read a file of records.

    Args:
        path: What a `History` wrote. A half-written last line, as a killed process leaves it, is
            left out.

    Returns:
        All records, in the order of the file.

    Raises:
        ValueError: A line is not a record.
        OSError: The file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    lines = text[: text.rfind("\n") + 1].splitlines()
    found = (_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip())
    return [record for record in found if record is not None]


def _parse(path: Path, number: int, line: str) -> Record | None:
    try:
        value = json.loads(line)
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        return from_json(value)  # pyright: ignore[reportUnknownArgumentType]
    except ValueError as error:
        raise ValueError(
            message(
                f"Line {number} of {path} is not a record of a run: {error}",
                "Each line is a JSON object that preamp wrote",
                "Pass another file, or remove the line",
            )
        ) from error


def _drop_partial_line(path: Path) -> None:
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        with path.open("r+b") as file:
            file.truncate(end)
