# SPDX-License-Identifier: BSD-3-Clause
"""Installing and removing: every attribute is exactly what it was."""

import itertools
import threading
import types
from collections.abc import Callable
from functools import partial
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from casting.probe import held, install_wide_half
from preamp.casting.functions import install_function_casts
from preamp.casting.mixed import install_mixed_calls
from preamp.casting.patches import PATCH_LOCK, PATCHES, PatchLock, PatchTable, Rank, SharedInstall
from preamp.core.undo import Removable

OWNERS = (torch, torch.Tensor, F, torch.linalg, torch.autograd, import_module("torch._VF"))


def _attributes() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(owner).items()} for owner in OWNERS]


INSTALLS: tuple[Callable[[], Removable], ...] = (
    partial(held, install_function_casts),
    lambda: held(install_wide_half, torch.float16),
    partial(held, install_function_casts),
    lambda: held(install_wide_half, torch.bfloat16),
    partial(held, install_mixed_calls),
)


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[::23])
def test_any_order_of_removal_restores_every_attribute(order: tuple[int, ...]) -> None:
    before = _attributes()
    handles = [install() for install in INSTALLS]
    during = _attributes()
    function_casts = {0, 2}
    for index in order:
        handles[index].remove()
        handles[index].remove()
        function_casts.discard(index)
        assert hasattr(torch.exp, "__wrapped__") is bool(function_casts)
    assert during != before
    assert _attributes() == before


def test_wrapped_functions_keep_their_names() -> None:
    original = torch.exp
    handle = held(install_function_casts)
    wrapped = torch.exp
    handle.remove()
    assert wrapped.__name__ == "exp"
    assert wrapped.__wrapped__ is original
    assert wrapped.__doc__ == original.__doc__


class _Owner:
    @staticmethod
    def static(x: int) -> int:
        return x

    @classmethod
    def of_class(cls, x: int) -> int:
        return x

    def method(self, x: int) -> int:
        return x


class _Child(_Owner):
    pass


@pytest.mark.parametrize("name", ["static", "of_class", "method"])
def test_patched_methods_bind_as_before(name: str) -> None:
    table = PatchTable()

    def double(fn: Callable[..., int]) -> Callable[..., int]:
        return lambda *args: 2 * fn(*args)

    handles = [held(table.add, _Child, name, Rank.WIDE, double) for _ in range(2)]
    doubled = getattr(_Child(), name)(1)
    for handle in handles:
        handle.remove()

    assert doubled == 4
    assert getattr(_Child(), name)(1) == 1
    assert name not in vars(_Child)


# -- finalizers never wait for the lock, nor run in the middle of a change --------------------


def _here(run: Callable[[], None]) -> None:
    run()


def _on_another_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=20)
    assert not thread.is_alive(), "the finalizer waits for the lock"


@pytest.mark.parametrize("where", [_here, _on_another_thread])
def test_job_that_finds_the_lock_taken_is_left_to_the_holder(
    where: Callable[[Callable[[], None]], None],
) -> None:
    lock, done = PatchLock(), list[str]()

    @lock.held
    def inner() -> None:
        where(lambda: lock.run_or_leave(lambda: done.append("job")))
        done.append("inner")

    @lock.held
    def outer() -> None:
        inner()
        done.append("outer")

    outer()

    assert done == ["inner", "outer", "job"]


def test_exception_inside_still_runs_the_jobs_and_releases() -> None:
    lock, done = PatchLock(), list[int]()

    @lock.held
    def fail() -> None:
        lock.run_or_leave(lambda: done.append(1))
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    _on_another_thread(lambda: lock.run_or_leave(lambda: done.append(2)))

    assert done == [1, 2]


@pytest.mark.parametrize("where", [_here, _on_another_thread])
def test_collection_in_the_middle_of_a_patch(where: Callable[[Callable[[], None]], None]) -> None:
    """As if the collector ran while ``PatchTable.add`` sorts its layers."""
    module = types.SimpleNamespace(f=lambda: "f", g=lambda: "g")
    original = vars(module).copy()
    add = partial(PATCHES.add, module, "f", Rank.TABLE, lambda fn: fn)
    shared = SharedInstall(add)
    dropped = held(shared.acquire)
    during: list[bool] = []

    def wrap(fn: Callable[[], str]) -> Callable[[], str]:
        where(lambda: PATCH_LOCK.run_or_leave(dropped.remove))
        during.append(shared.is_installed)
        return lambda: fn() + "!"

    handle = held(PATCHES.add, module, "g", Rank.TABLE, wrap)

    assert during == [True]
    assert not shared.is_installed
    assert (module.f(), module.g()) == ("f", "g!")
    handle.remove()
    assert vars(module) == original
