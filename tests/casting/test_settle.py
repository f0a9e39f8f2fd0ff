# SPDX-License-Identifier: BSD-3-Clause
"""Casts that end where the state could not be set, and forwards that never ended."""

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from casting.probe import BF16, CPU, F16, F32, Probe, held, product
from preamp.casting import functions, thread_casts
from preamp.casting.autocast_state import AutocastState, nesting
from preamp.casting.regions import attach_cast_region, attach_plain_region
from preamp.casting.thread_casts import (
    CASTS,
    disable_casts,
    push_thread_casts,
    settle_thread,
    thread_has_casts,
)

pytestmark = pytest.mark.usefixtures("function_casts")

State = tuple[AutocastState, int]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert CASTS.brackets == []
    assert list(CASTS.pushes) == []
    assert not CASTS.pushes.is_stale


def _state() -> State:
    return AutocastState.capture(), nesting()


def _on_another_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _plain_forward() -> None:
    model = Probe()
    held(attach_plain_region, model)
    model(torch.ones(2, 4))


def _cast_forward() -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    model(torch.ones(2, 4))


def _disabled_block() -> None:
    with disable_casts():
        pass


def _push_and_remove() -> None:
    held(push_thread_casts, CPU, F16).remove()


def _backward() -> None:
    leaf = torch.ones(1, requires_grad=True)
    torch.autograd.backward(leaf * 2)


ENTRANCES = [
    settle_thread,
    _plain_forward,
    _cast_forward,
    _disabled_block,
    _push_and_remove,
    _backward,
]


# --- casts removed where the state cannot be set ---


def test_casts_removed_by_another_thread_end_at_the_next_function() -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)

    _on_another_thread(handle.remove)

    assert product() is F32
    assert _state() == before


@pytest.mark.parametrize("enter", ENTRANCES)
def test_casts_of_another_thread_end_at_its_next_entrance(enter: Callable[[], None]) -> None:
    seen: list[object] = []

    def run() -> None:
        before = _state()
        handle = held(push_thread_casts, CPU, BF16)
        _on_another_thread(handle.remove)
        seen.append(_state() == before)
        enter()
        seen.append(_state() == before)

    _on_another_thread(run)

    assert seen == [False, True]


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mm": lambda x: torch.mm(x, x),
    "matmul": lambda x: x @ x,
    "linear": lambda x: nn.functional.linear(x, x),
    "exp": lambda x: x.half().exp(),
    "exp_": lambda x: x.half().exp_(),
    "cat": lambda x: torch.cat([x, x.half()]),
    "layer": lambda x: nn.Linear(2, 2)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_thread_whose_casts_were_ended_elsewhere_are_plain(name: str) -> None:
    torch.manual_seed(0)
    plain = FUNCTIONS[name](torch.ones(2, 2))
    seen: list[torch.Tensor] = []

    def run() -> None:
        handles = [held(push_thread_casts, CPU, F16), held(functions.install_function_casts)]
        _on_another_thread(lambda: [handle.remove() for handle in handles])
        torch.manual_seed(0)
        seen.append(FUNCTIONS[name](torch.ones(2, 2)))

    _on_another_thread(run)

    assert seen[0].dtype is plain.dtype
    assert torch.equal(seen[0], plain)


def test_functions_after_a_users_block_in_which_casts_ended_are_plain() -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)
    with torch.autocast("cpu", dtype=F16):
        handle.remove()
        inside = product()

    assert (inside, product()) == (F16, F32)
    assert _state() == before


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("enabled", [True, False])
def test_a_block_of_the_users_own_is_not_flipped(enter: Callable[[], None], enabled: bool) -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)

    with torch.autocast("cpu", dtype=F16, enabled=enabled):
        during = _state()
        handle.remove()
        assert _state() == during
        enter()
        assert _state() == during
    enter()

    assert _state() == before


def test_casts_begun_and_ended_inside_a_users_block() -> None:
    with torch.autocast("cpu", dtype=F16):
        inside = _state()
        handle = held(push_thread_casts, CPU, BF16)
        began = product()
        handle.remove()
        assert _state() == inside

    assert began is BF16


def test_second_casts_begun_inside_a_users_block_wait_for_its_end() -> None:
    first = held(push_thread_casts, CPU, BF16)
    with torch.autocast("cpu", enabled=False):
        first.remove()
        second = held(push_thread_casts, CPU, F16)
        inside = product()
    settle_thread()
    outside = product()
    second.remove()

    assert (inside, outside, product()) == (F32, F16, F32)


def test_casts_begun_in_a_users_block_that_has_ended() -> None:
    before = _state()
    with torch.autocast("cpu", dtype=F16):
        handle = held(push_thread_casts, CPU, BF16)
    after_block = _state()

    handle.remove()

    assert after_block == _state() == before
    _push_and_remove()
    assert _state() == before


def test_state_set_by_hand_is_left() -> None:
    handle = held(push_thread_casts, CPU, BF16)
    torch.set_autocast_enabled("cpu", False)
    handle.remove()
    off = product()

    later = held(push_thread_casts, CPU, F16)
    again = product()
    later.remove()

    assert (off, again, product()) == (F32, F16, F32)


