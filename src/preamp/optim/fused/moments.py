# SPDX-License-Identifier: BSD-3-Clause
"""Moments in fewer bits: how each is kept, where its elements lie, and conversions between.

Of this file a step at full storage only asks whether there is anything to do.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from typing import Any, ClassVar, cast

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state, bad_value
from preamp.core.tensors import is_sharded, local_of
from preamp.core.torch_private.shards import box_of, has_whole_rows, sharded_as
from preamp.kernels import Update
from preamp.kernels.stored import Format, Stored, are_scales, can_be_blocks, decode, scales_shape
from preamp.optim.fused.entries import Apart, Entry, kept_of
from preamp.optim.master_parameter import leaf_of
from preamp.policy.storage import FULL, Storage

SCALES = "_scales"
"""What the key of a moment's scales ends in."""

TWO_MOMENTS = {"exp_avg": Format.SIGNED, "exp_avg_sq": Format.UNSIGNED}
"""The moments of Adam and LAMB, and what they are with 8 bits."""

_referred_to: Any = cast("Any", weakref.ref).__call__
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
    fits = _shape_of(value) == _shape_of(home.leaf)
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


@dataclass(frozen=True, eq=False)
class _Homes:
    """Where an optimizer's parameters are, as long as these and its storage are the same."""

    storage: Storage
    refs: list[Any]  # to the parameters
    by_id: dict[int, Home]


