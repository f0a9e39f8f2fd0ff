# SPDX-License-Identifier: BSD-3-Clause
"""Engines that are dropped without ``close()`` leave nothing behind."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_KIND, LEVEL_NAMES
from preamp import amp

NAMESPACES = (torch, torch.Tensor, nn.functional, torch.autograd)


def _attributes() -> list[dict[str, Any]]:
    return [dict(vars(namespace)) for namespace in NAMESPACES]


def _casts() -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _train_and_drop(level: str, door: Any) -> list[weakref.ref[Any]]:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-4)
    model, optimizer = door.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(2):
        with door.scale_loss(model(torch.randn(8, 4)).pow(2).mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = preamp.engine_of(optimizer)
    return [weakref.ref(thing) for thing in (engine, model, optimizer, model[0].weight)]


@pytest.mark.each
@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
@pytest.mark.parametrize("level", BY_KIND)
def test_models_optimizers_and_engines_are_freed(level: str, door: Any) -> None:
    dropped = _train_and_drop(level, door)
    gc.collect()
    assert [ref() for ref in dropped] == [None] * len(dropped)


@pytest.mark.parametrize("level", BY_KIND)
def test_torch_is_as_it_was(level: str) -> None:
    attributes, casts = _attributes(), _casts()
    _train_and_drop(level, preamp)
    gc.collect()
    assert _casts() == casts
    for before, after in zip(attributes, _attributes(), strict=True):
        assert before.keys() == after.keys()
        assert [name for name in before if before[name] is not after[name]] == []


def test_many_engines_in_a_row_do_not_pile_up() -> None:
    attributes = _attributes()
    for level in LEVEL_NAMES * 3:
        _train_and_drop(level, preamp)
    gc.collect()
    assert [dict(vars(namespace)) for namespace in NAMESPACES] == attributes


def test_amp_without_a_living_engine_has_no_state() -> None:
    for level in ("O2", "O1"):  # O1's handle, which stays, must not hold the engine
        _train_and_drop(level, amp)
        gc.collect()
        assert amp.state_dict() == {}
        assert amp._amp_state.engine is None
    assert not amp._amp_state.handle.is_active()
    amp._amp_state.handle._deactivate()


def test_a_layer_shared_with_a_dropped_engine_is_free() -> None:
    shared = nn.Linear(4, 4)
    preamp.initialize(nn.Sequential(shared, nn.Linear(4, 2)), opt_level="O1", verbosity=0)
    model = nn.Sequential(shared, nn.Linear(4, 2))
    preamp.initialize(model, opt_level="O2", verbosity=0)  # with no collection in between
    assert shared.weight.dtype is torch.float16
    preamp.engine_of(model).close()


# -- collected where the thread's casts cannot be taken back at once ---------------------------


def _engine(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return preamp.initialize(model, optimizer, verbosity=0, **options)


Enter = Callable[[], object]


def _forward_elsewhere() -> Enter:
    model, _ = _engine(opt_level="O0")
    return lambda: model(torch.ones(1, 4))


def _step_elsewhere() -> Enter:
    _, optimizer = _engine(opt_level="O0")
    return optimizer.step


def _scale_loss_elsewhere() -> Enter:
    _, optimizer = _engine(opt_level="O0")

    def enter() -> None:
        with preamp.scale_loss(torch.ones(()), optimizer):
            pass

    return enter


def _initialize_another() -> Enter:
    return lambda: _engine(opt_level="O0")


def _close_another() -> Enter:
    model, _ = _engine(opt_level="O0")
    return preamp.engine_of(model).close


def _disable_casts() -> Enter:
    def enter() -> None:
        with preamp.disable_casts():
            pass

    return enter


ENTRANCES = [
    _forward_elsewhere,
    _step_elsewhere,
    _scale_loss_elsewhere,
    _initialize_another,
    _close_another,
    _disable_casts,
]


def test_a_block_of_the_users_own_keeps_its_casts() -> None:
    casts = _casts()
    _train_and_drop("O1", preamp)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        during = _casts()
        gc.collect()
        assert _casts() == during
    _disable_casts()()
    assert _casts() == casts


def _on_another_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def _collected_by_another_thread() -> None:
    gc.disable()
    try:
        _train_and_drop("O1", preamp)
        _on_another_thread(gc.collect)
    finally:
        gc.enable()


def test_collected_by_another_thread_than_the_main_one() -> None:
    attributes, casts = _attributes(), _casts()
    _collected_by_another_thread()
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
    assert _attributes() == attributes
    assert _casts() == casts


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_collected_by_another_thread_than_its_own(entrance: Callable[[], Enter]) -> None:
    seen: list[bool] = []

    def run() -> None:
        enter = entrance()
        attributes, casts = _attributes(), _casts()
        _collected_by_another_thread()
        seen.append(_attributes() == attributes)
        enter()
        gc.collect()
        seen.append(_casts() == casts)

    _on_another_thread(run)
    assert seen == [True, True]


# -- interrupted --------------------------------------------------------------------------------


class _Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear(x)
        raise KeyboardInterrupt


@pytest.mark.parametrize("scope", ["thread", "model"])
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_interrupted_forward(level: str, scope: Any) -> None:
    before = _casts()
    model, _ = preamp.initialize(_Interrupted(), [], opt_level=level, scope=scope, verbosity=0)
    casts = _casts()
    with pytest.raises(KeyboardInterrupt):
        model(torch.ones(1, 4))
    assert _casts() == casts
    assert _nesting() == 0
    preamp.engine_of(model).close()
    assert _casts() == before


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_casts_of_the_model_end_with_the_exception(
    level: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level=level, scope="model", verbosity=0)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    monkeypatch.setattr(model, "forward", fail)
    try:
        with preamp.scale_loss(torch.ones(()), optimizer):
            model(torch.ones(1, 4))
    except error:  # where the exception still holds its frames
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32


# -- forked -------------------------------------------------------------------------------------


class _Dtypes:
    """A data set that says what a product of float32 tensors is."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return str(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # newer Pythons, with threads
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_forked_worker_starts_without_casts(level: str) -> None:
    model, _ = _engine(opt_level=level)
    loader: Any = torch.utils.data.DataLoader(
        cast("Any", _Dtypes()), num_workers=1, multiprocessing_context="fork"
    )
    assert list(loader) == [["torch.float32"]]
    assert _Dtypes()[0] != "torch.float32"  # this process goes on as it was
    preamp.engine_of(model).close()
