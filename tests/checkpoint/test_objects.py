# SPDX-License-Identifier: BSD-3-Clause
"""What is of an unusual kind comes back as it was: tensors, optimizers, models, fewer bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import preamp
from cases.levels import F32_WEIGHTS
from distributed.storage_checks import STORAGES, MomentRun
from kit.compare import same
from preamp.kernels.stored import Format, decode

SPARSE: list[Callable[[Any], optim.Optimizer]] = [
    lambda params: optim.SGD(params, lr=0.1),
    lambda params: optim.SparseAdam(list(params), lr=0.1),
    lambda params: optim.Adagrad(params, lr=0.1),
]


def embedding(build: Callable[[Any], optim.Optimizer], level: str) -> tuple[Any, Any]:
    model = nn.Embedding(5, 4, sparse=True)
    return preamp.initialize(model, build(model.parameters()), opt_level=level, verbosity=0)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize("build", SPARSE)
@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_embeddings_with_sparse_gradients_go_on_bitwise(
    level: str, build: Callable[[Any], optim.Optimizer], tmp_path: Path
) -> None:
    def step(model: nn.Module, optimizer: Any, seed: int) -> None:
        torch.manual_seed(seed)
        loss = (model(torch.randint(0, 5, (40,))) * torch.randn(40, 4)).sum()
        with preamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    whole, resumed = embedding(build, level), embedding(build, level)
    step(*whole, seed=1)
    preamp.save_checkpoint(tmp_path / "a.safetensors", *whole)
    preamp.load_checkpoint(tmp_path / "a.safetensors", *resumed)
    for run in (whole, resumed):
        step(*run, seed=2)
    assert torch.equal(resumed[0].weight, whole[0].weight)


def test_state_of_no_parameter_and_of_another_dtype(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, Any]:
        model = nn.Linear(2, 2)
        return model, optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make()
    optimizer.state["calls"] = 2  # as of an optimizer that counts its steps
    optimizer.state[model.weight]["mean"] = mean = torch.full((2, 2), 0.1, dtype=torch.float64)
    preamp.save_checkpoint(tmp_path / "a.safetensors", model, optimizer)
    model, optimizer = make()
    model.weight.grad = torch.ones(2, 2)  # which no engine knows of
    preamp.load_checkpoint(tmp_path / "a.safetensors", model, optimizer)
    assert model.weight.grad is None
    assert optimizer.state["calls"] == 2
    assert same(optimizer.state[model.weight]["mean"], mean)


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_two_weights_do_not_load_into_one(level: str, tmp_path: Path) -> None:
    def make(is_tied: bool) -> nn.Module:
        model: Any = nn.Sequential(*[nn.Linear(2, 2, bias=False) for _ in range(2)])
        if is_tied:
            model[1].weight = model[0].weight
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return preamp.initialize(model, optimizer, opt_level=level, verbosity=0)[0]

    preamp.save_checkpoint(tmp_path / "two.safetensors", make(is_tied=False))
    model: Any = make(is_tied=True)
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"different values for '0.weight' and '1.weight'"):
        preamp.load_checkpoint(tmp_path / "two.safetensors", model)
    assert torch.equal(model[0].weight, before)

    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    preamp.save_checkpoint(tmp_path / "one.safetensors", model)
    for is_tied in (True, False):
        other: Any = make(is_tied=is_tied)
        preamp.load_checkpoint(tmp_path / "one.safetensors", other)
        assert other[1].weight.isnan().all()


@pytest.mark.parametrize("initialized", [(), (0,), (1,)], ids=str)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_optimizers_that_were_not_initialized_do_not_load(
    initialized: tuple[int, ...], level: str, tmp_path: Path
) -> None:
    """As where a script loads before it calls initialize; scales and counters would be lost."""

    def made(places: tuple[int, ...]) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        models: list[nn.Module] = [nn.Linear(3, 2), nn.Linear(3, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        for place in places:
            preamp.initialize(models[place], optimizers[place], opt_level=level, verbosity=0)
        return models, list(optimizers)

    path = tmp_path / "a.safetensors"
    preamp.save_checkpoint(path, *made((0, 1)))
    models, optimizers = made(initialized)
    before = [weight.detach().clone() for model in models for weight in model.parameters()]
    with pytest.raises(ValueError, match="initialized in the same way"):
        preamp.load_checkpoint(path, models, optimizers)
    after = [weight for model in models for weight in model.parameters()]
    assert all(map(torch.equal, before, after))


# -- masters and moments in fewer bits: bits come back, or conversions are told --------------------


def save(run: MomentRun, path: Path) -> None:
    preamp.save_checkpoint(path, run.model, run.optimizer)


def load(run: MomentRun, path: Path) -> None:
    preamp.load_checkpoint(path, run.model, run.optimizer)


def moments_of(run: MomentRun) -> list[torch.Tensor]:
    """The moments of all parameters as float32."""
    found: list[torch.Tensor] = []
    for state in run.optimizer.state.values():
        for key, kind in (("exp_avg", Format.SIGNED), ("exp_avg_sq", Format.UNSIGNED)):
            codes = state.get(key + "_scales") is not None
            found.append(decode(state[key], state[key + "_scales"], kind) if codes else state[key])
    return [value.float().clone() for value in found]


@pytest.mark.product
@pytest.mark.parametrize("saved", STORAGES)
@pytest.mark.parametrize("loaded", STORAGES)
def test_into_another_storage(saved: str, loaded: str, tmp_path: Path) -> None:
    run = MomentRun(saved)
    run.step(0)
    save(run, tmp_path / "a")
    other = MomentRun(loaded, seed=1)
    other.step(7)
    if STORAGES[loaded].moments not in ("float32", STORAGES[saved].moments):
        before = other.whole()
        with pytest.raises(preamp.PreampStateError, match="and its storage keeps it in"):
            load(other, tmp_path / "a")
        assert same(other.whole(), before)
        return
    load(other, tmp_path / "a")
    assert same(other.whole()["weights"], run.whole()["weights"])
    assert same(moments_of(other), moments_of(run))
    for one in (run, other):
        one.optimizer.zero_grad()
        one.step(1)
    if saved == loaded:
        assert same(other.whole(), run.whole())


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run = MomentRun("compact")
    run.step(0)
    scales = next(iter(run.optimizer.state.values()))
    scales["exp_avg_scales"] = scales["exp_avg_scales"][:-1]
    save(run, tmp_path / "a")
    other = MomentRun("compact", seed=1)
    other.step(7)
    before = other.whole()
    with pytest.raises(ValueError, match=r"that does not fit: .* nothing was loaded"):
        load(other, tmp_path / "a")
    assert same(other.whole(), before)
