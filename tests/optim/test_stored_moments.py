# SPDX-License-Identifier: BSD-3-Clause
"""Moments in bfloat16 and in 8 bits: what optimizers keep, save, load and refuse."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.tolerances import assert_same
from kit.refusals import assert_refused
from preamp.kernels.stored import decode, scales_shape
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.fused.moments import SCALES
from preamp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from preamp.policy.storage import FULL, Storage

SHAPES = ((48, 100), (12,), (3, 5), (64, 4, 4, 4))
"""Blocks of a row, a vector, a matrix too small for blocks, and the weight of a convolution."""
STORAGES = {name: Storage(moments=name, seed=3) for name in ("float32", "bfloat16", "8bit")}

Make = Callable[[Any], FusedOptimizer]
MAKE: dict[str, Make] = {
    "adam": lambda params: FusedAdam(params, lr=0.05, weight_decay=0.01),
    "capturable": lambda params: FusedAdam(params, lr=0.05, capturable=True),
    "early": lambda params: FusedAdam(params, lr=0.05, max_grad_norm=1.0),
    "lamb": lambda params: FusedLAMB(params, lr=0.05),
    "sgd": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "adagrad": lambda params: FusedAdagrad(params, lr=0.05),
    "novograd": lambda params: FusedNovoGrad(params, lr=0.05),
}
every_kind = pytest.mark.parametrize("kind", MAKE)
in_fewer_bits = pytest.mark.parametrize("moments", ["bfloat16", "8bit"])


def made(
    kind: str, moments: str, dtype: torch.dtype = torch.float32
) -> tuple[list[nn.Parameter], FusedOptimizer]:
    random = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(shape, generator=random).to(dtype)) for shape in SHAPES]
    params[3].data = params[3].data.contiguous(memory_format=torch.channels_last)
    optimizer = MAKE[kind]([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.storage = STORAGES[moments]
    return params, optimizer


def step(params: list[nn.Parameter], optimizer: FusedOptimizer, number: int) -> None:
    random = torch.Generator().manual_seed(100 + number)
    for param in params:
        param.grad = torch.randn(param.shape, generator=random).to(param.dtype)
    optimizer.step()


def tensors(optimizer: FusedOptimizer) -> list[dict[str, torch.Tensor]]:
    return [
        {key: torch.as_tensor(value) for key, value in state.items()}
        for state in optimizer.state.values()
    ]


def assert_same_state(a: FusedOptimizer, b: FusedOptimizer) -> None:
    for x, y in zip(tensors(a), tensors(b), strict=True):
        assert x.keys() == y.keys()
        for key, value in x.items():
            assert_same(value, y[key], key)


def values(optimizer: FusedOptimizer, place: int) -> dict[str, torch.Tensor]:
    """Moments of a parameter as float32."""
    state, found = list(optimizer.state.values())[place], dict[str, torch.Tensor]()
    for key, kind in optimizer.moments.items():
        is_codes = key + "_scales" in state
        found[key] = decode(state[key], state[key + "_scales"], kind) if is_codes else state[key]
    return {key: value.float() for key, value in found.items()}


# -- a run ---------------------------------------------------------------------------------------


@every_kind
def test_what_is_kept(kind: str) -> None:
    for moments in STORAGES:
        params, optimizer = made(kind, moments)
        step(params, optimizer, 0)
        for place, param in enumerate(params):
            state = optimizer.state[param]
            for key, coded in optimizer.moments.items():
                has_blocks = moments == "8bit" and place in (0, 3)
                plain = torch.bfloat16 if moments == "bfloat16" else torch.float32
                assert state[key].dtype is (coded.dtype if has_blocks else plain)
                assert state[key].shape == param.shape
                assert state[key].stride() == param.stride()
                assert (key + "_scales" in state) is has_blocks
                if has_blocks:
                    assert state[key + "_scales"].shape == scales_shape(param.shape)


@in_fewer_bits
def test_no_two_parameters_round_alike(moments: str) -> None:
    """Chance goes by a parameter's number, over all groups."""
    params = [nn.Parameter(torch.ones(48, 100)) for _ in range(3)]
    optimizer = FusedSGD([{"params": params[:2]}, {"params": params[2:]}], lr=0.05, momentum=0.9)
    optimizer.storage = STORAGES[moments]
    for _ in range(3):  # by the third what is told of lists is kept
        for param in params:
            param.grad = torch.linspace(0.1, 1.0, 4800).view(48, 100)
        optimizer.step()
    found = [optimizer.state[param]["momentum_buffer"] for param in params]
    for a, b in itertools.combinations(found, 2):
        assert 0.1 < (a != b).float().mean() < 0.9


@pytest.mark.parametrize("moments", STORAGES)
def test_parameters_that_are_taken_out_are_let_go(moments: str) -> None:
    params, optimizer = made("adam", moments)
    step(params, optimizer, 0)
    gone = weakref.ref(params[0])
    optimizer.param_groups[0]["params"].pop(0)
    optimizer.state.pop(params.pop(0))
    optimizer.zero_grad()
    step(params, optimizer, 1)
    gc.collect()
    assert gone() is None
    assert optimizer.state.keys() == set(params)


def test_state_that_is_dropped_is_let_go() -> None:
    """Nothing that an update was told stays with what launches the next one."""
    params, optimizer = made("adam", "8bit")
    for number in range(3):
        step(params, optimizer, number)
    entry = optimizer.state[params[0]]
    gone = weakref.ref(entry["exp_avg" + SCALES]), weakref.ref(entry["exp_avg"])
    optimizer.state[params[0]] = {key: value.clone() for key, value in entry.items()}
    del entry
    assert [ref() for ref in gone] == [None, None]


