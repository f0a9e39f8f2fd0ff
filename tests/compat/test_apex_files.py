# SPDX-License-Identifier: BSD-3-Clause
"""Files as scripts wrote them with Apex, made without Apex.

Classes under Apex's module names exist only while a file is written; a reader that imported them
would fail.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.fp16_utils
from cases.models import Exact, loss_of, values
from fp16_utils.steps import Weights, wrapped
from preamp import amp
from preamp.optimizers import FP16_Optimizer as FlatOptimizer
from preamp.optimizers import FusedAdam


@contextmanager
def apex_class(module: str, name: str) -> Iterator[Callable[..., Any]]:
    """Let a class exist under Apex's name; calling what is yielded makes an object of it."""
    parts = module.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    assert not set(names) & set(sys.modules)
    modules = {each: ModuleType(each) for each in names}
    made = type(name, (), {"__module__": module})
    setattr(modules[module], name, made)
    sys.modules.update(modules)

    def make(**attributes: Any) -> Any:
        thing = made()
        thing.__dict__.update(attributes)
        return thing

    try:
        yield make
    finally:
        for each in names:
            del sys.modules[each]


OLD = "apex.fp16_utils.loss_scaler"
SCALERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "amp": (
        "apex.amp.scaler",
        "LossScaler",
        {"dynamic": True, "_loss_scale": 512.0, "_max_loss_scale": 2.0**20}
        | {"_min_loss_scale": None, "_scale_seq_len": 100, "_unskipped": 42}
        | {"_has_overflow": False, "_overflow_buf": torch.zeros(1, dtype=torch.int32)},
    ),
    "dynamic": (
        OLD,
        "DynamicLossScaler",
        {"cur_scale": 2.0**32, "cur_iter": 1234, "last_overflow_iter": 33}
        | {"scale_factor": 2.0, "scale_window": 1000},
    ),
    "static": (OLD, "LossScaler", {"cur_scale": 128}),
}


# -- amp -----------------------------------------------------------------------------------------

ADAM: dict[str, Any] = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 2.0**-10, "weight_decay": 0.0}


def weights(level: str, old: bool = False) -> dict[str, torch.Tensor]:
    """Float32 copies of what the level trains; Apex before August 2019 saved halves as they are."""
    state = {name: value.clone() for name, value in Exact(seed=1).state_dict().items()}
    for name, value in state.items():
        half = level == "O3" or (level == "O2" and "linear" in name)
        if half and value.is_floating_point():
            state[name] = value.half() if old else value.half().float()
    return state


