# SPDX-License-Identifier: BSD-3-Clause
"""Storage where something goes wrong: memory runs out, values do not fit, arguments are wrong."""

from typing import Any

import pytest
import torch
from torch import nn

import preamp
from engine.test_storage import levels, packed, start
from kit.compare import same
from kit.refusals import refused
from kit.run import Run, assert_alike, assert_same_program
from preamp.optimizers import FusedAdam, FusedSGD


def tables(run: Run) -> list[Any]:
    return run.engine.sessions[id(run.optimizer)].tables


def first_master(run: Run) -> Any:
    return run.twins()[0].master.view(-1)


def stays_float32(run: Run) -> bool:
    """The first master, as the only one."""
    return packed(run) == [False, *[True] * (len(run.twins()) - 1)]


@levels
def test_memory_that_runs_out_while_packing_loses_nothing(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those packed before are whole, and no write of theirs is taken for a script's."""
    monkeypatch.setattr("preamp.optim.table._BOTH_FORMS", 1)
    runs = [start(level, "split").play("iterate") for _ in range(2)]
    for table in tables(runs[1]):
        table.make()
        original, calls = table._pack_few, 0

        def pack_few(rows: Any, original: Any = original) -> Any:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("of this test")
            return original(rows)

        with monkeypatch.context() as patch:
            patch.setattr(table, "_pack_few", pack_few)
            with pytest.raises(MemoryError):
                table.pack()
        assert sum(packed(runs[1])) == 2
    assert_alike(*runs)
    assert_same_program("iterate 1", *runs)
    assert all(packed(runs[1]))


class Slices(nn.Module):
    """Weights that are slices of one tensor, and so count each other's writes."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.linspace(-1, 1, 24)
        self.weights = nn.ParameterList([flat[8 * n : 8 * n + 8] for n in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.to(weight.dtype) * weight for weight in self.weights]).sum()


@levels
@pytest.mark.parametrize("name", ["FusedAdam", "AdamW"])
def test_slices_of_one_tensor_stay_exact(level: str, name: str, recwarn: Any) -> None:
    weights: list[list[torch.Tensor]] = []
    for storage in ("full", "split"):
        run = start(level, storage, name, model=Slices, starts=False)
        (group,) = run.optimizer.param_groups
        # Groups are updated one after the other.
        run.optimizer.param_groups[:] = [{**group, "params": [p]} for p in group["params"]]
        run.initialize()
        for number in range(4):
            run.back(run.model(torch.arange(8.0) + number))
            run.play("step; zero")
        weights.append([twin.value().clone() for twin in run.twins()])
        assert not any(twin.stays_wide for twin in run.twins())
    for full, split in zip(*weights, strict=True):
        torch.testing.assert_close(split, full, rtol=2.0**-20, atol=2.0**-38)
    assert not [
        str(w.message) for w in recwarn if "was written to between two steps" in str(w.message)
    ]


def test_loaded_masters_beyond_float16_stay_float32() -> None:
    run = start("O2", "full").play("iterate")
    with torch.no_grad():
        first_master(run)[0] = 1e5
    state, large = run.play("iterate 1").model.state_dict(), run.twins()[0].master.detach().clone()
    run.close()

    run = start("O2", "split")
    run.model.load_state_dict(state)
    tables(run)[0].compare()
    with pytest.warns(UserWarning, match=r"was given values beyond 65504.*stays float32"):
        tables(run)[0].pack()
    assert torch.equal(run.twins()[0].value(), large)
    assert stays_float32(run)


@pytest.mark.parametrize("name", ["FusedAdam", "AdamW"])
@pytest.mark.parametrize("look", [lambda model: None, Run.forward, lambda run: run.states()])
def test_masters_written_beyond_float16_stay_float32(name: str, look: Any) -> None:
    """Split they would be infinite, and a script that takes them back would find nothing."""
    run = start("O2", "split", name).play("backward; step; backward 1")
    with torch.no_grad():
        first_master(run)[0] = 1e5
    look(run)
    with pytest.warns(UserWarning, match=r"was given values beyond 65504.*stays float32"):
        run.play("step")
    assert 9e4 < float(run.twins()[0].value().detach().flatten()[0]) < 1.1e5
    assert stays_float32(run)


def test_infinite_masters_are_split_as_they_are() -> None:
    """Half weights hold them too."""
    run = start("O2", "split", "FusedSGD").play("backward; step; backward 1")
    with torch.no_grad():
        first_master(run)[0] = torch.inf
    assert all(packed(run.play("step")))
    assert run.twins()[0].value().flatten()[0] == torch.inf


@pytest.mark.parametrize(
    ("level", "convert"), [("O2", nn.Module.bfloat16), ("O5", nn.Module.half)], ids=["O2", "O5"]
)
def test_half_weights_of_another_half_dtype(level: str, convert: Any) -> None:
    """Masters are split by what their half weights are then, and read by the same."""
    runs = [start(level, storage) for storage in ("full", "split")]
    for run in runs:
        convert(run.model)  # while masters are float32
        run.play("backward; step")
    assert all(packed(runs[1]))
    for full, split in zip(runs[0].twins(), runs[1].twins(), strict=True):
        torch.testing.assert_close(split.value(), full.value(), rtol=0, atol=2.0**-38)


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
    preamp.initialize(other, sgd, opt_level="O5", storage="split", verbosity=0)
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
    assert "2 of 2 masters are split now" in told
    assert "2 of 4 moments are 8bit now" in told  # vectors keep float32 ones
