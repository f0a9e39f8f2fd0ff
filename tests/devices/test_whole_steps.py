# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps on a GPU: nothing waits, graphs replay them, launches do not add up."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.fused import FUSED, FusedCase, variant_id
from cases.waits import waits_refused
from preamp.optimizers import FusedAdagrad, FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

MASTERS = ("O2", "O5")
LEVELS = ("O1", *MASTERS)
WARM_UP = 3
REPLAYS = 6
OVERFLOW = 2


class Training:
    """A small model, and a batch that later steps write into."""

    def __init__(
        self, level: str, build: Any, storage: str = "full", loss_scale: Any = "dynamic"
    ) -> None:
        torch.manual_seed(0)
        size = 33 if storage == "full" else 256  # of 16 x 256 elements moments may have 8 bits
        self.net = nn.Sequential(
            nn.Linear(16, size), nn.LayerNorm(size), nn.GELU(), nn.Linear(size, 4)
        )
        self.net.cuda()
        self.optimizer = build(self.net.parameters())
        options = {"opt_level": level, "verbosity": 0, "storage": storage}
        preamp.initialize(self.net, self.optimizer, loss_scale=loss_scale, **options)
        self.engine = preamp.engine_of(self.net)
        if loss_scale == "dynamic":
            self.engine.scaler(0).set_scale(64.0)
        self.inputs = torch.zeros(32, 16, device="cuda")
        self.targets = torch.zeros(32, 4, device="cuda")
        self.factor = torch.ones((), device="cuda")

    def load(self, number: int, factor: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(number)
        self.inputs.copy_(torch.randn(32, 16, generator=generator))
        self.targets.copy_(torch.randn(32, 4, generator=generator))
        self.factor.fill_(factor)

    def step(self) -> None:
        loss = nn.functional.mse_loss(self.net(self.inputs).float(), self.targets) * self.factor
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(self.optimizer, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that steps change on the device."""
        masters = list(preamp.master_params(self.optimizer))
        scaler = self.engine.scaler(0)
        found = {f"weight {i}": p for i, p in enumerate(self.net.parameters())}
        exact = map(self.engine.exact_value, self.net.parameters())
        found |= {f"exact {i}": value for i, value in enumerate(exact) if value is not None}
        for i, param in enumerate(masters):
            state = self.optimizer.state[param]
            found |= {f"{key} {i}": v for key, v in state.items() if isinstance(v, torch.Tensor)}
        found["step"] = self.optimizer.param_groups[0]["step"]
        found |= {"scale": scaler.scale, "growth": scaler.growth_tracker}
        return {name: value.detach().clone() for name, value in found.items()}


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    """The current stream of the test; graphs want their warm-up on such a one."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", FUSED, ids=variant_id)
@pytest.mark.parametrize("level", LEVELS)
def test_no_step_waits_for_the_device(level: str, case: FusedCase) -> None:
    assert_no_step_waits(Training(level, lambda p: case.kind(p, **case.needs)))


@pytest.mark.parametrize("storage", ["split", "compact"])
@pytest.mark.parametrize("kind", [FusedAdam, FusedLAMB, FusedSGD, FusedAdagrad, FusedNovoGrad])
@pytest.mark.parametrize("level", MASTERS)
def test_no_step_in_fewer_bits_waits(level: str, kind: Any, storage: str) -> None:
    given: Any = {"momentum": 0.9} if kind is FusedSGD else {}
    training = Training(level, lambda p: kind(p, lr=1e-2, **given), storage)
    assert_no_step_waits(training)
    found = {v.itemsize for state in training.optimizer.state.values() for v in state.values()}
    assert found == ({1, 4} if storage == "compact" else {4})


def assert_no_step_waits(training: Training) -> None:
    """Once a few steps have made state and compiled kernels."""
    for number in range(WARM_UP):
        training.load(number)
        training.step()
    training.load(WARM_UP)
    with waits_refused():
        for _ in range(3):
            training.step()
    assert training.engine.steps_applied == WARM_UP + 3


def capturable(params: Any) -> FusedAdam:
    return FusedAdam(params, lr=1e-2, weight_decay=0.1, capturable=True)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0])
