# SPDX-License-Identifier: BSD-3-Clause
"""Pickles that nobody should run, put together by hand, in the two formats of ``torch.save``."""

from __future__ import annotations

import io
import pickle
import random
import struct
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch

ZEROS = 1 << 30  # of them in a compressed member
_DEPTH = 200_000  # of nested tuples, and a quarter of it of lists
_STEPS = 40  # of doublings


def text(value: str) -> bytes:
    """A string."""
    data = value.encode("utf-8")
    return b"X" + struct.pack("<I", len(data)) + data


def named(name: str) -> bytes:
    """A class or function."""
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    """A whole number of 32 bits."""
    return b"J" + struct.pack("<i", value)


def called(name: str, *arguments: bytes) -> bytes:
    """What a function returns."""
    return named(name) + b"(" + b"".join(arguments) + b"tR"


def doubled(start: bytes, twice: bytes, before: bytes = b"") -> bytes:
    """Something that holds twice what holds twice what holds twice, and so on.

    ``twice`` makes it of the one before, which ``?`` gets once more, and ``before`` precedes.
    """
    made = before * _STEPS + start
    for step in range(_STEPS):
        made += b"q" + bytes([step]) + twice.replace(b"?", b"h" + bytes([step]))
    return made


def calls(mark: Path) -> Iterator[tuple[str, bytes]]:
    """What would make a folder, or read another pickle, if it was run."""
    path = text(str(mark))
    inner = b"\x80\x02" + called("os.mkdir", path) + b"."
    scaler = "apex.amp.scaler.LossScaler"
    yield "reduce", called("os.mkdir", path)
    yield "posix", called("posix.mkdir", path)
    yield "obj", b"(" + named("os.mkdir") + path + b"o"
    yield "inst", b"(" + path + b"ios\nmkdir\n"
    yield "newobj", named("os.mkdir") + path + b"\x85\x81"
    yield "newobj_ex", named("os.mkdir") + path + b"\x85}\x92"
    yield "stack_global", text("os") + text("mkdir") + b"\x93" + path + b"\x85R"
    yield "persistent", b"Pos.mkdir\n"
    yield "persistent id", b"(" + text("storage") + named("os.mkdir") + path + b"tQ"
    yield "ext", b"\x82\x01"
    yield "eval", called("builtins.eval", text(f"__import__('os').mkdir({str(mark)!r})"))
    yield "system", called("os.system", text(f"mkdir {mark}"))
    yield "popen", called("subprocess.Popen", text("mkdir") + path + b"\x86")
    yield "getattr", called("builtins.getattr", named("collections.OrderedDict"), text("fromkeys"))
    yield "loads", called("pickle.loads", b"C" + bytes([len(inner) % 256]) + inner)
    yield "from bytes", called("torch.storage._load_from_bytes", text(inner.decode("latin-1")))
    yield "torch.load", called("torch.load", path)
    yield "hub", called("torch.hub.load", path, path)
    type_of = named("collections.OrderedDict")
    yield (
        "from type",
        called("torch._tensor._rebuild_from_type_v2", named("os.mkdir"), type_of, path, b"}"),
    )
    yield "methods", named("collections.OrderedDict") + b")R}" + text("items") + path + b"sb"
    yield "scaler called", called(scaler, path)
    yield "scaler built", named(scaler) + b")\x81}" + text("__class__") + path + b"sb"
    yield "scaler slots", named(scaler) + b")\x81}}" + text("__setstate__") + path + b"s\x86b"
    yield "class built", named(scaler) + b"}" + text("__setstate__") + path + b"sb"
    yield "partial", called("functools.partial", named("os.mkdir"), path)
    yield "environ", named("os.environ") + b"}" + text("A") + path + b"sb"
    for name in ("torch.nn.modules.linear.Linear", "numpy.load", "builtins.exec", "io.open"):
        yield name, called(name, path)


