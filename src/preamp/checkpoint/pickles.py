# SPDX-License-Identifier: BSD-3-Clause
"""Pickles that torch's restricted unpickler would run nothing of, but never come to an end with.

It calls the few functions that it takes for harmless with any arguments: a dozen bytes ask for
gigabytes. And what a dict or set has as a key is hashed: of tuples that hold another one twice, and
so on, that takes for ever, and of deeply nested ones more of the stack than there is.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass
from mmap import mmap
from typing import BinaryIO, cast

_DEEPEST = 1000  # nested tuples
_SMALL = 10_000  # elements of a tuple that no file is too small for
_SLOW = {"punycode", "idna"}  # the time that they take goes with the square of the length
_CONTAINERS = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"}  # none is hashed


@dataclass(frozen=True, slots=True)
class _Value:
    """What a pickle has made."""

    size: int = 1  # how many values hashing it would meet
    depth: int = 0  # of tuples


def check_pickle(file: BinaryIO | mmap, length: int) -> None:
    """Go through one pickle; raise `ValueError` if it is larger inside than ``length`` allows.

    Raises nearly anything for a damaged one, as torch does.
    """
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[object, _Value | None] = {}
    words: set[str] = set()
    for opcode, argument, _ in pickletools.genops(cast("BinaryIO", file)):
        name = opcode.name
        if name == "MARK":
            stack.append(None)
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        else:
            if isinstance(argument, str):
                words.add(_checked(name, argument))
            made = _made(opcode, stack)
            if made.size > max(length, _SMALL) or made.depth > _DEEPEST:
                raise ValueError("it has tuples in tuples without end")
            stack += [made] * len(opcode.stack_after)
    if "encode" in words and words & _SLOW:
        raise ValueError("it asks for an encoding that takes too long")


def _checked(name: str, argument: str) -> str:
    """The letters of a word that may be an encoding's, or the name of what is asked for."""
    if name == "GLOBAL":
        argument = argument.rpartition(" ")[2]
        if argument == "bytearray" or argument.endswith("Tensor"):  # the classes of old
            raise ValueError(f"it asks for a {argument} of any size")
    elif len(argument) > 100:
        return ""
    return "".join(filter(str.isalnum, argument.lower()))


def _made(opcode: pickletools.OpcodeInfo, stack: list[_Value | None]) -> _Value:
    """Take from the stack what an operation takes; return what it makes of it."""
    inside: list[_Value] = []
    before = len(opcode.stack_before)
    if pickletools.markobject in opcode.stack_before:
        before = opcode.stack_before.index(pickletools.markobject)
        while (value := stack.pop()) is not None:
            inside.append(value)
    taken = [stack.pop() for _ in range(before)]
    inside += [value for value in taken if value is not None]
    if opcode.name in _CONTAINERS:
        return _Value()
    return _Value(1 + sum(v.size for v in inside), 1 + max((v.depth for v in inside), default=-1))
