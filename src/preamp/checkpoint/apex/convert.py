# SPDX-License-Identifier: BSD-3-Clause
"""Turn a file written with Apex into plain data."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch

from preamp.checkpoint.apex.findings import Finding, describe
from preamp.checkpoint.apex.reader import ApexRecord, read_apex_checkpoint
from preamp.checkpoint.apex.scalers import plain_loss_scaler
from preamp.checkpoint.formats import write_zip
from preamp.core.errors import bad_value
from preamp.core.files import replacing


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
