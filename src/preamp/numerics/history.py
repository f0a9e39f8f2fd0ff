# SPDX-License-Identifier: BSD-3-Clause
"""The records of a run: a bounded number in memory, and all of them in a file if asked for."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

from preamp.core.errors import bad_state, bad_value
from preamp.core.files import lock, naming, open_regular, unlock
from preamp.core.undo import run_all
from preamp.numerics.records import NumericsRecord, Record, ResumeRecord, from_json, to_json


class Journal:
    """A file of lines, opened with the first of them and held alone until it is closed.

    Each line is one write, so that a killed process leaves at most one half line, which is removed
    when the file is gone on with. Without file locks nobody checks for other writers.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is opened or made yet."""
        self._path = path.absolute()  # the process may change its folder
        self._file: int | None = None
        self._size = 0
        self._is_closed = False
        self._finalizer: Callable[[], object] | None = None

    def append(self, line: str) -> None:
        """Write ``line``, which ends in a newline; all of it or nothing.

        Raises `PreampStateError` if the file was closed or removed, or somebody else writes to it,
        and `OSError` if it could not be written.
        """
        if self._is_closed:
            raise bad_state(
                f"A record was added to {self._path} after it was closed",
                "A history takes records until close(), or until its engine is closed",
                "Add it earlier, or open a new History with this path",
            )
        file = self._open() if self._file is None else self._file
        if os.fstat(file).st_nlink == 0 and not self._path.exists():
            raise bad_state(
                f"{self._path} was removed while records are written to it",
                "The file stays until its engine is closed; it may be moved, not removed",
                "Initialize with another path; what was written to this one is gone",
            )
        content = line.encode("utf-8")
        with naming(self._path):
            try:
                written = 0
                while written < len(content):
                    written += os.write(file, content[written:])
            except BaseException:
                os.ftruncate(file, self._size)
                raise
        self._size += written

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        self._is_closed = True
        if self._finalizer is not None:
            self._finalizer()

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)  # for Windows
        file = os.open(self._path, flags, 0o666)
        try:
            _lock(file, self._path)
            with open(file, "rb", closefd=False) as lines:
                self._size = lines.read().rfind(b"\n") + 1
            os.ftruncate(file, self._size)
        except BaseException:
            os.close(file)
            raise
        # Closes the file of an engine that is dropped without close().
        self._finalizer = weakref.finalize(self, _release, file, os.getpid())
        self._file = file
        return file


def _release(file: int, owner: int) -> None:
    # Processes forked meanwhile share the lock: they would keep it, and must not give it up.
    if os.getpid() == owner:
        unlock(file)
    os.close(file)


def _lock(file: int, path: Path) -> None:
    if lock(file) is False:
        gc.collect()  # an engine that is gone may be in a reference cycle, its file still open
        if lock(file) is False:
            raise bad_state(
                f"The history {path} is being written already, by another engine or process",
                "Each engine has a file of its own",
                "Pass another path, or call close() on the engine that writes to it",
            )


Listener = Callable[[Record], object]
R = TypeVar("R")

KEPT = 100_000  # records of each kind that stay in memory, statistics by their size


class History:
    """The records of a run, oldest first; may be read on another thread while they are added.

    ``path`` is the file that all of them go to, or ``None``.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, kept: int = KEPT) -> None:
        """Start, or go on with the file of an earlier run.

        Args:
            path: JSON lines are appended here; it and its folder are made with the first record.
                What is in it already is read.
            kept: Records of each kind that stay in memory; the oldest go first. The statistics of
                a tensor count for 2, with a histogram for 10. The file has them all.

        Raises:
            ValueError: The file holds something else than such lines; it is left as it was.
            OSError: The file cannot be read.
        """
        self.path = None if path is None else Path(path)
        self._kept = kept
        self._sizes: Counter[str] = Counter()
        self._lock = RLock()
        self._records: dict[str, deque[Record]] = {}
        self._listeners: list[Listener] = []
        self._journal = None if self.path is None else Journal(self.path)
        if self.path is not None and self.path.exists():
            for record in _records_in(self.path):
                self._keep(record)

    def add(self, record: Record) -> None:
        """Write ``record``, keep it, and hand it to the listeners.

        Raises:
            PreampStateError: The file was closed or removed, or somebody else writes to it.
            OSError: It could not be written; nothing happened.
        """
        with self._lock:
            if self._journal is not None:
                self._journal.append(json.dumps(to_json(record), allow_nan=False) + "\n")
            self._keep(record)
        for listener in tuple(self._listeners):
            listener(record)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every coming record; returns a function that ends this.

        What it raises comes out of the call that made the record, usually ``optimizer.step``. If it
        has a method ``close``, that is called when the history is closed.
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
            return [r for r in self._records.get(cast("Any", kind).kind, ()) if isinstance(r, kind)]

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
        self._sizes[record.kind] += _size_of(record)
        while self._sizes[record.kind] > self._kept and len(records) > 1:
            self._sizes[record.kind] -= _size_of(records.popleft())

    def _forget(self, resume: ResumeRecord) -> None:
        for kind, records in self._records.items():
            lasting = deque(record for record in records if not resume.voids(record))
            if len(lasting) < len(records):
                self._records[kind] = lasting
                self._sizes[kind] = sum(map(_size_of, lasting))


def _size_of(record: Record) -> int:
    """Roughly how much memory a record takes, in units of the smallest."""
    if not isinstance(record, NumericsRecord):
        return 1
    return sum(2 if tensor.histogram is None else 10 for tensor in record.tensors)


def read_history(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of ``path`` in their order, also those that a `ResumeRecord` made void.

    Kinds that this version does not know are left out, and so is a last line that is not complete.

    Raises:
        ValueError: A line is not a record.
        OSError: The file cannot be read.
    """
    return list(_records_in(Path(path)))


def _records_in(path: Path) -> Iterator[Record]:
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if not (line.endswith(b"\n") and line.strip()):
                continue
            try:
                record = from_json(json.loads(line))
            except (AttributeError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise bad_value(
                    f"Line {number} of {path} is not a record of a run: {str(error)[:200]}",
                    "Each line is a JSON object that preamp wrote",
                    "Pass another file, or remove the line",
                ) from error
            if record is not None:
                yield record