def moments(index: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return [torch.rand(param.shape, generator=generator) / 8 for param in Exact().parameters()]


def adam_state(level: str, fused: bool) -> dict[str, Any]:
    """As torch 1.x or Apex's FusedAdam, which counts in its groups, wrote it after 7 steps."""
    dtype = torch.float16 if level == "O3" and not fused else torch.float32
    pairs = enumerate(zip(moments(0), moments(1), strict=True))
    step = {} if fused else {"step": 7}
    state = {i: {**step, "exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)} for i, (m, v) in pairs}
    more = {"bias_correction": True, "step": 7} if fused else {"amsgrad": False}
    return {"state": state, "param_groups": [{**ADAM, **more, "params": [0, 1, 2, 3]}]}


@pytest.mark.parametrize("fused", [True, False], ids=["FusedAdam", "Adam"])
@pytest.mark.parametrize("old", [True, False], ids=["before August 2019", "after"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_run_of_amp_goes_on(level: str, old: bool, fused: bool, tmp_path: Path) -> None:
    """As the same in float32, by torch alone."""
    scaler = {"loss_scale": 512.0 if level in ("O1", "O2") else 1.0, "unskipped": 7}
    content = {"model": weights(level, old), "amp": {"loss_scaler0": scaler}}
    torch.save({**content, "optimizer": adam_state(level, fused)}, tmp_path / "run.pt")
    read = torch.load(tmp_path / "run.pt", weights_only=True)
    model, plain = Exact(), Exact()
    build: Any = FusedAdam if fused else torch.optim.Adam
    optimizer = build(model.parameters(), lr=9.0)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    model.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    amp.load_state_dict(read["amp"])

    assert amp.state_dict() == content["amp"]
    for name, value in weights(level).items():
        assert torch.equal(model.state_dict()[name], value), name
    kept = torch.float16 if level == "O3" and not fused else torch.float32
    for master, *wanted in zip(amp.master_params(optimizer), moments(0), moments(1), strict=True):
        for key, value in zip(("exp_avg", "exp_avg_sq"), wanted, strict=True):
            state = optimizer.state[master][key]
            assert state.dtype is kept
            assert torch.equal(state, value.to(kept))

    plain.load_state_dict(weights(level))
    reference = torch.optim.Adam(plain.parameters(), **ADAM)
    for param, m, v in zip(plain.parameters(), moments(0), moments(1), strict=True):
        reference.state[param] = {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": v}
    for index in range(2):
        with amp.scale_loss(loss_of([model], index), optimizer) as scaled:
            scaled.backward()
        loss_of([plain], index).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    tolerance = 1e-2 if level == "O3" else 1e-6
    for ours, exact in zip(values(optimizer), values(plain), strict=True):
        torch.testing.assert_close(ours.float(), exact, rtol=tolerance, atol=tolerance)


# -- fp16_utils.FP16_Optimizer -------------------------------------------------------------------


def write_run(path: Path, kind: str, *, zipped: bool) -> None:
    """A whole training script's checkpoint, of a `Weights` model with SGD."""
    module, name, attributes = SCALERS[kind]
    group = {"lr": 0.5, "momentum": 0.5, "dampening": 0, "weight_decay": 0, "nesterov": False}
    state = {0: {"momentum_buffer": torch.tensor([0.5, 0.25])}}
    with apex_class(module, name) as make:
        optimizer = {
            "loss_scaler": make(**attributes),
            "dynamic_loss_scale": kind != "static",
            "overflow": False,
            "first_closure_call_this_step": True,
            "optimizer_state_dict": {"state": state, "param_groups": [{**group, "params": [0, 1]}]},
            "fp32_from_fp16": [[torch.tensor([1.0 + 2.0**-20, 3.0], requires_grad=True)]],
        }
        content = {
            "epoch": 3,
            "model": {"low": torch.ones(2).half(), "wide": torch.tensor([5.0, 6.0])},
            "optimizer": optimizer,
            "amp": {"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 7}},
            "history": [0.5, (1, "two")],
        }
        torch.save(content, path, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("way", ["the alias", "the alias, legacy", "weights_only"])
@pytest.mark.parametrize("kind", SCALERS)
def test_an_fp16_optimizers_run_loads(kind: str, way: str, tmp_path: Path) -> None:
    """Under the alias, or without running its code."""
    write_run(tmp_path / "run.pt", kind, zipped="legacy" not in way)
    module, name, attributes = SCALERS[kind]
    if way == "weights_only":
        known: Any = amp if kind == "amp" else preamp.fp16_utils
        safe: Any = [(getattr(known, name), f"{module}.{name}")]
        with torch.serialization.safe_globals(safe):
            content = torch.load(tmp_path / "run.pt", weights_only=True)
    else:
        preamp.install_apex_alias()
        try:
            content = torch.load(tmp_path / "run.pt", weights_only=False)
        finally:
            preamp.remove_apex_alias()
    model = Weights()
    inner = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.25)
    optimizer = preamp.fp16_utils.FP16_Optimizer(inner, verbose=False)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    assert optimizer.loss_scale == attributes.get("_loss_scale", attributes.get("cur_scale"))
    assert optimizer.dynamic_loss_scale == (kind != "static")
    (master,) = optimizer.all_fp32_from_fp16_params
    assert master.tolist() == [1.0 + 2.0**-20, 3.0]
    assert model.low.tolist() == [1.0, 3.0]
    assert model.wide.tolist() == [5.0, 6.0]
    assert inner.state[master]["momentum_buffer"].tolist() == [0.5, 0.25]
    assert inner.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("kind", "missing", "wanted"),
    [
        ("amp", (), (512.0, 42, 100, None, 2.0**20)),
        # Files from before June 2019 have no limits
        ("amp", ("_min_loss_scale", "_max_loss_scale"), (512.0, 42, 100, None, 2.0**24)),
        # Above today's ceiling it stays
        ("dynamic", (), (2.0**32, 200, 1000, 1.0, float("inf"))),
    ],
)
def test_apexs_scalers_in_numbers(kind: str, missing: tuple[str, ...], wanted: Any) -> None:
    module, name, attributes = SCALERS[kind]
    _, optimizer = wrapped()
    with apex_class(module, name) as make:
        scaler = make(**{key: value for key, value in attributes.items() if key not in missing})
    optimizer.load_state_dict({**optimizer.state_dict(), "loss_scaler": scaler})
    state = optimizer.state_dict()["loss_scaler"]
    names = ("loss_scale", "unskipped", "scale_window", "min_loss_scale", "max_loss_scale")
    assert tuple(state[name] for name in names) == wanted


# -- the flat FP16_Optimizer of early 2019 around its FusedAdam, after 7 steps ---------------------


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
def test_a_flat_optimizers_run_goes_on(dynamic: bool, tmp_path: Path) -> None:
    options = {"lr": 0.125, "bias_correction": False, "betas": (0.5, 0.5), "eps": 0.0}
    group = {**options, "weight_decay": 0.0, "max_grad_norm": 1.0, "params": [0]}
    state = {"step": 7, "exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.full((3,), 0.25)}
    content: dict[str, Any] = {
        "dynamic_loss_scale": dynamic,
        "cur_scale": 512.0,
        "cur_iter": 7,
        "optimizer_state_dict": {"state": {0: state}, "param_groups": [group]},
        "fp32_groups_flat": [torch.tensor([1.0 + 2.0**-20, 2.0, 3.0], requires_grad=True)],
    }
    if dynamic:
        content |= {"last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000}
    torch.save(content, tmp_path / "run.pt")
    model = nn.Linear(2, 1).half()
    inner = FusedAdam(model.parameters(), bias_correction=False, max_grad_norm=1.0)
    optimizer = FlatOptimizer(inner, verbose=False)
    optimizer.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True))
    assert (optimizer.cur_scale, optimizer.cur_iter) == (512.0, 7)
    assert optimizer.dynamic_loss_scale == dynamic
    (master,) = optimizer.fp32_groups_flat
    assert master.tolist() == [1.0 + 2.0**-20, 2.0, 3.0]
    assert [*model.weight.flatten().tolist(), *model.bias.tolist()] == [1.0, 2.0, 3.0]
    optimizer.backward((model.weight.sum() + model.bias.sum()) * 0.5)
    optimizer.step()
    # g = 0.5; m = (0.5 + g) / 2, v = (0.25 + g * g) / 2, p -= lr * m / sqrt(v)
    torch.testing.assert_close(master.tolist(), [1.0 + 2.0**-20 - 0.125, 1.875, 2.875])
    assert optimizer.cur_iter == 8
