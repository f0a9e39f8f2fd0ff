# SPDX-License-Identifier: BSD-3-Clause
r"""Errors that a user can cause: acts, and the words of each in a book, ``tests/approved/*.txt``.

A book has a line ``name | Type: words`` for each refusal. Nothing writes it: where words are
missing or others, the failure prints the line, to be read and pasted. In a line ``{half}``,
``{level}`` and whatever else a test names stand for what they are in that run, ``[…]`` for words
that do not count, and ``\n`` for the end of a line. Every refusal leaves everything as it was.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import preamp
from kit.compare import differences, picture
from kit.run import Run

BOOKS = Path(__file__).parents[1] / "approved"


@functools.cache
def words_of(book: str) -> dict[str, str]:
    """Approved words by name."""
    lines = (BOOKS / f"{book}.txt").read_text("utf-8").splitlines()
    return dict(line.split(" | ", 1) for line in lines)


@contextmanager
def refused(
    book: str, name: str, *subjects: Any, changes: bool = False, **words: Any
) -> Iterator[None]:
    """The block raises what is approved under ``name``, and changes nothing.

    Args:
        book: A file of ``tests/approved``, without its ending.
        name: Of a line there, a few words that say what is refused.
        subjects: Models and optimizers that must be as before, beside torch itself.
        changes: Whether something may have changed; the test of the row says what.
        words: What ``{…}`` of the line stand for.
    """
    before = {} if changes else picture(*subjects)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the book has its type and its words
        yield
    assert_approved(book, name, f"{caught.type.__name__}: {caught.value}", **words)
    changed = [] if changes else differences(before, picture(*subjects))
    assert not changed, changed


def assert_approved(book: str, name: str, said: str, **words: Any) -> None:
    """What was said is the line ``name`` of the book."""
    said, wanted = said.replace("\n", "\\n"), words_of(book).get(name, "")
    for key, value in words.items():
        wanted = wanted.replace(f"{{{key}}}", str(value).replace("\n", "\\n"))
    pattern = ".*".join(map(re.escape, wanted.split("[…]")))
    assert re.fullmatch(pattern, said), (
        f"{name!r} has to say\n{wanted}\nbut says\n{said}\n"
        f"If that is better, the line of tests/approved/{book}.txt is\n{name} | {said}"
    )


def assert_refused(
    book: str, name: str, act: Callable[[], object], *subjects: Any, **words: Any
) -> None:
    """The act is `refused`; what it may have given is nothing to look at."""
    with refused(book, name, *subjects, **words):
        act()


# -- refusals that need a training ------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What a `Run` is refused.

    Attributes:
        act: A program, or a function of the run.
        before: A program that leads there.
        levels: At which it is refused.
        doors: Names of ``preamp`` and ``amp``.
        options: Of `Run`; ``starts=False`` for what comes before ``initialize``.
        changes: Whether something may have changed afterwards; the test of the row says what.
    """

    act: str | Callable[[Run], object]
    before: str = ""
    levels: Sequence[str] = ("O2",)
    doors: str = "preamp"
    options: Mapping[str, Any] = field(default_factory=dict)
    changes: bool = False


BOTH = "preamp amp"


def refusal(
    act: Any,
    before: str = "",
    levels: str | Sequence[str] = "O2",
    doors: str = "preamp",
    changes: bool = False,
    **options: Any,
) -> Refusal:
    """A `Refusal` in short: levels in a string, and options of `Run` by their names."""
    levels = levels.split() if isinstance(levels, str) else levels
    return Refusal(act, before, levels, doors, options, changes)


def each(rows: Mapping[str, Refusal]) -> pytest.MarkDecorator:
    """Parametrize over ``name, level, door``: every level and every door of each row."""
    cases = [
        pytest.param(name, level, door, id=f"{name}-{level}-{door}")
        for name, row in rows.items()
        for level, door in itertools.product(row.levels, row.doors.split())
    ]
    return pytest.mark.parametrize(("name", "level", "door"), cases)


def reached(row: Refusal, level: str, door: str) -> Run:
    """A run that stands before what is refused."""
    return Run(level, door=preamp.amp if door == "amp" else preamp, **row.options).play(row.before)


def assert_run_refused(book: str, name: str, row: Refusal, run: Run) -> None:
    """The run's act is refused in the words of the book; its engine's state too is as before."""
    subjects, words = (*run.models, *run.optimizers), words_for(run)
    before = _state_of(run)
    with refused(book, name, *subjects, changes=row.changes, **words):
        run.play(row.act) if isinstance(row.act, str) else row.act(run)
    assert row.changes or _state_of(run) == before


def _state_of(run: Run) -> object:
    return (
        preamp.engine_of(run.optimizer).state_dict()
        if hasattr(run.optimizer, "_preamp_link")
        else None
    )


def words_for(run: Run) -> dict[str, str]:
    """What the words of one refusal differ by between runs."""
    half = str(run.row.half).removeprefix("torch.") if run.row else ""
    door = run.door.__name__.rpartition(".")[2]
    return {"half": half, "level": repr(run.options["opt_level"]), "door": door}
