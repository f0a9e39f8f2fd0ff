# SPDX-License-Identifier: BSD-3-Clause
"""The part of a fused optimizer that keeps moments as its `storage` says."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import is_, itemgetter
from typing import Any, ClassVar, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import are_same, dtype_of
from preamp.kernels import Standing, Update
from preamp.kernels.stored import Format, Stored
from preamp.optim.fused.entries import Apart
from preamp.optim.fused.moments import SCALES, Entry, Home, as_kept, check_fits, format_kept
from preamp.policy.storage import FULL, Storage

Column = list[torch.Tensor]


@dataclass(slots=True, eq=False)
class Kept:
    """What parameters were updated with in a step, for the next one to know it again.

    Tensors are referred to weakly: where a script moves or drops them, memory is free at once.
    """

    places: list[int] | None  # of the parameters in all state; ``None`` for all, in their order
    # References, by what a list is: ``"params"``, ``"keys"`` of all state, ``"halves"``,
    # ``"lows"``, and the keys of the state
    lists: dict[str, list[Any] | None] = field(default_factory=dict[str, "list[Any] | None"])
    dtypes: dict[str, torch.dtype | None] = field(default_factory=dict[str, "torch.dtype | None"])
    homes: Any = None  # a reference to where they were, if moments are kept in fewer bits
    numbers: list[int] = field(default_factory=list[int])  # of these, see `Stored`
    starts: list[int] = field(default_factory=list[int])
    standing: Standing | None = None  # from the second step on, while all is the same

    def is_same(self, name: str, column: Collection[Any] | None) -> bool:
        """Whether a list has the very tensors that were noted."""
        before = self.lists.get(name)
        if column is None or before is None:
            return column is before
        referred: Any = map(_referred_to, before)
        return len(column) == len(before) and all(map(is_, column, referred))

    def note(self, name: str, column: Collection[Any] | None) -> None:
        """The update takes this list."""
        if not self.is_same(name, column):
            self.lists[name] = None if column is None else list(map(weakref.ref, column))
            self.standing = None


_MOST_KEPT = 256
"""Batches of an optimizer; it needs one for each group and kind of parameters in a step."""

_referred_to: Any = cast("Any", weakref.ref).__call__


@dataclass(frozen=True, eq=False)
class _Homes:
    """Where an optimizer's parameters are, as long as these and its storage are the same."""

    storage: Storage
    refs: list[Any]  # to the parameters
    by_id: dict[int, Home]


class KeepsMoments(torch.optim.Optimizer):
    """Makes, finds and checks moments; a step at full storage asks for none of this."""

    storage: Storage = FULL
    """How masters and moments are kept between steps; set by ``preamp.initialize``.

    At the next step moments in fewer bits become float32 where it says so; see `as_kept`.
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
        return home.kept_as(self.moments[key], param.dtype, self.storage)

    def _dtype_of(self, key: str, param: torch.Tensor) -> torch.dtype:
        """Of state that is not kept in fewer bits."""
        return math_dtype(param.dtype) if key in self._wide_state else param.dtype

    def _kept_dtype(self, key: str, param: torch.Tensor) -> torch.dtype:
        kept = None
        if self.storage.moments != "float32":
            kept = self._kept_as(key, param, self._homes().by_id[id(param)]).dtype
        return self._dtype_of(key, param) if kept is None else kept

    def _told(self, params: Sequence[torch.Tensor], update: Update) -> Update:
        """``update`` with how the moments of a batch are kept, in fewer bits."""
        homes = self._homes()
        first = homes.by_id[id(params[0])]
        formats = [self._kept_as(key, params[0], first) for key in self.moments]
        if set(formats) == {Format.PLAIN}:
            return update
        kept, states = self._kept(params)
        scales = [
            self._column(kept, states, key + SCALES, torch.float32) if kind.has_scales else None
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

    def _as_kept(self, param: torch.Tensor, entry: Entry, key: str, home: Home) -> Entry:
        """The moment ``key`` of ``entry`` as it is kept; see `as_kept`."""
        kept, dtype = self._kept_as(key, param, home), self._dtype_of(key, param)
        return as_kept(type(self).__name__, entry, key, home, kept, dtype)

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
            state[key] = home.made(kept.dtype or self._dtype_of(key, param))
            if kept.has_scales:
                state[key + SCALES] = home.made_scales()

    def _kept(self, params: Sequence[torch.Tensor]) -> tuple[Kept, list[Entry]]:
        """What is kept of a step that updated these ``params``, and their state dicts.

        To look up a dict takes a call of Python, which ``torch.Tensor.__hash__`` is: so they are
        found by their places, while the keys of the state are the same.
        """
        state: dict[Any, Entry] = self.state
        every: dict[Hashable, Kept] = vars(self).setdefault("_kept_lists", {})
        key = id(params[0]), len(params)
        kept = every.get(key)
        if kept and kept.is_same("params", params) and kept.is_same("keys", state):
            states = list(state.values())
            return kept, states if kept.places is None else [states[p] for p in kept.places]
        own = [state[param] for param in params]  # made where there is none
        places = None
        if not are_same(state, params):
            place_of = {id(key): place for place, key in enumerate(state)}
            places = [place_of[id(param)] for param in params]
        if len(every) > _MOST_KEPT:
            del every[next(iter(every))]
        kept = every[key] = Kept(places)
        kept.note("params", params)
        kept.note("keys", state)
        return kept, own

    def _column(
        self, kept: Kept, states: Sequence[Entry], key: str, dtype: torch.dtype | None
    ) -> Column | None:
        """State of one kind as it is, ``None`` unless all of it is there and of ``dtype``."""
        try:
            found: Any = list(map(itemgetter(key), states))
            if kept.dtypes.get(key) is dtype and kept.is_same(key, found):
                return found
            if set(map(dtype_of, found)) == {dtype}:
                kept.dtypes[key] = dtype
                kept.note(key, found)
                return found
        except (KeyError, AttributeError):  # one has none, or None
            pass
        return None

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
            is_in_codes = key in self.moments and format_kept(value).has_scales
            if key + SCALES in tensors or is_in_codes or not is_plain:
                check_fits(type(self).__name__, tensors, key, home, self.moments.get(key))
                own |= self._as_kept(param, tensors, key, home)
            elif key in self._wide_state or (is_away and value.is_floating_point()):
                own[key] = value.to(self._dtype_of(key, param))
        return own
