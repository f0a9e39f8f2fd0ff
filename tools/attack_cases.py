# SPDX-License-Identifier: BSD-3-Clause
"""The files that `attack_files` hands to readers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn, optim
from typer.testing import CliRunner

import preamp
from attack_targets import Broken, Guard, Target, same
from preamp import report
from preamp.checkpoint import latest_checkpoint, read_checkpoint
from preamp.cli.app import app
from preamp.numerics import History, ResumeRecord, read_history

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
Act = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A hostile file and what is attempted with it."""

    what: str
    path: Path
    acts: Sequence[Act]
    check: Act | None = None  # what has to hold if it was loaded


def command(*arguments: str | Path) -> None:
    """Run ``preamp`` and raise what it says, if it refuses."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise ValueError(done.stderr.removeprefix("Error: ").strip())


# -- damaged -------------------------------------------------------------------------------------


def damaged(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Checkpoints with other bytes."""
    path = folder / "damaged.safetensors"
    for level, target, good, other in _targets(folder, draw, cases, guard):
        for _ in range(-(-cases // _count(cases))):
            what, data = _damage(good.read_bytes(), other.read_bytes(), draw)
            path.write_bytes(data)
            acts = (partial(target.load, path), partial(read_checkpoint, path))
            yield Case(f"{level} {what}", path, acts, partial(_check_equal, target, good))


def _check_equal(target: Target, good: Path) -> None:
    """Raise `Broken` unless what was loaded is what the good file has."""
    loaded = target.numbers()
    target.load(good)
    if not same(target.numbers(), loaded):
        raise Broken("it was loaded and is not the file that it was made of")


def _damage(good: bytes, other: bytes, draw: random.Random) -> tuple[str, bytes]:
    kind = draw.choice(("cut", "flip", "splice", "swap", "grow", "zero", "size", "deep"))
    at = draw.randrange(len(good))
    to = min(len(good), at + draw.randint(1, 2000))
    bit = 1 << draw.randrange(8)
    made = {
        "cut": good[:at],
        "flip": good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :],
        "splice": good[:at] + other[at:to] + good[to:],
        "swap": good[:at] + good[to : 2 * to - at] + good[at:to] + good[2 * to - at :],
        "grow": good[:at] + bytes(to - at) + good[at:],
        "zero": good[:at] + bytes(to - at) + good[to:],
        # A file begins with the size of its header, which is JSON.
        "size": struct.pack("<Q", draw.choice((0, at, 10**9, 2**63, 2**64 - 1))) + good[8:],
        "deep": struct.pack("<Q", 100_000) + b"[" * 100_000 + good[at:to],
    }
    return f"{kind} {at} to {to}, bit {bit}", made[kind]


def _count(cases: int) -> int:
    """How many targets there are, each of which takes its time."""
    return max(1, min(len(LEVELS), cases // 10))


def _targets(
    folder: Path, draw: random.Random, cases: int, guard: Guard
) -> Iterator[tuple[str, Target, Path, Path]]:
    """For some levels objects to load into, a good file for them, and another one."""
    for level in draw.sample(LEVELS, _count(cases)):
        files = [folder / f"{level}_{number}.safetensors" for number in range(2)]
        for path in files:
            run = Target(level, draw.randrange(1000))
            run.save(path)
            run.close()
        guard.target = Target(level, draw.randrange(1000))
        yield level, guard.target, *files
        guard.target.close()


# -- crafted -------------------------------------------------------------------------------------

MANIFEST = "preamp"  # its name in the header; that of its checksum is longer
DIGEST = f"{MANIFEST}_sha256"

_GONE = object()
_TREES: list[Any] = [{"$tensor": "rng/torch"}, {"$tensor": "models/0/state/0.weight"}]
_TREES += [{"$float": "nan"}, {"$tuple": [1, 2]}, {"$size": [1, 2]}, {"$set": [1]}, {"$dict": 3}]
_TREES += [{"$bytes": "00"}, {"$device": "cpu"}, {"$dtype": "float16"}, {"$complex": [1, 2]}]
_TREES += [{"$ordered": [[1, 2]]}, {"$counter": [["a", 2]]}]
VALUES: list[Any] = [None, "x", -1, 0, True, 2**70, 10**400, float("nan"), 1e308, [], {}, [None]]
VALUES += [{"a": 1}, [10**9], "x" * 10_000, -(10**9), 10**18, _GONE]


def crafted(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Checkpoints with another header or manifest, and checksums that fit."""
    path = folder / "crafted.safetensors"
    for level, target, good, _ in _targets(folder, draw, cases, guard):
        for _ in range(-(-cases // _count(cases))):
            what = craft(good, path, draw)
            another = draw.choice((read_checkpoint, lambda path: latest_checkpoint(path.parent)))
            acts = (partial(target.load, path), partial(cast("Any", another), path))
            # What training would make of it is not what is looked for.
            yield Case(f"{level} {what}", path, acts, partial(target.load, good))


def craft(good: Path, path: Path, draw: random.Random) -> str:
    """Write ``good`` to ``path`` with one thing in header or manifest changed; tell which."""
    header, manifest = contents_of(good)
    part, tree = draw.choice((("header", header), ("manifest", manifest)))
    names = sorted(tree.keys() - {"__metadata__"})
    # Most nodes are in one entry, and the rest would hardly be met.
    largest = max(names, key=lambda name: len(json.dumps(tree[name])))
    name = largest if draw.random() < 0.5 else draw.choice(names)
    place = (name, *draw.choice([*nodes(tree[name])]))
    value = draw.choice(VALUES if draw.random() < 0.6 else _TREES)
    rewrite(good, path, part, place, value)
    return f"{part} {'/'.join(map(str, place))} = {_shown(value)}"


def contents_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header of a file, and the manifest in it."""
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack_from("<Q", data)[0]])
    return header, json.loads(header["__metadata__"][MANIFEST])


def rewrite(good: Path, path: Path, part: str, place: Sequence[Any], value: Any) -> None:
    """Write ``good`` to ``path`` with ``value`` at a place of a part, and right checksums."""
    header, manifest = contents_of(good)
    put({"header": header, "manifest": manifest}[part], place, value)
    text = json.dumps(manifest)
    digest = hashlib.sha256(text.encode()).hexdigest()
    header["__metadata__"] |= {MANIFEST: text, DIGEST: digest}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    data = good.read_bytes()
    tensors = data[8 + struct.unpack_from("<Q", data)[0] :]
    path.write_bytes(struct.pack("<Q", len(head)) + head + tensors)


def nodes(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of a tree's nodes."""
    yield place
    entries: dict[Any, Any] = {}
    if isinstance(tree, dict):
        entries = cast("dict[Any, Any]", tree)
    elif isinstance(tree, list):
        entries = dict(enumerate(cast("list[Any]", tree[:100])))  # numpy has 624 words of state
    for key, item in entries.items():
        yield from nodes(item, (*place, key))


def put(tree: Any, place: Sequence[Any], value: Any) -> None:
    """Set the node at ``place``, or take it away."""
    for key in place[:-1]:
        tree = tree[key]
    if value is _GONE:
        del tree[place[-1]]
    else:
        tree[place[-1]] = value


def _shown(value: Any) -> str:
    return "gone" if value is _GONE else repr(value)[:60]


# -- histories -----------------------------------------------------------------------------------


def histories(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Records of a run with one line or some bytes changed."""
    del guard
    lines = _records(folder / "good.jsonl")
    path, page = folder / "run.jsonl", folder / "page.html"
    for _ in range(cases):
        what, data = _changed(lines, draw)
        path.write_bytes(data)
        acts = [partial(_report, path), partial(_history, path)]
        if draw.random() < 0.1:  # the same through the command, which takes its time
            acts[0] = partial(command, "report", path, "-o", page)
        yield Case(what, path, acts)


def _records(path: Path) -> list[bytes]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"opt_level": "O2", "verbosity": 0, "numerics": "full"}
    preamp.initialize(model, optimizer, history=path, **options)
    for step in range(6):
        loss = model(torch.randn(3, 4)).float().sum()
        with preamp.scale_loss(loss * (float("inf") if step == 3 else 1), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    history: Any = preamp.engine_of(model).history
    history.add(ResumeRecord(step=4, steps=[4]))
    preamp.engine_of(model).close()
    return path.read_bytes().splitlines(keepends=True)


def _changed(lines: list[bytes], draw: random.Random) -> tuple[str, bytes]:
    number = draw.randrange(len(lines))
    way, line = draw.random(), lines[number]
    at = draw.randrange(len(line))
    long = {"deep": b"[" * 100_000, "long": b'"' + b"x" * 3_000_000, "digits": b"9" * 100_000}
    if way < 0.5:
        what, line = _damage(line, draw.choice(lines), draw)
    else:
        what = draw.choice(sorted(long))
        line = line[:at] + long[what] + draw.choice((b"", line[at:]))
    return f"line {number}: {what}", b"".join([*lines[:number], line, *lines[number + 1 :]])


def _report(path: Path) -> None:
    report.render(read_history(path))


def _history(path: Path) -> None:
    before = path.read_bytes()
    try:
        History(path).close()
    except ValueError:
        if path.read_bytes() != before:
            raise Broken("a history was refused and has another content") from None
        raise


# -- odd -----------------------------------------------------------------------------------------


def odd(folder: Path, _: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """What is no regular file."""
    del cases, guard
    for path in _places(folder):
        acts: dict[str, Act] = {
            "load_checkpoint": partial(preamp.load_checkpoint, path),
            "read_checkpoint": partial(read_checkpoint, path),
            "read_history": partial(read_history, path),
            "report": partial(command, "report", path, "-o", folder / "page.html"),
        }
        if path.parent == folder:  # there are disks in /dev
            acts["latest_checkpoint"] = partial(_latest, path.parent, never=path)
            acts["latest_checkpoint of it"] = partial(_latest, path, never=path)
        if path.stem != "nowhere":  # which they make
            acts["History"] = lambda path=path: History(path).close()
            acts["save_checkpoint"] = lambda path=path: preamp.save_checkpoint(path)
        for name, act in acts.items():
            yield Case(f"{name} of {path.name}", path, (act,))


def _latest(folder: Path, *, never: Path) -> None:
    """Find the newest checkpoint, which must not be ``never``."""
    if latest_checkpoint(folder) == never:
        raise Broken("latest_checkpoint names what cannot be loaded")


def _places(folder: Path) -> Iterator[Path]:
    names = ("pipe", "folder", "socket", "nowhere", "secret")
    made = {name: folder / f"{name}.safetensors" for name in names}
    os.mkfifo(made["pipe"])
    made["folder"].mkdir()
    made["nowhere"].symlink_to(folder / "missing")
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(made["socket"].name)
    os.chdir(here)
    if os.geteuid() == 0:
        del made["secret"]  # which root may read
    else:
        made["secret"].touch(mode=0)
    yield from (*made.values(), Path("/dev/zero"), Path("/dev/full"))


KINDS: dict[str, Callable[[Path, random.Random, int, Guard], Iterator[Case]]] = {
    "damaged": damaged,
    "crafted": crafted,
    "histories": histories,
    "odd": odd,
}