def test_casts_of_another_device_type_do_not_hold_these_up() -> None:
    handle = held(push_thread_casts, CPU, BF16)
    dtype = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", BF16)

    handle.remove()
    kept = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)

    assert product() is F32
    assert kept is BF16


def test_casts_removed_inside_a_forward_end_with_it() -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)
    seen: list[torch.dtype] = []
    model = Probe(lambda: (handle.remove(), seen.append(product())))
    held(attach_cast_region, model, CPU, F16)

    model(torch.ones(2, 4))

    assert seen == [F16]
    assert _state() == before


def test_casts_removed_inside_a_backward_end_with_it() -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)
    leaf = torch.ones(1, requires_grad=True)
    seen: list[torch.dtype] = []
    leaf.register_hook(lambda _: (handle.remove(), seen.append(product()), None)[-1])

    torch.autograd.backward(leaf * 2)

    assert seen == [F32]
    assert _state() == before


# --- collected in the middle of a change of state ---


class _Cycle:
    """Something that only the garbage collector frees."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.parametrize("name", ["capture", "restore"])
def test_collection_while_this_room_changes_the_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _state()
    dropped = _Cycle()
    weakref.finalize(dropped, held(push_thread_casts, CPU, BF16).remove)
    del dropped
    original = getattr(AutocastState, name)

    def collect_in_between(*args: AutocastState) -> object:
        result = original(*args)
        gc.collect()
        return result

    patched = staticmethod(collect_in_between) if name == "capture" else collect_in_between
    monkeypatch.setattr(AutocastState, name, patched)
    _cast_forward()
    monkeypatch.undo()
    _cast_forward()

    assert _state() == before


def test_collection_while_torch_opens_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """When it has read the state that its block will put back, and not yet set its own."""
    before = _state()
    dropped = _Cycle()
    weakref.finalize(dropped, held(push_thread_casts, CPU, BF16).remove)
    del dropped
    original: Callable[..., None] = torch.set_autocast_enabled

    def collect_first(*args: object) -> None:
        gc.collect()
        original(*args)

    monkeypatch.setattr(torch, "set_autocast_enabled", collect_first)
    with torch.autocast("cpu", dtype=F16):
        monkeypatch.undo()
    settle_thread()

    assert _state() == before


# --- forwards that end in a KeyboardInterrupt ---


def _interrupt() -> None:
    raise KeyboardInterrupt


def _interrupted_forwards() -> None:
    inner = Probe(_interrupt)
    outer = Probe(lambda: inner(torch.ones(2, 4)))
    for model in (outer, inner):
        held(attach_cast_region, model, CPU, BF16)
    with pytest.raises(KeyboardInterrupt):
        outer(torch.ones(2, 4))


@pytest.mark.parametrize("thread_wide", [True, False])
def test_interrupted_forward_is_closed_at_once(thread_wide: bool) -> None:
    handles = [held(push_thread_casts, CPU, BF16)] if thread_wide else []
    before = _state()

    _interrupted_forwards()

    assert _state() == before
    for handle in handles:
        handle.remove()


def test_torch_catches_interrupts_during_forwards_only() -> None:
    names = vars(nn.modules.module)
    seen: list[object] = []
    model = Probe(lambda: seen.append(names["Exception"]))
    held(attach_cast_region, model, CPU, BF16)

    model(torch.ones(2, 4))
    _interrupted_forwards()

    assert seen == [BaseException]
    assert "Exception" not in names


@pytest.mark.parametrize("enter", ENTRANCES)
@pytest.mark.parametrize("thread_wide", [True, False])
def test_forward_interrupted_at_a_hook_is_closed_at_the_next_entrance(
    enter: Callable[[], None], thread_wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles = [held(push_thread_casts, CPU, BF16)] if thread_wide else []
    before = _state()
    monkeypatch.setattr(thread_casts, "call_hooks_after_interrupts", lambda is_on: None)

    _interrupted_forwards()
    assert _state() != before
    enter()

    assert _state() == before
    for handle in handles:
        handle.remove()


def test_forwards_that_run_are_not_closed() -> None:
    seen: list[torch.dtype] = []
    model = Probe(lambda: (settle_thread(), seen.append(product())))
    held(attach_cast_region, model, CPU, BF16)

    model(torch.ones(2, 4))

    assert seen == [BF16]
    assert functions.FUNCTION_CASTS.is_installed


# --- forked processes ---


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons, with threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("where", ["outside", "forward", "disabled"])
def test_forked_process_has_no_casts(where: str) -> None:
    before = _state()
    handle = held(push_thread_casts, CPU, BF16)
    ends: list[int] = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(not (_state() == before and not CASTS.brackets and not thread_has_casts()))
        ends.append(os.waitpid(child, 0)[1])

    if where == "forward":
        model = Probe(fork)
        held(attach_cast_region, model, CPU, F16)
        model(torch.ones(2, 4))
    else:
        with disable_casts() if where == "disabled" else contextlib.nullcontext():
            fork()
    after = product()
    handle.remove()

    assert ends == [0]
    assert after is BF16
