# SPDX-License-Identifier: BSD-3-Clause
"""Storage where something goes wrong: memory runs out, values do not fit, arguments are wrong."""

from typing import Any

import pytest
import torch
from torch import nn

import preamp
from engine.test_storage import levels, start
from kit.compare import same
from kit.refusals import refused
from kit.run import assert_same_program
from preamp.optimizers import FusedAdam, FusedSGD


class Slices(nn.Module):
    """Weights that are slices of one tensor, and so count each other's writes."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 24)
        self.weights = nn.ParameterList([flat[8 * n : 8 * n + 8] for n in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.to(weight.dtype) * weight for weight in self.weights]).sum()


@levels
def test_slices_of_one_tensor_stay_exact(level: str) -> None:
    weights: list[list[torch.Tensor]] = []
    for storage in ("full", "split"):
        run = start(level, storage, model=Slices, starts=False)
        (group,) = run.optimizer.param_groups
        # Groups are updated one after the other.
        run.optimizer.param_groups[:] = [{**group, "params": [p]} for p in group["params"]]
        run.initialize()
        for number in range(4):
            run.back(run.model(torch.arange(8.0) + number))
            run.play("step; zero")
        weights.append([twin.value().clone() for twin in run.twins()])
    for full, split in zip(*weights, strict=True):
        torch.testing.assert_close(split, full, rtol=2.0**-20, atol=2.0**-38)


def test_infinite_masters_are_split_as_they_are() -> None:
    """Half weights hold them too."""
    run = start("O2", "split", "FusedSGD").play("backward; step; backward 1")
    with torch.no_grad(), run.engine.exact_weights():
        run.model.first.weight[0, 0] = torch.inf
    run.play("step")
    assert run.twins()[0].value().flatten()[0] == torch.inf


@levels
def test_states_of_float64_load(level: str) -> None:
    runs = [start(level, "split").play("iterate") for _ in range(2)]
    state = runs[0].model.state_dict()
    runs[0].model.load_state_dict({name: value.double() for name, value in state.items()})
    assert_same_program("iterate 1", *runs)


def test_codes_load_into_optimizers_without_moments_in_fewer_bits() -> None:
    """As float32 values: codes taken for values would be wrong by orders of magnitude."""
    model = nn.Linear(64, 128)
    optimizer = FusedAdam(model.parameters())
    model, optimizer = preamp.initialize(
        model, optimizer, opt_level="O0", storage=preamp.Storage(moments="8bit"), verbosity=0
    )
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"][0]["exp_avg"].dtype is torch.int8
    preamp.engine_of(model).close()

    other = nn.Linear(64, 128)
    lamb = preamp.optimizers.FusedMixedPrecisionLamb(other.parameters())
    lamb.load_state_dict(state)
    gradient = next(iter(model.parameters())).grad
    assert gradient is not None
    loaded = lamb.state[next(iter(other.parameters()))]
    assert loaded["exp_avg"].dtype is torch.float32
    assert not [key for key in loaded if key.endswith("_scales")]
    # A tenth of the gradient, by the betas; a code has 5 bits of mantissa
    torch.testing.assert_close(
        loaded["exp_avg"], 0.1 * gradient, rtol=2.0**-5, atol=2.0**-5 * float(gradient.abs().max())
    )


def _with_codes() -> dict[str, Any]:
    """The state of an SGD with moments in 8 bits, after a step."""
    model = nn.Linear(64, 128)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    preamp.initialize(model, optimizer, opt_level="O5", storage="compact", verbosity=0)
    with preamp.scale_loss(model(torch.ones(2, 64)).square().mean(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"][0]["momentum_buffer"].dtype is torch.int8
    preamp.engine_of(model).close()
    return state


def test_codes_load_into_torchs_optimizers_as_values() -> None:
    state = _with_codes()
    wanted = FusedSGD(nn.Linear(64, 128).parameters(), lr=0.1, momentum=0.9)
    wanted.load_state_dict(state)
    other = nn.Linear(64, 128)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    preamp.initialize(other, sgd, opt_level="O5", verbosity=0)
    sgd.load_state_dict(state)
    loaded, expected = (list(optimizer.state.values()) for optimizer in (sgd, wanted))
    assert same(loaded, expected)
    assert state["state"][0]["momentum_buffer"].dtype is torch.int8  # as it was given
    preamp.engine_of(other).close()
    assert not sgd._optimizer_load_state_dict_pre_hooks  # pyright: ignore


@pytest.mark.parametrize("scales", [None, torch.ones(3, 1), torch.ones(128)])
def test_codes_whose_scales_do_not_fit_are_refused(scales: Any) -> None:
    state = _with_codes()
    state["state"][0]["momentum_buffer_scales"] = scales
    other = nn.Linear(64, 128)
    sgd = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    preamp.initialize(other, sgd, opt_level="O5", verbosity=0)
    with pytest.raises(ValueError, match=r"momentum_buffer in 8 bits .* nothing was loaded\. Load"):
        sgd.load_state_dict(state)
    assert not sgd.state


def test_a_failed_load_tells_of_nothing_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    run = start("O5", "full").play("iterate")
    state = run.optimizer.state_dict()
    state["param_groups"].append(state["param_groups"][0])
    run.close()

    other = start("O5", preamp.Storage(moments="bfloat16")).optimizer
    capsys.readouterr()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other.load_state_dict(state)
    assert "are rounded" not in capsys.readouterr().out
    state["param_groups"].pop()
    other.load_state_dict(state)
    assert "moments of float32 are rounded to bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("misspelt masters", {"masters": "Split"}),
        ("masters of None", {"masters": None}),
        ("moments of a number", {"moments": 8}),
        ("unknown moments", {"moments": "int4"}),
        ("a seed in words", {"seed": "0"}),
        ("a seed out of range", {"seed": -1}),
        ("a seed out of range", {"seed": 2**32}),
    ],
)
def test_wrong_storages(name: str, given: dict[str, Any]) -> None:
    with refused("engine", name, **given):
        preamp.Storage(**given)


def test_seeds_may_be_of_any_whole_type() -> None:
    assert preamp.Storage(seed=torch.tensor(7)).seed == 7  # pyright: ignore[reportArgumentType]


def test_explain_counts_moments() -> None:
    model = nn.Linear(64, 128)
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O5", storage="compact", verbosity=0)
    with preamp.scale_loss(model(torch.ones(2, 64)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    told = preamp.engine_of(model).explain()
    assert "2 masters are split" in told
    assert "2 of 4 moments are 8bit now" in told  # vectors keep float32 ones
