# SPDX-License-Identifier: BSD-3-Clause
"""The format of safetensors: strings, and tensors by name.

Eight bytes with the length of a JSON header, the header, and the bytes of the tensors
(https://github.com/huggingface/safetensors). The package safetensors is not used: it renames a file
of its own over the draft, neither flushed nor locked.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import torch

_ABOUT = "__metadata__"  # in the header
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES = tuple(_NAMES)
"""What is written; others as their bytes."""


def write_tensors(
    file: BinaryIO, about: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write strings, and contiguous CPU tensors of `DTYPES`."""
    # The widest first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_ABOUT: {"format": "pt", **about}}
    end = 0
    for name in names:
        data = tensors[name]
        start, end = end, end + data.nbytes
        header[name] = {
            "dtype": _NAMES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(bytes_of(tensors[name]))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(cast("Any", tensor.detach().reshape(-1).view(torch.uint8)).numpy())


def read_tensors(file: BinaryIO) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the strings, and the tensors mapped from the file, which may be closed then.

    Raises `ValueError`, and nearly anything else, for a file that is damaged or a foreign one.
    Allocates no more than a small multiple of the file's size.
    """
    about, entries, start = _read_header(file)
    size = os.fstat(file.fileno()).st_size
    # Private pages, and no descriptor that stays open
    memory = cast("Any", torch.UntypedStorage).from_file(_path_of(file), False, size)
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        dtype, shape = dtypes[entry["dtype"]], tuple(map(int, entry["shape"]))
        begin, end = (start + int(offset) for offset in entry["data_offsets"])
        count = math.prod(shape)
        is_inside = start <= begin <= end <= size and min((0, *shape)) == 0
        if not is_inside or end - begin != count * dtype.itemsize or begin % dtype.itemsize:
            raise ValueError(f"its part {name!r} does not lie where its header says")
        flat = torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.set_(memory[begin:end]).view(shape) if count else flat.view(shape)
    return about, tensors


def read_strings(file: BinaryIO) -> dict[str, Any]:
    """Return the strings alone."""
    return _read_header(file)[0]


def _read_header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any], int]:
    """The strings, what is said of each tensor, and where the header ends."""
    length_bytes = file.read(8)
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or length > os.fstat(file.fileno()).st_size - 8:
        raise ValueError("it is not in the format of safetensors")
    header: Any = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is not in the format of safetensors")
    entries = cast("dict[str, Any]", header)
    return entries.pop(_ABOUT, {}), entries, 8 + length


def _path_of(file: BinaryIO) -> str:
    """A path that leads to an open file, whatever is put in its place meanwhile."""
    own = f"/dev/fd/{file.fileno()}"
    # Windows has none, and replaces no file that is open.
    return own if os.path.exists(own) else file.name
