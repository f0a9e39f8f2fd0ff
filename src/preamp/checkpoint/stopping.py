# SPDX-License-Identifier: BSD-3-Clause
"""Ending a run in good order when the system asks for it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from preamp.checkpoint.background import LATEST
from preamp.checkpoint.ranks import any_rank
from preamp.core.errors import bad_state


class StopRequest:
    """Whether the process was asked to stop, and the way to do so.

    Attributes:
        signal_number: Of the signal that came, or ``None``.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal came, to this process or to any other one of the default process group.

        With several ranks every one of them asks at the same place, as often as the others: the
        answer is an all-reduce of one number, and the same for all. Signals do not reach ranks at
        the same time, and one that stopped alone would leave the others waiting.
        """
        return any_rank(self.signal_number is not None)

    def exit(self) -> NoReturn:
        """Leave the program with 128 plus the signal's number, 143 for SIGTERM.

        A checkpoint that is being written in the background is waited for.

        Raises:
            SystemExit: Always, unless an error is raised.
            OSError: The checkpoint could not be written.
        """
        LATEST.wait()
        raise SystemExit(128 + (self.signal_number or signal.SIGTERM))


@contextmanager
def stop_on_signal(*signals: int) -> Generator[StopRequest]:
    """Let a signal end the run after the step under way instead of at once.

    Inside of the block a signal only sets a mark, which the loop looks at between two steps.
    Further ones change nothing; afterwards they do again what they did before.

    Args:
        *signals: Which ones, such as ``signal.SIGUSR1``; ``signal.SIGTERM`` if left out.

    Yields:
        What tells whether one came.

    Raises:
        PreampStateError: Not in the main thread, which alone can receive signals.
        OSError: The system lets nobody listen to one of them, such as ``signal.SIGKILL``.

    Example:
        ```python
        with preamp.checkpoint.stop_on_signal() as stop:
            for step in range(start, steps):
                train(step)
                if stop.requested:
                    preamp.save_checkpoint(path, model, optimizer, extra={"step": step + 1})
                    stop.exit()
        ```
    """
    if threading.current_thread() is not threading.main_thread():
        raise bad_state(
            f"stop_on_signal was called in the thread {threading.current_thread().name!r}",
            "Python receives signals in the main thread only",
            "Enter it in the main thread, around the training loop",
        )
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        request.signal_number = number

    before: dict[int, Any] = {}
    try:
        for number in signals or (signal.SIGTERM,):
            old = signal.signal(number, note)
            before.setdefault(number, old)  # one that is given twice had another handler at first
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
