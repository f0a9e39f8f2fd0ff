# SPDX-License-Identifier: BSD-3-Clause
"""The records of a run: a bounded number in memory, and all of them in a file if asked for."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar, cast

from preamp.core.errors import bad_state, bad_value
from preamp.core.files import lock, naming, open_regular, unlock
from preamp.core.undo import run_all
from preamp.numerics.records import NumericsRecord, Record, ResumeRecord, from_json, to_line

_KEEPS_OPEN_FILES = os.name == "nt"  # Windows removes no file that is open


class Journal:
    """An open file of lines; whoever opens it has it alone until it is closed.

    Each line is one write, so that a killed process leaves whole lines and at most one half one,
    which is removed when the file is opened next. A file that did not exist and got no line is
    removed again. Where the system has no file locks, nobody checks for other writers.
    """

    def __init__(self, path: Path) -> None:
        """Open or create ``path``, and its folder; `PreampStateError` if another writes to it."""
        path = self._path = path.absolute()  # the process may change its folder
        path.parent.mkdir(parents=True, exist_ok=True)
        file, self._is_new = _open(path)
        try:
            self._size = _remove_partial_line(file)
        except BaseException:
            os.close(file)
            raise
        self._file: int | None = file
        # Closes the file of an engine that is dropped without close().
        self._finalizer = weakref.finalize(self, _release, file, os.getpid())

    @property
    def is_open(self) -> bool:
        """Whether lines can be added."""
        return self._file is not None

    def append(self, line: str) -> None:
        """Write ``line``, which ends in a newline; all of it or nothing.

        Raises `PreampStateError` if the file was closed, or somebody has removed it, and `OSError`
        if it could not be written, for example because the disk is full.
        """
        if self._file is None:
            raise bad_state(
                f"A record was added to {self._path} after it was closed",
                "A history takes records until close(), or until its engine is closed",
                "Add it earlier, or open a new History with this path",
            )
        if os.fstat(self._file).st_nlink == 0 and not _is_at(self._file, self._path):
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
                    written += os.write(self._file, content[written:])
            except BaseException:
                os.ftruncate(self._file, self._size)
                raise
        self._size += written

    def close(self) -> None:
        """Let go of the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            # Still under the lock, so nobody else can have begun to write to it.
            is_unused = self._is_new and os.fstat(file).st_size == 0 and _is_at(file, self._path)
            if is_unused and not _KEEPS_OPEN_FILES:
                self._path.unlink()
        finally:
            self._finalizer()
        if is_unused and _KEEPS_OPEN_FILES:
            self._path.unlink()


def _open(path: Path) -> tuple[int, bool]:
    """Open and lock ``path``, which others may remove until then; tell whether this created it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)  # for Windows
    while True:
        try:
            file, is_new = os.open(path, flags | os.O_EXCL, 0o666), True
        except FileExistsError:
            file, is_new = os.open(path, flags, 0o666), False
        try:
            _lock(file, path)
            if _is_at(file, path):
                return file, is_new
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether ``file`` is what lies at ``path`` now."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


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


def _remove_partial_line(file: int) -> int:
    """Remove what follows the last newline; returns the size of the rest."""
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - (1 << 16))
        os.lseek(file, start, os.SEEK_SET)
        newline = os.read(file, end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return end


Listener = Callable[[Record], object]
R = TypeVar("R")

KEPT = 100_000  # records of each kind that stay in memory

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

        Returns:
            A function that ends this.
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


def read_history(path: str | os.PathLike[str]) -> list[Record]:
    """Read the records of ``path`` in their order, also those that a `ResumeRecord` made void.

    A half-written last line, as a killed process leaves it, is left out, and so are kinds of
    records that this version does not know.

    Raises:
        ValueError: A line is not a record.
        OSError: The file cannot be read.
    """
    return list(_records_in(Path(path)))


def _records_in(path: Path) -> Iterator[Record]:
    with open_regular(path) as file:
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
