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
from preamp.checkpoint.pieces import Box, Piece, describe_frame, piece_of, pieces_named
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_type, bad_value
from preamp.core.tensors import is_sharded
from preamp.kernels.sparse import stored_parts

Tensors = dict[str, torch.Tensor | Piece]
Found = torch.Tensor | list[tuple[Box, torch.Tensor]]

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


def encode(tree: Any, what: str = "content", ranks: int = 1) -> tuple[Any, Tensors]:
    """Take plain data apart into what ``json.dumps`` takes, and its tensors by name.

    Tensors are not copied; those that are the same memory in the same shape are one. Of sharded
    ones there are this rank's pieces, under names that are the same on every rank. ``what`` is what
    errors call the data. Raises `TypeError` for what is no plain data or a tensor of a kind that is
    not stored, `ValueError` if it contains itself, and `PreampStateError` if the pieces of a
    sharded tensor are no blocks of its elements.
    """
    encoder = _Encoder(what, ranks)
    try:
        return encoder.encode(tree, ()), encoder.tensors
    except RecursionError:
        raise bad_value(
            f"{what} contains itself, or is nested too deep",
            "Only containers that end somewhere can be saved",
            "Leave out what refers back to its container",
        ) from None


class _Encoder:
    def __init__(self, what: str, ranks: int) -> None:
        self.tensors: Tensors = {}
        self._what = what
        self._ranks = ranks
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, Piece):
            return self._piece(value, path)
        if is_sharded(value):
            return self._piece(piece_of(value, self._place(path), self._ranks), path)
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
        # A lazy conjugate or negative is another value of the same memory.
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        memory += (value.is_conj(), value.is_neg())
        return {"$tensor": self._named(value.detach(), memory if value.numel() else None, path)}

    def _piece(self, piece: Piece, path: tuple[Any, ...]) -> Any:
        # Two names for one tensor would be one name where pieces are empty and two elsewhere.
        return {"$sharded": describe_frame(self._named(piece, None, path), piece)}

    def _named(
        self, kept: torch.Tensor | Piece, memory: tuple[Any, ...] | None, path: tuple[Any, ...]
    ) -> str:
        name = None if memory is None else self._names.get(memory)
        if name is None:
            name = "/".join(map(str, path)) or "value"
            while name in self.tensors:
                name += "'"
            self.tensors[name] = kept
            if memory is not None:
                self._names[memory] = name
        return name

    def _sparse(self, value: torch.Tensor, path: tuple[Any, ...]) -> Any:
        # Not coalesced: sums would be taken in another order than by what goes on with it.
        pair = self._items(stored_parts(value.detach()), path)
        return {"$sparse": [*pair, list(value.shape), value.is_coalesced()]}

    def _place(self, path: tuple[Any, ...]) -> str:
        return self._what + "".join(f"[{key!r}]" for key in path)

    def _refused(self, value: Any, path: tuple[Any, ...]) -> TypeError:
        kind = cast("type[Any]", type(value))
        return bad_type(
            f"{self._place(path)} is a {kind.__module__}.{kind.__qualname__}",
            _ALLOWED,
            "Save what it is made of, such as vars(options), array.tolist() or "
            "torch.from_numpy(array), and make it again after loading",
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


def decode(tree: Any, tensors: Mapping[str, Found]) -> Any:
    """Put together what `encode` took apart; raises `ValueError` if ``tree`` is not of that form.

    Tensors are used as they are. Of sharded ones ``tensors`` has all pieces; there will be
    `Pieces`.
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
    "$sparse": lambda made: _sparse(*made),
}


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: list[int], is_coalesced: bool = True
) -> torch.Tensor:
    return cast("Any", torch).sparse_coo_tensor(
        indices, values, shape, check_invariants=True, is_coalesced=is_coalesced
    )


def _decode(tree: Any, tensors: Mapping[str, Found]) -> Any:
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
        return _whole(tensors[inside])
    if tag == "$sharded":
        return pieces_named(inside, dtype_named(inside[1]), tensors)
    return _MAKERS[tag](_decode(inside, tensors))


def _whole(found: Found) -> torch.Tensor:
    if not isinstance(found, torch.Tensor):
        raise ValueError("of a tensor there are only pieces")
    return found
