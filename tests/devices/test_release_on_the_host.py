# SPDX-License-Identifier: BSD-3-Clause
"""Gradients released where masters and moments lie on the host: they wait there for their step.

That they train as the device does is in ``test_host_storage.py``.
"""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack  # pyright: ignore

import preamp
from devices.host_runs import Kept, Run, assert_same, every_level, ids, overflowing, with_masters
from preamp.core.away import values_of
from preamp.core.errors import PreampStateError
from preamp.numerics import NumericsRecord, OverflowRecord
from preamp.optimizers import FusedAdam, FusedLion

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("small_runs"),
]


def away(run: Run) -> list[bool]:
    """Which gradients take no memory where they are."""
    grads = [param.grad for param in run.net.parameters()]
    return [grad is not None and grad.untyped_storage().nbytes() <= 4 for grad in grads]


def on_device() -> int:
    """Bytes of all tensors that are there now."""
    gc.collect()
    return torch.cuda.memory_allocated()


# -- bytes ---------------------------------------------------------------------------------------


@every_level
def test_nothing_of_a_gradient_is_left(kept: Kept) -> None:
    """Neither after a backward, nor within the accumulation of several."""
    before = on_device()
    run = Run("released", kept)
    run.steps(2)
    weights = sum(t.nbytes for t in (*run.net.parameters(), *run.net.buffers()))
    for _ in range(2):
        for _ in range(3):
            run.backward()
            assert away(run) == [True] * 6
            counted = preamp.count_memory(run.engine)
            assert counted["gradients"] == counted["optimizer state"] == 0
            assert counted["gradients on the host"] > 0
            assert 0 <= on_device() - before - weights < 400  # single numbers
        run.end()


def values_on_host(run: Run) -> list[torch.Tensor]:
    return [values_of(param.grad) for param in run.net.parameters()]


def places_on_host(run: Run) -> list[int]:
    return [values.data_ptr() for values in values_on_host(run)]


@every_level
def test_memory_on_the_host_stays_from_step_to_step(kept: Kept) -> None:
    run = Run("released", kept)
    places: list[list[int]] = []
    counts: list[int] = []
    for _ in range(4):
        run.backward()
        places.append(places_on_host(run))
        run.end()
        counts.append(preamp.count_memory(run.engine)["gradients on the host"])
    assert places == [places[0]] * 4
    assert counts == [sum(param.nbytes for param in run.net.parameters())] * 4
    run.engine.close()
    assert "gradients on the host" not in preamp.count_memory(run.engine)


@every_level
def test_gradients_that_somebody_holds_stay_as_they_are(kept: Kept) -> None:
    """The next ones get other memory, which is kept from then on."""
    run = Run("released", kept)
    run.steps(1)
    run.backward()
    held = [param.grad for param in run.net.parameters()]
    before = [values.clone() for values in values_on_host(run)]
    run.end()
    run.backward()
    places = places_on_host(run)
    run.end()
    pairs = zip(map(values_of, held), before, strict=True)
    assert [torch.equal(now, then) for now, then in pairs] == [True] * 6
    run.backward()
    assert places_on_host(run) == places


def test_gradients_go_one_after_the_other() -> None:
    """There are that at hand and two on their way at most, in an accumulation too."""
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
    assert len(seen) == 2 * 6
    assert 2 * 2 * 128 * 128 < max(seen) <= 3 * 2 * 128 * 128


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
    assert found.gradients == 0
    assert found.gradients_on_host == halves + 4 * 2 * 128
    assert found.on_device == halves + found.buffers + found.scaler + 4 * 2 * 128


# -- checkpoints, copies, the end ----------------------------------------------------------------


@every_level
def test_a_checkpoint_is_written_while_gradients_come_anew(kept: Kept, tmp_path: Path) -> None:
    first, second = Run("released", kept), Run("released", kept)
    for run in (first, second):
        run.steps()
    saving = preamp.save_checkpoint(tmp_path / "run", first.net, first.optimizer, asynchronous=True)
    first.steps(2)
    saving.wait()
    preamp.load_checkpoint(tmp_path / "run", first.net, first.optimizer, rng=False)
    assert_same(first, second)