def test_a_graph_replays_what_steps_do(
    level: str, loss_scale: Any, side_stream: torch.cuda.Stream
) -> None:
    """To the bit, with an overflow in one replay; training goes on after the graph."""
    is_dynamic = loss_scale == "dynamic"
    eager, graphed = (Training(level, capturable, loss_scale=loss_scale) for _ in range(2))
    for number in range(WARM_UP):
        for training in (eager, graphed):
            training.load(number)
            training.step()
    graph = torch.cuda.CUDAGraph()
    assert graphed.engine.steps_applied == WARM_UP  # nothing holds the graphs of earlier steps
    with torch.cuda.graph(graph, stream=side_stream):
        graphed.step()
    for number in range(REPLAYS):
        overflows = is_dynamic and number == OVERFLOW
        factor = math.inf if overflows else 1.0
        before = graphed.tensors()
        for training in (eager, graphed):
            training.load(WARM_UP + number, factor)
        eager.step()
        graph.replay()
        wanted, ours = eager.tensors(), graphed.tensors()
        different = [name for name in wanted if not torch.equal(ours[name], wanted[name])]
        assert different == [], number
        changed = {name.split()[0] for name in ours if not torch.equal(ours[name], before[name])}
        assert ("weight" in changed) != overflows
        assert ("scale" in changed) == overflows
    for training in (eager, graphed):
        training.load(100)
        training.step()
    wanted, ours = eager.tensors(), graphed.tensors()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []
    assert eager.engine.steps_skipped == is_dynamic
    assert eager.engine.steps_applied == WARM_UP + REPLAYS + 1 - is_dynamic
    assert graphed.engine.steps_applied == WARM_UP + 1  # replays are not counted


def test_two_graphs_of_one_optimizer(side_stream: torch.cuda.Stream) -> None:
    """Each has tables of its own, which what runs in between leaves alone."""
    eager, graphed = (
        Training("O2", lambda p: FusedAdam(p, lr=1e-2, capturable=True)) for _ in range(2)
    )
    for number in range(WARM_UP):
        for training in (eager, graphed):
            training.load(number)
            training.step()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    side_stream.synchronize()
    for graph in graphs:
        with torch.cuda.graph(graph, stream=side_stream):
            graphed.step()
    for number in range(4):
        for training in (eager, graphed):
            training.load(WARM_UP + number)
        eager.step()
        graphs[number % 2].replay()
    wanted, ours = eager.tensors(), graphed.tensors()
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


def _kernels_of_a_step(level: str, tensors: int) -> list[str]:
    """Names of the kernels that run between the end of a backward and that of the step."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(tensors)).cuda()
    optimizer = FusedAdam(layers.parameters(), lr=1e-2)
    preamp.initialize(layers, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    names: list[str] = []
    for turn in range(3):
        loss = torch.stack([(p.float() ** 2).sum() for p in layers.parameters()]).sum()
        block = preamp.scale_loss(loss, optimizer)
        block.__enter__().backward()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=kinds) as profile:
            block.__exit__(None, None, None)
            preamp.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            torch.cuda.synchronize()
        optimizer.zero_grad()
        if turn:  # by now it is known that steps are clipped
            names = [
                event.name
                for event in profile.events() or ()
                if event.device_type == torch.profiler.DeviceType.CUDA
                and not event.name.lower().startswith(("memcpy", "memset"))
            ]
    preamp.engine_of(layers).close()
    return sorted(names)


@pytest.mark.parametrize("level", LEVELS)
def test_launches_do_not_grow_with_the_tensors(level: str) -> None:
    few, many = _kernels_of_a_step(level, 5), _kernels_of_a_step(level, 60)
    if not few:
        pytest.skip("The profiler sees no kernels here")
    assert len(few) == len(many), (few, many)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
@pytest.mark.parametrize("level", LEVELS)
def test_a_model_away_from_the_current_device(level: str) -> None:
    """And one on two of them; the current device stays the first."""
    results: list[list[torch.Tensor]] = []
    for places in ((0, 0), (1, 1), (0, 1)):
        torch.manual_seed(0)
        first, last = (nn.Linear(8, 8).to(f"cuda:{place}") for place in places)
        model = nn.ModuleList([first, last])
        optimizer = FusedAdam(model.parameters(), lr=1e-2)
        preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
        engine = preamp.engine_of(model)
        engine.scaler(0).set_scale(64.0)
        for turn in range(4):
            hidden = first(torch.ones(2, 8, device=f"cuda:{places[0]}"))
            out = last(hidden.to(f"cuda:{places[1]}")).float()
            loss = (out**2).sum() * (math.inf if turn == 1 else 1.0)
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert (engine.steps_applied, engine.steps_skipped) == (3, 1)
        results.append([p.detach().cpu() for p in preamp.master_params(optimizer)])
        engine.close()
    for other in results[1:]:
        for ours, wanted in zip(other, results[0], strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)
