# SPDX-License-Identifier: BSD-3-Clause
"""Stop anywhere, resume by the standard recipe, and get bitwise what an uninterrupted run gets."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from kit.compare import halves_match, same
from kit.loops import make, masters, started, train_plain, train_step, weights
from kit.run import Net, Run, assert_alike
from preamp import amp

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


@pytest.mark.product
@ALL_LEVELS
@pytest.mark.parametrize("then", LEVEL_NAMES)
def test_resume_at_another_level(level: str, then: str) -> None:
    first = started(level, optimizer="Adam")
    train_step(*first, 0)
    state = copy.deepcopy({"model": first[0].state_dict(), "optimizer": first[1].state_dict()})
    second = started(then, 1, "Adam")
    second[0].load_state_dict(state["model"])
    second[1].load_state_dict(state["optimizer"])
    loaded = {k: v for k, v in second[0].state_dict().items() if "running" not in k}
    if then != "O3":
        assert same(loaded, {k: state["model"][k] for k in loaded})
    train_step(*second, 1)
    assert halves_match(second[0])
    assert all(p.dtype is torch.float32 or then == "O3" for p in amp.master_params(second[1]))


@MASTERS
@pytest.mark.parametrize("storage", ["full", "split", "compact"])
def test_norms_of_novograd_resume(level: str, storage: str) -> None:
    """Its norms are single numbers: of a gradient as a whole, and kept as such."""
    whole, resumed = (
        Run(level, "FusedNovoGrad", seed=seed, loss_scale="dynamic", storage=storage)
        for seed in (0, 1)  # other weights to begin with
    )
    resumed.saved = whole.play("iterate 0 1; save").saved
    resumed.play("load")
    for run in (whole, resumed):
        run.play("iterate 2; backward 3 inf; step; zero; iterate 4")
    assert_alike(whole, resumed)


# -- the model's state_dict ------------------------------------------------------------------


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_state_is_float32_and_does_not_alias(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    state = model.state_dict()
    assert list(state) == list(Net().state_dict())
    assert {v.dtype for k, v in state.items() if "num_batches" not in k} == {torch.float32}
    frozen = copy.deepcopy(state)
    halves = {name for name, p in model.named_parameters() if p.dtype is not torch.float32}
    train_step(model, optimizer, 1)
    assert same({k: state[k] for k in halves}, {k: frozen[k] for k in halves})
    for name in halves:
        state[name].zero_()
    assert all(p.abs().sum() > 0 for n, p in model.named_parameters() if n in halves)
    assert not any(value.requires_grad for value in state.values())


@MASTERS
def test_state_of_a_part_is_exact(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    whole = model.state_dict()
    assert same(
        dict(model.first.state_dict()), {k: whole[f"first.{k}"] for k in ("weight", "bias")}
    )
    other, _ = started(level, 1)
    other.first.load_state_dict(model.first.state_dict())
    assert same(other.state_dict()["first.weight"], whole["first.weight"])
    assert halves_match(other)


@MASTERS
def test_half_values_load_too(level: str) -> None:
    """A file that somebody saved from the raw parameters holds half values."""
    model, optimizer = started(level)
    half = next(p.dtype for p in model.parameters())
    state = {k: v.to(half) if v.is_floating_point() else v for k, v in Net().state_dict().items()}
    model.load_state_dict(state)
    assert same(model.state_dict()["first.weight"], state["first.weight"].float())
    train_step(model, optimizer, 0)
    assert halves_match(model)


def _without(state: dict[str, Any]) -> None:
    del state["first.weight"]


def _misshapen(state: dict[str, Any]) -> None:
    state["first.weight"] = torch.ones(2, 2)


@MASTERS
@pytest.mark.parametrize(
    ("change", "strict", "error"),
    [(_without, False, ""), (_without, True, "Missing key"), (_misshapen, True, "size mismatch")],
)
def test_a_state_that_does_not_fit(level: str, change: Any, strict: bool, error: str) -> None:
    """As in torch, what fits is loaded all the same."""
    model, optimizer = started(level)
    before, target = model.state_dict(), Net().state_dict()
    change(target)
    if error:
        with pytest.raises(RuntimeError, match=error):
            model.load_state_dict(target, strict=strict)
    else:
        result = model.load_state_dict(target, strict=strict)
        assert result.missing_keys == ["first.weight"]
    after = model.state_dict()
    assert same(after["first.weight"], before["first.weight"])
    assert same(after["last.weight"], target["last.weight"])
    assert halves_match(model)
    train_step(model, optimizer, 0)
    assert halves_match(model)


@MASTERS
def test_loading_leaves_the_file_s_tensors_alone(level: str) -> None:
    model, optimizer = started(level)
    state = Net().state_dict()
    kept = copy.deepcopy(state)
    ids = {key: id(value) for key, value in state.items()}
    model.load_state_dict(state)
    train_step(model, optimizer, 0)
    assert same(dict(state), dict(kept))
    assert {key: id(value) for key, value in state.items()} == ids


class Extra(nn.Module):
    """Extra state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.note = "new"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_extra_state(level: str) -> None:
    model = preamp.initialize(Extra(), opt_level=level, verbosity=0)
    state = model.state_dict()
    assert state["_extra_state"] == {"note": "new"}
    state["_extra_state"] = {"note": "loaded"}
    model.load_state_dict(state)
    assert model.note == "loaded"


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@MASTERS
def test_tied_weights(level: str) -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    exact = model.a.weight.detach().clone()
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    state = model.state_dict()
    assert same(state["a.weight"], exact)
    assert same(state["b.weight"], exact)
    target = Tied().state_dict()
    model.load_state_dict(target)
    assert same(model.state_dict()["b.weight"], target["b.weight"])
    assert model.a.weight is model.b.weight


