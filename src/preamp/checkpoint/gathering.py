# SPDX-License-Identifier: BSD-3-Clause
"""From the contents of all ranks to the draft of one file, or of one file for each rank."""

from __future__ import annotations

import contextlib
import hashlib
import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from preamp.checkpoint.codec import Stored, Tensors, store
from preamp.checkpoint.ranks import (
    exchanged,
    from_first,
    gathered,
    gathered_on_first,
    rank,
    world_size,
)
from preamp.checkpoint.shards import Box, Frame, Shard
from preamp.checkpoint.staging import SplitTensor, Value
from preamp.checkpoint.storage import Draft, ShardFile, next_number
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.files import naming

Encoded = tuple[Any, Tensors]
Finish = Callable[[], Draft | None]
Print = tuple[Any, ...]  # what differs where two tensors differ
_Prints = dict[str, Print]

_WORDS = 1 << 17
"""Of eight bytes, that are multiplied at a time: they stay in the processor's cache."""
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed number
_SHARED = ("models/", "optimizers/", "own_params/")
_SHOWN = 3


def gather(
    make: Callable[[], Encoded], path: Path, buffers: frozenset[str]
) -> Callable[[bool], Finish]:
    """Agree with the other ranks on what this one is to write; return what brings it to the CPU.

    Where nothing is sharded that is everything on the first rank and nothing on the others, which
    only send what they have of their own: gradients that were not reduced, buffers, random states.
    Where something is sharded every rank writes a file with its pieces and what it has of its own.
    What ranks tell each other has one size, however many tensors there are; names and fingerprints
    of single tensors are exchanged only where something is not as it usually is.

    ``make`` returns the content of this rank; where it fails on one rank, all raise. ``buffers``
    are the names of tensors that are buffers of models. What is returned may fail on one rank
    alone; its argument is whether later changes must not change the draft. It returns what waits
    for the copies, and returns the draft, or ``None`` on ranks that write nothing. Raises
    `PreampStateError` if weights or optimizer states are not the same on all ranks, copies of one
    piece differ, or pieces do not make up a tensor.
    """
    tree: Any = None
    tensors: Tensors = {}
    prints: _Prints = {}

    def tell() -> Summary | None:
        nonlocal tree, tensors, prints
        tree, tensors = make()
        has_pieces = any(isinstance(kept, Shard) for kept in tensors.values())
        if world_size() == 1 and not has_pieces:
            return None
        number = next_number(path) if rank() == 0 else 0
        if rank() == 0 and has_pieces:
            with naming(path):
                path.mkdir(parents=True, exist_ok=True)
        prints = fingerprints(tensors)
        return Summary.of(tensors, prints, buffers, number)

    try:
        told = [one for one in exchanged(tell) if one is not None]
        if not told:
            return lambda copy: _draft([tree], store(_plain(tensors), copy=copy))
        found = _Findings.of(told, tensors, prints, buffers)
    except BaseException:
        with contextlib.suppress(OSError):  # it is not empty, or not there
            if rank() == 0 and len(_plain(tensors)) < len(tensors):
                path.rmdir()
        raise
    return lambda copy: _collected(tree, tensors, found, copy=copy)


def _plain(tensors: Tensors) -> dict[str, Value]:
    return {name: kept for name, kept in tensors.items() if not isinstance(kept, Shard)}


def _pieces(tensors: Tensors) -> dict[str, Shard]:
    return {name: kept for name, kept in tensors.items() if isinstance(kept, Shard)}


def _draft(trees: list[Any], finish: Callable[[], dict[str, Stored]], *more: Any) -> Finish:
    return lambda: Draft(trees, finish(), *more)


