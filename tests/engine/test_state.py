# SPDX-License-Identifier: BSD-3-Clause
"""State dicts of models and optimizers: the standard recipe, torch's by names, and Apex's files."""

import copy
import importlib
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import HALF_WEIGHTS, WITH_MASTERS
from kit.compare import same
from kit.loops import started, train_step
from kit.run import Net, Run, assert_alike
from preamp.core.torch_private.named_state import MODULE
from preamp.optimizers import FusedAdam, FusedNovoGrad, FusedSGD

MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


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


# -- files of Apex ---------------------------------------------------------------------------


BUILDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.01),
    "FusedSGD, no state": lambda params: FusedSGD(params, lr=0.1, weight_decay=0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD, no state": lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1),
}
NAMES = ("_iterate_valid_model_state", "_get_optim_state_dict", "_init_optim_state")
OPTIONS: dict[str, dict[str, bool]] = {
    "plain": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "offloaded": {"cpu_offload": True},
    "trainable": {"ignore_frozen_params": True, "strict": False},
}


class Model(Net):
    """With a frozen layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.frozen(x))


@pytest.fixture
def torchs() -> Any:
    """The module, which is imported late, as most scripts do not need it."""
    return importlib.import_module(MODULE)


def start(level: str, name: str = "FusedAdam", storage: str = "full", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = Model()
    torch.nn.init.eye_(model.frozen.weight)
    groups = [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": [param for param in model.parameters() if param.dim() == 1], "lr": 0.003},
    ]
    more = {"opt_level": level, "storage": storage, "verbosity": 0, "backend": "plain"}
    return preamp.initialize(model, BUILDS[name](groups), **more)


def exact(model: nn.Module, optimizer: Any) -> Any:
    halves = [param.detach().clone() for param in model.parameters()]
    return copy.deepcopy([dict(model.state_dict()), halves, optimizer.state_dict()])


# Torch's options decide how a state is laid out; level, optimizer and storage what is in it.
@pytest.mark.threes
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("storage", ["full", "split"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_new", [True, False])
def test_loading_goes_on_bitwise(
    torchs: Any, level: str, name: str, storage: str, options: str, is_new: bool
) -> None:
    """A new optimizer has no state yet; torch takes a step with zeros for it."""
    if name == "SGD, no state" and options == "flat":
        options = "plain"  # torch itself does not load that
    storage = storage if level != "O1" and "Fused" in name else "full"
    model, optimizer = start(level, name, storage)
    for number in range(2):
        train_step(model, optimizer, number)
    told = torchs.StateDictOptions(**OPTIONS[options])
    file = io.BytesIO()
    torch.save(torchs.get_state_dict(model, optimizer, options=told), file)
    file.seek(0)
    weights, state = torch.load(file)
    other, others = start(level, name, storage, seed=1)
    if not is_new:
        train_step(other, others, 5)
    torchs.set_state_dict(
        other, others, model_state_dict=weights, optim_state_dict=state, options=told
    )
    preamp.engine_of(other).load_state_dict(preamp.engine_of(model).state_dict())
    if options == "trainable":
        other.frozen.load_state_dict(model.frozen.state_dict())
    for number in range(2, 4):
        train_step(model, optimizer, number)
        train_step(other, others, number)
    assert same(exact(model, optimizer), exact(other, others))


def test_saving_before_the_first_step_changes_no_weight(torchs: Any) -> None:
    """Nor is it counted, or warned of for want of ``scale_loss``; a script's own step still is."""
    model, optimizer = start("O2")
    before = exact(model, optimizer)
    torchs.get_state_dict(model, optimizer)
    assert same(exact(model, optimizer)[:2], before[:2])
    assert preamp.engine_of(model).steps_applied == 0
    for param in preamp.master_params(optimizer):
        param.grad = torch.ones_like(param)
    with pytest.warns(UserWarning, match="no scale_loss block has made"):
        optimizer.step()


class Wrapper(torch.optim.Optimizer):
    """A framework's, which takes no step while gradients accumulate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> None:
        del closure

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.optimizer.load_state_dict(state_dict)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_state_is_made_by_the_optimizer_inside_a_frameworks_wrapper(
    torchs: Any, level: str
) -> None:
    model, optimizer = start(level)
    train_step(model, optimizer, 0)
    _, wanted = torchs.get_state_dict(model, Wrapper(optimizer))
    other, others = start(level)
    _, found = torchs.get_state_dict(other, Wrapper(others))
    assert found["state"].keys() == wanted["state"].keys()
    torchs.set_optimizer_state_dict(other, Wrapper(others), copy.deepcopy(wanted))
    assert same(others.state_dict(), optimizer.state_dict())
    assert preamp.engine_of(other).steps_applied == 0


def functions_of(module: Any) -> list[Any]:
    return [vars(module)[name] for name in NAMES]


def test_torchs_module_is_changed_for_as_long_as_an_engine_needs_it(torchs: Any) -> None:
    before = functions_of(torchs)
    engines = [preamp.engine_of(start(level)[0]) for level in WITH_MASTERS]
    changed = functions_of(torchs)
    assert not any(one is other for one, other in zip(before, changed, strict=True))
    engines[0].close()
    assert functions_of(torchs) == changed
    engines[1].close()
    assert functions_of(torchs) == before


@pytest.mark.parametrize("level", ["O0", "O3", "O4"])
def test_engines_without_masters_and_dynamic_scales_leave_it_alone(torchs: Any, level: str) -> None:
    before, finders = functions_of(torchs), [*sys.meta_path]
    model, optimizer = start(level)
    train_step(model, optimizer, 0)
    assert functions_of(torchs) == before
    assert sys.meta_path == finders


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("missing", NAMES)
def test_a_torch_without_one_of_the_functions_is_not_changed(
    torchs: Any, monkeypatch: pytest.MonkeyPatch, level: str, missing: str
) -> None:
    monkeypatch.delattr(torchs, missing)
    before = dict(vars(torchs))
    model, optimizer = start(level)
    train_step(model, optimizer, 0)
    assert dict(vars(torchs)) == before
    preamp.engine_of(model).close()
    assert dict(vars(torchs)) == before


def test_a_module_that_is_imported_later_is_changed_then(
    torchs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, name = MODULE.rsplit(".", 1)
    monkeypatch.setattr(sys.modules[parent], name, torchs)  # put back at the end
    monkeypatch.delitem(sys.modules, MODULE)
    finders = [*sys.meta_path]
    model, optimizer = start("O5")
    train_step(model, optimizer, 0)
    later = importlib.import_module(MODULE)
    assert later is not torchs
    assert "first.weight" in later.get_optimizer_state_dict(model, optimizer)["state"]
    preamp.engine_of(model).close()
    assert sys.meta_path == finders
    assert all([type(function).__name__ == "function" for function in functions_of(later)])