# -- files of Apex ---------------------------------------------------------------------------


@ALL_LEVELS
def test_file_in_the_format_of_apex(level: str) -> None:
    """float32 model (widened halves), torch's optimizer dict, and the scalers' numbers."""
    source, trained = make(optimizer="Adam")
    train_plain(source, trained, 0)
    file = io.BytesIO()
    state = {
        "model": {
            k: v.half().float() if v.is_floating_point() else v
            for k, v in source.state_dict().items()
        },
        "optimizer": trained.state_dict(),
        "amp": {"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 17}},
    }
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    model, optimizer = make(1, "Adam")
    amp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    amp.load_state_dict(loaded["amp"])
    assert amp.state_dict() == state["amp"]
    assert same(model.state_dict()["first.weight"], state["model"]["first.weight"]) or level in (
        "O3",
    )
    train_step(model, optimizer, 1)
    assert halves_match(model)
    assert all(p.isfinite().all() for p in model.parameters())


@MASTERS
def test_masters_saved_as_a_list(level: str) -> None:
    """The recipe for exact masters under Apex: their list in the file, copied back by ``data``."""
    model, optimizer = started(level, optimizer="Adam")
    train_step(model, optimizer, 0)
    saved = copy.deepcopy([p.detach() for p in amp.master_params(optimizer)])
    widened = {
        k: v.to(next(model.parameters()).dtype).float() if "weight" in k else v
        for k, v in model.state_dict().items()
    }
    state = copy.deepcopy(optimizer.state_dict())
    train_step(model, optimizer, 1)
    expected = masters(optimizer)
    other, second = started(level, 1, "Adam")
    other.load_state_dict(widened)
    second.load_state_dict(state)
    for param, value in zip(amp.master_params(second), saved, strict=True):
        param.data.copy_(value.data)
    assert same(masters(second), saved)
    train_step(other, second, 1)
    assert halves_match(other)
    assert len(expected) == len(masters(second))
    assert not same(weights(other), weights(model)) or same(masters(second), expected)