def _collected(tree: Any, tensors: Tensors, found: _Findings, *, copy: bool) -> Finish:
    plain, pieces = _plain(tensors), _pieces(tensors)
    mine = {_name(rank(), name): plain[name] for name in found.own}
    renamed = _renamed(tree, set(found.own), rank())
    if found.has_pieces:
        kept = (mine if rank() else plain) | {name: pieces[name].data for name in found.pieces}
        member = ShardFile(token=found.token, number=found.number, rank=rank(), ranks=world_size())
        boxes = {name: pieces[name].box for name in found.pieces}
        return _draft([renamed], store(kept, copy=copy), member, boxes)
    others = gathered_on_first((renamed, store(mine, copy=False)()) if rank() else None)
    if rank():
        return lambda: None
    trees = [tree, *(theirs for theirs, _ in others[1:])]
    added = {name: part for _, parts in others[1:] for name, part in parts.items()}
    finish = store(plain, copy=copy)
    return _draft(trees, lambda: finish() | added)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a rank tells the others of its tensors: a few numbers, however many tensors there are.

    Numbers are modulo 2⁶⁴. Elements count by a factor for each name, so that what one tensor lacks
    another cannot make up for.
    """

    token: str  # drawn by each rank; the first one's counts
    number: int  # of the save into the folder, as the first rank knows it
    has_pieces: bool  # whether any tensor is in pieces
    shared: bytes  # digest of what is the same on all ranks: whole tensors, and forms of the cut
    own: bytes  # digest of what may differ and often does not: gradients and buffers
    elements: int  # of all tensors that are in pieces
    # Of the pieces that this rank is the first to have; and of copies, what adds up to 0 over the
    # ranks if all copies of each piece are equal.
    held: int

    @classmethod
    def of(cls, tensors: Tensors, prints: _Prints, buffers: frozenset[str], number: int) -> Summary:
        """Sum up ``tensors`` and their ``prints``."""
        pieces, own = _pieces(tensors), _compared(prints, buffers)
        shared: dict[str, Any] = {
            name: print_
            for name, print_ in prints.items()
            if name not in pieces and is_shared(name) and name not in buffers
        }
        elements = held = 0
        for name, piece in pieces.items():
            print_, factor = prints[name], _hash(name)
            shared[name] = (piece.frame, str(piece.data.dtype))
            elements += factor * math.prod(piece.frame.shape)
            if piece.box.numel and piece.is_first:
                held += factor * piece.box.numel
            if piece.box.numel and piece.copies > 1:
                held += _hash((name, print_)) * (piece.copies * piece.is_first - 1)
        return cls(
            token=uuid.uuid4().hex,
            number=number,
            has_pieces=bool(pieces),
            shared=_digest(sorted(shared.items())),
            own=_digest(sorted(own.items())),
            elements=elements % _MODULUS,
            held=held % _MODULUS,
        )


_MODULUS = 1 << 64


def are_as_usual(told: Sequence[Summary]) -> bool:
    """Whether all ranks have the same tensors, all pieces are there, and their copies equal."""
    return (
        len({one.shared for one in told}) == 1
        and sum(one.held for one in told) % _MODULUS == told[0].elements
    )


def _digest(thing: object) -> bytes:
    return hashlib.sha256(repr(thing).encode()).digest()


def _hash(thing: object) -> int:
    """An odd number."""
    return int.from_bytes(_digest(thing)[:8], "little") | 1


def _is_random_state(name: str) -> bool:
    return name.startswith("rng/")


def _compared(prints: _Prints, buffers: frozenset[str]) -> _Prints:
    """Of whole tensors that ranks may have each for themselves, those that may be equal as well.

    Random states hardly ever are.
    """
    return {
        name: print_
        for name, print_ in prints.items()
        if not (_is_piece(print_) or _is_random_state(name))
        and (name in buffers or not is_shared(name))
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Findings:
    """What this rank writes, as far as it depends on the other ranks."""

    own: list[str]  # names of whole tensors that the first rank lacks, or has others for
    has_pieces: bool  # whether any rank has pieces of tensors
    token: str  # that the first rank drew
    number: int  # of the save into the folder
    pieces: list[str]  # names of those that this rank is the first to have

    @classmethod
    def of(
        cls, told: Sequence[Summary], tensors: Tensors, prints: _Prints, buffers: frozenset[str]
    ) -> _Findings:
        """Compare what all ranks have told; `PreampStateError` if they do not fit together."""
        first = told[0]
        if not are_as_usual(told):
            return cls.of_details(first, tensors, prints, buffers)
        pieces = [n for n, piece in _pieces(tensors).items() if piece.is_first and piece.box.numel]
        own = [name for name in prints if _is_random_state(name)]
        if any(one.own != first.own for one in told):
            compared = _compared(prints, buffers)
            own += differing(compared, from_first(compared))
        own = own if rank() else []
        return cls(own, first.has_pieces, first.token, first.number, pieces)

    @classmethod
    def of_details(
        cls, first: Summary, tensors: Tensors, prints: _Prints, buffers: frozenset[str]
    ) -> _Findings:
        """Exchange fingerprints of all tensors, to name what differs or to see what fits after all.

        That is some hundred bytes for each tensor of each rank: stages of a pipeline, whose tensors
        have different names, pay for it in every save.
        """
        every: list[_Prints] = gathered(prints)
        differences, pieces = compare_details(every)
        check_shared(differences, buffers, frozenset(_pieces(tensors)))
        has_pieces = any(_is_piece(print_) for one in every for print_ in one.values())
        own = differences[rank()]
        return cls(own, has_pieces, first.token, first.number, pieces[rank()])


def compare_details(every: Sequence[_Prints]) -> tuple[list[list[str]], list[list[str]]]:
    """Return for each rank in what it differs from the first, and the pieces it is first to have.

    Raises `PreampStateError`, on all ranks, unless pieces under each name make up one tensor.
    """
    whole = [{n: p for n, p in one.items() if not _is_piece(p)} for one in every]
    differences = [differing(one, whole[0]) for one in whole]
    pieces = [{n: p for n, p in one.items() if _is_piece(p)} for one in every]
    _check_whole(every)
    return differences, _first_holders(pieces, differences)


def _is_piece(print_: Print) -> bool:
    return isinstance(print_[0], Box)


def _first_holders(
    pieces: Sequence[dict[str, Print]], differences: list[list[str]]
) -> list[list[str]]:
    """For each rank, names of pieces that none before has; notes how others' copies differ."""
    known: dict[tuple[str, Any], Print] = {}
    own: list[list[str]] = []
    for one, different in zip(pieces, differences, strict=True):
        first: list[str] = []
        for name, print_ in one.items():
            if print_[0].numel == 0:
                continue
            if known.setdefault((name, print_[0]), print_) is print_:
                first.append(name)
            elif known[name, print_[0]] != print_:
                different.append(name)
        own.append(first)
    return own


