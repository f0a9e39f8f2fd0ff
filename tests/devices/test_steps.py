# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps on a GPU: nothing waits, results are the CPU's, graphs replay them.

Masters, skipped steps and closes there are in `test_programs_on_a_device`.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.fused import FUSED
from cases.levels import WITH_MASTERS
from cases.waits import waits_refused
from devices.host_runs import Apart
from kit import run as kit
from kit.run import act, build
from preamp.optimizers import FusedAdam, FusedSGD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

LEVELS = ("O1", "O2", "O4", "O5")
WARM_UP, STEPS = 3, 6
OVERFLOW = WARM_UP + 1  # in the steps that must not wait
BATCHES = WARM_UP + STEPS + 1
KINDS = tuple(dict.fromkeys(case.name for case in FUSED))
LOOPS = {
    "plain": "backward; step",
    "clipped": "backward; clip .5; step",
    "accumulated": "backward; backward; clip .5; step",
    "delayed": "backward 0 delay; backward; step",
    "by_grad_scaler": "scaled; clip .5; step_by_scaler",
}
UNSCALED = "scaled; unscale; clip_plainly; step_by_scaler"


class Training(kit.Run):
    """A small model whose batches are on its device already; `load` puts one where steps read."""

    def __init__(
        self,
        level: str,
        kind: str = "FusedAdam",
        storage: str = "full",
        loss_scale: Any = "dynamic",
        device: str = "cuda",
        **given: Any,
    ) -> None:
        size = 256 if storage == "compact" else 33  # of 16 x 256 elements moments may have 8 bits

        def net() -> nn.Module:
            layers = nn.Linear(16, size), nn.LayerNorm(size), nn.GELU(), nn.Linear(size, 4)
            return nn.Sequential(*layers).to(device)

        super().__init__(level, kind, net, starts=False, storage=storage, loss_scale=loss_scale)
        if "eps" in self.optimizer.defaults:
            given["eps"] = 1e-3  # beside which gradients of almost nothing count little
        self.optimizers = [build(kind, self.model.parameters(), **given)]
        (self.optimizer,) = self.optimizers
        self.initialize()
        self.is_dynamic = self.engine.policy.is_dynamic
        if self.is_dynamic:
            self.engine.scaler(0).set_scale(64.0)
        self.scaler: Any = preamp.GradScaler(self.optimizer)
        factors = torch.ones(BATCHES)
        factors[OVERFLOW] = torch.inf if self.is_dynamic else 1.0
        every = torch.randn(BATCHES, 32, 16), torch.randn(BATCHES, 32, 4), factors
        self.batches = [column.to(device) for column in every]
        self.batch = [column[0].clone() for column in self.batches]

    def load(self, number: int) -> None:
        for place, every in zip(self.batch, self.batches, strict=True):
            place.copy_(every[number])

    def loss(self, index: int = 0) -> torch.Tensor:
        inputs, target, factor = self.batch
        return nn.functional.mse_loss(self.model(inputs).float(), target) * factor

    @act
    def scaled(self) -> None:
        self.scaler.scale(self.loss()).backward()

    @act
    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizer)

    @act
    def clip_plainly(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)

    @act
    def step_by_scaler(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, loop: str, first: int = 0, end: int = BATCHES, *, waits: bool = True) -> Any:
        """Steps of one loop; ``waits=False`` lets CUDA raise where the host waits, once warm."""
        for number in range(first, end):
            with nullcontext() if waits or number < WARM_UP else waits_refused():
                self.load(number)
                self.play(loop, "zero")
        return self

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that steps change on the device."""
        masters = list(preamp.master_params(self.optimizer))
        scaler = self.engine.scaler(0)
        found = {f"weight {i}": p for i, p in enumerate(self.model.parameters())}
        exact = map(self.engine.exact_value, self.model.parameters())
        found |= {f"exact {i}": value for i, value in enumerate(exact) if value is not None}
        for i, param in enumerate(masters):
            state = self.optimizer.state[param]
            found |= {f"{key} {i}": v for key, v in state.items() if isinstance(v, torch.Tensor)}
        found["step"] = self.optimizer.param_groups[0]["step"]
        found |= {"scale": scaler.scale, "growth": scaler.growth_tracker}
        return {name: value.detach().clone() for name, value in found.items()}

    def values(self) -> list[torch.Tensor]:
        """Weights, exactly, and the loss scale."""
        (engine := self.engine).close()
        scale = torch.tensor(engine.loss_scale())
        return [*(param.detach().cpu() for param in self.model.parameters()), scale]


def assert_as_on_the_cpu(loop: str, *what: Any, waits: bool = False) -> None:
    """Train on the device and on the CPU by ``what`` `Training` takes, and compare."""
    run = Training(*what).train(loop, waits=waits)
    other = Training(*what, device="cpu").train(loop)
    assert {scaler.device.type for scaler in run.engine.scalers} == {"cuda"}
    assert run.engine.steps_applied == other.engine.steps_applied
    assert run.engine.steps_skipped == other.engine.steps_skipped == int(run.is_dynamic)
    for ours, wanted in zip(run.values(), other.values(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("kind", ["FusedAdam", "FusedLAMB", "FusedSGD", "AdamW fused"])
@pytest.mark.parametrize("level", LEVELS)
def test_no_loop_waits(level: str, kind: str, loop: str) -> None:
    assert_as_on_the_cpu(LOOPS[loop], level, kind)


@pytest.mark.parametrize("loop", ["clipped", "accumulated"])
@pytest.mark.parametrize("storage", ["split", "compact"])
@pytest.mark.parametrize("kind", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_no_storage_waits(level: str, kind: str, storage: str, loop: str) -> None:
    assert_as_on_the_cpu(LOOPS[loop], level, kind, storage)


@pytest.mark.parametrize("storage", ["full", "split", "compact"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", ["O1", *WITH_MASTERS])
def test_no_optimizer_waits(level: str, kind: str, storage: str) -> None:
    if level == "O1" or kind in ("FusedLARS", "FusedMixedPrecisionLamb"):
        storage = "full"
    Training(level, kind, storage).train(LOOPS["clipped"], waits=False)


@pytest.mark.parametrize("level", LEVELS)
def test_after_unscale_results_are_those_of_the_cpu(level: str) -> None:
    """The host waits once for what a script did to half gradients."""
    assert_as_on_the_cpu(UNSCALED, level, waits=True)


@pytest.mark.parametrize(("level", "scale"), [("O1", "dynamic"), ("O5", None)])
def test_where_half_gradients_need_no_second_look_unscale_does_not_wait(
    level: str, scale: Any
) -> None:
    """At O5 the scale is static by default, so that there is nothing to unscale."""
    Training(level, loss_scale=scale).train(UNSCALED, waits=False)


@pytest.fixture
def side_stream() -> Iterator[torch.cuda.Stream]:
    """The current stream of the test; graphs want their warm-up on such a one."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream
    torch.cuda.synchronize()


