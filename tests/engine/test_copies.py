# SPDX-License-Identifier: BSD-3-Clause
"""Copies, files and compiled forms of models; `test_programs` trains copies of pairs."""

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from engine.programs import COPIES
from kit.compare import halves_match, same
from kit.loops import masters, started, train_plain, train_step, weights
from kit.run import Net, batch_of

MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)
ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
calls = pytest.mark.parametrize("call", COPIES.values(), ids=COPIES)


def is_plain(level: str) -> bool:
    """Whether copies are plain float32 modules: wherever weights are float32 or have masters."""
    return level != "O3"


@pytest.mark.parametrize("level", [*filter(is_plain, LEVEL_NAMES)])
def test_a_pickled_model_needs_no_preamp(level: str) -> None:
    class Watched(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            assert not module.startswith("preamp"), (module, name)
            return super().find_class(module, name)

    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    made = Watched(io.BytesIO(pickle.dumps(model))).load()
    assert same(weights(made), dict(model.state_dict()))


@MASTERS
@calls
def test_tied_weights_stay_tied(level: str, call: Any) -> None:
    def tied() -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].weight = model[1].weight.requires_grad_(False)  # so that they have no master
        return model

    made = call(started(level, model=tied)[0])
    assert made[0].weight is made[1].weight


# -- optimizers of other kinds -----------------------------------------------------------------


class CopiesAll(torch.optim.SGD):
    """Has all of its attributes copied, where torch has three."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.125, momentum=0.5)
        self.own = ["kept"]

    def __getstate__(self) -> Any:
        return self.__dict__


@MASTERS
@calls
def test_a_copied_engine_says_how_to_go_on(level: str, call: Any) -> None:
    """Hooks lead from an optimizer that has all of its attributes copied to its engine."""
    model = Net()
    optimizer = CopiesAll(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(preamp.PreampStateError, match="An engine was to be copied or pickled"):
        call(optimizer)
    train_step(model, optimizer, 0)


# -- models ----------------------------------------------------------------------------------


@ALL_LEVELS
@calls
def test_a_copy_is_a_model_of_its_own(level: str, call: Any) -> None:
    """It has the exact weights, nothing of ours, and neither of the two hears of the other."""
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    twin = call(model)
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


# -- compiled and wrapped --------------------------------------------------------------------


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
