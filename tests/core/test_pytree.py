# SPDX-License-Identifier: BSD-3-Clause
"""Casting inside containers keeps every container's type, and identity where nothing changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.core.pytree import cast_floating, map_tensors

F16, F32 = torch.float16, torch.float32


def t() -> torch.Tensor:
    return torch.ones(2)


class Pair(NamedTuple):
    x: Any
    ids: Any


@dataclasses.dataclass
class Record:
    x: Any
    ids: Any = None


class Output(collections.OrderedDict[str, Any]):
    """Like the outputs of model libraries: entries are attributes too, and there are others."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(entries)
        self.note = "kept"

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Batch:
    """A user's batch class, which moves and casts itself."""

    def __init__(self) -> None:
        self.ids = torch.tensor([257, 513, 999])
        self.target = torch.tensor([1001.3])

    def to(self, device: str) -> Batch:
        self.ids, self.target = self.ids.to(device), self.target.to(device)
        return self


@dataclasses.dataclass
class Edge:
    """A dataclass with a field of that name."""

    x: Any
    to: Any


class Fields(collections.UserDict[str, Any]):
    """A mapping that is no dict and has attributes."""

    note = "of the class"


class Table(collections.UserDict[str, Any]):
    """One whose copies share its items, and whose class takes other arguments."""

    def __init__(self, size: int, **items: Any) -> None:
        self.size = size
        self.data = items

    def __copy__(self) -> Table:
        twin = Table(self.size)
        vars(twin).update(vars(self))
        return twin


class Slots(Mapping[str, Any]):
    """One that cannot be rebuilt."""

    __slots__ = ("_pairs",)

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self._pairs = list(zip(names, values, strict=True))

    def __getitem__(self, key: str) -> Any:
        return dict(self._pairs)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self._pairs))

    def __len__(self) -> int:
        return len(self._pairs)


class Single(list[Any]):
    """One whose copies are itself."""

    def __copy__(self) -> Single:
        return self


class Sized(list[Any]):
    """A list with an argument of its own, as lists of images have."""

    def __init__(self, items: list[Any], size: int) -> None:
        super().__init__(items)
        self.size = size


class Bag(frozenset[Any]):
    """A set that cannot be made of its items."""

    def __new__(cls, first: Any, last: Any) -> Bag:
        return super().__new__(cls, (first, last))


class Span(tuple[Any, ...]):
    """A tuple that takes its items one by one, and has attributes."""

    def __new__(cls, first: Any, last: Any) -> Span:
        return super().__new__(cls, (first, last))


