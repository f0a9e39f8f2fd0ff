# SPDX-License-Identifier: BSD-3-Clause
"""Moments in fewer bits: how each is kept, where its elements lie, and conversions between."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state, bad_value
from preamp.core.tensors import is_sharded, local_of
from preamp.core.torch_private.shards import box_of, has_whole_rows, sharded_as
from preamp.kernels.stored import Format, are_scales, can_be_blocks, decode, scales_shape
from preamp.optim.master_parameter import leaf_of
from preamp.policy.storage import Storage

SCALES = "_scales"
"""What the key of a moment's scales ends in."""

TWO_MOMENTS = {"exp_avg": Format.SIGNED, "exp_avg_sq": Format.UNSIGNED}
"""The moments of Adam and LAMB, and what they are with 8 bits."""

Entry = dict[str, Any]
"""An optimizer's state of one parameter."""

_IN_CODES = {torch.int8: Format.SIGNED, torch.uint8: Format.UNSIGNED}


def format_kept(value: object) -> Format:
    """How a moment is kept that is there already; bfloat16 may be rounded either way."""
    dtype: Any = getattr(value, "dtype", None)
    return _IN_CODES.get(dtype, Format.PLAIN)


def format_of(kind: Format, dtype: torch.dtype, storage: Storage, *, has_blocks: bool) -> Format:
    """How a moment is kept that is ``kind`` with 8 bits; ``dtype`` is the parameter's.

    Those of float64 parameters stay float64, and vectors' and small tensors', which have no blocks,
    as they are.
    """
    if storage.moments == "float32" or dtype is torch.float64:
        return Format.PLAIN
    if storage.moments == "bfloat16":
        return Format.BFLOAT16
    return kind if has_blocks else Format.PLAIN


@dataclass(frozen=True, slots=True)
class Home:
    """A parameter of an optimizer, and which elements of the whole one this rank has."""

    number: int  # its position over all groups
    leaf: torch.Tensor  # the model's parameter
    shape: tuple[int, ...]  # of the whole parameter
    start: int  # the index in it of the first element that this rank has
    has_blocks: bool  # whether its moments can be kept in 8 bits
    device: torch.device  # where its state lies

    @classmethod
    def of(cls, number: int, param: torch.Tensor, device: torch.device | None = None) -> Home:
        """That of ``param``; state is where it is, or elsewhere."""
        leaf = leaf_of(param)
        shape, start = tuple(leaf.shape), 0
        if is_sharded(leaf) and local_of(leaf).numel():
            start = box_of(leaf)[0][0] * math.prod(shape[1:])
        where = device or leaf.device
        return cls(number, leaf, shape, start, can_be_blocks(shape), where)

    def kept_as(self, kind: Format, dtype: torch.dtype, storage: Storage) -> Format:
        """How a moment of it is kept; see `format_of`."""
        return format_of(kind, dtype, storage, has_blocks=self.has_blocks)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Of what this rank keeps of a moment."""
        return tuple(local_of(self.leaf).shape)

    @property
    def held_scales(self) -> tuple[int, int]:
        """The shape of what this rank keeps of a moment's scales."""
        if not self.shape:
            return 0, 0
        return local_of(self.leaf).shape[0], scales_shape(self.shape)[1]

    def check(self, kind: str, storage: Storage) -> None:
        """Raise `PreampStateError` unless this rank has rows of the whole parameter."""
        if is_sharded(self.leaf) and not has_whole_rows(self.leaf):
            placements: Any = getattr(self.leaf, "placements", None)
            raise bad_state(
                f"{kind} got moments={storage.moments!r} for a parameter {self.shape} with the "
                f"placements {placements}",
                "Moments in fewer bits need whole rows on each rank: Shard(0) and Replicate()",
                "Shard the parameter along dimension 0, as fully_shard does, or keep float32 "
                "moments",
            )

    def made(self, dtype: torch.dtype) -> torch.Tensor:
        """A new moment of zeros."""
        kind = torch.preserve_format
        return torch.zeros_like(
            self.leaf.detach(), dtype=dtype, memory_format=kind, device=self.device
        )

    def made_scales(self) -> torch.Tensor:
        """Scales of a new moment in 8 bits."""
        own = torch.zeros(self.held_scales, dtype=torch.float32, device=self.device)
        return sharded_as(own, self.leaf, scales_shape(self.shape))


def as_kept(
    kind: str, entry: Mapping[str, Any], key: str, home: Home, kept: Format, dtype: torch.dtype
) -> Entry:
    """The moment ``key`` of ``entry`` as ``kept``, and its scales; ``dtype`` is of plain ones.

    What is kept so already is returned as it is, and what has fewer bits widened where a plain one
    is kept. Raises `PreampStateError` for one that would have to be rounded.
    """
    value, given = entry[key], format_kept(entry[key])
    if given.has_scales and given is kept:
        return {key: value, key + SCALES: entry[key + SCALES]}
    if given.has_scales and kept is Format.PLAIN:
        wide = decode(local_of(value), local_of(entry[key + SCALES]), given)
        like = torch.empty_like(local_of(home.leaf.detach()), dtype=dtype, device=home.device)
        value = sharded_as(like.copy_(wide), home.leaf)
    elif given.has_scales or (kept is not Format.PLAIN and value.dtype is not kept.dtype):
        raise bad_state(
            f"{kind} got {key} of parameter {home.number} in {_in_words(given, value.dtype)}, and "
            f"its storage keeps it in {_in_words(kept, kept.dtype)}",
            "Moments come back as they were kept; only float32 ones are made of those in fewer "
            "bits, since others would be rounded once more",
            "Load a state under the storage that it was saved with, or storage='full' for float32 "
            "moments",
        )
    return {key: value.to(kept.dtype or dtype)}


def _in_words(kept: Format, dtype: torch.dtype | None) -> str:
    return "8 bits" if kept.has_scales or dtype is None else dtype_name(dtype)


def is_in_codes(entry: Mapping[str, Any], key: str) -> bool:
    """Whether the moment ``key`` is there in 8 bits, with its scales."""
    return f"{key}{SCALES}" in entry and format_kept(entry.get(key)).has_scales


def check_fits(
    kind: str, entry: Mapping[str, Any], key: str, home: Home, codes: Format | None = None
) -> None:
    """Raise `ValueError` unless a loaded moment is one that this rank may keep or convert.

    ``codes`` are those that it may have; ``None`` if any. Synchronises where there are scales.
    """
    value, scales = entry.get(key), entry.get(key + SCALES)
    given = format_kept(value)
    fits = _shape_of(value) == home.held_shape
    found = [_described(key, value)]
    if given.has_scales or scales is not None:
        fits &= given is (codes or given) and given.has_scales and _are_scales(scales, home)
        found.append(_described(key + SCALES, scales))
    if fits:
        return
    raise bad_value(
        f"{kind} got a state for parameter {home.number}, {home.shape}, that does not fit: "
        + ", ".join(found),
        "Its moments have the parameter's shape, and those with a sign in int8, or without in "
        f"uint8, float32 scales of shape {home.held_scales}, powers of two; nothing was loaded",
        "Load the state into the model and optimizer that it was saved from",
    )


def _shape_of(value: object) -> tuple[int, ...] | None:
    return tuple(local_of(value).shape) if isinstance(value, torch.Tensor) else None


def _are_scales(value: object, home: Home) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
        return False
    return _shape_of(value) == home.held_scales and are_scales(local_of(value))


def _described(name: str, value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"{name} is missing"
    return f"{name} is {dtype_name(value.dtype)} {_shape_of(value)}"
