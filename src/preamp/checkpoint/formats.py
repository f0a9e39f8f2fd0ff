# SPDX-License-Identifier: BSD-3-Clause
"""The two formats of checkpoint files, torch's zip and safetensors: strings and tensors by name.

Both are written into a draft and read from one open file, so that they share what keeps files
whole. Tensors are mapped from the file. The layout of safetensors is eight bytes with the length of
a JSON header, the header, and the tensors (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import os
import pickle
import pickletools
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from preamp.core.files import DraftFile

_SAFETENSORS = ".safetensors"
_ABOUT = "__metadata__"  # in the header of safetensors
ZIP = b"PK\x03\x04"
_END, _LOCATOR, _RECORD = 22, 20, 56  # bytes at the end of a zip, the latter two of a large one
_ADVICE = ("Weights only load failed", "Please file an issue", "Check the documentation")
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
"""What both formats can hold."""

Tensors = Mapping[str, torch.Tensor]


def suffix_of(path: Path) -> str:
    """The suffix of files in the format that the name of ``path`` chooses."""
    return _SAFETENSORS if path.suffix == _SAFETENSORS else ".pt"


def write_format(draft: DraftFile, suffix: str, about: Mapping[str, str], tensors: Tensors) -> None:
    """Write strings, and contiguous CPU tensors of `DTYPES`, each of which is a whole storage."""
    if suffix == _SAFETENSORS:
        _write_safetensors(draft, about, tensors)
    else:
        write_zip(draft, {**about, "tensors": dict(tensors)})


def write_zip(draft: DraftFile, content: Any) -> None:
    """Write what ``torch.load`` reads."""
    try:
        torch.save(content, cast("Any", draft))
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            # torch complains in its place of a file without an end.
            raise error.__context__ from None
        raise


def read_format(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the strings, and the tensors mapped from the file, which may be closed then.

    Raises `ValueError`, and nearly anything else, for a file that is damaged or a foreign one.
    Allocates no more than a small multiple of the file's size.
    """
    start = file.read(8)
    return _read_zip(file) if start[:4] == ZIP else _read_safetensors(file, start)


def _write_safetensors(draft: DraftFile, about: Mapping[str, str], tensors: Tensors) -> None:
    # The widest first, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_ABOUT: {"format": "pt", **about}}
    end = 0
    for name in names:
        data = tensors[name]
        start, end = end, end + data.numel() * data.element_size()
        header[name] = {
            "dtype": _NAMES[data.dtype],
            "shape": list(data.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    draft.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        draft.write(bytes_of(tensors[name]))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return memoryview(cast("Any", tensor.detach().reshape(-1).view(torch.uint8)).numpy())


def _read_safetensors(file: BinaryIO, start: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(start, "little")
    if len(start) < 8 or length > size - 8:
        raise ValueError("it is in neither of the two formats")
    header: Any = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("it is in neither of the two formats")
    entries = cast("dict[str, Any]", header)
    about = entries.pop(_ABOUT, {})
    # As torch.load does it: private pages, and no descriptor that stays open.
    memory = cast("Any", torch.UntypedStorage).from_file(path_of(file), False, size)
    dtypes = {name: dtype for dtype, name in _NAMES.items()}
    tensors: dict[str, Any] = {}
    for name, entry in entries.items():
        dtype, shape = dtypes[entry["dtype"]], tuple(map(int, entry["shape"]))
        begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
        count = math.prod(shape)
        is_inside = 8 + length <= begin <= end <= size and min((0, *shape)) == 0
        if not is_inside or end - begin != count * dtype.itemsize or begin % dtype.itemsize:
            raise ValueError(f"its part {name!r} does not lie where its header says")
        flat = torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.set_(memory[begin:end]).view(shape) if count else flat.view(shape)
    return about, tensors


def _read_zip(file: BinaryIO) -> tuple[dict[str, Any], dict[str, Any]]:
    check_zip(file)
    file.seek(0)  # which other openings of the path below may share
    content: Any = cast("Any", torch).load(
        path_of(file), map_location="cpu", mmap=True, weights_only=True
    )
    if not isinstance(content, dict) or "tensors" not in content:
        return {}, {}
    about = cast("dict[str, Any]", content)
    return about, about["tensors"]


def check_zip(file: BinaryIO) -> None:
    """Raise `ValueError` if a zip file may be larger inside, or another one to another reader."""
    size = os.fstat(file.fileno()).st_size
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("it is compressed, which torch.save never does")
        if sum(max(member.file_size, member.compress_size) for member in members) > size:
            raise ValueError("what it has inside is larger than itself")
        names = {member.filename.lower() for member in members}
        if len(names) < len(members) or not _has_one_directory(file, size):
            raise ValueError("it can be read in several ways")
        for member in members:
            if member.filename.lower().endswith("data.pkl"):
                with archive.open(member) as content:
                    check_pickle(cast("BinaryIO", content), size)


def _has_one_directory(file: BinaryIO, size: int) -> bool:
    """Whether all readers find a zip's directory at one place: from the end, where it says."""
    file.seek(max(0, size - _END - _LOCATOR))
    locator, end = file.read(_LOCATOR), file.read()
    if not end.startswith(b"PK\x05\x06") or len(end) != _END:
        return False
    if not locator.startswith(b"PK\x06\x07"):
        return int.from_bytes(end[12:16], "little") + int.from_bytes(end[16:20], "little") == (
            size - _END
        )
    place = int.from_bytes(locator[8:16], "little")
    file.seek(place)
    record = file.read(_RECORD)
    start, length = (int.from_bytes(record[at : at + 8], "little") for at in (48, 40))
    return place == size - _END - _LOCATOR - _RECORD == start + length


def path_of(file: BinaryIO) -> str:
    """A path that leads to an open file, whatever is put in its place meanwhile."""
    own = f"/dev/fd/{file.fileno()}"
    # Windows has none, and replaces no file that is open.
    return own if os.path.exists(own) else file.name


def class_asked_for(error: Exception) -> str | None:
    """What torch's restricted unpickler refused, if that is the error."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is None or not isinstance(error, pickle.UnpicklingError):
        return None
    return named[1].removeprefix("builtins.")  # only some versions of torch write it


def cause_of(error: Exception) -> str:
    """The line that says what is wrong with a file; torch puts advice before and after it."""
    name = class_asked_for(error)
    if name is not None:
        return f"it asks for {name}, which is no plain data"
    if isinstance(error, LookupError):  # whose text is the key alone
        return f"it is of another form ({error!r})"
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line for line in lines if line and not line.startswith(_ADVICE)]
    return causes[-1] if causes else type(error).__name__


# -- pickles --------------------------------------------------------------------------------------
#
# torch's restricted unpickler runs nothing of a file, but may never come to an end with it. It
# calls the few functions that it takes for harmless with any arguments: a dozen bytes ask for
# gigabytes. And what a dict or set has as a key is hashed: of tuples that hold another one twice,
# and so on, that takes for ever, and of deeply nested ones more of the stack than there is.

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
