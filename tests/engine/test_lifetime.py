# SPDX-License-Identifier: BSD-3-Clause
"""What initializing again, ``Engine.close`` and dropping an engine leave behind: nothing."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_KIND, CASTING_FUNCTIONS, F32_WEIGHTS, LEVEL_NAMES
from cases.models import Parts, batch
from kit.compare import differences, picture
from kit.loops import begin, make, scaled_step, train_plain
from kit.refusals import assert_refused, refused
from kit.run import PLAIN, Run, differing
from preamp import amp
from preamp.optimizers import FusedAdam


def hooks_of(model: nn.Module) -> int:
    """How many hooks there are on all modules of ``model``."""
    return sum(
        len(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if name.endswith("hooks") and isinstance(hooks, dict)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    x, coefficients = batch(0)
    scaled_step((model(x).float() * coefficients).sum(), optimizer)


@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_initializing_again_replaces_hooks_and_lets_the_engine_go(level: str) -> None:
    """A new optimizer for the next phase of training; the old one is dropped."""
    model = Parts()
    engines = []
    counts = []
    for _ in range(3):
        optimizer = begin(level, model, torch.optim.SGD(model.parameters(), lr=0.5))
        assert preamp.engine_of(model) is preamp.engine_of(optimizer)
        engines.append(weakref.ref(preamp.engine_of(model)))
        counts.append(hooks_of(model))
        train(model, optimizer)
    assert len(set(counts)) == 1
    gc.collect()
    assert [ref() is None for ref in engines] == [True, True, False]
    preamp.engine_of(model).close()
    assert hooks_of(model) == 0
    kind = type(model).__name__
    assert_refused("lifetime", "no engine", lambda: preamp.engine_of(model), kind=kind)


def test_initializing_again_at_a_level_without_casts_ends_the_casts() -> None:
    """A-9: O1's casts stayed on for good."""
    model = Parts()
    preamp.initialize(model, opt_level="O1", scope="thread", verbosity=0)
    assert _product() is torch.float16
    preamp.initialize(model, opt_level="O0", verbosity=0)
    assert _product() is torch.float32
    assert model(torch.ones(1, 3)).dtype is torch.float32


def test_a_failed_call_leaves_the_earlier_engine_in_place() -> None:
    model = Parts()
    preamp.initialize(model, opt_level="O1", verbosity=0)
    engine = preamp.engine_of(model)
    hooks = hooks_of(model)
    taken = begin("O0", Parts(), torch.optim.SGD(model.parameters(), lr=0.5))
    with refused("lifetime", "an optimizer of another engine", model, taken):
        preamp.initialize(model, taken, opt_level="O1", verbosity=0)
    assert preamp.engine_of(model) is engine
    assert hooks_of(model) == hooks


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Python collects reference cycles only where it is asked to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.usefixtures("uncollected")
def test_a_closed_engine_holds_nothing(level: str) -> None:
    """After close() everything goes with its last reference, without the cycle collector."""
    model = Parts()
    optimizer = begin(level, model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    train(model, optimizer)
    engine = preamp.engine_of(model)
    masters = [weakref.ref(param) for param in preamp.master_params(optimizer)]
    engine.close()
    parts = [weakref.ref(thing) for thing in (model, optimizer, *model.parameters())]
    del model, optimizer, engine
    assert [ref() for ref in (*parts, *masters)] == [None] * len([*parts, *masters])


@pytest.mark.parametrize("masters", [False, True])
def test_fused_optimizers_hold_no_state_beside_their_own(masters: bool) -> None:
    """Moments that a script clears, or of parameters that are gone, are freed at once."""
    param = nn.Parameter(torch.randn(64).to(torch.bfloat16 if masters else torch.float32))
    optimizer = FusedAdam([param], capturable=masters, master_weights=masters)
    param.grad = torch.ones_like(param)
    optimizer.step()
    moments = [weakref.ref(value) for value in optimizer.state[param].values()]
    assert len(moments) == 3 if masters else 2
    gone, key = weakref.ref(param), "exp_avg"
    optimizer.param_groups.clear()
    optimizer.state.clear()
    gc.collect()
    if not masters:
        assert [ref() for ref in moments] == [None] * len(moments)
    del param
    other = nn.Parameter(torch.randn(64).to(torch.bfloat16 if masters else torch.float32))
    optimizer.add_param_group({"params": [other]})
    other.grad = torch.ones_like(other)
    optimizer.step()
    gc.collect()
    assert [ref() for ref in (*moments, gone)] == [None] * (len(moments) + 1)
    assert key in optimizer.state[other]


# -- close, compared attribute by attribute ---------------------------------------------------


ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)