def capturable(level: str, **given: Any) -> Training:
    return Training(level, weight_decay=0.1, capturable=True, **given)


def captured(run: Training, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run.play(LOOPS["clipped"], "zero")
    return graph


def assert_same(*runs: Training) -> None:
    wanted, ours = (run.tensors() for run in runs)
    assert [name for name in wanted if not torch.equal(ours[name], wanted[name])] == []


@pytest.mark.parametrize("level", ["O1", *WITH_MASTERS])
@pytest.mark.parametrize("loss_scale", ["dynamic", 1.0])
def test_a_graph_replays_what_steps_do(
    level: str, loss_scale: Any, side_stream: torch.cuda.Stream
) -> None:
    """To the bit, with an overflow in one replay; training goes on after the graph."""
    is_dynamic = loss_scale == "dynamic"
    eager, graphed = (capturable(level, loss_scale=loss_scale) for _ in range(2))
    for run in (eager, graphed):
        run.train(LOOPS["clipped"], 0, WARM_UP)
    assert graphed.engine.steps_applied == WARM_UP  # nothing holds the graphs of earlier steps
    graph = captured(graphed, side_stream)
    for number in range(WARM_UP, WARM_UP + STEPS):
        overflows = is_dynamic and number == OVERFLOW
        before = graphed.tensors()
        graphed.load(number)
        graph.replay()
        assert_same(eager.train(LOOPS["clipped"], number, number + 1), graphed)
        now = graphed.tensors()
        changed = {name.split()[0] for name in now if not torch.equal(now[name], before[name])}
        assert ("weight" in changed) != overflows
        assert ("scale" in changed) == overflows
    for run in (eager, graphed):
        run.train(LOOPS["clipped"], BATCHES - 1)
    assert_same(eager, graphed)
    assert eager.engine.steps_skipped == is_dynamic
    assert eager.engine.steps_applied == WARM_UP + STEPS + 1 - is_dynamic
    assert graphed.engine.steps_applied == WARM_UP + 1  # replays are not counted


def test_two_graphs_of_one_optimizer(side_stream: torch.cuda.Stream) -> None:
    """Each has tables of its own, which what runs in between leaves alone."""
    eager, graphed = (capturable("O2") for _ in range(2))
    for run in (eager, graphed):
        run.train(LOOPS["clipped"], 0, WARM_UP)
    side_stream.synchronize()
    graphs = [captured(graphed, side_stream) for _ in range(2)]
    for number in range(WARM_UP, WARM_UP + 4):
        eager.train(LOOPS["clipped"], number, number + 1)
        graphed.load(number)
        graphs[number % 2].replay()
    assert_same(eager, graphed)


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


@pytest.mark.parametrize("level", ["O1", *WITH_MASTERS])
def test_launches_do_not_grow_with_the_tensors(level: str) -> None:
    few, many = _kernels_of_a_step(level, 5), _kernels_of_a_step(level, 60)
    if not few:
        pytest.skip("The profiler sees no kernels here")
    assert len(few) == len(many), (few, many)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU only")
@pytest.mark.parametrize("level", ["O1", *WITH_MASTERS])
def test_a_model_away_from_the_current_device(level: str) -> None:
    """And one on two of them; the current device stays the first."""
    results: list[list[torch.Tensor]] = []
    for places in ((0, 0), (1, 1), (0, 1)):
        run = kit.Run(level, "FusedAdam", lambda at=places: Apart(*at), loss_scale="dynamic")
        run.engine.scaler(0).set_scale(64.0)
        for batch in ("0", "1 inf", "2", "3"):
            run.play(f"backward {batch}; clip .5; step; zero")
        assert (run.engine.steps_applied, run.engine.steps_skipped) == (3, 1)
        results.append([p.detach().cpu() for p in preamp.master_params(run.optimizer)])
        run.close()
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_torch_takes_its_multi_tensor_path_for_masters() -> None:
    run = Training("O2", "AdamW").play("backward")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.optimizer.step()
    assert any("_foreach_" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_tensors_on_other_devices_are_not_cast(level: str) -> None:
    net = nn.Linear(2, 2).cuda()
    preamp.initialize(net, opt_level=level, scope="thread", verbosity=0)
    matrix = torch.randn(4, 4)
    assert torch.mm(matrix, matrix).dtype is torch.float32
    assert torch.mm(matrix.cuda(), matrix.cuda()).dtype in (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("build", [FusedSGD, torch.optim.SGD])
def test_what_was_written_to_masters_moves_with_the_model(
    level: str, build: Callable[..., torch.optim.Optimizer]
) -> None:
    net = nn.Linear(8, 8)
    optimizer = build(net.parameters(), lr=0.1)
    preamp.initialize(net, optimizer, opt_level=level, verbosity=0)
    for master in preamp.master_params(optimizer):
        with torch.no_grad():
            master.fill_(0.3)
    net.cuda()
    for value in net.state_dict().values():
        assert torch.equal(value.cpu(), torch.full_like(value, 0.3, device="cpu"))


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_one_layer_moves_to_where_others_are(level: str) -> None:
    """Then a model is on the same devices as before, and some weights are not."""
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    optimizer = FusedSGD(layers.parameters(), lr=0.1)
    preamp.initialize(layers, optimizer, opt_level=level, verbosity=0)
    layers[2].cuda()
    for turn in range(4):
        if turn == 2:
            layers[1].cuda()
        x = torch.ones(2, 8)
        for layer in layers:
            x = layer(x.to(next(layer.parameters()).device))
        with preamp.scale_loss(x.float().mean(), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    places = [master.device.type for master in preamp.master_params(optimizer)]
    assert places == ["cpu"] * 2 + ["cuda"] * 4
