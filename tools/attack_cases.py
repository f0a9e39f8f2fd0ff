# SPDX-License-Identifier: BSD-3-Clause
"""The files that `attack_files` hands to readers."""

from __future__ import annotations

import hashlib
import json
import os
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn, optim
from typer.testing import CliRunner

import attack_pickles
import preamp
from attack_targets import Broken, Guard, Target, same
from preamp import report
from preamp.checkpoint import (
    convert_apex_checkpoint,
    latest_checkpoint,
    plain_loss_scaler,
    read_apex_checkpoint,
    read_checkpoint,
)
from preamp.checkpoint.codec import encode, store
from preamp.checkpoint.formats import read_format, write_format
from preamp.checkpoint.shards import Box, Frame, Shard
from preamp.checkpoint.storage import Draft, ShardFile, write
from preamp.cli.app import app
from preamp.core.files import replacing
from preamp.numerics import History, ResumeRecord, read_history

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SUFFIXES = (".pt", ".safetensors")
Act = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A hostile file and what is attempted with it."""

    what: str
    paths: tuple[Path, ...]
    acts: Sequence[Act]
    check: Act | None = None  # what has to hold if it was loaded


def command(*arguments: str | Path) -> None:
    """Run ``preamp`` and raise what it says, if it refuses."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    if done.exit_code:
        raise ValueError(done.stderr.removeprefix("Error: ").strip())


def show(path: Path) -> None:
    """Run ``preamp checkpoint show``, for people and for programs."""
    command("checkpoint", "show", path)
    command("checkpoint", "show", "--json", path)


def latest(folder: Path, *, never: Path) -> None:
    """Find the newest checkpoint, which must not be ``never``."""
    if latest_checkpoint(folder) == never:
        raise Broken("latest_checkpoint names what cannot be loaded")


# -- damaged -------------------------------------------------------------------------------------