@with_masters
def test_close_gives_all_back(kept: Kept) -> None:
    run = Run("released", kept)
    run.steps()
    exact = [value.detach().cpu().clone() for value in run.values()]
    run.engine.close()
    params = list(run.net.parameters())
    assert {(p.device.type, p.dtype) for p in params} == {("cuda", torch.float32)}
    assert [torch.equal(p.cpu(), e) for p, e in zip(params, exact, strict=True)] == [True] * 6
    run.net(torch.ones(2, 16).cuda()).sum().backward()
    assert away(run) == [False] * 6
    run.end()


class Layer(nn.Module):
    """A linear layer of frozen weights, and beside it one of low rank that is trained."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, width).requires_grad_(requires_grad=False)
        self.down = nn.Linear(width, 4, bias=False)
        self.up = nn.Linear(4, width, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        return x + nn.functional.gelu(self.frozen(normed) + self.up(self.down(normed)))


class Language(nn.Module):
    """Layers that are computed again in the backward, between tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.tokens.weight
        self.layers = nn.ModuleList(Layer(32) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class FineTuning:
    """Two optimizers that accumulate and clip."""

    def __init__(self, place: Any, level: str) -> None:
        torch.manual_seed(0)
        self.net, self.number = Language().cuda(), 0
        small = [p for p in self.net.layers.parameters() if p.requires_grad]
        self.optimizers = [FusedLion(small, lr=1e-3), FusedLion([self.net.tokens.weight], lr=1e-4)]
        storage = preamp.Storage(masters="split", place=place, release_gradients=place == "host")
        options: dict[str, Any] = {"storage": storage, "backend": "reference", "verbosity": 0}
        preamp.initialize(self.net, self.optimizers, opt_level=level, **options)

    def backward(self) -> None:
        generator = torch.Generator().manual_seed(self.number)
        self.number += 1
        tokens = torch.randint(64, (4, 9), generator=generator).cuda()
        logits = self.net(tokens[:, :-1]).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
        with preamp.scale_loss(loss, self.optimizers) as scaled:
            scaled.backward()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.backward()
            self.backward()
            self.end()

    def end(self) -> None:
        preamp.clip_grad_norm_(self.net.parameters(), 0.5)
        for optimizer in self.optimizers:
            optimizer.step()
        self.net.zero_grad()

    def everything(self) -> list[torch.Tensor]:
        exact = map(preamp.engine_of(self.net).exact_value, self.net.parameters())
        values = [value for value in exact if value is not None]
        return [tensor.detach().cpu() for tensor in (*self.net.parameters(), *values)]


@pytest.mark.parametrize("way", [("host", "device"), ("device", "host")], ids=ids)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_language_model_is_fine_tuned(level: str, way: tuple[str, str], tmp_path: Path) -> None:
    """A checkpoint goes on at the other place."""
    first, second = (FineTuning(place, level) for place in way)
    first.steps(3)
    preamp.save_checkpoint(tmp_path / "run", first.net, first.optimizers)
    preamp.load_checkpoint(tmp_path / "run", second.net, second.optimizers, rng=False)
    second.number = first.number
    for run in (first, second):
        run.steps(2)
    weights = 1 + 3 * 6  # the tied one, and of each layer two frozen and four trained ones
    trained = 1 + 3 * 4
    pairs = list(zip(first.everything(), second.everything(), strict=True))
    assert len(pairs) == weights + trained
    assert all(torch.equal(a, b) for a, b in pairs)


# -- trouble -------------------------------------------------------------------------------------


@with_masters
def test_gradients_come_back_at_the_end(kept: Kept) -> None:
    device, host = Run("device", kept), Run("released", kept)
    grads: list[list[torch.Tensor]] = []
    for run in (device, host):
        run.steps()
        run.backward()
        run.engine.close()
        grads.append([param.grad.cpu() for param in run.net.parameters() if param.grad is not None])
    assert len(grads[0]) == 6
    assert [torch.equal(a, b) for a, b in zip(*grads, strict=True)] == [True] * 6


def test_a_dropped_engine_sends_nothing_away() -> None:
    run = Run("released", ("O4", "full"))
    run.steps()
    weight, engine = next(run.net.parameters()), weakref.ref(run.engine)
    del run
    gc.collect()
    assert engine() is None
    (weight * 2.0).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((256, 16), 2.0))  # pyright: ignore


