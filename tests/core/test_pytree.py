# SPDX-License-Identifier: BSD-3-Clause
"""Casting inside containers keeps every container's type, and identity where nothing changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from preamp.core.late_numbers import LateNumber, read_numbers
from preamp.core.pytree import cast_floating, map_leaves, map_tensors

F16, F32 = torch.float16, torch.float32


def t() -> torch.Tensor:
    return torch.ones(2)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Record:
    x: Any
    label: str = "same"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


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


class Moved(NamedTuple):
    """A named tuple with a field of that name."""

    x: Any
    to: Any


@dataclasses.dataclass
class Graph:
    """A dataclass with both a method and fields."""

    x: Any
    ids: Any

    def to(self, dtype: torch.dtype) -> Graph:
        self.x, self.ids = self.x.to(dtype), self.ids.to(dtype)
        return self


@dataclasses.dataclass
class Edge:
    """A dataclass with a field of that name."""

    x: Any
    to: Any


class Fields(collections.UserDict[str, Any]):
    """A mapping that is no dict and has attributes."""

    note = "of the class"


class Table(MutableMapping[str, Any]):
    """One whose copies share its items, and whose class takes other arguments."""

    def __init__(self, size: int, **items: Any) -> None:
        self.size = size
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


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


class MyList(list[Any]):
    pass


class Attributes(dict[str, Any]):
    """A dict whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def looped() -> Record:
    """Make a node whose child knows its parent."""
    node = Record(t())
    node.x = [t(), {"parent": node}]
    return node


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floating_tensors_are_cast(dtype: torch.dtype) -> None:
    assert cast_floating(t().to(dtype), F16).dtype is F16


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)
def test_other_tensors_are_not(dtype: torch.dtype) -> None:
    x = torch.ones(2).to(dtype)
    assert cast_floating(x, F16) is x


@pytest.mark.parametrize("make", [list, tuple, collections.deque, MyList, set, frozenset])
def test_sequences_and_sets(make: Any) -> None:
    got = cast_floating(make([t(), "s", 3]), F16)
    assert type(got) is make
    items = sorted(got, key=lambda item: type(item).__name__)  # sets have no order
    assert (items[0].dtype, items[1:]) == (F16, [3, "s"])
    assert isinstance(got, (set, frozenset)) or list(got)[1:] == ["s", 3]


def test_deque_keeps_its_length_limit() -> None:
    assert cast_floating(collections.deque([t()], maxlen=3), F16).maxlen == 3


def test_named_tuple() -> None:
    got = cast_floating(Pair(t(), "b"), F16)
    assert type(got) is Pair
    assert (got.a.dtype, got.b) == (F16, "b")


@pytest.mark.parametrize("make", [Record, Frozen, Slotted])
def test_dataclasses(make: Any) -> None:
    given = make(t())
    got = cast_floating(given, F16)
    assert type(got) is make
    assert got.x.dtype is F16
    assert given.x.dtype is F32


def test_dict_keeps_keys_and_order() -> None:
    got = cast_floating({"b": t(), 1: "x"}, F16)
    assert type(got) is dict
    assert list(got) == ["b", 1]
    assert got["b"].dtype is F16


def test_dict_subclass_with_attributes() -> None:
    given = Output(logits=t(), ids=torch.ones(1, dtype=torch.int64))
    got = cast_floating(given, F16)
    assert type(got) is Output
    assert got.logits.dtype is F16
    assert got.ids is given.ids
    assert got.note == "kept"
    assert given.logits.dtype is F32


def test_dict_whose_attributes_are_its_items() -> None:
    given = Attributes(x=t())
    got = cast_floating(given, F16)
    assert (got.x.dtype, got["x"].dtype, given.x.dtype) == (F16, F16, F32)
    got.new = 1
    assert (got["new"], "new" in given) == (1, False)


def test_default_dict_keeps_its_factory() -> None:
    given = collections.defaultdict(list, x=t())
    got = cast_floating(given, F16)
    assert got["x"].dtype is F16
    assert got["new"] == []


def test_nesting() -> None:
    got = cast_floating({"a": [Pair(t(), (Record(t()),))]}, F16)
    assert got["a"][0].a.dtype is F16
    assert got["a"][0].b[0].x.dtype is F16


@pytest.mark.parametrize(
    "make",
    [Batch, lambda: Slots(["x"], [t()]), lambda: Bag(t(), t()), lambda: Single([t()]), looped],
)
def test_what_is_no_container_or_cannot_be_rebuilt_is_left_alone(make: Any) -> None:
    given = make()
    for value in (given, [given], {"a": (given, 1)}):
        assert cast_floating(value, F16) is value
    if isinstance(given, Single):
        assert given[0].dtype is F32


