# SPDX-License-Identifier: BSD-3-Clause
"""Remember how to take things back, in reverse order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast


class Removable(Protocol):
    """Anything that one ``remove()`` takes away again, such as torch's hook handles."""

    def remove(self) -> None:
        """Take it away; a second call does nothing."""
        ...


class UndoOnce:
    """A `Removable` whose callback runs on the first ``remove`` only."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def remove(self) -> None:
        """Run the callback once."""
        callback, self._callback = self._callback, None
        if callback is not None:
            callback()


def run_all(steps: Iterable[Callable[[], Any]]) -> None:
    """Run all steps in order, as what is not taken back now never is; raise the first error."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


class UndoStack:
    """Steps that restore what was changed; used when `initialize` fails and by ``close``."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], Any]] = []

    def push(self, step: Callable[[], Any]) -> None:
        """Add a step that takes the latest change back."""
        self._steps.append(step)

    def hold(self, *handles: Removable) -> None:
        """Add ``handle.remove`` for each handle."""
        for handle in handles:
            self.push(handle.remove)

    def unwind(self) -> None:
        """Run all steps as `run_all` does, last change first, and forget them."""
        run_all(self._popped())

    def _popped(self) -> Iterator[Callable[[], Any]]:
        while self._steps:
            yield self._steps.pop()


_MISSING = object()


def set_attribute(owner: Any, name: str, value: Any, undo: UndoStack) -> None:
    """Set an instance attribute so that ``undo`` restores what was in the instance before.

    An attribute that only the class had is deleted again, not copied onto the instance. If
    somebody replaced the value in the meantime, theirs stays.
    """
    own = cast("dict[str, object]", vars(owner))
    before = own.get(name, _MISSING)
    setattr(owner, name, value)

    def restore() -> None:
        if own.get(name, _MISSING) is not value:
            return
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    undo.push(restore)
