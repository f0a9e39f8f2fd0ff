# SPDX-License-Identifier: BSD-3-Clause
"""The lock over what is patched in torch, which a garbage collector never waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Final


class PatchLock:
    """A re-entrant lock with jobs that run when nobody is in the middle of a change.

    An engine that nobody refers to any more is collected on whichever thread allocates next,
    perhaps on one that holds this lock and is half-way through a change. Waiting there would be a
    deadlock, and running there would change a list while it is being sorted. So a finalizer hands
    its work in, and whoever holds the lock does it on the way out.
    """

    def __init__(self) -> None:
        """Start unlocked, with nothing to do."""
        self._lock = threading.RLock()
        self._depth = 0  # changed only by the thread that holds the lock
        self._jobs: deque[Callable[[], None]] = deque()

    def __enter__(self) -> None:
        """Wait for the lock; the holder may enter again."""
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        """Leave; the outermost exit runs the jobs that came meanwhile."""
        try:
            if self._depth == 1:
                self._run_jobs()
        finally:
            self._depth -= 1
            self._lock.release()
        # One may have come between the last look and the release.
        self._run_unless_held()

    def run_or_leave(self, job: Callable[[], None]) -> None:
        """Run ``job`` now if the lock is free, else leave it to the holder; never waits."""
        self._jobs.append(job)
        self._run_unless_held()

    def _run_unless_held(self) -> None:
        while self._jobs and self._lock.acquire(blocking=False):
            try:
                if self._depth:  # held by this very thread, further up
                    return
                self._depth = 1
                try:
                    self._run_jobs()
                finally:
                    self._depth = 0
            finally:
                self._lock.release()

    def _run_jobs(self) -> None:
        while self._jobs:
            self._jobs.popleft()()


PATCH_LOCK: Final = PatchLock()
"""Held during every change to the table of patches and to the counts of who wants them."""