def _check_whole(prints: Sequence[dict[str, Print]]) -> None:
    """Raise `PreampStateError`, on all ranks, unless pieces under each name make up one tensor."""
    known: dict[str, tuple[int, Any]] = {}
    boxes: dict[str, set[Box]] = {}
    for number, one in enumerate(prints):
        for name, (box, *form) in one.items():
            of = form[:2] if isinstance(box, Box) else None
            first, wanted = known.setdefault(name, (number, of))
            if of != wanted:
                raise _not_one_tensor(name, f"rank {first} has another tensor than rank {number}")
            if isinstance(box, Box) and box.numel:
                boxes.setdefault(name, set()).add(box)
    for name, found in boxes.items():
        frame: Frame = known[name][1][0]
        if sum(box.numel for box in found) != math.prod(frame.shape):
            raise _not_one_tensor(name, "what the ranks have overlaps, or is not all of it")


def _not_one_tensor(name: str, reason: str) -> PreampStateError:
    return bad_state(
        f"The pieces of {name!r} do not make up one tensor: {reason}",
        "Under one name ranks have pieces of the same tensor; nothing was saved",
        "Give different parts of a model different names, such as one attribute of the model "
        "for each stage of a pipeline",
    )


def _name(number: int, name: str) -> str:
    """What a rank's own tensor is called in a file; those of the first keep their names."""
    return f"ranks/{number}/{name}" if number else name


