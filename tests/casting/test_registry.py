# SPDX-License-Identifier: BSD-3-Clause
"""The user's own rules: registered functions and decorated ones."""

import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from casting.probe import BF16, F16, F32, casting, held, install_wide_half, registrations_forgotten
from kit.refusals import refused
from preamp.casting.functions import FUNCTION_CASTS, install_function_casts
from preamp.casting.mixed import install_mixed_calls
from preamp.casting.registry import (
    bfloat16_function,
    float_function,
    half_function,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from preamp.casting.thread_casts import disable_casts


def _dtypes(x: torch.Tensor, y: torch.Tensor | None = None) -> tuple[torch.dtype, ...]:
    return (x.dtype,) if y is None else (x.dtype, y.dtype)


@pytest.fixture
def module() -> types.ModuleType:
    made = types.ModuleType("made")
    made.probe = _dtypes
    return made


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    with registrations_forgotten():
        yield
    assert not FUNCTION_CASTS.is_installed


RULES: list[tuple[Callable[[Any, str], None], Callable[[Any], Any], tuple[torch.dtype, ...]]] = [
    (register_half_function, half_function, (F16, F16)),
    (register_bfloat16_function, bfloat16_function, (BF16, BF16)),
    (register_float_function, float_function, (F32, F32)),
    (register_promote_function, promote_function, (F32, F32)),
]


@pytest.mark.parametrize(("register", "_decorate", "expected"), RULES)
@pytest.mark.parametrize("before_engine", [True, False])
def test_registration(
    module: types.ModuleType,
    register: Callable[[Any, str], None],
    _decorate: Any,
    expected: tuple[torch.dtype, ...],
    before_engine: bool,
) -> None:
    half, single = torch.ones(1, dtype=F16), torch.ones(1)
    if before_engine:
        register(module, "probe")
        assert module.probe is _dtypes
    with casting():
        if not before_engine:
            register(module, "probe")
        active = module.probe(half, y=single)
        with disable_casts():
            disabled = module.probe(half, single)
    removed = module.probe
    with casting():
        again = module.probe(half, single)

    assert active == again == expected
    assert disabled == (F16, F32)
    assert removed is _dtypes


@pytest.mark.parametrize(("_register", "decorate", "expected"), RULES)
def test_decorators(_register: Any, decorate: Callable[[Any], Any], expected: Any) -> None:
    half, single = torch.ones(1, dtype=F16), torch.ones(1)

    class Owner:
        @decorate
        def method(self, x: torch.Tensor, y: torch.Tensor) -> Any:
            """Documented."""
            return _dtypes(x, y)

        @decorate
        @staticmethod
        def static(x: torch.Tensor, y: torch.Tensor) -> Any:
            return _dtypes(x, y)

    inactive = Owner().method(half, single)
    with casting():
        active = Owner().method(half, single), Owner.static(half, single)

    assert inactive == (F16, F32)
    assert active == (expected, expected)
    assert Owner.method.__name__ == "method"
    assert Owner.method.__doc__ == "Documented."


def test_registration_overrides_the_table() -> None:
    original = torch.mm, torch.sigmoid, torch.exp
    register_float_function(torch, "mm")
    register_float_function(torch, "sigmoid")
    register_half_function(torch, "exp")
    half = torch.ones(2, 2, dtype=BF16)
    with casting(BF16):
        found = torch.mm(half, half), torch.sigmoid(half), torch.exp(half.float())
    assert [result.dtype for result in found] == [F32, F32, BF16]
    assert (torch.mm, torch.sigmoid, torch.exp) == original


@pytest.mark.parametrize("install", [partial(install_wide_half, F16), install_mixed_calls])
def test_registration_overrides_what_half_models_need(install: Any) -> None:
    """Layers for half models lie below the registration."""
    below = held(install)
    register_float_function(torch, "mm")
    with casting(BF16):
        dtypes = {torch.mm(torch.ones(2, 2), torch.ones(2, 2, dtype=d)).dtype for d in (F16, F32)}
    below.remove()
    assert dtypes == {F32}


def test_registration_lifts_the_ban() -> None:
    """Closed: autocast must not see the body, which on CUDA it refuses for float32 too."""
    register_float_function(F, "binary_cross_entropy")
    half, seen = torch.full((3,), 0.5, dtype=BF16), list[bool]()

    class Spy(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().__torch_function__(*args, **kwargs)

    with casting(BF16):
        loss = F.binary_cross_entropy(half, torch.ones(3).as_subclass(Spy))

    assert loss.dtype is F32
    assert seen
    assert not seen[-1]


def test_registering_again_replaces(module: types.ModuleType) -> None:
    with casting():
        for _ in range(3):
            register_half_function(module, "probe")
        register_float_function(module, "probe")
        dtypes = module.probe(torch.ones(1, dtype=F16))
        depth, layer = 0, module.probe
        while (layer := getattr(layer, "__wrapped__", None)) is not None:
            depth += 1
    assert dtypes == (F32,)
    assert depth == 1


def test_tensors_beside_other_values_are_cast(module: types.ModuleType) -> None:
    """What is no floating tensor stays the object it is, and dicts are not looked into."""
    module.probe = lambda *args, **kwargs: (args, kwargs)
    register_half_function(module, "probe")
    ids, text, inner = torch.arange(2), "text", {"x": torch.ones(1)}
    with casting():
        given = [torch.ones(1), ids, None, 3, (torch.nn.Parameter(torch.ones(1)),)]
        args, kwargs = module.probe(given, inner, text, key=torch.ones(1))
    assert args[0][0].dtype is args[0][4][0].dtype is kwargs["key"].dtype is F16
    assert args[0][1] is ids
    assert args[0][2:4] == [None, 3]
    assert args[1] is inner
    assert inner["x"].dtype is F32
    assert args[2] is text


@pytest.mark.parametrize("register", [rule[0] for rule in RULES])
def test_missing_function_is_refused(register: Callable[[Any, str], None]) -> None:
    with refused("casting", "no such function", register=register.__name__):
        register(torch, "sigmod")


@pytest.mark.parametrize("register", [rule[0] for rule in RULES])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"), [(torch._C.TensorBase, "exp"), (torch.nn, "functional")], ids=["c", "module"]
)
def test_what_cannot_be_wrapped_is_refused(
    register: Callable[[Any, str], None], is_open: bool, owner: Any, name: str
) -> None:
    """At once: kept for the next engine, it would fail every ``initialize`` from then on."""
    before = getattr(owner, name)
    words = {"register": register.__name__, "owner": repr(owner), "function": repr(name)}
    with casting() if is_open else nullcontext():
        with refused("casting", "what cannot be replaced", **words):
            register(owner, name)
    with casting():
        pass
    assert getattr(owner, name) is before


def test_a_registered_name_that_is_gone_leaves_no_casts(module: types.ModuleType) -> None:
    original = torch.exp
    register_half_function(module, "probe")
    del module.probe
    for _ in range(2):
        with pytest.raises(AttributeError, match="probe"):
            held(install_function_casts)
        assert torch.exp is original
    module.probe = _dtypes
    with casting():
        assert module.probe(torch.ones(1)) == (F16,)
    assert torch.exp is original
