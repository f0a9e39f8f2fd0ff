# SPDX-License-Identifier: BSD-3-Clause
"""What ``keep_fp32`` names: the parts of half models that are not rounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_type

KeepPredicate = Callable[[str, torch.Tensor], bool]
KeepEntry = type[nn.Module] | str | KeepPredicate


class KeepFP32:
    """Types, patterns and predicates, immutable; reads the same in all processes, to compare."""

    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[KeepEntry] = ()) -> None:
        """Take over what `parse_keep` has checked."""
        self._entries = tuple(entries)

    def __iter__(self) -> Iterator[KeepEntry]:
        """Iterate over the entries as they were given."""
        return iter(self._entries)

    def __len__(self) -> int:
        """How many entries there are."""
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` has the same entries in the same order."""
        return isinstance(other, KeepFP32) and self._entries == other._entries

    def __hash__(self) -> int:
        """As equality wants it."""
        return hash(self._entries)

    def __deepcopy__(self, memo: object) -> KeepFP32:
        """Return itself: a predicate may be a method of something large."""
        return self

    def __repr__(self) -> str:
        """Show types and predicates by their names, without addresses."""
        return ", ".join(map(describe_entry, self._entries)) or "nothing"


NOTHING = KeepFP32()


def describe_entry(entry: KeepEntry) -> str:
    """One entry in words: a type or a predicate by its name, a pattern in quotes."""
    if isinstance(entry, str):
        return repr(entry)
    return str(getattr(entry, "__qualname__", type(entry).__qualname__))


def parse_keep(value: object) -> KeepFP32:
    """Return what ``value`` names, one entry or a list or tuple of them."""
    if isinstance(value, KeepFP32):
        return value
    given = cast("Sequence[Any]", value if isinstance(value, (list, tuple)) else [value])
    for entry in given:
        is_type = isinstance(entry, type)
        if not (issubclass(entry, nn.Module) if is_type else _is_pattern_or_predicate(entry)):
            raise bad_type(
                f"keep_fp32 contains {entry!r}",
                "Allowed are module types, patterns for the names of parameters, buffers or "
                "modules, and functions of (name, tensor) that return a bool; one of them or "
                "a list",
                "Pass for example torch.nn.LayerNorm, 'rotary.*', or [torch.nn.LayerNorm, 'head']",
            )
    return KeepFP32(given)


def _is_pattern_or_predicate(entry: object) -> bool:
    return isinstance(entry, str) or (callable(entry) and not isinstance(entry, nn.Module))