class Attributes(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


LOOP = Record(t())
LOOP.x = [t(), {"parent": LOOP}]


def by_field(value: Any) -> list[Any]:
    return [value.x, value.ids]


def by_key(value: Any) -> list[Any]:
    return [value["x"], value["ids"]]


def by_size(value: Any) -> list[Any]:
    return sorted(value, key=len)


Kind = tuple[Callable[[Any, Any], Any], Callable[[Any], list[Any]]]
KINDS: dict[str, Kind] = {
    "a list": (lambda x, ids: [x, ids], list),
    "a tuple": (lambda x, ids: (x, ids), list),
    "a deque": (lambda x, ids: collections.deque([x, ids], maxlen=3), list),
    "a list of a class": (lambda x, ids: type("MyList", (list,), {})([x, ids]), list),
    "a list with an argument": (lambda x, ids: Sized([x, ids], size=7), list),
    "a tuple that takes items one by one": (Span, list),
    "a named tuple": (Pair, by_field),
    "a dataclass with a field called to": (Edge, lambda value: [value.x, value.to]),
    "a dataclass": (Record, by_field),
    "a frozen one": (dataclasses.make_dataclass("Frozen", ["x", "ids"], frozen=True), by_field),
    "one with slots": (dataclasses.make_dataclass("Slotted", ["x", "ids"], slots=True), by_field),
    "a dict": (lambda x, ids: {"x": x, "ids": ids}, by_key),
    "a default dict": (lambda x, ids: collections.defaultdict(list, x=x, ids=ids), by_key),
    "a read-only one": (lambda x, ids: MappingProxyType({"x": x, "ids": ids}), by_key),
    "a dict with attributes": (lambda x, ids: Output(x=x, ids=ids), by_field),
    "a dict whose attributes are its items": (lambda x, ids: Attributes(x=x, ids=ids), by_field),
    "a mapping that is no dict": (lambda x, ids: Fields({"x": x, "ids": ids}), by_key),
    "one that takes other arguments": (lambda x, ids: Table(3, x=x, ids=ids), by_key),
    "a set": (lambda x, ids: {x, ids}, by_size),
    "a frozen set": (lambda x, ids: frozenset({x, ids}), by_size),
    "what torch returns in fields": (lambda x, ids: torch.return_types.max((x, ids)), list),
    "a packed sequence": (lambda x, ids: PackedSequence(x, ids), lambda value: list(value[:2])),
    "containers in others": (
        lambda x, ids: {"a": [Pair(x, (Record(ids),))]},
        lambda value: [value["a"][0].x, value["a"][0].ids[0].x],
    ),
}
"""How to make a container of two tensors, and what is in it."""


@pytest.mark.parametrize("name", KINDS)
def test_a_container_keeps_its_type(name: str) -> None:
    make, parts = KINDS[name]
    ids = torch.tensor([257, 513, 999])
    given = make(torch.tensor([1001.3]), ids)
    if isinstance(given, (Fields, Table, Span)):
        given.note = "kept"
    before = dict(getattr(given, "__dict__", {}))
    got = cast_floating(given, F16)
    assert type(got) is type(given)
    assert (parts(got)[0].dtype, parts(got)[1] is ids) == (F16, True)
    assert (parts(given)[0].dtype, parts(given)[1] is ids) == (F32, True)
    for attribute in ("note", "size", "maxlen", "default_factory"):
        assert getattr(got, attribute, None) == getattr(given, attribute, None)
    assert dict(getattr(given, "__dict__", {})).keys() == before.keys()
    if isinstance(got, MutableMapping):
        got["new"] = 1
        assert "new" not in given
    if isinstance(got, Attributes):
        assert got.new == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floating_tensors_are_cast(dtype: torch.dtype) -> None:
    assert cast_floating(t().to(dtype), F16).dtype is F16


@pytest.mark.parametrize(
    "given", [Batch(), Slots(["x"], [t()]), Bag(t(), t()), Single([t()]), LOOP]
)
def test_what_is_no_container_or_cannot_be_rebuilt_is_left_alone(given: Any) -> None:
    for value in (given, [given], {"a": (given, 1)}):
        assert cast_floating(value, F16) is value
    if isinstance(given, Single):
        assert given[0].dtype is F32


NO_CONTAINERS = (None, "text", b"bytes", 3, 2.5, 1j, True, range(3), torch.Size([2]), torch.float32)
NO_CONTAINERS += (nn.Linear, nn.Linear(2, 2), np.ones(2), object(), slice(1), dict(a=1).keys())
NO_CONTAINERS += (iter([torch.ones(1)]), (torch.ones(1) for _ in range(2)))
NO_CONTAINERS += tuple(
    torch.ones(2).to(d) for d in (torch.int64, torch.int32, torch.uint8, torch.bool, torch.cfloat)
)
NOTHING_TO_CAST = ([1, "a"], (torch.ones(1, dtype=torch.int64),), {"a": 1}, Pair(1, 2), Record("x"))
NOTHING_TO_CAST += (Output(a=1), MappingProxyType({"a": 1}), [t().half()])


@pytest.mark.parametrize(
    "value", NO_CONTAINERS + NOTHING_TO_CAST, ids=lambda value: type(value).__name__
)
def test_what_needs_no_cast_comes_back_as_it_is(value: Any) -> None:
    assert cast_floating(value, F16) is value


def test_tensors_are_mapped_in_sequences_of_their_own_kind() -> None:
    ones, number = torch.ones(2), torch.ones(2, dtype=torch.int64)
    given = Pair([ones, number], (ones, 3))
    found = map_tensors(torch.Tensor.double, given)
    assert type(found) is Pair
    assert (type(found[0]), type(found[1])) == (list, tuple)
    assert [found[0][0].dtype, found[1][0].dtype] == [torch.float64] * 2
    assert found[0][1] is number
    unchanged = Pair([number], 3)
    assert map_tensors(torch.Tensor.double, unchanged) is unchanged


# -- numbers of a tree that are read together -------------------------------------------------


def test_each_number_is_of_its_kind() -> None:
    tensor = torch.ones(2)
    tree = {
        "scale": LateNumber(float, torch.tensor(2.0**-149)),
        "count": [LateNumber(int, torch.tensor(2**31 - 1, dtype=torch.int32)), None],
        "flag": (LateNumber(bool, torch.tensor(True)), "text"),
        "tensor": tensor,
    }
    read = read_numbers(tree)
    assert read == {
        "scale": 2.0**-149,
        "count": [2**31 - 1, None],
        "flag": (True, "text"),
        "tensor": tensor,
    }
    kinds = [type(value) for value in (read["scale"], read["count"][0], read["flag"][0])]
    assert kinds == [float, int, bool]
    assert isinstance(tree["scale"], LateNumber)
