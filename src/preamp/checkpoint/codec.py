# SPDX-License-Identifier: BSD-3-Clause
"""Trees of plain data as JSON and a table of tensors, and back; exact, and without classes.

Tensors lie in a file contiguous, in a dtype that safetensors has, with a checksum.
"""

from __future__ import annotations

import enum
import hashlib
import math
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.checkpoint.safetensors import DTYPES, bytes_of
from preamp.checkpoint.staging import SplitTensor, Value, download
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_type, bad_value, with_article
from preamp.core.tensors import memory_order
from preamp.core.torch_private.sparse import stored_parts

_HASHING_THREADS = 8  # hashlib lets go of the interpreter's lock

Entry = dict[str, Any]
"""What a file's manifest says about one of its tensors, as JSON; see `Stored.entry`."""


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype that ``dtype_name`` calls ``name``; `ValueError` if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def check_storable(tensor: torch.Tensor, place: str) -> None:
    """Raise `TypeError`, naming its ``place``, unless ``tensor`` is an ordinary one."""
    is_ordinary = type(tensor) is torch.Tensor or isinstance(tensor, torch.nn.Parameter)
    # Sharded and quantized tensors are subclasses, whose memory is not the value.
    is_ordinary = is_ordinary and not hasattr(tensor, "__tensor_flatten__")
    if is_ordinary and tensor.layout is torch.strided and not tensor.is_quantized:
        if tensor.device.type != "meta":
            return
    kind = type(tensor).__name__ if not is_ordinary else f"{tensor.layout} tensor"
    if hasattr(tensor, "dequantize") and not is_ordinary:
        raise bad_type(
            f"{place} is a {kind}, a quantized tensor of {type(tensor).__module__}",
            "Ordinary tensors are saved, so that files load without running foreign code",
            "Save model.state_dict(), optimizer.state_dict() and "
            "preamp.engine_of(optimizer).state_dict() by torch.save; they resume to the bit",
        )
    raise bad_type(
        f"{place} is {with_article(kind)} on {tensor.device}",
        "Ordinary dense tensors are saved, and sparse ones in the coordinate format",
        "Save what it is made of, such as tensor.to_dense() or tensor.to_local()",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor as it lies in a file."""

    data: torch.Tensor  # contiguous, on the CPU
    dtype: torch.dtype  # of the tensor that it is
    shape: tuple[int, ...]  # of that tensor
    # The dimensions in the order of their strides, where that is not the usual one.
    order: tuple[int, ...] | None

    def entry(self) -> Entry:
        """Return what the manifest says of it, reading all of it for the checksum."""
        return {
            "dtype": dtype_name(self.dtype),
            "shape": self.shape,
            "order": self.order,
            "bytes": self.data.numel() * self.data.element_size(),
            "sha256": _checksum(self.data),
        }


def store(tensors: Mapping[str, Value], *, copy: bool) -> Callable[[], dict[str, Stored]]:
    """Begin to bring ``tensors`` to the CPU; return what waits for them and returns them.

    With ``copy`` none shares memory with what it was, and what is queued later changes none;
    without it the host may wait here already.
    """
    values = [
        value if isinstance(value, SplitTensor) else value.detach().resolve_conj().resolve_neg()
        for value in tensors.values()
    ]
    orders = list(map(_dense_order, values))
    laid = [
        v if order is None else v.permute(order) for v, order in zip(values, orders, strict=True)
    ]
    if copy:
        laid = [value.clone() if value.device.type == "cpu" else value for value in laid]
    arrive = download(laid, waits=not copy)
    names = list(tensors)
    forms = [(v.dtype, tuple(v.shape), order) for v, order in zip(values, orders, strict=True)]

    # It holds no tensor of a device, which may be freed before the file is written.
    def finish() -> dict[str, Stored]:
        return {
            name: Stored(_as_stored(data), *form)
            for name, data, form in zip(names, arrive(), forms, strict=True)
        }

    return finish


def _as_stored(value: torch.Tensor) -> torch.Tensor:
    value = value.contiguous()
    if value.untyped_storage().nbytes() != value.numel() * value.element_size():
        value = value.clone()  # files hold whole storages
    return value if value.dtype in DTYPES else value.reshape(-1).view(torch.uint8)  # its bytes


def describe(tensors: Mapping[str, Stored], *, alone: bool) -> dict[str, Entry]:
    """Return the manifest's entries; ``alone`` starts no threads, as an interpreter that exits."""
    if alone:
        return {name: kept.entry() for name, kept in tensors.items()}
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return dict(zip(tensors, threads.map(Stored.entry, tensors.values()), strict=True))


def verified(
    parts: Mapping[str, Entry], data: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the tensors that a file holds, sharing its memory, compared with the manifest.

    Reads all of them. Raises `ValueError` if one is missing, left over, of another kind, or its
    bytes are others.
    """
    if parts.keys() != data.keys():
        missing, extra = sorted(parts.keys() - data.keys()), sorted(data.keys() - parts.keys())
        raise ValueError(f"it lacks {missing[:3] or 'nothing'} and has {extra[:3]} beyond it")
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        found = (data[name] for name in parts)
        return dict(zip(parts, threads.map(_verified, parts, parts.values(), found), strict=True))


def _verified(name: str, part: Entry, data: torch.Tensor) -> torch.Tensor:
    dtype, shape, order = dtype_named(part["dtype"]), tuple(part["shape"]), part["order"]
    dims = list(range(len(shape)))
    if min(shape, default=0) < 0 or (order is not None and sorted(order) != dims):
        raise ValueError(f"the entry {part!r} of its part {name!r} contradicts itself")
    if order is not None:
        shape = tuple(shape[dim] for dim in order)
    is_bytes = dtype not in DTYPES
    expected = (torch.uint8, (part["bytes"],)) if is_bytes else (dtype, shape)
    if (data.dtype, tuple(data.shape)) != expected:
        raise ValueError(f"its part {name!r} is {data.dtype} {tuple(data.shape)}, not {expected}")
    if data.nbytes != part["bytes"]:
        raise ValueError(f"its part {name!r} has {data.nbytes} bytes, not {part['bytes']}")
    if _checksum(data) != part["sha256"]:
        raise ValueError(f"the checksum of its part {name!r} is wrong")
    value = data.detach()
    if is_bytes:
        value = value.view(dtype).view(shape)
    if order is not None:
        value = value.permute([order.index(dim) for dim in range(len(order))])
    return value


def _dense_order(value: Value) -> tuple[int, ...] | None:
    """See `Stored`; ``None`` also where no order makes it contiguous."""
    tensor = value.form if isinstance(value, SplitTensor) else value
    order = memory_order(tensor)
    is_usual = tensor.is_contiguous() or not tensor.permute(order).is_contiguous()
    return None if is_usual else order


def _checksum(data: torch.Tensor) -> str:
    """SHA-256 of the bytes of a contiguous CPU tensor."""
    return hashlib.sha256(bytes_of(data)).hexdigest()


Tensors = dict[str, Value]

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


def encode(tree: Any, what: str = "content") -> tuple[Any, Tensors]:
    """Take plain data apart into what ``json.dumps`` takes, and its tensors by name.

    Tensors are not copied; those that are the same memory in the same shape are one. ``what`` is
    what errors call the data. Raises `TypeError` for what is no plain data or a tensor of a kind
    that is not stored, and `ValueError` if it contains itself.
    """
    encoder = _Encoder(what)
    try:
        return encoder.encode(tree, ()), encoder.tensors
    except RecursionError:
        raise bad_value(
            f"{what} contains itself, or is nested too deep",
            "Only containers that end somewhere can be saved",
            "Leave out what refers back to its container",
        ) from None


class _Encoder:
    def __init__(self, what: str) -> None:
        self.tensors: Tensors = {}
        self._what = what
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, SplitTensor):
            return {"$tensor": self._named(value, None, path)}
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

    def _named(self, kept: Value, memory: tuple[Any, ...] | None, path: tuple[Any, ...]) -> str:
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
            f"{self._place(path)} is {with_article(f'{kind.__module__}.{kind.__qualname__}')}",
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
    indices: torch.Tensor, values: torch.Tensor, shape: list[int], is_coalesced: bool
) -> torch.Tensor:
    return cast("Any", torch).sparse_coo_tensor(
        indices, values, shape, check_invariants=True, is_coalesced=is_coalesced
    )


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Put together what `encode` took apart; raises nearly anything for a tree of another form.

    Tensors are used as they are.
    """
    if isinstance(tree, list):
        return [decode(item, tensors) for item in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    tag = next(iter(entries), "")
    if tag[:1] != "$":
        return {key: decode(item, tensors) for key, item in entries.items()}
    ((tag, inside),) = entries.items()
    return tensors[inside] if tag == "$tensor" else _MAKERS[tag](decode(inside, tensors))