@ALL_LEVELS
def test_after_close_the_users_own_hooks_are_all_that_is_found(level: str) -> None:
    model, optimizer = make()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step before"))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert hasattr(optimizer, "_amp_stash")
    model.register_forward_hook(lambda *_: calls.append("after"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step after"))
    preamp.engine_of(model).close()
    assert not hasattr(optimizer, "_amp_stash")
    assert amp._amp_state.engine is None
    assert amp.state_dict() == {}
    kind = type(model).__name__
    assert_refused("lifetime", "no engine", lambda: preamp.engine_of(model), kind=kind)
    train_plain(model, optimizer, 0)
    assert calls == ["before", "after", "step before", "step after"]


# -- engines that are dropped without close ---------------------------------------------------


def _train_and_drop(level: str, door: Any) -> list[weakref.ref[Any]]:
    run = Run(level, "Adam", door=door, scope="thread").play("iterate 0 1")
    return [weakref.ref(one) for one in (run.engine, run.model, run.optimizer, run.params()[0])]


def _on_another_thread() -> None:
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()


@pytest.mark.each
@pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
@pytest.mark.parametrize("level", BY_KIND)
@pytest.mark.parametrize("collect", [gc.collect, _on_another_thread])
@pytest.mark.usefixtures("uncollected")
def test_a_dropped_engine_leaves_nothing(level: str, door: Any, collect: Any) -> None:
    """O1's handle stays and does not hold it; casts go with the next function that is called."""
    _train_and_drop("O1", preamp)  # what torch imports at a first step is no change below
    gc.collect()
    before = picture()
    dropped = _train_and_drop(level, door)
    collect()
    assert [ref() for ref in dropped] == [None] * len(dropped)
    assert _product() is torch.float32
    assert differences(before, picture()) == []
    assert (amp.state_dict(), amp._amp_state.engine) == ({}, None)
    if door is amp and level == "O1":
        assert not amp._amp_state.handle.is_active()
        amp._amp_state.handle._deactivate()


def test_a_layer_shared_with_a_dropped_engine_is_free() -> None:
    shared = nn.Linear(4, 4)
    preamp.initialize(nn.Sequential(shared, nn.Linear(4, 2)), opt_level="O1", verbosity=0)
    model = nn.Sequential(shared, nn.Linear(4, 2))
    preamp.initialize(model, opt_level="O2", verbosity=0)  # with no collection in between
    assert shared.weight.dtype is torch.float16
    preamp.engine_of(model).close()


# -- a session whose cells fail ------------------------------------------------------------------


def _product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


class _Fault(BaseException):
    """What goes wrong in the functions below, as an interrupt does."""


def _raise(*_: object) -> None:
    raise _Fault


def _fail_in_a_block(run: Run) -> None:
    with preamp.scale_loss(run.loss(), run.optimizer):
        _raise()


def _fail_without_casts(run: Run) -> None:
    with preamp.disable_casts():
        _raise()


def _interrupt_the_forward(run: Run) -> None:
    run.model.forward = _raise  # torch's hooks hear of no interrupt
    with preamp.scale_loss(torch.ones(()), run.optimizer):
        run.loss()


FAILURES: list[Callable[[Run], object]] = [
    lambda run: run.model.register_forward_hook(_raise) and run.loss(),
    _fail_in_a_block,
    _fail_without_casts,
    _interrupt_the_forward,
    lambda run: _raise(Run(run.options["opt_level"]).loss()),
    lambda run: run.initialize(loss_scale=-1),
]


@pytest.mark.parametrize("level", CASTING_FUNCTIONS)
@pytest.mark.parametrize("fail", FAILURES)
def test_a_float32_model_in_a_session_whose_cell_failed_is_plain_torch(
    fail: Callable[[Run], object], level: str
) -> None:
    """The session keeps its variables and the latest traceback, and closes nothing."""
    program = "backward; clip; step; zero; iterate 1"
    expected = Run(PLAIN, "AdamW").play(program).numbers()
    run = Run(level)
    with pytest.raises((_Fault, RuntimeError, ValueError)) as failed:
        fail(run)
    assert not differing(Run(PLAIN, "AdamW").play(program).numbers(), expected)
    assert _product() is torch.float32
    assert failed.value.__traceback__ is not None
