# SPDX-License-Identifier: BSD-3-Clause
"""Finalizers never wait for the patch lock and never run in the middle of a change."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from functools import partial

import pytest

from casting.probe import held
from preamp.casting.patches import PATCH_LOCK, PATCHES, PatchLock, Rank, SharedInstall


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


def test_job_runs_at_once_where_nobody_holds_the_lock() -> None:
    lock, done = PatchLock(), list[int]()

    lock.run_or_leave(lambda: done.append(1))

    assert done == [1]


def test_job_handed_in_by_a_job_runs_after_it() -> None:
    lock, done = PatchLock(), list[int]()

    def first() -> None:
        lock.run_or_leave(lambda: done.append(2))
        done.append(1)

    lock.run_or_leave(first)

    assert done == [1, 2]


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