def _renamed(tree: Any, names: set[str], number: int) -> Any:
    """Give the tensors that are this rank's own names of their own."""
    if isinstance(tree, list):
        return [_renamed(item, names, number) for item in cast("list[Any]", tree)]
    if not isinstance(tree, dict):
        return tree
    entries = cast("dict[str, Any]", tree)
    if list(entries) == ["$tensor"] and entries["$tensor"] in names:
        return {"$tensor": _name(number, entries["$tensor"])}
    return {key: _renamed(item, names, number) for key, item in entries.items()}


# -- what ranks tell each other of tensors --------------------------------------------------------


def fingerprints(tensors: Mapping[str, Value | Shard]) -> dict[str, Print]:
    """Return for each tensor what differs where two of them differ, computed on its device.

    Of a piece that no other rank has the values are not looked at. Waits once for each device.
    """
    read = {
        name: kept.data if isinstance(kept, Shard) else kept
        for name, kept in tensors.items()
        if not isinstance(kept, Shard) or not kept.is_alone
    }
    sums: dict[str, int] = {}
    for device in {tensor.device for tensor in read.values()}:
        names = [name for name, tensor in read.items() if tensor.device == device]
        factors = _factors(device)
        found = torch.stack([_fingerprint(read[name], factors) for name in names])
        sums.update(zip(names, cast("Any", found).tolist(), strict=True))
    return {
        name: (kept.box, kept.frame, str(kept.data.dtype), sums.get(name))
        if isinstance(kept, Shard)
        else (str(kept.dtype), tuple(kept.shape), sums[name])
        for name, kept in tensors.items()
    }


def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, so that no word is lost and none can take another's place."""
    mixed = torch.arange(1, _WORDS + 1, device=device) * _ODD
    return ((mixed ^ (mixed >> 29)) * _ODD) | 1


def _fingerprint(value: Value, factors: torch.Tensor) -> torch.Tensor:
    """A sum modulo 2⁶⁴: reading the tensor once takes a tenth of the time of copying it."""
    tensor = value.clone() if isinstance(value, SplitTensor) else value
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    end = raw.numel() // 8 * 8
    words: Any = raw[:end].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for chunk in cast("Iterable[torch.Tensor]", (*words.split(_WORDS), raw[end:].long())):
        own = factors[: chunk.numel()]
        is_near = raw.device.type == "cpu"  # elsewhere torch has no product of integers
        total = total * _ODD + (torch.dot(chunk, own) if is_near else (chunk * own).sum())
    return total


def is_shared(name: str) -> bool:
    """Whether a tensor of this name is the same on all ranks, if it is no buffer and whole."""
    return name.startswith(_SHARED)


def differing(prints: Mapping[str, Print], first: Mapping[str, Print]) -> list[str]:
    """Names of the tensors that the first rank does not have, or has others for."""
    return [name for name, known in prints.items() if first.get(name) != known]


def check_shared(
    differences: list[list[str]], buffers: frozenset[str], pieces: frozenset[str]
) -> None:
    """Raise `PreampStateError` if ranks disagree about what they train together.

    For each rank, ``differences`` has in what it differs from the first one. ``buffers`` of models
    may differ; copies of ``pieces`` of sharded tensors may not.
    """
    for number, names in enumerate(differences):
        shared = [
            name for name in names if name in pieces or (is_shared(name) and name not in buffers)
        ]
        if shared:
            raise bad_state(
                f"Rank {number} has other values than rank 0 in {len(shared)} of the weights "
                f"and optimizer states, such as {', '.join(shared[:_SHOWN])}",
                "Ranks that save one checkpoint have the same weights and optimizer states; "
                "gradients, buffers and random states may differ",
                "Broadcast them from one rank if they should be the same. Parts of one model "
                "in plain tensors are not known as such: make them DTensor parameters, or "
                "save model.state_dict() on each rank yourself",
            )
