# SPDX-License-Identifier: BSD-3-Clause
"""Remember how to take things back, in reverse order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
Step = Callable[[], Any]


class Removable(Protocol):
    """Anything that one ``remove()`` takes away again, such as torch's hook handles."""

    def remove(self) -> None:
        """Take it away; a second call does nothing."""
        ...


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


def finished(fn: Callable[P, None]) -> Callable[P, None]:
    """Call ``fn`` once more if a ``KeyboardInterrupt`` ends it."""

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            fn(*args, **kwargs)
        except KeyboardInterrupt:
            fn(*args, **kwargs)
            raise

    return call


def all_or_nothing(prepare: Callable[[], Iterable[Step]], undo: Step) -> None:
    """Run the steps that ``prepare`` returns, to the end; ``undo`` where it raises.

    An interrupt is raised when all has been done, or undone. Steps may run twice, as those of an
    `UndoStack`; the first error of one is raised at the end.
    """
    left: list[Step] | None = None
    try:
        left = [*prepare()][::-1]
        unwind(left)
    except BaseException:
        undo() if left is None else unwind(left)
        raise


def unwind(steps: list[Step]) -> None:
    """Run all steps, the last one first, and forget each one that has run. Mutates the list.

    The first error is raised at the end. A step that has raised or was interrupted runs once
    more; if an interrupt comes between steps, the others stay for the next call.
    """
    first: BaseException | None = None
    again: Step | None = None
    while steps:
        step = steps[-1]
        try:
            step()
        except BaseException as error:
            first = first or error
            if step is not again:
                again = step
                continue
        if steps and steps[-1] is step:
            steps.pop()
    if first is not None:
        raise first


def run_to_end(*steps: Step) -> None:
    """Run all steps in order, or none of them; see `all_or_nothing`."""
    all_or_nothing(lambda: steps, lambda: None)


class UndoStack:
    """Steps that restore what was changed; used when `initialize` fails and by ``close``.

    An interrupt may come between a change and whatever follows it. So a step is added before the
    change that it takes back, does nothing where that was not made, and may run twice.
    """

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def push(self, step: Callable[[], Any]) -> None:
        """Add a step that takes the coming change back."""
        self._steps.append(step)

    def hold(self, *handles: Removable) -> None:
        """Add ``handle.remove`` for each handle."""
        for handle in handles:
            self.push(handle.remove)

    def unwind(self) -> None:
        """Run all steps, last change first; see `unwind`."""
        unwind(self._steps)


_MISSING = object()


def set_attribute(owner: Any, name: str, value: Any, undo: UndoStack) -> None:
    """Set an instance attribute so that ``undo`` restores what was in the instance before.

    An attribute that only the class had is deleted again, not copied onto the instance. If
    somebody replaced the value in the meantime, theirs stays.
    """
    own = cast("dict[str, object]", vars(owner))
    before = own.get(name, _MISSING)
    if before is value:
        return

    def restore() -> None:
        if own.get(name, _MISSING) is not value:
            return
        if before is _MISSING:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, before)

    undo.push(restore)
    object.__setattr__(owner, name, value)  # a class of its own may forward it to another object


def append(items: list[T], item: T, undo: UndoStack) -> None:
    """Append ``item``, which equals no other, until ``undo``."""

    def remove() -> None:
        with suppress(ValueError):
            items.remove(item)

    undo.push(remove)
    items.append(item)
