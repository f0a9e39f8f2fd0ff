# SPDX-License-Identifier: BSD-3-Clause
"""Turn a file written with Apex into plain data, and say what is in it."""

from __future__ import annotations

import copy
import math
import os
import pickle
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

import torch

from preamp.checkpoint.formats import write_zip
from preamp.checkpoint.reader import ApexRecord, read_apex_checkpoint
from preamp.core.errors import bad_value
from preamp.core.files import replacing


class ScalerState(TypedDict):
    """Everything that a loss scaler goes on from.

    Attributes:
        dynamic: Whether the scale reacts to overflows.
        loss_scale: The scale.
        unskipped: Clean updates since the last overflow or growth.
        scale_factor: Growth and, inverted, backoff.
        scale_window: Clean updates before growth.
        min_loss_scale: Floor, or ``None``.
        max_loss_scale: Ceiling; infinite for none.
    """

    dynamic: bool
    loss_scale: float
    unskipped: int
    scale_factor: float
    scale_window: int
    min_loss_scale: float | None
    max_loss_scale: float


def plain_loss_scaler(source: object) -> ScalerState:
    """Return the state of a loss scaler as plain data.

    Args:
        source: A mapping in this very form; a record from `read_apex_checkpoint`; or the live
            object of Apex, if the caller chose to unpickle it. Understood are
            ``apex.amp.scaler.LossScaler`` and both scalers of ``apex.fp16_utils``.

    Raises:
        ValueError: ``source`` is none of these, or a number in it is not usable.
    """
    try:  # numbers may be tensors, which raise RuntimeError where they hold no number
        if isinstance(source, Mapping):
            state = _from_mapping(cast("Mapping[str, Any]", source))
        elif isinstance(source, ApexRecord):
            state = _from_apex(source.attributes)
        else:
            state = _from_apex(vars(source))
        _check(state)
        return state
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise bad_value(
            f"A loss scaler's state {_shown(cast('Any', source))} cannot be read ({error!r})",
            f"Needed are {', '.join(ScalerState.__annotations__)}, or the attributes of one "
            "of Apex's loss scalers",
            "Pass what state_dict() returned, or what read_apex_checkpoint() read",
        ) from error


def _state(
    dynamic: Any,
    scale: Any,
    unskipped: Any,
    *,
    factor: Any = 2.0,
    window: Any = 1000,
    floor: Any = None,
    ceiling: Any = math.inf,
) -> ScalerState:
    return ScalerState(
        dynamic=bool(dynamic),
        loss_scale=float(scale),
        unskipped=int(unskipped),
        scale_factor=float(factor),
        scale_window=int(window),
        min_loss_scale=None if floor is None else float(floor),
        max_loss_scale=float(ceiling),
    )


def _from_mapping(source: Mapping[str, Any]) -> ScalerState:
    dynamic, scale, unskipped, *others = (source[name] for name in ScalerState.__annotations__)
    names = ("factor", "window", "floor", "ceiling")
    return _state(dynamic, scale, unskipped, **dict(zip(names, others, strict=True)))


def _from_apex(found: Mapping[str, Any]) -> ScalerState:
    if "_loss_scale" in found:  # apex.amp.scaler.LossScaler, whose factor was always 2
        return _state(
            found["dynamic"],
            found["_loss_scale"],
            found["_unskipped"],
            window=found.get("_scale_seq_len", 2000),
            floor=found.get("_min_loss_scale") or None,  # files from before June 2019 have none
            ceiling=found.get("_max_loss_scale", 2.0**24),
        )
    if "cur_iter" not in found:  # apex.fp16_utils.LossScaler
        return _state(False, found["cur_scale"], 0)
    window = int(found["scale_window"])
    # Growth came whenever the distance from the last overflow was a multiple of the window.
    clean = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    unskipped = clean % window if window > 0 else 0
    factor = found["scale_factor"]
    return _state(True, found["cur_scale"], unskipped, factor=factor, window=window, floor=1.0)


def _check(state: ScalerState) -> None:
    floor = state["min_loss_scale"] or 0.0
    usable = {
        "loss_scale": math.isfinite(state["loss_scale"]) and state["loss_scale"] > 0,
        "unskipped": state["unskipped"] >= 0,
        "scale_factor": math.isfinite(state["scale_factor"]) and state["scale_factor"] >= 1,
        "scale_window": state["scale_window"] >= 1,
        "min_loss_scale": math.isfinite(floor) and floor >= 0,
        "max_loss_scale": state["max_loss_scale"] > 0 and state["max_loss_scale"] >= floor,
    }
    wrong = [name for name, is_usable in usable.items() if not is_usable]
    if wrong:
        raise ValueError(f"out of range: {', '.join(wrong)}")


