# SPDX-License-Identifier: BSD-3-Clause
"""model.forward called by hand after amp.initialize: float32 out, as where Apex replaced it."""

import copy
import gc
import inspect
import io
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp import amp

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASTS = pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
X = torch.tensor([[1.0, -2.0, 0.5]])


class Net(nn.Module):
    """Notes the dtype that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, scale: Any = 1.0) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.linear(x) * scale


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def started(level: str, model: nn.Module | None = None, **arguments: Any) -> Any:
    made = Net() if model is None else model
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    amp.initialize(made, optimizer, opt_level=level, verbosity=0, **arguments)
    return made


@CASTS
def test_forward_by_hand_is_the_call(level: str) -> None:
    model = started(level)
    out = model.forward(X, scale=torch.tensor(2.0))
    assert out.dtype is F32
    assert_same(out, model(X, scale=torch.tensor(2.0)))
    assert model.seen == [BY_NAME[level].weight] * 2
    out.sum().backward()
    assert model.linear.weight.grad is not None


def test_dtype_of_outputs() -> None:
    model = started("O3", cast_model_outputs=BF16)
    assert model.forward(X).dtype is BF16
    model = started("O1", cast_model_outputs=F16)
    assert model.forward(X).dtype is F16
    assert "forward" not in vars(started("O1"))


def test_preamps_own_engines_have_hooks_only() -> None:
    model = Net()
    preamp.initialize(model, opt_level="O3", verbosity=0)
    assert "forward" not in vars(model)
    assert model.forward(X.half()).dtype is F16


@CASTS
def test_trainers_read_the_signature(level: str) -> None:
    assert inspect.signature(started(level).forward) == inspect.signature(Net().forward)


@CASTS
def test_copies_compute_with_their_own_weights(level: str) -> None:
    model = started(level)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    assert copied.forward(X).count_nonzero() == 0
    assert model.forward(X).count_nonzero() > 0
    assert copied.forward(X).dtype is F32
    preamp.engine_of(model).close()
    assert copied.forward(X).dtype is F32


@CASTS
def test_pickles_compute_with_their_own_weights(level: str) -> None:
    model = started(level)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(model)
    assert_same(loaded.forward(X), copied.forward(X))
    del model, copied
    assert loaded.forward(X).dtype is F32


@CASTS
def test_replicas_compute_with_their_own_weights(level: str) -> None:
    """As DataParallel makes them: a shallow copy that gets other tensors for parameters."""
    model = started(level)
    replica = model._replicate_for_data_parallel()
    assert "forward" not in vars(replica)
    replica.linear = nn.Linear(3, 3, dtype=model.linear.weight.dtype)
    for param in replica.linear.parameters():
        nn.init.zeros_(param)
    assert replica(X).count_nonzero() == 0
    assert replica(X).dtype is F32
    assert "forward" in vars(model)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo asks for it
@CASTS
def test_compiled(level: str) -> None:
    model = started(level, Plain())
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(compiled(X), model(X))


@CASTS
def test_close_takes_it_back(level: str) -> None:
    model = started(level)
    before = set(vars(Net()))
    preamp.engine_of(model).close()
    assert set(vars(model)) == before
    assert model.forward(X).dtype is F32


def test_a_forward_of_the_models_own_stays() -> None:
    model = Net()
    own = vars(model)["forward"] = lambda x: model.linear(x) * 2
    started("O3", model)
    out = model.forward(X)
    assert out.dtype is F32
    assert_same(out, model(X))
    preamp.engine_of(model).close()
    assert vars(model)["forward"] is own
    started("O3", model)
    later = vars(model)["forward"] = lambda x: x
    preamp.engine_of(model).close()
    assert vars(model)["forward"] is later


def test_the_latest_engine_counts() -> None:
    model = Net()
    amp.initialize(model, opt_level="O0", verbosity=0)
    amp.initialize(model, opt_level="O0", cast_model_outputs=F16, verbosity=0)
    assert model.forward(X).dtype is F16
    preamp.initialize(model, opt_level="O0", verbosity=0)
    assert "forward" not in vars(model)
    amp.initialize(model, opt_level="O0", verbosity=0)
    kept = vars(model)["forward"]
    taken = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(Net(), taken, opt_level="O0", verbosity=0)
    with refused("compat", "an optimizer of another engine", model, taken):
        amp.initialize(model, taken, opt_level="O0", verbosity=0)
    assert vars(model)["forward"] is kept


def test_forward_of_a_deleted_model() -> None:
    forward = started("O3").forward
    gc.collect()
    with refused("compat", "forward of a deleted model"):
        forward(X)


def test_exact_weights() -> None:
    model = started("O2")
    with preamp.engine_of(model).exact_weights():
        assert_same(
            model.forward(X), nn.functional.linear(X, model.linear.weight, model.linear.bias)
        )
