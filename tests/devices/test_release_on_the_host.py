# SPDX-License-Identifier: BSD-3-Clause
"""Gradients released where masters and moments lie on the host: updated there as they are made.

Runs take the same back end. The pretended device brings copies late, over garbage, so a value that
was read too early shows. Runs of few bytes make several of a model's few tensors.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVELS
from preamp.core.errors import PreampStateError, PreampUnavailableError
from preamp.engine import release
from preamp.kernels import staged
from preamp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedADOPT,
    FusedLion,
    FusedNovoGrad,
    FusedSGD,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

STORAGES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"masters": "split"},
    "compact": {"masters": "split", "moments": "8bit"},
}
SCALES: dict[str, Any] = {case.name: 128.0 if case.is_dynamic else None for case in LEVELS}
WITH_MASTERS = [*itertools.product(("O2", "O5"), STORAGES)]
EVERY = [*WITH_MASTERS, *[(level, "full") for level in SCALES if level not in ("O2", "O5")]]
KINDS: dict[str, Callable[..., Any]] = {
    kind.__name__: kind for kind in (FusedAdam, FusedADOPT, FusedAdagrad, FusedLion, FusedNovoGrad)
}
KINDS |= {"FusedSGD": lambda params, lr: FusedSGD(params, lr=lr, momentum=0.9)}
Kept = tuple[str, str]  # a level and a storage


def ids(given: Any) -> str:
    return "-".join(given) if isinstance(given, tuple) else str(given)


with_masters = pytest.mark.parametrize("kept", WITH_MASTERS, ids=ids)


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a few tensors be several runs, and does not let all wait for the end of the block."""
    monkeypatch.setattr(staged, "RUN", 4096)
    monkeypatch.setattr(release, "TOGETHER", 1024)


