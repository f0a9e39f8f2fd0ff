# SPDX-License-Identifier: BSD-3-Clause
"""What is in a file written with Apex."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.checkpoint.apex.reader import ApexRecord

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