@in_fewer_bits
@pytest.mark.parametrize("kind", ["adam", "capturable"])
def test_a_refused_step_is_not_counted(kind: str, moments: str) -> None:
    params, optimizer = made(kind, moments)
    for number in range(2):
        step(params, optimizer, number)
    optimizer.state[params[0]]["exp_avg"] = torch.zeros(SHAPES[0])
    before = int(optimizer.param_groups[0]["step"])
    with pytest.raises(preamp.PreampStateError):
        step(params, optimizer, 2)
    assert int(optimizer.param_groups[0]["step"]) == before == 2


@in_fewer_bits
def test_own_masters_of_half_parameters(moments: str) -> None:
    """Of ``master_weights=True``: the run is that of their float32 copies, and resumes bitwise."""
    runs: list[tuple[list[nn.Parameter], FusedOptimizer]] = []
    for _ in range(2):
        params, _ = made("adam", moments, torch.bfloat16)
        optimizer = FusedAdam(params, lr=0.05, capturable=True, master_weights=True)
        optimizer.storage = STORAGES[moments]
        runs.append((params, optimizer))
    wide = [nn.Parameter(param.detach().float()) for param in runs[0][0]]
    plain = FusedAdam(wide, lr=0.05, capturable=True)
    plain.storage = STORAGES[moments]
    for number in range(2):
        step(*runs[0], number)
        for param, own in zip(runs[0][0], wide, strict=True):
            own.grad = None if param.grad is None else param.grad.float()
        plain.step()
    runs[1][1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
    for param, own, value in zip(*[run[0] for run in runs], wide, strict=True):
        assert_same(param.detach(), value.detach().bfloat16())
        own.data.copy_(param.detach())
    for run in runs:
        step(*run, 2)
    assert_same_state(runs[0][1], runs[1][1])


# -- from one storage to another -----------------------------------------------------------------


@every_kind
@in_fewer_bits
def test_moments_in_fewer_bits_load_as_the_values_that_they_stand_for(
    kind: str, moments: str
) -> None:
    params, saved = made(kind, moments)
    for number in range(2):
        step(params, saved, number)
    state = copy.deepcopy(saved.state_dict())
    again, loaded = made(kind, "float32")
    loaded.load_state_dict(copy.deepcopy(state))
    for place in range(len(SHAPES)):
        for key, exact in values(saved, place).items():
            assert_same(values(loaded, place)[key], exact, key)
    # And changed between steps, they become the same.
    saved.storage = STORAGES["float32"]
    step(params, saved, 2)
    for param, value in zip(again, params, strict=True):
        param.data.copy_(value.detach())
    step(again, loaded, 2)
    assert_same_state(saved, loaded)


@pytest.mark.parametrize(
    ("source", "target"),
    [("float32", "bfloat16"), ("float32", "8bit"), ("bfloat16", "8bit"), ("8bit", "bfloat16")],
)
def test_moments_that_would_be_rounded_once_more_are_refused(source: str, target: str) -> None:
    params, saved = made("adam", source)
    step(params, saved, 0)
    others, optimizer = made("adam", target)
    step(others, optimizer, 1)
    load = partial(optimizer.load_state_dict, copy.deepcopy(saved.state_dict()))
    words = {"8bit": "8 bits"}
    said = {"source": words.get(source, source), "target": words.get(target, target)}
    assert_refused("optim", "moments of another storage", load, optimizer, **said)
    saved.storage = STORAGES[target]
    assert_refused("optim", "moments of another storage", saved.step, saved, **said)


def test_copies_and_pickles_keep_storage_and_state() -> None:
    params, optimizer = made("adam", "8bit")
    step(params, optimizer, 0)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert copied.storage == STORAGES["8bit"]
        assert_same_state(copied, optimizer)
    old = optimizer.__getstate__()
    del old["storage"]  # as of a file from before there were storages
    optimizer.__setstate__(old)
    assert FusedAdam([nn.Parameter(torch.zeros(1))]).storage is FULL


# -- what is refused -----------------------------------------------------------------------------


def put(key: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    """What replaces an item of a state by what ``change`` makes of it."""

    def forge(state: dict[str, Any]) -> None:
        state[key] = change(state[key])

    return forge


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no scales": lambda state: state.pop("exp_avg_scales"),
    "scales alone": lambda state: state.pop("exp_avg"),
    "a row of scales too few": put("exp_avg_scales", lambda scales: scales[:-1]),
    "flat scales": put("exp_avg_scales", lambda scales: scales.flatten()),
    "float64 scales": put("exp_avg_scales", lambda scales: scales.double()),
    "scales that are no tensor": put("exp_avg_scales", lambda scales: scales.tolist()),
    "scales below zero": put("exp_avg_scales", lambda scales: -scales),
    "scales that are no powers of two": put("exp_avg_scales", lambda scales: scales * 3),
    "flat codes": put("exp_avg", lambda codes: codes.flatten()),
    "codes of 16 bits": put("exp_avg", lambda codes: codes.short()),
    "codes of the other kind": put("exp_avg_sq", lambda codes: codes.view(torch.int8)),
    "float32 beside scales": put("exp_avg", lambda codes: codes.float()),
    "a moment that is no tensor": put("exp_avg", lambda codes: codes.tolist()),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_state_that_does_not_fit_changes_nothing(forged: str) -> None:
    params, saved = made("adam", "8bit")
    step(params, saved, 0)
    state = copy.deepcopy(saved.state_dict())
    FORGED[forged](state["state"][0])
    others, optimizer = made("adam", "8bit")
    step(others, optimizer, 1)
    assert_refused("optim", forged, lambda: optimizer.load_state_dict(state), optimizer)
