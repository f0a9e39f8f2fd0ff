# SPDX-License-Identifier: BSD-3-Clause
"""The records of a run: a bounded number in memory, all of them on disk if asked for."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

from preamp.core.errors import bad_value
from preamp.core.undo import run_all
from preamp.numerics.journal import Journal
from preamp.numerics.lines import from_json, to_line
from preamp.numerics.records import NumericsRecord, Record, ResumeRecord

Listener = Callable[[Record], object]
R = TypeVar("R")

KEPT = 100_000
"""Records of each kind that stay in memory."""

KEPT_TENSORS = 50_000
"""Statistics of tensors that stay in memory, all records together: tens of megabytes."""

_HISTOGRAM = 4  # times as large as the rest


class History:
    """The records of a run, oldest first; may be read on another thread while they are added.

    Attributes:
        path: The file that all records go to, or ``None``.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, kept: int | None = None
    ) -> None:
        """Start, or go on with the file of an earlier run.

        Args:
            path: JSON lines are appended here; its folder is made where it does not exist. What
                is in it already is read, and a half-written last line is removed.
            kept: Records of each kind that stay in memory. By default 100,000, and as many
                statistics of tensors as fit into some tens of megabytes. The oldest go first;
                the file has them all.

        Raises:
            PreampStateError: Another engine or process writes to the file.
            ValueError: The file holds something else than such lines; it is left as it was.
            OSError: The file cannot be written.
        """
        self.path = None if path is None else Path(path)
        self._kept = KEPT if kept is None else kept
        self._kept_tensors = KEPT_TENSORS if kept is None else None
        self._tensors = 0
        self._lock = RLock()
        self._records: dict[str, deque[Record]] = {}
        self._listeners: list[Listener] = []
        self._journal: Journal | None = None
        if self.path is not None:
            if self.path.exists():
                for record in _records_in(self.path):
                    self._keep(record)
            self._journal = Journal(self.path)

    def add(self, record: Record) -> None:
        """Write ``record``, keep it, and hand it to the listeners.

        Raises:
            PreampStateError: The file was closed.
            OSError: It could not be written; nothing happened.
        """
        with self._lock:
            if self._journal is not None:
                self._journal.append(to_line(record))
            self._keep(record)
        for listener in tuple(self._listeners):
            listener(record)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every coming record.

        Args:
            listener: Takes a record. What it raises comes out of the call that made the record,
                usually ``optimizer.step``. If it has a method ``close``, that is called when the
                history is closed.
        """
        self._listeners.append(listener)

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return end

    def of(self, kind: type[R]) -> list[R]:
        """Return the records of one class that are in memory, oldest first.

        Those that a later `ResumeRecord` made void are left out.
        """
        with self._lock:
            return [r for r in self._records.get(_kind_of(kind), ()) if isinstance(r, kind)]

    def close(self) -> None:
        """Close the file and the listeners; what is in memory stays. A second call does nothing.

        Raises:
            Exception: The first that a listener or the file raised, after all were closed.
        """
        listeners, self._listeners = self._listeners, []
        closes = (getattr(listener, "close", None) for listener in listeners)
        own = () if self._journal is None else (self._journal.close,)
        run_all((*filter(callable, closes), *own))

    def __iter__(self) -> Iterator[Record]:
        """All records that are in memory now, by kind."""
        with self._lock:
            return iter([record for records in self._records.values() for record in records])

    def __len__(self) -> int:
        """How many records are in memory."""
        with self._lock:
            return sum(map(len, self._records.values()))

    def _keep(self, record: Record) -> None:
        if isinstance(record, ResumeRecord):
            self._forget(record)
        records = self._records.setdefault(record.kind, deque())
        records.append(record)
        self._tensors += _size_of(record)
        while len(records) > self._kept or self._holds_too_much(records):
            self._tensors -= _size_of(records.popleft())

    def _holds_too_much(self, records: deque[Record]) -> bool:
        if self._kept_tensors is None or len(records) < 2:
            return False
        return isinstance(records[0], NumericsRecord) and self._tensors > self._kept_tensors

    def _forget(self, resume: ResumeRecord) -> None:
        for kind, records in self._records.items():
            lasting = deque(record for record in records if not resume.voids(record))
            if len(lasting) < len(records):
                self._records[kind] = lasting
        self._tensors = sum(map(_size_of, self._records.get(NumericsRecord.kind, ())))


def _size_of(record: Record) -> int:
    """Statistics of tensors in ``record``."""
    if not isinstance(record, NumericsRecord):
        return 0
    with_histogram = sum(tensor.histogram is not None for tensor in record.tensors)
    return len(record.tensors) + _HISTOGRAM * with_histogram


def _kind_of(kind: type[Any]) -> str:
    return str(kind.kind)


def read_history(path: str | os.PathLike[str]) -> list[Record]:
    """Read a file of records.

    Args:
        path: What a `History` wrote. A half-written last line, as a killed process leaves it, is
            left out, and so are kinds of records that this version does not know.

    Returns:
        All records, in the order of the file, also those that a `ResumeRecord` made void.

    Raises:
        ValueError: A line is not a record.
        OSError: The file cannot be read.
    """
    return list(_records_in(Path(path)))


def _records_in(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and line.strip():
                record = _parse(path, number, line)
                if record is not None:
                    yield record


def _parse(path: Path, number: int, line: bytes) -> Record | None:
    try:
        value: object = json.loads(line.decode("utf-8"))
        if not isinstance(value, dict):
            raise ValueError("it is not an object")
        return from_json(cast("dict[str, Any]", value))
    except (ValueError, RecursionError) as error:
        raise bad_value(
            f"Line {number} of {path} is not a record of a run: {error}",
            "Each line is a JSON object that preamp wrote",
            "Pass another file, or remove the line",
        ) from error