class Run:
    """A training of a small model whose gradients are released."""

    def __init__(
        self, place: str, kept: Kept, kind: str = "FusedAdam", *, releases: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 4)
        ).cuda()
        self.optimizer = KINDS[kind](self.net.parameters(), lr=1e-2)
        level, storage = kept
        keeps: Any = {"place": place, "release_gradients": releases, **STORAGES[storage]}
        preamp.initialize(
            self.net,
            self.optimizer,
            opt_level=level,
            storage=preamp.Storage(**keeps),
            backend="reference",
            verbosity=0,
            loss_scale=SCALES[level],
        )
        self.engine = preamp.engine_of(self.net)
        self.number = 0

    def loss(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        inputs = torch.randn(32, 16, generator=generator).cuda()
        targets = torch.randn(32, 4, generator=generator).cuda()
        return nn.functional.mse_loss(self.net(inputs).float(), targets)

    def backward(self) -> None:
        with preamp.scale_loss(self.loss(), self.optimizer) as scaled:
            scaled.backward()

    def end(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, count: int = 3) -> None:
        for _ in range(count):
            self.backward()
            self.end()

    def state(self) -> list[torch.Tensor]:
        entries = [self.optimizer.state[p] for p in preamp.master_params(self.optimizer)]
        values = [value for entry in entries for value in entry.values()]
        return [value for value in values if isinstance(value, torch.Tensor)]

    def everything(self) -> list[torch.Tensor]:
        """On the CPU: weights, buffers, masters, state and the number of the update."""
        found = [*self.net.parameters(), *self.net.buffers()]
        found += [*preamp.master_params(self.optimizer), *self.state()]
        number = float(self.optimizer.param_groups[0].get("step", 0))
        return [t.detach().cpu().clone() for t in found] + [torch.tensor([number])]


def assert_same(some: Run, other: Run) -> None:
    pairs = zip(some.everything(), other.everything(), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [True] * len(some.everything())


def on_device() -> int:
    """Bytes of all tensors that are there now."""
    gc.collect()
    return torch.cuda.memory_allocated()


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", EVERY, ids=ids)
def test_the_host_trains_as_the_device(kept: Kept, kind: str) -> None:
    """With gradients released there and without: three trainings of the same numbers."""
    whole = Run("device", kept, kind, releases=False)
    device, host = Run("device", kept, kind), Run("host", kept, kind)
    for run in (whole, device, host):
        run.steps(4)
    assert_same(whole, device)
    assert_same(device, host)
    assert {tensor.device.type for tensor in host.state()} == {"cpu"}
    assert {p.device.type for p in host.net.parameters()} == {"cuda"}


def test_weights_are_new_after_the_backward() -> None:
    host, device = Run("host", ("O5", "split")), Run("device", ("O5", "split"))
    for run in (host, device):
        run.steps()
        run.backward()
    assert_same(host, device)
    assert host.optimizer.param_groups[0]["step"] == 3


# -- bytes ---------------------------------------------------------------------------------------


@with_masters
def test_nothing_of_a_gradient_is_left(kept: Kept) -> None:
    before = on_device()
    run = Run("host", kept)
    run.steps(2)
    weights = sum(t.nbytes for t in (*run.net.parameters(), *run.net.buffers()))
    for _ in range(2):
        run.backward()
        assert [param.grad for param in run.net.parameters()] == [None] * 6
        counted = preamp.count_memory(run.engine)
        assert counted["gradients"] == counted["masters"] == counted["optimizer state"] == 0
        assert 0 <= on_device() - before - weights < 200  # the loss, the loss scale, a few factors
        run.end()


def test_gradients_go_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never are two of the largest there."""
    monkeypatch.setattr(release, "TOGETHER", 1)
    net = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)]).cuda()
    optimizer = FusedLion(net.parameters())
    storage = preamp.Storage(masters="split", place="host", release_gradients=True)
    preamp.initialize(net, optimizer, opt_level="O5", storage=storage, verbosity=0)
    inputs, seen, start = torch.ones(2, 128, device="cuda"), list[int](), list[int]()
    for param in net.parameters():
        param.register_hook(lambda grad: seen.append(on_device() - start[-1]))
    for _ in range(2):
        with preamp.scale_loss(net(inputs).float().mean(), optimizer) as scaled:
            start.append(on_device())
            scaled.backward()
        optimizer.step()
    assert len(seen) == 2 * 6
    assert max(seen) < 2 * 2 * 128 * 128


@pytest.mark.parametrize("moments", ["float32", "8bit"])
@pytest.mark.parametrize("masters", ["float32", "split"])
def test_both_places_are_counted_as_estimated(masters: Any, moments: Any) -> None:
    storage = preamp.Storage(masters=masters, moments=moments, place="host", release_gradients=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 64)).cuda()
    found = preamp.estimate(model, preamp.OPT_LEVELS["O5"].replace(storage=storage), "FusedAdam")
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O5", storage=storage, verbosity=0)
    engine, counted = preamp.engine_of(model), dict[str, int]()
    for _ in range(2):
        loss = model(torch.ones(4, 64, device="cuda")).float().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        counted = preamp.count_memory(engine)
        optimizer.step()
    assert counted == found.categories
    halves = 2 * (2 * 64 * 128 + 128 + 64)
    assert found.on_device == halves + found.buffers + found.scaler + 4 * 2 * 128


# -- checkpoints, copies, the end ----------------------------------------------------------------


@pytest.mark.parametrize("way", [("host", "device"), ("device", "host"), ("host", "host")], ids=ids)
@with_masters
def test_a_checkpoint_goes_on_at_either_place(
    kept: Kept, way: tuple[str, str], tmp_path: Path
) -> None:
    """Between a backward and its step, too."""
    first, second = Run(way[0], kept), Run(way[1], kept)
    first.steps()
    first.backward()
    preamp.save_checkpoint(tmp_path / "run", first.net, first.optimizer)
    second.steps(1)
    preamp.load_checkpoint(tmp_path / "run", second.net, second.optimizer, rng=False)
    second.number = first.number
    for run in (first, second):
        run.end()
        run.steps()
    assert_same(first, second)
    assert {t.device.type for t in second.state()} == {"cpu" if way[1] == "host" else "cuda"}


@with_masters
def test_close_gives_all_back(kept: Kept) -> None:
    run = Run("host", kept)
    run.steps()
    exact = [master.detach().cpu().clone() for master in preamp.master_params(run.optimizer)]
    copied = copy.deepcopy(run.net)
    run.engine.close()
    for net in (run.net, copied):
        params = list(net.parameters())
        assert {(p.device.type, p.dtype) for p in params} == {("cuda", torch.float32)}
        assert [torch.equal(p.cpu(), e) for p, e in zip(params, exact, strict=True)] == [True] * 6
        net(torch.ones(2, 16).cuda()).sum().backward()
        assert all(param.grad is not None for param in params)
    run.end()


# -- trouble -------------------------------------------------------------------------------------


@with_masters
def test_a_body_that_raises(kept: Kept) -> None:
    host, device = Run("host", kept), Run("device", kept)
    for run in (host, device):
        run.steps(2)
        with suppress(KeyError), preamp.scale_loss(run.loss(), run.optimizer) as scaled:
            scaled.backward()
            raise KeyError
        run.steps(2)
    assert_same(host, device)


_empty = torch.empty


def without_pinned_memory(*sizes: Any, **options: Any) -> torch.Tensor:
    if options.get("pin_memory"):
        raise RuntimeError("out of memory")
    return _empty(*sizes, **options)


@with_masters
def test_without_pinned_memory_no_parameter_is_half_updated(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("host", kept)
    run.steps()
    before = run.everything()[: len(list(run.net.parameters()))]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", without_pinned_memory)
        with pytest.raises(PreampUnavailableError, match="bytes of pinned memory"):
            run.backward()
    now = run.everything()[: len(before)]
    assert [torch.equal(a, b) for a, b in zip(now, before, strict=True)] == [True] * len(before)
    assert run.optimizer.param_groups[0]["step"] == 3
    run.steps()


def test_explain_says_where_things_are() -> None:
    text = Run("host", ("O5", "split")).engine.explain()
    assert "a host synchronisation for each update in a backward" in text
    assert "storage: masters and moments lie on the host, which makes the update" in text
    assert "storage: each gradient is applied as soon as it is made, and then dropped" in text


def test_what_needs_gradients_of_a_step_is_refused() -> None:
    run = Run("host", ("O5", "full"))
    run.steps()
    with pytest.raises(PreampStateError, match="clip_grad_norm_ was called"):
        preamp.clip_grad_norm_(run.optimizer, 1.0)
    run.backward()
    with pytest.raises(PreampStateError, match=r"no optimizer\.step\(\) has ended"):
        run.backward()
    run.end()
    run.steps(1)
