# SPDX-License-Identifier: BSD-3-Clause
"""Storage where something goes wrong: memory runs out, values do not fit, arguments are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import preamp
from engine.harness import loss_of, train_step
from engine.test_storage import BUILDS, exact, is_packed, levels, start, twins
from kit.compare import same
from kit.refusals import assert_refused, refused
from preamp.optimizers import FusedAdam, FusedSGD


def tables(optimizer: Any) -> list[Any]:
    return preamp.engine_of(optimizer).sessions[id(optimizer)].tables


@levels
def test_memory_that_runs_out_while_packing_loses_nothing(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those packed before are whole, and no write of theirs is taken for a script's."""
    monkeypatch.setattr("preamp.optim.table._BOTH_FORMS", 1)
    runs = [start(level, storage) for storage in ("split", "split")]
    for model, optimizer in runs:
        train_step(model, optimizer, 0)
    _, optimizer = runs[1]
    for table in tables(optimizer):
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
        assert sum(is_packed(optimizer)) == 2
    assert same(*[exact(*run) for run in runs])
    for model, optimizer in runs:
        train_step(model, optimizer, 1)
    assert same(*[exact(*run) for run in runs])
    assert all(is_packed(runs[1][1]))


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
        model = Slices()
        # Groups are updated one after the other.
        optimizer = BUILDS[name]([{"params": [weight]} for weight in model.weights])
        model, optimizer = preamp.initialize(
            model, optimizer, opt_level=level, storage=storage, backend="reference", verbosity=0
        )
        for number in range(4):
            with preamp.scale_loss(model(torch.arange(8.0) + number), optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append([twin.value().clone() for twin in twins(optimizer)])
        assert not any(twin.stays_wide for twin in twins(optimizer))
    for full, split in zip(*weights, strict=True):
        torch.testing.assert_close(split, full, rtol=2.0**-20, atol=2.0**-38)
    assert not [
        str(w.message) for w in recwarn if "was written to between two steps" in str(w.message)
    ]


def test_loaded_masters_beyond_float16_stay_float32() -> None:
    model, optimizer = start("O2", "full")
    train_step(model, optimizer, 0)
    with torch.no_grad():
        twins(optimizer)[0].master.view(-1)[0] = 1e5
    train_step(model, optimizer, 1)
    state, engine = model.state_dict(), preamp.engine_of(model)
    large = twins(optimizer)[0].master.detach().clone()
    engine.close()

    model, optimizer = start("O2", "split")
    model.load_state_dict(state)
    tables(optimizer)[0].compare()
    with pytest.warns(UserWarning, match=r"was given values beyond 65504.*stays float32"):
        tables(optimizer)[0].pack()
    assert torch.equal(twins(optimizer)[0].value(), large)
    assert is_packed(optimizer) == [False, *[True] * (len(twins(optimizer)) - 1)]


@pytest.mark.parametrize("name", ["FusedAdam", "AdamW"])
@pytest.mark.parametrize(
    "look", [None, lambda model: model(torch.ones(2, 4)), nn.Module.state_dict]
)
def test_masters_written_beyond_float16_stay_float32(name: str, look: Any) -> None:
    """Split they would be infinite, and a script that takes them back would find nothing."""
    model, optimizer = start("O2", "split", BUILDS[name])
    train_step(model, optimizer, 0)
    with preamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
    with torch.no_grad():
        twins(optimizer)[0].master.view(-1)[0] = 1e5
    if look is not None:
        look(model)
    with pytest.warns(UserWarning, match=r"was given values beyond 65504.*stays float32"):
        optimizer.step()
    assert 9e4 < float(twins(optimizer)[0].value().detach().flatten()[0]) < 1.1e5
    assert is_packed(optimizer) == [False, *[True] * (len(twins(optimizer)) - 1)]


def test_infinite_masters_are_split_as_they_are() -> None:
    """Half weights hold them too."""
    model, optimizer = start("O2", "split", BUILDS["FusedSGD"])
    train_step(model, optimizer, 0)
    with preamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
        scaled.backward()
    with torch.no_grad():
        twins(optimizer)[0].master.view(-1)[0] = torch.inf
    optimizer.step()
    assert all(is_packed(optimizer))
    assert twins(optimizer)[0].value().flatten()[0] == torch.inf


@pytest.mark.parametrize(
    ("level", "convert"), [("O2", nn.Module.bfloat16), ("O5", nn.Module.half)], ids=["O2", "O5"]
)
def test_half_weights_of_another_half_dtype(level: str, convert: Any) -> None:
    """Masters are split by what their half weights are then, and read by the same."""
    masters: list[list[torch.Tensor]] = []
    for storage in ("full", "split"):
        model, optimizer = start(level, storage)
        convert(model)  # while masters are float32
        with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        masters.append([twin.value().clone() for twin in twins(optimizer)])
    assert all(is_packed(optimizer))
    for full, split in zip(*masters, strict=True):
        torch.testing.assert_close(split, full, rtol=0, atol=2.0**-38)


@levels
def test_states_of_float64_load(level: str) -> None:
    model, optimizer = start(level, "split")
    train_step(model, optimizer, 0)
    model.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    other, again = start(level, "split")
    train_step(other, again, 0)
    for one in (model, other):
        train_step(one, preamp.engine_of(one).optimizers[0], 1)
    assert same(exact(model, optimizer), exact(other, again))


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
    with refused("storage_in_trouble", "scales that do not fit", sgd):
        sgd.load_state_dict(state)


def test_a_failed_load_tells_of_nothing_rounded(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = start("O5", "full")
    train_step(model, optimizer, 0)
    state = optimizer.state_dict()
    state["param_groups"].append(state["param_groups"][0])
    preamp.engine_of(model).close()

    _, other = start("O5", preamp.Storage(moments="bfloat16"))
    capsys.readouterr()
    with refused("storage_in_trouble", "groups of another number"):
        other.load_state_dict(state)
    assert "are rounded" not in capsys.readouterr().out
    state["param_groups"].pop()
    other.load_state_dict(state)
    assert "moments of float32 are rounded to bfloat16" in capsys.readouterr().out


REFUSED: dict[str, dict[str, Any]] = {
    "another spelling": {"masters": "Split"},
    "masters of None": {"masters": None},
    "moments of 8": {"moments": 8},
    "an unknown format": {"moments": "int4"},
    "a seed in words": {"seed": "0"},
    "a seed below zero": {"seed": -1},
    "a seed of 33 bits": {"seed": 2**32},
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_storages(name: str) -> None:
    assert_refused("storage_in_trouble", name, lambda: preamp.Storage(**REFUSED[name]))


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