def _shown(source: object) -> str:
    short = reprlib.Repr()  # of what holds itself twice, and so on, repr would never end
    short.maxlevel, short.maxdict, short.maxstring, short.maxother = 3, 20, 200, 200
    return short.repr(dict(cast("Any", source)) if isinstance(source, Mapping) else source)


UNCHANGED = "unchanged"
RECORD = "object of "


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a checkpoint contains.

    Attributes:
        key: Where it is, as in ``['optimizer']['loss_scaler']``; empty for the file as a whole.
        kind: What it is, in words.
        becomes: What the conversion makes of it, and who loads that.
    """

    key: str
    kind: str
    becomes: str


def _has(*keys: str) -> Callable[[Mapping[Any, Any]], bool]:
    return lambda value: all(key in value for key in keys)


def _is_amp_state(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(
        str(key).startswith("loss_scaler") and isinstance(item, Mapping) and "unskipped" in item
        for key, item in value.items()
    )


def _is_model_state(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(item, torch.Tensor) for item in value.values())


_KINDS: tuple[tuple[Callable[[Mapping[Any, Any]], bool], str, str], ...] = (
    (
        _has("fp32_from_fp16", "loss_scaler"),
        "state of fp16_utils.FP16_Optimizer",
        "for preamp.fp16_utils.FP16_Optimizer.load_state_dict",
    ),
    (
        _has("fp32_groups_flat", "cur_scale"),
        "state of the flat FP16_Optimizer of early apex.optimizers",
        "unchanged; for preamp.optimizers.FP16_Optimizer.load_state_dict",
    ),
    (
        _has("fp32_groups", "cur_scale"),
        "state of apex.contrib.optimizers.FP16_Optimizer",
        "unchanged; no class of preamp loads it, its masters are in 'fp32_groups'",
    ),
    (
        _is_amp_state,
        "amp.state_dict()",
        "unchanged; for preamp.amp.load_state_dict, after initialize",
    ),
    (_has("state", "param_groups"), "state of an optimizer", "unchanged; for its load_state_dict"),
    (_is_model_state, "state of a model", "unchanged; for its load_state_dict"),
)
"""Test, name and use of each kind of dict, the most particular first."""


def describe(content: Any, key: str = "") -> Iterator[Finding]:
    """Say what a checkpoint contains, from the outside in.

    Args:
        content: What `read_apex_checkpoint` returned.
        key: Where ``content`` is.

    Yields:
        A finding for each thing of a known kind, each record, and each other entry.
    """
    yield from _describe(content, key, {})


def _describe(content: Any, key: str, places: dict[int, str]) -> Iterator[Finding]:
    """Describe ``content``; ``places`` tells where each container of containers was met first."""
    if isinstance(content, ApexRecord):
        yield Finding(key=key, kind=RECORD + content.class_name, becomes="a dict of numbers")
        return
    # Without this a small file of lists that hold another list twice, and so on, takes for ever.
    if any(_entries(item) for _, item in _entries(content)):
        first = places.setdefault(id(content), key)
        if first != key:
            yield Finding(key=key, kind=_name_of(content), becomes=f"as {first or 'the file'}")
            return
    kind, becomes = _kind_of(content)
    inside = (
        found for name, item in _entries(content) for found in _describe(item, key + name, places)
    )
    if kind:
        yield Finding(key=key, kind=kind, becomes=becomes)
        yield from (found for found in inside if found.kind.startswith(RECORD))
    elif isinstance(content, Mapping) and content:
        yield from inside
    else:
        told = [found for found in inside if found.becomes != UNCHANGED]
        yield from told or [Finding(key=key, kind=_name_of(content), becomes=UNCHANGED)]


def _kind_of(content: Any) -> tuple[str, str]:
    if isinstance(content, Mapping):
        mapping = cast("Mapping[Any, Any]", content)
        for fits, kind, becomes in _KINDS:
            if fits(mapping):
                return kind, becomes
    return "", UNCHANGED


def _entries(content: Any) -> list[tuple[str, Any]]:
    """What is in a container, each with how to index it; nothing in anything else."""
    if isinstance(content, Mapping):
        mapping = cast("Mapping[Any, Any]", content)
        return [(f"[{name!r}]", item) for name, item in mapping.items()]
    if isinstance(content, (list, tuple)):
        return [(f"[{index}]", item) for index, item in enumerate(cast("list[Any]", content))]
    return []


def _name_of(content: Any) -> str:
    if isinstance(content, Mapping):
        entries = cast("Mapping[Any, Any]", content)
        return f"dict of {len(entries)}" if entries else "empty dict"
    if isinstance(content, torch.Tensor):
        return f"{str(content.dtype).removeprefix('torch.')} tensor of shape {tuple(content.shape)}"
    if isinstance(content, (list, tuple, set)):
        items = cast("list[Any]", content)
        return f"{type(items).__name__} of {len(items)}"
    return type(content).__name__


def to_plain(content: Any) -> Any:
    """Return what `read_apex_checkpoint` returned with records of loss scalers as plain data."""
    try:
        return _to_plain(content, {})
    except RecursionError:
        raise bad_value(
            "The checkpoint contains itself, or is nested too deep",
            "Only containers that end somewhere can be converted",
            "Load it with read_apex_checkpoint and take out what is needed",
        ) from None


def _to_plain(content: Any, known: dict[int, Any]) -> Any:
    """Return the plain twin of ``content``; ``known`` has those of the containers met before."""
    place = id(content)
    if place in known:
        return known[place]
    if isinstance(content, ApexRecord):
        return dict(plain_loss_scaler(content))
    twin: Any = content
    if isinstance(content, dict):
        items = cast("dict[Any, Any]", content)
        _check_methods(items)
        _check_hashed(items, known)
        plain = {key: _to_plain(item, known) for key, item in items.items()}
        if not all(plain[key] is item for key, item in items.items()):
            twin = copy.copy(items)  # an OrderedDict keeps its attributes, such as _metadata
            twin.update(plain)
    elif isinstance(content, (list, tuple)):
        old = cast("list[Any]", content)
        new = [_to_plain(item, known) for item in old]
        if not all(a is b for a, b in zip(old, new, strict=True)):
            twin = type(old)(new)
    elif isinstance(content, set):
        _check_hashed(cast("set[Any]", content), known)
    else:
        return content
    known[place] = twin
    return twin


def _check_methods(items: dict[Any, Any]) -> None:
    """Refuse an OrderedDict whose file gave it an ``items`` or ``update`` of its own."""
    replaced = [name for name in getattr(items, "__dict__", {}) if hasattr(type(items), name)]
    if replaced:
        raise bad_value(
            f"The checkpoint has a dict with its own {', '.join(map(repr, replaced))}",
            "A dict may have attributes, but has its class's methods",
            "Do not use the file unless you know why it was written like that",
        )


def _check_hashed(items: Iterable[Any], known: dict[int, Any]) -> None:
    """Refuse records where the dict that replaces them cannot be."""
    if any(_to_plain(item, known) is not item for item in items):
        raise bad_value(
            "The checkpoint has a loss scaler as the key of a dict, or in a set",
            "Loss scalers become dicts, which are values and items of lists",
            "Load it with read_apex_checkpoint and take out what is needed",
        )


def convert_apex_checkpoint(
    src: str | os.PathLike[str], dst: str | os.PathLike[str]
) -> tuple[Finding, ...]:
    """Write a checkpoint made with Apex as plain data that ``torch.load`` reads by default.

    The new file takes its place at once, after it was read back: an interrupted conversion leaves
    ``dst`` as it was. Tensors are saved as CPU tensors.

    Args:
        src: File written by ``torch.save``; see `read_apex_checkpoint`.
        dst: Where to write; replaced if it exists.

    Returns:
        What was found in ``src``.

    Raises:
        OSError: A file cannot be read or written.
        ValueError: ``src`` is refused by `read_apex_checkpoint`, cannot be converted, or is
            ``dst``; ``dst`` is a folder or a device.
    """
    source, target = Path(src), Path(dst)
    if target.exists() and target.samefile(source):
        raise bad_value(
            f"{source} is to be replaced by its own conversion",
            "Source and destination are two files",
            "Choose another destination, so that the original stays",
        )
    if target.exists() and not target.is_file():  # a device would be gone for all programs
        got, allowed = f"{target} is no regular file", "A checkpoint goes to a file of its own"
        raise bad_value(got, allowed, "Choose another destination")
    content = read_apex_checkpoint(source)
    plain = to_plain(content)
    try:
        write_atomically(plain, target)
    except pickle.PickleError as error:
        raise bad_value(
            f"{source} cannot be written as plain data: {str(error).splitlines()[0]}",
            "Plain data hold loss scalers as values, and no classes",
            "Load it with read_apex_checkpoint and take out what is needed",
        ) from error
    return tuple(describe(content))


def write_atomically(content: Any, target: Path) -> None:
    """Save plain data so that ``target`` is either what it was or complete."""
    with replacing(target) as draft:
        write_zip(draft, content)
        # torch.load's default must take it, or the conversion would have been for nothing.
        cast("Any", torch).load(draft.check(), map_location="cpu", mmap=True, weights_only=True)