class KeepsMoments(torch.optim.Optimizer):
    """The part of a fused optimizer that keeps moments as its `storage` says."""

    storage: Storage = FULL
    """How masters and moments are kept between steps; set by ``preamp.initialize``.

    At the next step moments in fewer bits become float32 where it says so.
    """

    moments: ClassVar[Mapping[str, Format]] = {}
    """State that may be kept in fewer bits, in the rule's order, and its format with 8 bits.

    Where there is any, split masters too are updated as they are.
    """

    _more_state: ClassVar[tuple[str, ...]] = ()
    """The rule's state behind `moments`."""

    _wide_state: ClassVar[frozenset[str]] = frozenset()
    """State that is float32 even where the parameter is half; the rest has its dtype."""

    @property
    def _has_fewer_bits(self) -> bool:
        return self.storage.moments != "float32"

    def check_storage(self) -> None:
        """Raise `PreampStateError` if moments cannot be kept as `storage` says."""
        if self._has_fewer_bits:
            self._homes()

    def _homes(self) -> _Homes:
        """Where the parameters are; raises `PreampStateError` as `check_storage` does."""
        params: list[Any] = [*itertools.chain(*(group["params"] for group in self.param_groups))]
        known: _Homes | None = vars(self).get("_kept_homes")
        if known is not None and known.storage == self.storage:
            before: Any = map(_referred_to, known.refs)
            if len(params) == len(known.refs) and all(map(is_, params, before)):
                return known
        homes = {
            id(param): Home.of(number, param, self._state_device)
            for number, param in enumerate(params)
        }
        state: dict[Any, Entry] = self.state
        for param in params if self._has_fewer_bits else ():
            home, entry = homes[id(param)], state.get(param, {})
            home.check(type(self).__name__, self.storage)
            for key in [key for key in self.moments if entry.get(key) is not None]:
                self._as_kept(param, entry, key, home)  # which refuses what it would have to round
        known = _Homes(self.storage, list(map(weakref.ref, params)), homes)
        # At full storage no step asks again, and what is kept would keep weights alive.
        vars(self)["_kept_homes"] = known if self._has_fewer_bits else None
        return known

    # -- where state lies --------------------------------------------------------------------

    @property
    def _state_device(self) -> torch.device | None:
        """Where all state lies, or ``None`` where each parameter's lies beside it."""
        return torch.device("cpu") if self.storage.place == "host" else None

    def place_state(self) -> None:
        """Bring state to where `storage` says, after this or the parameters were changed."""
        vars(self).pop("_kept_lists", None)
        state: dict[Any, Entry] = self.state
        for param, entry in state.items():
            for key in (*self.moments, *self._more_state):
                for name in (key, key + SCALES):
                    value = entry.get(name)
                    if isinstance(value, torch.Tensor):
                        entry[name] = value.to(self._state_device or param.device)

    # -- a step ------------------------------------------------------------------------------

    def _apart(self, also: Apart | None) -> Apart:
        """What `batches` sorts by where moments have 8 bits: how they are kept, and ``also``."""
        by_id = self._homes().by_id

        def column(params: list[torch.Tensor]) -> Sequence[Hashable]:
            kept = [by_id[id(param)].has_blocks for param in params]
            return kept if also is None else list(zip(kept, also(params), strict=True))

        return column

    def _kept_as(self, key: str, param: torch.Tensor, home: Home) -> Format:
        if key not in self.moments:
            return Format.PLAIN
        kind, has_blocks = self.moments[key], home.has_blocks
        return format_of(kind, param.dtype, self.storage, has_blocks=has_blocks)

    def _told(self, params: Sequence[torch.Tensor], update: Update) -> Update:
        """``update`` with how the moments of a batch are kept, in fewer bits."""
        homes = self._homes()
        first = homes.by_id[id(params[0])]
        formats = [self._kept_as(key, params[0], first) for key in self.moments]
        if set(formats) == {Format.PLAIN}:
            return update
        kept, states = kept_of(self, params)
        scales = [
            kept.column(states, key + SCALES, torch.float32) if kind.has_scales else None
            for key, kind in zip(self.moments, formats, strict=True)
        ]
        if kept.homes is None or kept.homes() is not homes:
            own = [homes.by_id[id(param)] for param in params]
            kept.numbers, kept.starts = [h.number for h in own], [h.start for h in own]
            kept.homes, kept.standing = weakref.ref(homes), None
        others = len(self._more_state)
        stored = replace(
            update.stored or Stored(),
            formats=(*formats, *[Format.PLAIN] * others),
            scales=(*scales, *[None] * others),
            seed=self.storage.seed,
            numbers=kept.numbers,
            starts=kept.starts,
        )
        return replace(update, stored=stored)

    def _dtype_of(self, key: str, param: torch.Tensor) -> torch.dtype:
        """Of state that is not kept in fewer bits."""
        raise NotImplementedError

    def _as_kept(self, param: torch.Tensor, entry: Entry, key: str, home: Home) -> Entry:
        """The moment ``key`` of ``entry`` as it is kept, and its scales.

        What is kept so already is returned as it is, and what has fewer bits widened where a plain
        one is kept. Raises `PreampStateError` for one that would have to be rounded.
        """
        kept, dtype = self._kept_as(key, param, home), self._dtype_of(key, param)
        value, given = entry[key], format_kept(entry[key])
        if given.has_scales and given is kept:
            return {key: value, key + SCALES: entry[key + SCALES]}
        if given.has_scales and kept is Format.PLAIN:
            wide = decode(local_of(value), local_of(entry[key + SCALES]), given)
            like = torch.empty_like(local_of(home.leaf.detach()), dtype=dtype, device=home.device)
            value = sharded_as(like.copy_(wide), home.leaf)
        elif kept is not Format.PLAIN and value.dtype is not kept.dtype:
            raise bad_state(
                f"{type(self).__name__} got {key} of parameter {home.number} in "
                f"{_in_words(given, value.dtype)}, and its storage keeps it in "
                f"{_in_words(kept, kept.dtype)}",
                "Moments come back as they were kept; only float32 ones are made of those in fewer "
                "bits, since others would be rounded once more",
                "Load a state under the storage that it was saved with, or storage='full' for "
                "float32 moments",
            )
        return {key: value.to(kept.dtype or dtype)}

    def _make_moments(
        self, params: Sequence[torch.Tensor], states: Sequence[Entry], key: str
    ) -> None:
        """Let all ``states`` have the moment ``key`` as it is kept: zeros where there is none."""
        by_id = self._homes().by_id
        for param, state in zip(params, states, strict=True):
            home = by_id[id(param)]
            if state.get(key) is not None:
                made = self._as_kept(param, state, key, home)
                state.pop(key + SCALES, None)
                state.update(made)
                continue
            kept = self._kept_as(key, param, home)
            dtype = kept.dtype or self._dtype_of(key, param)
            state[key] = torch.zeros_like(home.leaf.detach(), dtype=dtype, device=home.device)
            if kept.has_scales:
                scales = torch.zeros(home.held_scales, dtype=torch.float32, device=home.device)
                state[key + SCALES] = sharded_as(scales, home.leaf, scales_shape(home.shape))

    # -- loading -----------------------------------------------------------------------------

    def _own_state(
        self, given: Mapping[str, Any]
    ) -> tuple[dict[torch.Tensor, Entry], dict[Any, Any]]:
        """Of a loaded state what is kept as it is, by parameter, and the rest for torch to cast.

        Raises `ValueError` for moments in fewer bits that do not fit, and `PreampStateError` for
        those that `storage` keeps in fewer bits than they are in.
        """
        numbers = [number for group in given["param_groups"] for number in group["params"]]
        params = itertools.chain(*(group["params"] for group in self.param_groups))
        homes, rest = self._homes().by_id, dict[Any, Any](given["state"])
        found: dict[torch.Tensor, Entry] = {}
        for number, param in zip(numbers, params, strict=False):
            entry = cast("Entry | None", rest.get(number))
            if isinstance(entry, dict):
                own = found[param] = self._own_entry(param, entry, homes[id(param)])
                mine = {*own, *(key + SCALES for key in (*own, *self.moments))}
                rest[number] = {key: value for key, value in entry.items() if key not in mine}
        return found, rest

    def _own_entry(self, param: torch.Tensor, given: Entry, home: Home) -> Entry:
        own = dict[str, Any]()
        where = self._state_device or param.device
        tensors = {k: v.to(where) for k, v in given.items() if isinstance(v, torch.Tensor)}
        is_away = where != param.device  # torch would bring it to the parameter
        for key in self.moments:
            if key not in tensors and (key + SCALES in tensors or given.get(key) is not None):
                check_fits(type(self).__name__, tensors, key, home)
        for key, value in tensors.items():
            is_plain = self._kept_as(key, param, home) is Format.PLAIN
            has_codes = key in self.moments and format_kept(value).has_scales
            if key + SCALES in tensors or has_codes or not is_plain:
                check_fits(type(self).__name__, tensors, key, home, self.moments.get(key))
                own |= self._as_kept(param, tensors, key, home)
            elif key in self._wide_state or (is_away and value.is_floating_point()):
                own[key] = value.to(self._dtype_of(key, param))
        return own
