# SPDX-License-Identifier: BSD-3-Clause
"""Trees of plain data as JSON and a table of tensors, and back; exact, and without classes.

JSON has fewer types than Python. What it lacks is an object with a single key that begins with
``$``, such as ``{"$tuple": [1, 2]}``; a dict that could be mistaken for one is a list of pairs.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch

from preamp.checkpoint.parts import check_storable, dtype_named
from preamp.core.dtypes import dtype_name
from preamp.core.errors import message

_ALLOWED = (
    "Plain data are numbers, strings, bytes, None, tensors, dtypes and devices, and lists, tuples, "
    "sets, dicts, OrderedDicts and Counters of these"
)
_PAIRS: dict[type[Any], str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_LISTS: dict[type[Any], str] = {
    tuple: "$tuple",
    torch.Size: "$size",
    set: "$set",
    frozenset: "$frozenset",
}


def encode(tree: Any, what: str = "content") -> tuple[Any, dict[str, torch.Tensor]]:
    """Take ``tree`` apart.

    Args:
        tree: Plain data. Not mutated, and its tensors are not copied.
        what: How to call it in errors.

    Returns:
        What ``json.dumps`` takes, and the tensors by name. Those that are the same memory in the
        same shape are one.

    Raises:
        TypeError: Something in it is no plain data, or a tensor of a kind that is not stored.
        ValueError: It contains itself.
    """
    encoder = _Encoder(what)
    try:
        return encoder.encode(tree, ()), encoder.tensors
    except RecursionError:
        raise ValueError(
            message(
                f"{what} contains itself, or is nested too deep",
                "Only containers that end somewhere can be saved",
                "Leave out what refers back to its container",
            )
        ) from None


class _Encoder:
    def __init__(self, what: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._what = what
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._sparse(value, path) if value.is_sparse else self._tensor(value, path)
        kind: type[Any] = cast("type[Any]", type(value))
        if kind is list:
            return self._items(value, path)
        if kind in _LISTS:
            return {_LISTS[kind]: self._items(value, path)}
        if kind in _PAIRS:
            return self._mapping(value, _PAIRS[kind], path)
        atom = None if isinstance(value, enum.Enum) else _atom(value)
        if atom is None and value is not None:
            raise self._refused(value, path)
        return atom

    def _items(self, value: Iterable[Any], path: tuple[Any, ...]) -> list[Any]:
        return [self.encode(item, (*path, index)) for index, item in enumerate(value)]

    def _mapping(self, value: Mapping[Any, Any], tag: str, path: tuple[Any, ...]) -> Any:
        if tag == "$dict" and all(type(key) is str and key[:1] != "$" for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        return {
            tag: [
                [self.encode(key, path), self.encode(item, (*path, key))]
                for key, item in value.items()
            ]
        }

    def _tensor(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        check_storable(value, self._place(path))
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        name = self._names.get(memory) if value.numel() else None
        if name is None:
            name = "/".join(map(str, path)) or "value"
            while name in self.tensors:
                name += "'"
            self.tensors[name] = value.detach()
            self._names[memory] = name
        return {"$tensor": name}

    def _sparse(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        whole = value.detach().coalesce()
        pair = (whole.indices(), whole.values())
        return {"$sparse": [*self._items(pair, path), list(whole.shape)]}

    def _place(self, path: tuple[Any, ...]) -> str:
        return self._what + "".join(f"[{key!r}]" for key in path)

    def _refused(self, value: Any, path: tuple[Any, ...]) -> TypeError:
        kind = cast("type[Any]", type(value))
        return TypeError(
            message(
                f"{self._place(path)} is a {kind.__module__}.{kind.__qualname__}",
                _ALLOWED,
                "Save what it is made of, such as vars(options), array.tolist() or "
                "torch.from_numpy(array), and make it again after loading",
            )
        )


def _atom(value: Any) -> Any:
    """The JSON of something without parts, or ``None``."""
    if isinstance(value, (bool, str)):
        return value if isinstance(value, bool) else str(value)
    if isinstance(value, numbers.Integral):  # numpy's too
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Rational):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if isinstance(value, complex):
        return {"$complex": [_atom(value.real), _atom(value.imag)]}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    return {"$device": str(value)} if isinstance(value, torch.device) else None


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put together what `encode` took apart.

    Args:
        tree: What ``json.loads`` returned.
        tensors: By name; used as they are.

    Raises:
        ValueError: ``tree`` is not of that form.
    """
    try:
        return _decode(tree, tensors)
    except (KeyError, TypeError, RuntimeError, OverflowError, IndexError) as error:
        raise ValueError(f"its manifest cannot be read ({error!r})") from error


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$ordered": OrderedDict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$float": float,
    "$complex": lambda pair: complex(*pair),
    "$bytes": bytes.fromhex,
    "$dtype": dtype_named,
    "$device": torch.device,
    "$sparse": lambda made: cast("Any", torch).sparse_coo_tensor(
        *made, check_invariants=True, is_coalesced=True
    ),
}


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    tag = next(iter(entries), "")
    if tag[:1] != "$":
        return {key: _decode(item, tensors) for key, item in entries.items()}
    ((tag, inside),) = entries.items()
    if tag == "$tensor":
        return tensors[inside]
    return _MAKERS[tag](_decode(inside, tensors))
