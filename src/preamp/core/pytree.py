# SPDX-License-Identifier: BSD-3-Clause
"""Walk containers: map or cast the tensors in them, list them, or write them as plain data.

Containers keep their type: named tuples, dataclasses, ``dict`` subclasses (such as the output
classes of model libraries), ``deque`` with its ``maxlen``. ``torch.utils._pytree`` is private and
turns unknown containers into leaves, which is why this small mapping exists.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import types
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

LeafFn = Callable[[Any], Any]

_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.Size, torch.nn.Module)


def map_leaves(fn: LeafFn, value: Any) -> Any:
    """Return ``value`` with ``fn`` applied to every leaf in it; nothing is modified in place.

    Leaves are tensors, and objects that have a ``to`` method and are no mapping (a user's batch
    class, a packed sequence). Strings, numbers, ``None``, modules, ranges, numpy arrays and other
    unknown objects come back as they are. A generator comes back as a generator that maps on the
    way; other iterators may have methods of their own and come back as they are. A container in
    which nothing changed is returned itself, so identity survives where it can.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, Mapping):
        return _map_mapping(fn, cast("Mapping[Any, Any]", value))
    if hasattr(value, "to"):
        return fn(value)
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return _map_sequence(fn, cast("list[Any]", value))
    if dataclasses.is_dataclass(value):
        return _map_dataclass(fn, value)
    if isinstance(value, types.GeneratorType):
        return (map_leaves(fn, item) for item in cast("Generator[Any]", value))
    return value


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, see `map_leaves`, with every floating-point tensor in it cast to ``dtype``.

    Differentiable like ``Tensor.to``. Integer, bool and complex tensors stay as they are. An object
    with a ``to`` method is cast by ``value.to(dtype)``, the extension point for batch classes.
    """
    if type(value) is torch.Tensor:  # as nearly always: every layer's forward comes here
        return value.to(dtype) if value.is_floating_point() else value

    def cast_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and not leaf.is_floating_point():
            return leaf
        return leaf.to(dtype)

    return map_leaves(cast_leaf, value)


def _unchanged(old: list[Any], new: list[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def _map_sequence(fn: LeafFn, value: Any) -> Any:
    items: list[Any] = list(value)
    mapped = [map_leaves(fn, item) for item in items]
    if _unchanged(items, mapped):
        return value
    if isinstance(value, collections.deque):
        return collections.deque(mapped, maxlen=cast("collections.deque[Any]", value).maxlen)
    if hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*mapped)
    return type(value)(mapped)


def _map_mapping(fn: LeafFn, value: Mapping[Any, Any]) -> Any:
    mapped = {key: map_leaves(fn, item) for key, item in value.items()}
    if _unchanged(list(value.values()), list(mapped.values())):
        return value
    if type(value) is dict:
        return mapped
    # A subclass may have attributes and a constructor of its own: copy it, then replace items.
    try:
        twin = cast("dict[Any, Any]", copy.copy(value))
        for key, item in mapped.items():
            twin[key] = item
    except TypeError:  # read-only: a plain dict has the same items
        return mapped
    return twin


def _map_dataclass(fn: LeafFn, value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    old = [getattr(value, name) for name in names]
    mapped = [map_leaves(fn, item) for item in old]
    if _unchanged(old, mapped):
        return value
    twin = copy.copy(value)
    for name, item in zip(names, mapped, strict=True):
        object.__setattr__(twin, name, item)  # also reaches frozen dataclasses
    return twin


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts, lists, tuples and sets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in cast("Iterable[Any]", value):
            yield from tensors_in(item)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Apply ``fn`` to floating tensors in nested lists and tuples; what is unchanged is kept."""
    if isinstance(value, torch.Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        mapped = [map_tensors(fn, item) for item in items]
        if all(new is old for new, old in zip(mapped, items, strict=True)):
            return items
        kind = type(items)
        return kind(*mapped) if hasattr(kind, "_fields") else kind(mapped)  # pyright: ignore[reportCallIssue]
    return value


def map_plain(fn: LeafFn, tree: Any) -> Any:
    """Return a new tree of plain data, ``fn`` applied to all that is no dict, list or tuple."""
    if isinstance(tree, dict):
        twin = copy.copy(cast("dict[Any, Any]", tree))
        for key, item in twin.items():
            twin[key] = map_plain(fn, item)
        return twin
    if isinstance(tree, (list, tuple)) and not isinstance(tree, torch.Size):
        items = cast("list[Any]", tree)
        return type(items)([map_plain(fn, item) for item in items])
    return fn(tree)


def plain(value: Any, nonfinite: Callable[[float], Any] = str) -> Any:
    """Return ``value`` as what ``json.dumps(..., allow_nan=False)`` accepts.

    Dataclasses become dicts, tuples lists, keys strings; of infinities and nan ``nonfinite`` tells
    what becomes.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: plain(getattr(value, name), nonfinite) for name in names}
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(key): plain(item, nonfinite) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [plain(item, nonfinite) for item in cast("Sequence[Any]", value)]
    return value