def _write_part(grad: torch.Tensor) -> None:
    grad[0] = 0.0


def _set_data(grad: Any) -> None:
    grad.data = torch.ones(grad.shape, dtype=grad.dtype).cuda()


LOOKS: dict[str, Callable[[Any], Any]] = {
    "array": lambda grad: grad.numpy(),
    "as_subclass": lambda grad: grad.as_subclass(torch.Tensor),
    "as_tensor": lambda grad: torch.as_tensor(grad, dtype=torch.float64),
    "autograd": lambda grad: torch.func.grad(torch.sum)(grad),
    "clip": lambda grad: torch.nn.utils.clip_grad_norm_([nn.Parameter(grad)], 1.0),
    "copy": lambda grad: torch.empty(grad.shape, device="cuda").copy_(grad),
    "data": lambda grad: grad.data,
    "deepcopy": copy.deepcopy,
    "detach": lambda grad: grad.detach(),
    "dlpack": torch.from_dlpack,
    "foreach": lambda grad: torch._foreach_mul_([grad], 2.0),  # pyright: ignore
    "into it": lambda grad: torch.mul(torch.ones(grad.shape).cuda(), 2.0, out=grad),
    "item": lambda grad: grad.sum(),
    "items": list,
    "masked": lambda grad: grad.masked_fill_(grad == 0, 1.0),
    "new_tensor": lambda grad: grad.new_tensor(grad),
    "new_tensor of another": lambda grad: torch.ones(1).cuda().new_tensor(grad),
    "norm": torch.linalg.vector_norm,
    "part": _write_part,
    "pickle": pickle.dumps,
    "plus": lambda grad: grad + 1.0,
    "row": lambda grad: grad[0].zero_(),
    "scaled": lambda grad: grad.mul_(2.0),
    "set_": lambda grad: grad.set_(torch.ones(grad.shape, dtype=grad.dtype).cuda()),
    "set_ of another": lambda grad: torch.ones(1, dtype=grad.dtype).cuda().set_(grad),  # pyright: ignore
    "set data": _set_data,
    "tensor": torch.tensor,
    "to host": lambda grad: grad.cpu(),
    "to list": lambda grad: grad.tolist(),
    "turned": lambda grad: grad.T,
    "vmap": lambda grad: torch.vmap(torch.neg)(grad),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("way", LOOKS)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_script_that_reads_or_writes_there_is_told(way: str, level: str) -> None:
    """What is left on the device is no number. Nothing changes by that."""
    run, other = (Run(place, (level, "full")) for place in ("released", "device"))
    for one in (run, other):
        one.steps()
        one.backward()
    for param in run.net.parameters():  # the last one has one dimension
        with pytest.raises(PreampStateError, match=r"gradient that waits on the host.*Change g"):
            LOOKS[way](param.grad)  # pyright: ignore[reportArgumentType]
    assert "that waits on the host" in repr(next(run.net.parameters()).grad)
    for one in (run, other):
        one.end()
    assert_same(run, other)


def test_no_pointer_is_told() -> None:
    run = Run("released", ("O5", "full"))
    run.backward()
    for param in run.net.parameters():
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            to_dlpack(param.grad)  # pyright: ignore


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_script_may_add_to_them(level: str) -> None:
    """As autograd does, which nobody can tell from it."""
    run, other = (Run(place, (level, "full")) for place in ("released", "device"))
    for one in (run, other):
        one.steps()
        one.backward()
        for param in one.net.parameters():
            assert param.grad is not None
            param.grad.add_(torch.full(param.shape, 0.25, dtype=param.dtype).cuda())
        one.end()
    assert_same(run, other)


def test_torch_clips_none_of_them() -> None:
    run = Run("released", ("O5", "full"))
    run.backward()
    with pytest.raises(PreampStateError, match="waits on the host"):
        torch.nn.utils.clip_grad_norm_(run.net.parameters(), 1.0)


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_a_backward_that_fails_leaves_no_copy_behind(level: str) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("from a hook")

    runs = [Run(place, (level, "full")) for place in ("device", "released")]
    for run in runs:
        run.steps(1)
        handle = next(run.net.parameters()).register_hook(fail)  # the last one that is made
        with pytest.raises(ValueError, match="from a hook"):
            run.backward()
        handle.remove()
        run.optimizer.zero_grad()
        run.steps(2)
    assert_same(*runs)


def test_a_half_model_is_all_that_the_card_holds() -> None:
    net = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    net = net.to(torch.bfloat16).cuda()
    weights, around = 2 * sum(p.numel() for p in net.parameters()), 2**18
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() - weights
    optimizer = FusedAdam(net.parameters())
    storage = preamp.Storage(masters="split", place="host", release_gradients=True)
    options: dict[str, Any] = {"opt_level": "O5", "storage": storage, "verbosity": 0}
    preamp.initialize(net, optimizer, allow_half_model=True, **options)
    assert torch.cuda.max_memory_allocated() - held < weights + around
    for _ in range(2):
        inputs = torch.ones(4, 256, dtype=torch.bfloat16).cuda()
        with preamp.scale_loss(net(inputs).float().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Beside weights and activations there were the gradient at hand and two on their way.
    assert torch.cuda.max_memory_allocated() - held < weights + 3 * weights // 8 + around


class Shapes(nn.Module):
    """Parameters of no dimension, of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate + self.shift + self.none.sum()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_parameters_of_any_shape(level: str) -> None:
    nets: list[nn.Module] = []
    for place in ("device", "host"):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), Shapes()).cuda()
        optimizer = FusedLion(net.parameters(), lr=1e-2)
        storage = preamp.Storage(place=place, release_gradients=place == "host")  # pyright: ignore
        preamp.initialize(
            net, optimizer, opt_level=level, storage=storage, backend="reference", verbosity=0
        )
        for _ in range(3):
            with preamp.scale_loss(net(torch.ones(4, 8).cuda()).float().mean(), optimizer) as loss:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    pairs = list(zip(*(net.parameters() for net in nets), strict=True))
    assert [torch.equal(a, b) for a, b in pairs] == [True] * 5


def test_gradients_go_again_after_others_were_asked_for() -> None:
    run = Run("released", ("O5", "full"))
    run.steps()
    with preamp.scale_loss(run.loss(), run.optimizer) as scaled:
        scaled.backward()
        torch.autograd.grad(run.loss(), list(run.net.parameters()))
    assert all(away(run))


@pytest.mark.parametrize("numerics", ["light", "full"])
@every_level
def test_statistics_are_those_of_the_device(kept: Kept, numerics: str) -> None:
    """Of gradients and weights, of weights that a step left unchanged, of a skipped step."""
    options: Any = {"numerics": numerics, "numerics_every": 1}
    runs = [Run(place, kept, **options) for place in ("device", "released")]
    for run in runs:
        overflowing(run)
        with preamp.scale_loss(run.loss(), run.optimizer, delay_unscale=True) as scaled:
            scaled.backward()
        run.backward()
        run.end()
        run.loss().backward()  # outside of a block
        run.end()
    records = [[*run.engine.history.of(NumericsRecord)] for run in runs]
    device, host = ([tensor for record in own for tensor in record.tensors] for own in records)
    assert [record.step for record in records[0]] == [1, 2, 3, 4, 5, 6, 7]
    assert len(device) == 7 * 6 * (2 if numerics == "full" else 1)
    assert [one.rms for one in host] == pytest.approx([one.rms for one in device], rel=1e-5)
    assert [replace(one, rms=0) for one in host] == [replace(one, rms=0) for one in device]
    assert_same(*runs)


@every_level
def test_an_overflow_is_traced_as_on_the_device(kept: Kept) -> None:
    found: list[list[OverflowRecord]] = []
    runs = [Run(place, kept, overflow="trace") for place in ("device", "released")]
    for run in runs:
        run.steps(2)
        run.backward(float("inf"))
        run.end()
        found.append([cause.to_record() for cause in run.engine.overflow_causes])
    assert repr(found[0]) == repr(found[1])  # nan is unlike itself
    assert [record.trace is not None for record in found[0]] == [True]
