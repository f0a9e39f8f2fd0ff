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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

LeafFn = Callable[[Any], Any]

_ATOMS = (str, bytes, int, float, complex, type(None), type, torch.Size, torch.nn.Module)


def map_leaves(fn: LeafFn, value: Any) -> Any:
    """Return ``value`` with ``fn`` applied to every tensor in it; nothing is modified in place.

    Looked into are mappings, sequences and sets of Python, named tuples (packed sequences are such)
    and dataclasses. Any other object comes back as it is, whatever methods it has, and so does a
    container in which nothing changed, one that contains itself, as a node that knows its parent
    does, or one whose class cannot be rebuilt around other items.
    """
    try:
        return _mapped(fn, value)
    except RecursionError:
        return value


def _mapped(fn: LeafFn, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, _ATOMS):
        return value
    parts = _parts(value)
    mapped = {key: _mapped(fn, part) for key, part in parts.items()}
    if all(mapped[key] is part for key, part in parts.items()):
        return value
    return _rebuilt(value, mapped)


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value``, see `map_leaves`, with every floating-point tensor in it cast to ``dtype``.

    Differentiable like ``Tensor.to``. Integer, bool and complex tensors stay as they are.
    """
    if type(value) is torch.Tensor:  # as nearly always: every layer's forward comes here
        return value.to(dtype) if value.is_floating_point() else value
    return map_leaves(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, value)


_is_a: Callable[[Any, Any], bool] = isinstance  # which would narrow to items of unknown type


def _parts(value: Any) -> dict[Any, Any]:
    """What is in a container, by key, place or field; nothing for other values."""
    if _is_a(value, Mapping):
        return dict(value.items())
    if _is_a(value, (list, tuple, set, frozenset, collections.deque)):
        return dict(enumerate(cast("Iterable[Any]", value)))
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    return {}


def _rebuilt(value: Any, parts: dict[Any, Any]) -> Any:
    """A container like ``value`` with other `_parts`; where its class refuses that, ``value``."""
    kind = cast("Any", type(value))
    items = list(parts.values())
    if kind is dict:
        return parts
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    try:
        if _is_a(value, collections.deque):
            return kind(items, value.maxlen)
        if _is_a(value, tuple) and not hasattr(value, "n_fields"):  # torch's own have that
            twin = cast("Any", tuple).__new__(kind, items)  # the class's may take other arguments
            getattr(twin, "__dict__", {}).update(getattr(value, "__dict__", {}))
            return twin
        if _is_a(value, (tuple, set, frozenset)):
            return kind(items)
        return _rebuilt_copy(value, parts)
    except Exception:  # of a class of anyone's
        return value


def _rebuilt_copy(value: Any, parts: dict[Any, Any]) -> Any:
    """The same by a copy, which has attributes that a constructor would not know."""
    if _is_a(value, Mapping) and not _is_a(value, dict):
        return _rebuilt_mapping(value, parts)
    twin = copy.copy(value)
    if twin is value:
        return value
    if _is_a(value, list):
        twin[:] = list(parts.values())
    elif _is_a(value, dict):
        if getattr(value, "__dict__", None) is value:  # whose attributes are its items
            twin.__dict__ = twin
        for key, item in parts.items():
            twin[key] = item
    else:
        for name, part in parts.items():
            object.__setattr__(twin, name, part)  # also reaches frozen dataclasses
    return twin


def _rebuilt_mapping(value: Any, items: dict[Any, Any]) -> Any:
    """One that is no ``dict``: copies may share the store of its items, so that is replaced."""
    own: dict[str, Any] | None = getattr(value, "__dict__", None)
    if own is None:
        return type(value)(items)
    for name, store in own.items():
        if _is_a(store, dict) and store.keys() == items.keys():
            twin = copy.copy(value)
            if twin is not value:
                vars(twin)[name] = _rebuilt(store, items)
            return twin
    return value


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
    if _is_a(value, (list, tuple)):
        mapped = [map_tensors(fn, item) for item in value]
        if any(new is not old for new, old in zip(mapped, value, strict=True)):
            return _rebuilt(value, dict(enumerate(mapped)))
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