def bombs() -> Iterator[tuple[str, bytes]]:
    """What would take all time or memory."""
    tuples, lists = doubled(b")", b"?\x86"), doubled(b"]", b"?e", b"](")
    scaler = named("apex.amp.scaler.LossScaler") + b")\x81"
    keys = ("dynamic", "loss_scale", "unskipped", "scale_factor", "scale_window")
    yield "shared tuples", tuples
    yield "shared lists", lists
    yield "shared dicts", doubled(b"}", text("b") + b"?u", b"}(" + text("a"))
    yield "shared keys", b"}" + tuples + b"Ns"
    yield "shared in a set", called("builtins.set", b"]" + tuples + b"a")
    yield "shared in a counter", called("collections.Counter", b"]" + tuples + b"a")
    yield "shared in an OrderedDict", called("collections.OrderedDict", b"]" + tuples + b"N\x86a")
    yield "shared sizes", b"}" + called("torch.Size", tuples) + b"Ns"
    yield "shared in a scaler", scaler + b"}" + text("_loss_scale") + tuples + b"sb"
    inside = b"".join(text(key) + b"h\x05" for key in keys)
    others = b"".join(text(key) + b"N" for key in ("min_loss_scale", "max_loss_scale"))
    yield "shared in a state", tuples + b"q\x050}(" + inside + others + b"u"
    yield "deep lists", b"]" * (_DEPTH // 4) + b"a" * (_DEPTH // 4 - 1)
    yield "deep tuples", b")" + b"\x85" * _DEPTH
    yield "deep keys", b"})" + b"\x85" * _DEPTH + b"Ns"
    yield "deep set", called("builtins.set", b"])" + b"\x85" * _DEPTH + b"a")
    yield "deep marks", b"(" * _DEPTH + b"t" * _DEPTH
    yield "long number", b"\x8b" + struct.pack("<i", 2**31 - 1) + b"1"
    yield "long text", b"X" + struct.pack("<I", 2**32 - 1) + b"x"
    yield "longer text", b"\x8d" + struct.pack("<Q", 2**62) + b"x"
    yield "long bytes", b"\x8e" + struct.pack("<Q", 2**62) + b"x"
    yield "frame", b"\x95" + struct.pack("<Q", 2**62) + b"N"
    yield "memo", b"Nr" + struct.pack("<I", 2**32 - 1)
    yield "bytearray", called("builtins.bytearray", number(2**31 - 1))
    yield "bytearray of old", called("__builtin__.bytearray", number(2**31 - 1))
    yield "bytearray made", named("builtins.bytearray") + number(2**31 - 1) + b"\x85\x81"
    large = text("".join(chr(200 + index % 5000) for index in range(40_000)))
    yield "punycode", called("_codecs.encode", large, text("Puny-Code".replace("-", "")))
    yield "punycode spelled", called("_codecs.encode", large, text("-punycode-"))
    yield "tensor of old", called("torch.FloatTensor", number(2**31 - 1))
    yield "tensor", called("torch.Tensor", number(2**31 - 1))
    storage = text("storage") + named("torch.FloatStorage") + text("0") + text("cpu")
    for size in (1, 2**31 - 1):
        place = b"(" + storage + number(size) + b"tQ"
        hooks = named("collections.OrderedDict") + b")R"
        shape, stride = number(2**31 - 1) + b"\x85", number(0) + b"\x85"
        rebuild = "torch._utils._rebuild_tensor_v2"
        yield f"expanded {size}", called(rebuild, place, b"K\x00", shape, stride, b"\x89", hooks)
        stride = number(1) + b"\x85"
        yield f"enlarged {size}", called(rebuild, place, b"K\x00", shape, stride, b"\x89", hooks)


def mixed(parts: list[bytes], draw: random.Random) -> bytes:
    """A hostile file made of some of these values, cut and spliced and changed anywhere."""
    value = b"(" + b"".join(draw.choices(parts, k=draw.randint(1, 4))) + b"t"
    for _ in range(draw.randint(0, 3)):
        start, stop = sorted(draw.choices(range(len(value) + 1), k=2))
        stop = min(stop, start + 16)
        other = draw.choice(parts)
        begin = draw.randrange(len(other))
        with_what = draw.choice(
            (b"", draw.randbytes(stop - start), other[begin : begin + 32], value[start:stop] * 2)
        )
        value = value[:start] + with_what + value[stop:]
    whole = b"\x80\x02" + draw.choice((b"", b"}(" + text("tensors"))) + value + b"."
    return draw.choice((bytes, legacy, zipped))(whole)


def files(folder: Path, mark: Path) -> Iterator[tuple[str, bytes | None]]:
    """Names and content of hostile files; what has none is a file of ``folder`` already."""
    for name, value in (*calls(mark), *bombs()):
        beside = text("tensors") + b"}" + text("preamp") + text("{}")
        for place, made in (
            ("alone", value),
            ("inside", b"}(" + text("x") + value + beside + b"u"),
            ("as tensors", b"}(" + text("tensors") + b"}" + text("a") + value + b"su"),
        ):
            whole = b"\x80\x02" + made + b"."
            yield f"{name} {place}, pickle", whole
            yield f"{name} {place}, legacy", legacy(whole)
            yield f"{name} {place}, zip", zipped(whole)
    yield from _zips(folder)


def legacy(content: bytes) -> bytes:
    """A file of torch's older format."""
    head = (torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION)
    about = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    parts = (pickle.dumps(part, protocol=2) for part in (*head, about))
    return b"".join(
        [*parts, content, pickle.dumps(["0"], protocol=2), struct.pack("<q", 1), b"1234"]
    )


def zipped(content: bytes, way: int = zipfile.ZIP_STORED) -> bytes:
    """A file of torch's zip format."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", way) as archive:
        members = {
            "data.pkl": content,
            "byteorder": b"little",
            "data/0": b"1234",
            "version": b"3\n",
        }
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return made.getvalue()


def _zips(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    plain = zipped(b"\x80\x02}.")
    bomb = zipped(b"\x80\x02" + text(" " * 1000) + b".", zipfile.ZIP_DEFLATED)
    yield "zip deflated", bomb
    yield "zip of two, bomb last", plain + bomb
    yield "zip of two, bomb first", bomb + plain
    yield "zip in a comment", plain[:-2] + struct.pack("<H", len(bomb)) + bomb
    yield "zip behind text", b"hello" * 100 + plain
    for member in ("data.pkl", "data/0"):
        _zeros(folder / f"zeros-{member.replace('/', '-')}", member)
        yield f"zeros-{member.replace('/', '-')}", None
    yield (
        "directory of another",
        _two_directories(
            b"\x80\x02}.", b"\x80\x02" + called("builtins.bytearray", number(2**31 - 1)) + b"."
        ),
    )
    yield "same name twice", _twice()


def _zeros(path: Path, member: str) -> None:
    """Write a zip with a compressed member of a GiB of zeros."""
    chunk = bytes(1 << 24)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, data in (("data.pkl", b"\x80\x02}."), ("version", b"3\n"), ("data/0", b"1234")):
            if name != member:
                archive.writestr(f"archive/{name}", data)
        with archive.open(f"archive/{member}", "w", force_zip64=True) as file:
            for _ in range(ZEROS // len(chunk)):
                file.write(chunk)


def _two_directories(one: bytes, other: bytes) -> bytes:
    """A zip of which readers that follow the 64-bit locator see ``other``."""
    first, second = zipped(one), zipped(other)
    end = second.rindex(b"PK\x05\x06")
    count, size, start = struct.unpack("<HII", second[end + 10 : end + 20])
    # The second zip comes first in the file, so that its offsets stay true.
    record = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, start)
    own_end = first.rindex(b"PK\x05\x06")
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1)
    return second[:end] + record + first[:own_end] + locator + first[own_end:]


def _twice() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says so
        for content in (b"}", called("builtins.bytearray", number(2**31 - 1))):
            archive.writestr("archive/data.pkl", b"\x80\x02" + content + b".")
        archive.writestr("archive/version", b"3\n")
    return made.getvalue()
