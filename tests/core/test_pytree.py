# SPDX-License-Identifier: BSD-3-Clause
"""Casting inside containers keeps every container's type, and identity where nothing changed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

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
    """A user's batch class: the documented extension point is its ``to``."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.x.to(dtype))


class MyList(list[Any]):
    pass


@pytest.mark.apex("1.8 Tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_floating_tensors_are_cast(dtype: torch.dtype) -> None:
    assert cast_floating(t().to(dtype), F16).dtype is F16


@pytest.mark.apex("1.8 Tensor")
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]
)
def test_other_tensors_are_not(dtype: torch.dtype) -> None:
    x = torch.ones(2).to(dtype)
    assert cast_floating(x, F16) is x


@pytest.mark.apex("1.8 other Iterable")
@pytest.mark.parametrize("make", [list, tuple, collections.deque, MyList])
def test_sequences(make: Any) -> None:
    got = cast_floating(make([t(), "s", 3]), F16)
    assert type(got) is make
    assert got[0].dtype is F16
    assert list(got)[1:] == ["s", 3]


@pytest.mark.parametrize("make", [set, frozenset])
def test_sets(make: Any) -> None:
    got = cast_floating(make([t(), 3]), F16)
    assert type(got) is make
    assert {x.dtype for x in got if isinstance(x, torch.Tensor)} == {F16}


def test_deque_keeps_its_length_limit() -> None:
    assert cast_floating(collections.deque([t()], maxlen=3), F16).maxlen == 3


@pytest.mark.apex("1.8 other Iterable")
def test_named_tuple() -> None:
    got = cast_floating(Pair(t(), "b"), F16)
    assert type(got) is Pair
    assert (got.a.dtype, got.b) == (F16, "b")


@pytest.mark.apex("1.8 anything else")
@pytest.mark.parametrize("make", [Record, Frozen, Slotted])
def test_dataclasses(make: Any) -> None:
    given = make(t())
    got = cast_floating(given, F16)
    assert type(got) is make
    assert got.x.dtype is F16
    assert given.x.dtype is F32


@pytest.mark.apex("1.8 Mapping")
def test_dict_keeps_keys_and_order() -> None:
    got = cast_floating({"b": t(), 1: "x"}, F16)
    assert type(got) is dict
    assert list(got) == ["b", 1]
    assert got["b"].dtype is F16


@pytest.mark.apex("1.8 Mapping")
def test_dict_subclass_with_attributes() -> None:
    given = Output(logits=t(), ids=torch.ones(1, dtype=torch.int64))
    got = cast_floating(given, F16)
    assert type(got) is Output
    assert got.logits.dtype is F16
    assert got.ids is given.ids
    assert got.note == "kept"
    assert given.logits.dtype is F32


def test_default_dict_keeps_its_factory() -> None:
    given = collections.defaultdict(list, x=t())
    got = cast_floating(given, F16)
    assert got["x"].dtype is F16
    assert got["new"] == []


def test_nesting() -> None:
    got = cast_floating({"a": [Pair(t(), (Record(t()),))]}, F16)
    assert got["a"][0].a.dtype is F16
    assert got["a"][0].b[0].x.dtype is F16


@pytest.mark.apex("1.8 object with to")
def test_object_with_to() -> None:
    assert cast_floating(Batch(t()), F16).x.dtype is F16


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


def test_other_iterators_come_back_as_they_are() -> None:
    stream, tensors = Stream(), iter([torch.ones(1)])

    assert map_leaves(torch.Tensor.half, stream) is stream
    assert map_leaves(torch.Tensor.half, tensors) is tensors


@pytest.mark.apex("1.8 other Iterable")
def test_generator_is_mapped_on_the_way() -> None:
    started: list[int] = []

    def items() -> Iterator[Any]:
        started.append(1)
        yield t()
        yield "s"

    got = cast_floating(items(), F16)
    assert started == []
    first, second = got
    assert first.dtype is F16
    assert second == "s"


@pytest.mark.apex("1.8 anything else")
@pytest.mark.parametrize(
    "value",
    [
        None,
        "text",
        b"bytes",
        3,
        2.5,
        1j,
        True,
        range(3),
        torch.Size([2]),
        torch.float32,
        nn.Linear,
        np.ones(2),
        object(),
        slice(1),
        dict(a=1).keys(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_come_back_as_they_are(value: Any) -> None:
    assert cast_floating(value, F16) is value


@pytest.mark.apex("1.8 object with to")
def test_modules_are_not_touched() -> None:
    module = nn.Linear(2, 2)
    assert cast_floating(module, F16) is module
    assert cast_floating([module], F16)[0] is module
    assert module.weight.dtype is F32


@pytest.mark.parametrize(
    "value",
    [[1, "a"], (torch.ones(1, dtype=torch.int64),), {"a": 1}, Pair(1, 2), Record("x"), Output(a=1)],
    ids=lambda value: type(value).__name__,
)
def test_a_container_in_which_nothing_changes_is_returned_itself(value: Any) -> None:
    assert cast_floating(value, F16) is value


def test_right_dtype_already() -> None:
    value = [t()]
    assert cast_floating(value, F32) is value


def test_read_only_mapping_without_floats() -> None:
    value = MappingProxyType({"a": 1})
    assert cast_floating(value, F16) is value


def test_read_only_mapping_with_floats_becomes_a_dict() -> None:
    got = cast_floating(MappingProxyType({"a": t(), "b": 1}), F16)
    assert type(got) is dict
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
