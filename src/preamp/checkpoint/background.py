# SPDX-License-Identifier: BSD-3-Clause
"""Writing while training goes on: one file at a time, and no error is lost."""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable
from pathlib import Path


class Saving:
    """A checkpoint on its way to the disk.

    The interpreter does not exit before it is there. An error that nobody has been told of by
    then is printed.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a thread of its own."""

        def run() -> None:
            try:
                job()
            except Exception as error:
                self._error = error

        # No daemon: the interpreter waits for it.
        self._thread = threading.Thread(target=run, name=f"saving {self.path.name}", daemon=False)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether nothing is being written any more. Never waits."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the file is on the disk.

        Returns:
            Its path.

        Raises:
            OSError: It could not be written; the file is what it was before. Raised once, here or
                by the next ``save_checkpoint``.
        """
        error = self._take_error()
        if error is not None:
            raise error
        return self.path

    def join(self) -> None:
        """Wait until nothing is being written any more, without asking what became of it."""
        if self._thread is not None:
            self._thread.join()

    def _take_error(self) -> Exception | None:
        self.join()
        error, self._error = self._error, None
        return error

    def tell(self) -> None:
        """Print the error that nobody has been told of."""
        error = self._take_error()
        if error is not None:
            print(f"preamp: {error}", file=sys.stderr, flush=True)


class Latest:
    """The one checkpoint that may be on its way; the process's, since files outlive objects."""

    def __init__(self) -> None:
        self._saving: Saving | None = None
        self._is_registered = False

    def wait(self) -> None:
        """Wait for it, and raise its error if nobody was told."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.wait()

    def join(self) -> None:
        """Wait for it, whatever becomes of it."""
        if self._saving is not None:
            self._saving.join()

    def set(self, saving: Saving) -> None:
        """There is a new one."""
        if not self._is_registered:
            self._is_registered = True
            atexit.register(self._tell)
        self._saving = saving

    def _tell(self) -> None:
        if self._saving is not None:
            self._saving.tell()


LATEST = Latest()