@pytest.mark.parametrize("kind", [Moved, Edge])
def test_a_field_named_to(kind: Any) -> None:
    ids = torch.tensor([257, 999])
    given = kind(t(), t())
    got = cast_floating(given, F16)
    assert type(got) is kind
    assert (got.x.dtype, got.to.dtype, given.to.dtype) == (F16, F16, F32)
    assert cast_floating(kind(t(), ids), F16).to is ids


def test_a_dataclass_with_a_method_to_is_cast_by_its_fields() -> None:
    given = Graph(torch.tensor([1001.3]), torch.tensor([257, 513, 999]))
    got = cast_floating(given, torch.bfloat16)
    assert (got.x.dtype, got.ids) == (torch.bfloat16, given.ids)
    assert given.x.tolist() == torch.tensor([1001.3]).tolist()


@pytest.mark.parametrize("make", [lambda **items: Fields(items), lambda **items: Table(3, **items)])
def test_a_mapping_that_is_no_dict(make: Any) -> None:
    given = make(x=t(), ids=torch.tensor([999]))
    given.note = "kept"
    got = cast_floating(given, F16)
    assert type(got) is type(given)
    assert (got["x"].dtype, got["ids"], got.note) == (F16, given["ids"], "kept")
    assert given["x"].dtype is F32
    got["new"] = 1
    assert "new" not in given


def test_a_list_with_an_argument_of_its_own() -> None:
    given = Sized([t(), "a"], size=7)
    got = cast_floating(given, F16)
    assert (type(got), got[0].dtype, got[1], got.size) == (Sized, F16, "a", 7)
    assert given[0].dtype is F32


def test_a_tuple_that_takes_items_one_by_one() -> None:
    given = Span(t(), 1)
    given.note = "kept"
    got = cast_floating(given, F16)
    assert (type(got), got[0].dtype, got[1], got.note) == (Span, F16, 1, "kept")


def test_what_torch_returns_in_fields() -> None:
    got = cast_floating(torch.ones(2, 3).max(0), F16)
    assert type(got) is torch.return_types.max
    assert (got.values.dtype, got.indices.dtype) == (F16, torch.int64)


def test_packed_sequence() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    got = cast_floating(packed, F16)
    assert type(got) is PackedSequence
    assert got.data.dtype is F16
    assert torch.equal(got.batch_sizes, packed.batch_sizes)


class Stream:
    """An iterator with something of its own."""

    position = 0

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> torch.Tensor:
        raise StopIteration


def test_iterators_come_back_as_they_are() -> None:
    for stream in (Stream(), iter([torch.ones(1)]), (torch.ones(1) for _ in range(2))):
        assert map_leaves(torch.Tensor.half, stream) is stream


NO_CONTAINERS = (None, "text", b"bytes", 3, 2.5, 1j, True, range(3), torch.Size([2]), torch.float32)
NO_CONTAINERS += (nn.Linear, np.ones(2), object(), slice(1), dict(a=1).keys())
NOTHING_TO_CAST = ([1, "a"], (torch.ones(1, dtype=torch.int64),), {"a": 1}, Pair(1, 2), Record("x"))
NOTHING_TO_CAST += (Output(a=1), MappingProxyType({"a": 1}), [t().half()])


@pytest.mark.parametrize(
    "value", NO_CONTAINERS + NOTHING_TO_CAST, ids=lambda value: type(value).__name__
)
def test_what_needs_no_cast_comes_back_as_it_is(value: Any) -> None:
    assert cast_floating(value, F16) is value


def test_modules_are_not_touched() -> None:
    module = nn.Linear(2, 2)
    assert cast_floating(module, F16) is module
    assert cast_floating([module], F16)[0] is module
    assert module.weight.dtype is F32


def test_read_only_mapping_with_floats() -> None:
    got = cast_floating(MappingProxyType({"a": t(), "b": 1}), F16)
    assert type(got) is MappingProxyType
    assert got["a"].dtype is F16
    assert got["b"] == 1


def test_casts_are_differentiable() -> None:
    leaf = torch.ones(2, requires_grad=True)
    cast_floating((leaf,), F16)[0].float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [1.0, 1.0]


def test_map_leaves_takes_any_function() -> None:
    assert map_leaves(lambda x: x.shape, [torch.ones(2, 3)]) == [torch.Size([2, 3])]


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
    assert [type(v) for v in (read["scale"], read["count"][0], read["flag"][0])] == [
        float,
        int,
        bool,
    ]
    assert isinstance(tree["scale"], LateNumber)
