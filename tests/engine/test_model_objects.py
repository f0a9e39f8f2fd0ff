# SPDX-License-Identifier: BSD-3-Clause
"""Copies, files and compiled forms of initialized models and optimizers."""

import copy
import io
import pickle
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from kit.compare import halves_match, same
from kit.loops import OPTIMIZERS, loss_of, masters, started, train_plain, train_step, weights
from kit.run import Net, batch_of
from preamp import amp

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)


def through_a_file(thing: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


DUPLICATES = {
    "deepcopy": copy.deepcopy,
    "file": lambda model: through_a_file(model, weights_only=False),
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.fixture(params=DUPLICATES)
def duplicate(request: pytest.FixtureRequest) -> Any:
    """A way to get a second model from a first."""
    return DUPLICATES[request.param]


def is_plain(level: str) -> bool:
    """Whether copies are plain float32 modules: wherever weights are float32 or have masters."""
    return level != "O3"


# -- models ----------------------------------------------------------------------------------


@ALL_LEVELS
def test_a_copy_is_a_model_of_its_own(level: str, duplicate: Any) -> None:
    """It has the exact weights, nothing of ours, and neither of the two hears of the other."""
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    twin = duplicate(model)
    assert type(twin) is Net
    with pytest.raises(preamp.PreampStateError, match="has no engine"):
        preamp.engine_of(twin)
    assert {value.dtype for value in twin.state_dict().values()} == {torch.float32, torch.int64}
    for part, plain in zip(twin.modules(), Net().modules(), strict=True):
        assert {"__deepcopy__", "__reduce_ex__", "forward"}.isdisjoint(vars(part))
        if is_plain(level):
            assert not any(value for name, value in vars(part).items() if "hooks" in name)
            assert vars(part).keys() <= vars(plain).keys()
    exact = copy.deepcopy(dict(model.state_dict()) if is_plain(level) else weights(model))
    assert same(weights(twin), exact)
    x = batch_of(model, 7)
    ours, its = model.eval()(x), twin.eval()(x)
    assert its.dtype is torch.float32
    torch.testing.assert_close(its, ours, rtol=0.1 * is_plain(level), atol=0.1 * is_plain(level))

    train_step(model.train(), optimizer, 1)
    assert same(weights(twin), exact)
    before = weights(model), masters(optimizer)
    train_plain(twin.train(), torch.optim.SGD(twin.parameters(), lr=0.125), 0)
    assert not same(weights(twin), exact)
    assert same((weights(model), masters(optimizer)), before)
    twin.load_state_dict(model.state_dict())
    assert same(weights(twin), dict(model.state_dict()) if is_plain(level) else before[0])

    if is_plain(level):
        preamp.initialize(twin, opt_level=level, verbosity=0)
        assert preamp.engine_of(twin) is not preamp.engine_of(model)


# -- masters and optimizers ------------------------------------------------------------------


@ALL_LEVELS
def test_masters_in_a_file(level: str) -> None:
    _, optimizer = started(level)
    loaded = through_a_file(list(amp.master_params(optimizer)), weights_only=True)
    assert same([p.detach() for p in loaded], masters(optimizer))
    assert {type(p) for p in loaded} == {nn.Parameter}


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_deepcopy_of_the_optimizer(level: str, name: str) -> None:
    model, optimizer = started(level, optimizer=name)
    train_step(model, optimizer, 0)
    before = weights(model), masters(optimizer), copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(optimizer)
    assert same([p.detach() for p in preamp.master_params(twin)], before[1])
    assert same(twin.state_dict(), before[2])
    with pytest.raises(preamp.PreampStateError, match="has no engine"):
        preamp.engine_of(twin)
    for param in preamp.master_params(twin):
        param.grad = torch.ones_like(param)
    twin.step()
    assert same((weights(model), masters(optimizer), optimizer.state_dict()), before)
    assert not same([p.detach() for p in preamp.master_params(twin)], before[1])
    train_step(model, optimizer, 1)
    assert halves_match(model)


# -- compiled and wrapped --------------------------------------------------------------------

BACKENDS = ["eager", "aot_eager"]


@pytest.fixture
def fresh_compiler() -> Any:
    """Compiled code of other tests must not be reused."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def trained_compiled(level: str, backend: str) -> tuple[Any, Any]:
    model, optimizer = started(level)
    compiled = torch.compile(model, backend=backend)
    for step in range(2):
        optimizer.zero_grad()
        with preamp.scale_loss(loss_of(compiled, step), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    assert preamp.engine_of(compiled) is preamp.engine_of(optimizer)
    return model, optimizer


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "level", ["O2", *(pytest.param(name, marks=pytest.mark.full) for name in ("O0", "O1", "O5"))]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore::Warning")
def test_compiled(level: str, backend: str) -> None:
    model, optimizer = trained_compiled(level, backend)
    reference, plain = started(level)
    for step in range(2):
        train_step(reference, plain, step)
    assert halves_match(model)
    for got, expected in zip(masters(optimizer), masters(plain), strict=True):
        assert torch.allclose(got.float(), expected.float(), atol=1e-2)
    assert preamp.engine_of(model).steps_applied == 2


class Recalled:
    """A hook with a state, as those of scripts may have one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any) -> None:
        self.calls += 1


@ALL_LEVELS
def test_hooks_have_one_order(level: str) -> None:
    """As torch 2.8 compiles them in that of the dictionary below the ``OrderedDict``."""
    model, first, second = nn.Linear(2, 1), Recalled(), Recalled()
    handle = model.register_forward_pre_hook(first)
    model.register_forward_pre_hook(second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    tables = [table for name, table in vars(model).items() if name.endswith("_hooks")]
    for table in tables:
        assert list(table) == list(dict.keys(table))
    hooks = list(model._forward_pre_hooks.values())
    assert hooks.index(first) < hooks.index(second)
    handle.remove()
    model(torch.ones(1, 2))
    assert (first.calls, second.calls) == (0, 1)


@pytest.mark.full
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::Warning")
def test_compiled_by_inductor() -> None:
    model, _ = trained_compiled("O2", "inductor")
    assert halves_match(model)
    assert preamp.engine_of(model).steps_applied == 2


@ALL_LEVELS
def test_engine_is_found_through_data_parallel(level: str) -> None:
    model, optimizer = started(level)
    wrapped = nn.DataParallel(model)
    assert preamp.engine_of(wrapped) is preamp.engine_of(optimizer)
    train_step(wrapped, optimizer, 0)
    assert halves_match(model)


FIRST_COMPILED_UNDER_CASTS = """
import sys, torch, preamp

def normalized(x):
    return torch.layer_norm(x, (4,))

net = torch.nn.Linear(4, 4)
preamp.initialize(net, opt_level="O1", verbosity=0)
print("torch._dynamo" in sys.modules)
torch.compile(normalized, backend="eager")(torch.randn(2, 4))
preamp.engine_of(net).close()
torch.compiler.reset()
compiled = torch.compile(normalized, backend="eager", fullgraph=True)
print(compiled(torch.randn(2, 4)).dtype)
"""


@pytest.mark.full
def test_compiling_after_an_engine_that_was_compiled_under() -> None:
    """The compiler's table of torch's functions may have been made while they were replaced."""
    done = subprocess.run(
        [sys.executable, "-c", FIRST_COMPILED_UNDER_CASTS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["False", "torch.float32"], done.stderr