def damaged(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Checkpoints with other bytes."""
    for target, good in _targets(folder, draw, cases, guard):
        for _ in range(-(-cases // _count(cases))):
            own = draw.choice(good)
            path = folder / f"damaged{own.suffix}"
            other = own.parents[1] / "other" / own.name
            what, data = _damage(own.read_bytes(), other.read_bytes(), draw)
            path.write_bytes(data)
            yield Case(
                f"damaged {own.parents[1].name}{own.suffix} {what}",
                (path,),
                (partial(target.load, path), partial(draw.choice((show, read_checkpoint)), path)),
                partial(_check_equal, target, own),
            )


def _check_equal(target: Target, good: Path) -> None:
    """Raise `Broken` unless what was loaded is what the good file has."""
    loaded = target.numbers()
    target.load(good)
    if not same(target.numbers(), loaded):
        raise Broken("it was loaded and is not the file that it was made of")


def _damage(good: bytes, other: bytes, draw: random.Random) -> tuple[str, bytes]:
    kind = draw.choice(("cut", "flip", "splice", "swap", "grow", "zero"))
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
    }
    return f"{kind} {at} to {to}, bit {bit}", made[kind]


def _count(cases: int) -> int:
    """How many targets there are, each of which takes its time."""
    return max(1, min(2 * len(LEVELS), cases // 10))


def _targets(
    folder: Path, draw: random.Random, cases: int, guard: Guard
) -> Iterator[tuple[Target, list[Path]]]:
    """For each level objects to load into and good files, with pending gradients and without."""
    places = [(level, pending) for level in LEVELS for pending in (False, True)]
    for level, pending in draw.sample(places, _count(cases)):
        own = folder / f"{level}-{pending}"
        files = [own / name / f"run{suffix}" for name in ("good", "other") for suffix in SUFFIXES]
        for path in files:
            run = Target(level, draw.randrange(1000), pending=pending)
            run.save(path)
            run.close()
        guard.target = Target(level, draw.randrange(1000), pending=not pending)
        yield guard.target, files[:2]
        guard.target.close()


# -- crafted -------------------------------------------------------------------------------------

_GONE = object()
_TREES: list[Any] = [{"$tensor": "rng/torch"}, {"$tensor": "models/0/state/0.weight"}]
_TREES += [{"$float": "nan"}, {"$tuple": [1, 2]}, {"$size": [1, 2]}, {"$set": [1]}, {"$dict": 3}]
_TREES += [{"$bytes": "00"}, {"$device": "cpu"}, {"$dtype": "float16"}, {"$complex": [1, 2]}]
_TREES += [
    {"$ordered": [[1, 2]]},
    {"$counter": [["a", 2]]},
    {"$sharded": ["x", "float32", [3], None]},
]
VALUES: list[Any] = [None, "x", -1, 0, True, 2**70, 10**400, float("nan"), 1e308, [], {}, [None]]
VALUES += [{"a": 1}, [10**9], "x" * 10_000, -(10**9), 10**18, _GONE]


def crafted(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Checkpoints with another manifest and checksums that fit, and files of sharded ones."""
    each = -(-cases // (_count(cases) + 1))
    for target, files in _targets(folder, draw, cases, guard):
        for _ in range(each):
            good = draw.choice(files)
            path = folder / "crafted" / good.name
            what = craft(good, path, draw)
            yield Case(
                f"crafted {good.parents[1].name}{good.suffix} {what}",
                (path,),
                (partial(target.load, path), _another_reader(path, draw)),
                # What training would make of it is not what is looked for.
                partial(target.load, good),
            )
    guard.target = None
    yield from _sharded(folder, draw, each)


def _another_reader(path: Path, draw: random.Random) -> Act:
    readers = (show, read_checkpoint, lambda path: latest_checkpoint(cast("Path", path).parent))
    return partial(draw.choice(readers), path)


def _sharded(folder: Path, draw: random.Random, cases: int) -> Iterator[Case]:
    good = folder / "good_1.pt"
    save_sharded(good)
    for number in range(cases):
        path = folder / f"sharded_{number}.pt"
        path.mkdir()
        files = sorted(good.iterdir())
        what = craft(files[0], path / files[0].name, draw)
        if draw.random() < 0.5:
            os.link(files[1], path / files[1].name)
        else:
            what += " and " + craft(files[1], path / files[1].name, draw)
        acts = (partial(preamp.load_checkpoint, path), partial(read_checkpoint, path))
        yield Case(f"sharded {what}", (path,), (*acts, partial(show, path)))
        for file in path.iterdir():
            file.unlink()
        path.rmdir()


def save_sharded(folder: Path) -> None:
    """Save as two ranks would, each with a part of one tensor."""
    kinds = {"models": [], "optimizers": [], "schedulers": [], "engines": []}
    content: dict[str, Any] = {**kinds, "own_params": {}, "gradients": {}, "rng": {}}
    frame = Frame((4, 3))
    boxes = [Box((0, 0), (3, 3)), Box((3, 0), (1, 3))]
    folder.mkdir()
    for rank, box in enumerate(boxes):
        shard = Shard(torch.full(box.sizes, float(rank)), frame, box, is_alone=True)
        tree, tensors = encode({**content, "extra": {"x": shard, "rank": rank}})
        (name,) = tensors
        member = ShardFile(token="mark", number=1, rank=rank, ranks=2)
        stored = store({name: shard.data}, copy=True)()
        write(Draft([tree], stored, member, {name: box}), member.file_in(folder))


def craft(good: Path, path: Path, draw: random.Random) -> str:
    """Write ``good`` to ``path`` with one thing in its manifest changed; tell which."""
    with good.open("rb") as file:
        manifest = json.loads(read_format(file)[0]["preamp"])
    # Most nodes are in the trees, and the rest would hardly be met.
    names = sorted(manifest.keys() - {"trees"}) if draw.random() < 0.4 else ["trees"]
    places = [(name, *place) for name in names for place in nodes(manifest[name])]
    place = draw.choice(places)
    value = draw.choice(VALUES if draw.random() < 0.6 else _TREES)
    rewrite(good, path, place, value)
    return f"{'/'.join(map(str, place))} = {_shown(value)}"


def rewrite(good: Path, path: Path, place: Sequence[Any], value: Any) -> None:
    """Write ``good`` to ``path`` with ``value`` at a place of its manifest, and right checksums."""
    with good.open("rb") as file:
        about, tensors = read_format(file)
    manifest = json.loads(about["preamp"])
    put(manifest, place, value)
    text = json.dumps(manifest)
    about = {"preamp": text, "preamp_sha256": hashlib.sha256(text.encode()).hexdigest()}
    with replacing(path) as draft:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        write_format(draft, path.suffix, about, copies)


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
        yield Case(f"history {what}", (path,), acts)


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


# -- pickles -------------------------------------------------------------------------------------


def mixed(folder: Path, draw: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Pickles put together of hostile ones by chance."""
    parts = [*attack_pickles.calls(guard.mark), *attack_pickles.bombs()]
    small = [value for _, value in parts if len(value) < 2000]
    files = ((str(number), attack_pickles.mixed(small, draw)) for number in range(cases))
    yield from _pickles(folder, files)


def pickles(folder: Path, _: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """Hostile pickles, bombs, and zip files that are two."""
    del cases
    yield from _pickles(folder, attack_pickles.files(folder, guard.mark))


def _pickles(folder: Path, files: Iterable[tuple[str, bytes | None]]) -> Iterator[Case]:
    for number, (what, data) in enumerate(files):
        path = folder / f"{number}.pt"
        if data is not None:
            path.write_bytes(data)
        else:
            path = folder / what
        acts: list[Act] = [partial(preamp.load_checkpoint, path), partial(_read_apex, path)]
        acts.append(partial(convert_apex_checkpoint, path, folder / "converted.pt"))
        yield Case(what, (path,), acts, partial(latest, folder, never=path))
        path.unlink()


def _read_apex(path: Path) -> None:
    content = read_apex_checkpoint(path)
    plain_loss_scaler(content["x"] if isinstance(content, dict) and "x" in content else content)


# -- odd -----------------------------------------------------------------------------------------


def odd(folder: Path, _: random.Random, cases: int, guard: Guard) -> Iterator[Case]:
    """What is no regular file."""
    del cases, guard
    good, lines = folder / "good.pt", folder / "lines.jsonl"
    preamp.save_checkpoint(good)
    lines.touch()
    for path in _places(folder):
        acts: dict[str, Act] = {
            "load_checkpoint": partial(preamp.load_checkpoint, path),
            "read_checkpoint": partial(read_checkpoint, path),
            "checkpoint show": partial(show, path),
            "latest_checkpoint": partial(latest, path.parent, never=path),
            "latest_checkpoint of it": partial(latest, path, never=path),
            "read_apex_checkpoint": partial(read_apex_checkpoint, path),
            "convert_apex_checkpoint": partial(convert_apex_checkpoint, path, folder / "new.pt"),
            "convert-checkpoint": partial(command, "convert-checkpoint", path, folder / "new.pt"),
            "read_history": partial(read_history, path),
            "report": partial(command, "report", path, "-o", folder / "page.html"),
        }
        if path.name != "nowhere":  # which they make
            acts["History"] = lambda path=path: History(path).close()
            acts["save_checkpoint"] = lambda path=path: preamp.save_checkpoint(path)
            acts["convert to it"] = partial(convert_apex_checkpoint, good, path)
        for name, act in acts.items():
            if path.parent == folder or not name.startswith("latest"):  # there are disks in /dev
                yield Case(f"{name} of {path.name}", (path,), (act,))


def _places(folder: Path) -> Iterator[Path]:
    made = {name: folder / name for name in ("pipe", "folder", "socket", "nowhere", "secret")}
    os.mkfifo(made["pipe"])
    made["folder"].mkdir()
    made["nowhere"].symlink_to(folder / "missing")
    here = os.getcwd()
    os.chdir(folder)  # the path of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
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
    "mixed": mixed,
    "pickles": pickles,
    "odd": odd,
}
