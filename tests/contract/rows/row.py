# SPDX-License-Identifier: BSD-3-Clause
"""What a row of the contract with Apex is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["supported", "differs", "refused"]


@dataclass(frozen=True)
class Row:
    """One thing that scripts written for Apex rely on.

    Attributes:
        section: Which part of the contract it belongs to; a key of `contract.rows.SECTIONS`.
        name: What scripts write, or what happens.
        verdict: Whether it works as in Apex, works otherwise, or raises an error that says why.
        why: What differs and for which reason; may be empty for what is supported.
        tests: The functions that prove it, as ``"tests/room/test_file.py::test_function"``.
            A function ``check_…`` is run on two ranks by the ``test_on_two_ranks`` beside it.
    """

    section: str
    name: str
    verdict: Verdict
    why: str
    tests: tuple[str, ...]


def tests(file: str, *functions: str) -> tuple[str, ...]:
    """Node ids of ``functions`` in ``tests/file``."""
    return tuple(f"tests/{file}.py::{function}" for function in functions)


class Section:
    """Makes the rows of one section."""

    def __init__(self, key: str) -> None:
        self._key = key

    def supported(self, name: str, tests: tuple[str, ...], why: str = "") -> Row:
        return Row(self._key, name, "supported", why, tests)

    def differs(self, name: str, tests: tuple[str, ...], why: str) -> Row:
        return Row(self._key, name, "differs", why, tests)

    def refused(self, name: str, tests: tuple[str, ...], why: str) -> Row:
        return Row(self._key, name, "refused", why, tests)
