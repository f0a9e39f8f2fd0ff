# SPDX-License-Identifier: BSD-3-Clause
"""Tensors as they lie in a file: contiguous, in a dtype that every format has, with a checksum."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, cast

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_type

_AS_THEY_ARE = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
"""What both formats can hold. The bytes of any other dtype are stored as uint8."""

_HASHING_THREADS = 8  # hashlib lets go of the interpreter's lock


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a file's manifest says about one of its tensors.

    Attributes:
        dtype: Its name, such as ``"float32"``.
        shape: Of the tensor.
        order: The dimensions in the order of their strides, where that is not the usual one.
        bytes: Size.
        sha256: Of the bytes as they are stored, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Part:
        """Read it again; raises `ValueError` if something is missing or of another kind."""
        try:
            order = given["order"]
            part = cls(
                dtype=str(given["dtype"]),
                shape=tuple(map(int, given["shape"])),
                order=None if order is None else tuple(map(int, order)),
                bytes=int(given["bytes"]),
                sha256=str(given["sha256"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the entry {given!r} of a part cannot be read") from error
        dims = list(range(len(part.shape)))
        size = math.prod(part.shape) * dtype_named(part.dtype).itemsize
        if size != part.bytes or (part.order is not None and sorted(part.order) != dims):
            raise ValueError(f"the entry {given!r} of a part contradicts itself")
        return part


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
    raise bad_type(
        f"{place} is a {kind} on {tensor.device}",
        "Ordinary dense tensors are saved, and sparse ones in the coordinate format",
        "Save what it is made of, such as tensor.to_dense() or tensor.to_local()",
    )


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor as it lies in a file.

    Attributes:
        data: Contiguous, on the CPU.
        dtype: Of the tensor that it is.
        shape: Of that tensor.
        order: See `Part`.
    """

    data: torch.Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, copy: bool) -> Stored:
        """Bring ``tensor`` to the CPU, sharing no memory with it if ``copy``. Synchronises."""
        value = tensor.detach().resolve_conj().resolve_neg()
        dtype, shape, order = value.dtype, tuple(value.shape), _memory_order(value)
        if order is not None:
            value = value.permute(order)
        value = value.to("cpu", copy=copy).contiguous()
        if value.untyped_storage().nbytes() != value.numel() * value.element_size():
            value = value.clone()  # files hold whole storages
        if dtype not in _AS_THEY_ARE:
            value = value.reshape(-1).view(torch.uint8)
        return cls(value, dtype, shape, order)

    def part(self) -> Part:
        """Return the manifest's entry, reading all of it for the checksum."""
        return Part(
            dtype=dtype_name(self.dtype),
            shape=self.shape,
            order=self.order,
            bytes=self.data.numel() * self.data.element_size(),
            sha256=_checksum(self.data),
        )


def describe(tensors: Mapping[str, Stored], *, alone: bool) -> dict[str, Part]:
    """Return the manifest's entries of ``tensors``.

    ``alone`` starts no threads: while the interpreter exits there can be no new ones.
    """
    if alone:
        return {name: kept.part() for name, kept in tensors.items()}
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return dict(zip(tensors, threads.map(Stored.part, tensors.values()), strict=True))


def verified(
    parts: Mapping[str, Part], data: Mapping[str, Any], *, checksums: bool = True
) -> dict[str, torch.Tensor]:
    """Return the tensors that a file holds, sharing its memory, compared with the manifest.

    ``checksums`` compares contents, too, which reads all of them. Raises `ValueError` if one is
    missing, left over, of another kind, or its bytes are others.
    """
    if parts.keys() != data.keys():
        missing, extra = sorted(parts.keys() - data.keys()), sorted(data.keys() - parts.keys())
        raise ValueError(f"it lacks {missing[:3] or 'nothing'} and has {extra[:3]} beyond it")
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        found = (data[name] for name in parts)
        checked = threads.map(_verified, parts, parts.values(), found, repeat(checksums))
        return dict(zip(parts, checked, strict=True))


def _verified(name: str, part: Part, data: Any, checksums: bool) -> torch.Tensor:
    dtype, order = dtype_named(part.dtype), part.order
    shape = part.shape if order is None else tuple(part.shape[dim] for dim in order)
    is_bytes = dtype not in _AS_THEY_ARE
    expected = (torch.uint8, (part.bytes,)) if is_bytes else (dtype, shape)
    if not isinstance(data, torch.Tensor) or data.device.type != "cpu":
        raise ValueError(f"its part {name!r} is no tensor")
    if (data.dtype, tuple(data.shape)) != expected or not data.is_contiguous():
        raise ValueError(f"its part {name!r} is {data.dtype} {tuple(data.shape)}, not {expected}")
    if checksums and _checksum(data) != part.sha256:
        raise ValueError(f"the checksum of its part {name!r} is wrong")
    value = data.detach()
    if is_bytes:
        value = value.view(dtype).view(shape)
    if order is not None:
        value = value.permute([order.index(dim) for dim in range(len(order))])
    return value


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions from the largest stride to the smallest, if that makes it contiguous."""
    if tensor.is_contiguous():
        return None
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tuple(dims) if tensor.permute(dims).is_contiguous() else None


def _checksum(data: torch.Tensor) -> str:
    """SHA-256 of the bytes of a contiguous CPU tensor."""
    raw = cast("Any", data.detach().reshape(-1).view(torch.uint8))
    return hashlib.sha256(raw.numpy()).hexdigest()
