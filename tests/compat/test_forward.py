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
        if not torch.compiler.is_compiling():
            self.seen.append(x.dtype)
        return self.linear(x) * scale


def started(level: str, model: nn.Module | None = None, **arguments: Any) -> Any:
    made = Net() if model is None else model
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    amp.initialize(made, optimizer, opt_level=level, verbosity=0, **arguments)
    return made


def through_a_file(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@CASTS
def test_forward_by_hand_is_the_call_until_close(level: str) -> None:
    """Trainers read the signature."""
    model = started(level)
    out = model.forward(X, scale=torch.tensor(2.0))
    assert out.dtype is F32
    assert_same(out, model(X, scale=torch.tensor(2.0)))
    assert model.seen == [BY_NAME[level].weight] * 2
    out.sum().backward()
    assert model.linear.weight.grad is not None
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    if BY_NAME[level].has_masters:
        with preamp.engine_of(model).exact_weights():
            linear = model.linear
            assert_same(model.forward(X), nn.functional.linear(X, linear.weight, linear.bias))
    preamp.engine_of(model).close()
    assert set(vars(model)) == set(vars(Net()))
    assert model.forward(X).dtype is F32


def test_dtype_of_outputs() -> None:
    for level, dtype in (("O3", BF16), ("O1", F16)):
        assert started(level, cast_model_outputs=dtype).forward(X).dtype is dtype
    assert "forward" not in vars(started("O1"))
    model = Net()
    preamp.initialize(model, opt_level="O3", verbosity=0)  # which has hooks only
    assert "forward" not in vars(model)
    assert model.forward(X.half()).dtype is F16


@CASTS
@pytest.mark.parametrize("copied", [copy.deepcopy, through_a_file])
def test_copies_compute_with_their_own_weights(level: str, copied: Any) -> None:
    model = started(level)
    twin, other = copied(model), copy.deepcopy(model)
    assert_same(twin.forward(X), other.forward(X))
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert twin.forward(X).count_nonzero() == 0
    assert model.forward(X).count_nonzero() > 0
    preamp.engine_of(model).close()
    del model
    assert twin.forward(X).dtype is F32


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
    model = started(level)
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    assert_same(compiled(X), model(X))


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
