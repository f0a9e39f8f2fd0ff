# SPDX-License-Identifier: BSD-3-Clause
"""Masters and moments on the host: the numbers of the same storage on the device, bit by bit.

So it is where gradients are released, and wait there for their step.
"""

import copy
import gc
import operator
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # pyright: ignore

import preamp
import preamp.kernels
from cases.rules import row
from cases.waits import waits_refused
from devices.host_runs import (
    KINDS,
    Apart,
    Kept,
    Run,
    every_level,
    ids,
    loop_of,
    pair,
    there,
    with_masters,
    without_pinned_memory,
)
from kit.compare import same
from kit.run import assert_same_program
from preamp.core.away import values_of
from preamp.core.errors import PreampStateError, PreampUnavailableError
from preamp.kernels import Update, lamb_norms, staged
from preamp.kernels.rules import LambRule
from preamp.numerics import NumericsRecord, OverflowRecord
from preamp.optimizers import FusedAdam

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
    pytest.mark.usefixtures("small_runs"),
]
TAKEN = "iterate 0 1 2; backward 3"
END = "step; zero"


# -- numbers, wherever gradients are ------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@every_level
@there
def test_the_host_trains_as_the_device(place: str, kept: Kept, kind: str) -> None:
    if kind == "FusedLARS":
        kept = kept[0], "full"  # it keeps nothing in fewer bits
    device, host = pair(place, kept, kind)
    assert_same_program(loop_of(host), device, host)
    assert {tensor.device.type for tensor in host.state()} <= {"cpu"}
    assert {p.device.type for p in host.model.parameters()} == {"cuda"}
    skipped = int(host.engine.policy.is_dynamic)
    assert host.engine.steps_skipped == device.engine.steps_skipped == skipped


class Shapes(nn.Module):
    """Parameters of no dimension, of one element, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gate + self.shift + self.none.sum()


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("model", [Shapes, Apart], ids=lambda kind: kind.__name__)
def test_other_models(level: str, model: Any) -> None:
    if model is Apart and torch.cuda.device_count() < 2:
        pytest.skip("one device")
    place = "host" if model is Apart else "released"
    runs = pair(place, (level, "full"), model=model, loss_scale=128.0)
    assert_same_program("iterate 0 | backward 1; clip .5; step; zero | iterate 2", *runs)


# -- states from one place to another ------------------------------------------------------------

WAYS = [("host", "device"), ("device", "host"), ("host", "host")]
WAYS += [("released", "device"), ("device", "released"), ("released", "released")]


@pytest.mark.parametrize("in_a_file", [True, False])
@pytest.mark.parametrize("way", WAYS, ids=ids)
@with_masters
def test_a_run_goes_on_at_either_place(
    kept: Kept, way: tuple[str, str], in_a_file: bool, tmp_path: Path
) -> None:
    first, second = Run(way[0], kept).play("iterate 0 1 2"), Run(way[1], kept).play("iterate 5")
    if in_a_file:
        preamp.save_checkpoint(tmp_path / "run", first.model, first.optimizer)
        preamp.load_checkpoint(tmp_path / "run", second.model, second.optimizer, rng=False)
    else:
        first.save()
        second.saved = first.saved
        second.load()
    assert_same_program("backward 3; backward 4; clip .5; step; zero; iterate 5", first, second)
    assert {t.device.type for t in second.state()} == {"cuda" if way[1] == "device" else "cpu"}


# -- around the step -----------------------------------------------------------------------------


@with_masters
def test_nothing_waits_but_the_step(kept: Kept) -> None:
    run = Run("host", kept).play(2 * "backward; clip .5; step; zero; ")
    inputs = torch.ones(32, 16).cuda()
    for _ in range(2):
        with waits_refused():
            run.back(run.model(inputs).float().square().mean())
            run.clip()
        run.step()
        with waits_refused():
            run.zero()


# -- the end, and words --------------------------------------------------------------------------


@with_masters
@there
def test_all_comes_back_at_the_end(kept: Kept, place: str) -> None:
    runs = pair(place, kept)
    grads: list[list[torch.Tensor]] = []
    for run in runs:
        run.play(TAKEN)
        exact = [value.detach().cpu().clone() for value in run.values()]
        run.engine.close()
        params = list(run.model.parameters())
        assert {(p.device.type, p.dtype) for p in params} == {("cuda", torch.float32)}
        assert same([p.detach().cpu() for p in params], exact)
        grads.append([p.grad.cpu() for p in params if p.grad is not None])
        run.model(torch.ones(2, 16).cuda()).sum().backward()
        assert away(run) == [False] * 6
        run.step()  # its moments came back as well
    assert len(grads[0]) == 6
    assert same(*grads)


@there
def test_explain_says_where_things_are(place: str) -> None:
    text = Run(place, ("O2", "full")).engine.explain()
    assert "storage: masters and moments lie on the host, which makes the update" in text
    behind = ", and for gradients behind the last two" if place == "released" else ""
    assert f"one host synchronisation per step{behind}" in text
    goes = "storage: each gradient goes to the host as soon as it is made" in text
    assert goes == (place == "released")
    assert "on the host" not in Run("device", ("O2", "full")).engine.explain()


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_graph_is_refused_and_nothing_changed(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Run("host", (level, "full")).play(TAKEN), Run("host", (level, "full")).play(TAKEN)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(PreampStateError, match=r"captured in a CUDA graph.*place=\"device\""):
            runs[0].step()
    assert_same_program(f"forward | {END}", *runs)


@there
@with_masters
@pytest.mark.parametrize("had", [0, 1])
def test_pinned_memory_that_cannot_be_had_changes_nothing(
    kept: Kept, place: str, had: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first that a step needs; or the second, of three."""
    if had:
        kept, place = (kept[0], "full"), "host"
    runs = Run(place, kept).play(TAKEN), Run(place, kept).play(TAKEN)
    left = [False] * had

    def scarce(*sizes: Any, **options: Any) -> torch.Tensor:
        if left and options.get("pin_memory"):
            options["pin_memory"] = left.pop()
        return without_pinned_memory(*sizes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", scarce)
        with pytest.raises(PreampUnavailableError, match=r"no \d+ bytes of pinned memory"):
            runs[0].step()
    assert_same_program(END, *runs)


def test_without_pinned_memory_there_is_no_such_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", without_pinned_memory)
    with pytest.raises(PreampUnavailableError, match="no 16384 bytes of pinned memory"):
        Run("host", ("O5", "full"))  # whose largest weight has 16 x 256 elements


# -- ops -----------------------------------------------------------------------------------------


def test_pinned_memory_is_that_of_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = staged.pinned

    def counted(size: int, *words: str) -> torch.Tensor:
        sizes.append(size)
        return make(size, *words)

    monkeypatch.setattr(staged, "pinned", counted)
    ops = preamp.kernels.backend("reference", "host")
    sources = [torch.randn(512) for _ in range(9)]
    targets = [torch.empty(512, dtype=torch.bfloat16, device="cuda") for _ in sources]
    ops.cast_copy_(sources, targets)
    assert sizes == [4096] * 3
    assert same([target.cpu() for target in targets], [source.bfloat16() for source in sources])
    sizes.clear()
    ops.cast_copy_([torch.randn(4097)], [torch.empty(4097, dtype=torch.bfloat16, device="cuda")])
    assert sizes == [8256]  # of a tensor that is larger than a run


def test_memory_is_used_again_once_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pretended device does not show it: there copies to the device are never late."""
    events, streams = list[str](), list[str]()
    synchronize, wait_stream = torch.cuda.Event.synchronize, torch.cuda.Stream.wait_stream

    def note_synchronize(event: Any) -> None:
        events.append("waited for")
        synchronize(event)

    def note_wait(stream: Any, other: Any) -> None:
        current = torch.cuda.current_stream()
        streams.append("training waits" if stream == current else "copies wait")
        wait_stream(stream, other)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", note_synchronize)
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", note_wait)
    ops = preamp.kernels.backend("reference", "host")
    wides = [torch.zeros(2048) for _ in range(9)]
    halves = [torch.ones(2048, dtype=torch.bfloat16, device="cuda") for _ in wides]
    lows = [torch.zeros(2048, dtype=torch.int16) for _ in wides]
    ops.join_(halves, lows, wides)
    # Nine have come, and three times three shared memory, of which the last three did not wait.
    assert events == ["waited for"] * (9 + 6)
    assert streams == ["copies wait", "copies wait", "training waits"]
    assert torch.equal(torch.stack(wides), torch.ones(9, 2048))


def test_norms_of_parts_are_taken_there() -> None:
    """As where LAMB's tensors are parts of larger ones."""
    rule: Any = row(LambRule).rule
    lists = [[torch.randn(600).abs() for _ in range(5)] for _ in range(4)]
    update = Update(step=3, inv_scale=torch.tensor(0.5))
    expected = lamb_norms(*lists, rule=rule, update=update)
    grads = [grad.cuda() for grad in lists[1]]
    there = replace(update, inv_scale=torch.tensor(0.5).cuda())
    found = lamb_norms(lists[0], grads, *lists[2:], rule=rule, update=there)
    assert torch.equal(found, expected)


# -- gradients that wait ----------------------------------------------------------------------


def away(run: Run) -> list[bool]:
    """Which gradients take no memory where they are."""
    grads = [param.grad for param in run.model.parameters()]
    return [grad is not None and grad.untyped_storage().nbytes() <= 4 for grad in grads]


def on_device() -> int:
    """Bytes of all tensors that are there now."""
    gc.collect()
    return torch.cuda.memory_allocated()


@every_level
def test_nothing_of_a_gradient_is_left(kept: Kept) -> None:
    """Neither after a backward, nor within the accumulation of several."""
    before = on_device()
    run = Run("released", kept).play("iterate 0 1")
    weights = sum(t.nbytes for t in (*run.model.parameters(), *run.model.buffers()))
    for _ in range(2):
        for _ in range(3):
            run.backward()
            assert away(run) == [True] * 6
            counted = preamp.count_memory(run.engine)
            assert counted["gradients"] == counted["optimizer state"] == 0
            assert counted["gradients on the host"] > 0
            assert 0 <= on_device() - before - weights < 400  # single numbers
        run.play(END)


def values_on_host(run: Run) -> list[torch.Tensor]:
    return [values_of(param.grad) for param in run.model.parameters()]


@every_level
def test_memory_on_the_host_stays_but_where_somebody_holds_gradients(kept: Kept) -> None:
    """These stay as they are. The next ones get other memory, which is kept from then on."""
    run = Run("released", kept)
    places: list[list[int]] = []
    for turn in range(6):
        run.backward()
        places.append([values.data_ptr() for values in values_on_host(run)])
        if turn == 2:
            held = [param.grad for param in run.model.parameters()]
            before = [values.clone() for values in values_on_host(run)]
        run.play(END)
        count = preamp.count_memory(run.engine)["gradients on the host"]
        assert count == sum(param.nbytes for param in run.model.parameters())
    assert places[:3] == places[:1] * 3
    assert places[3:] == places[3:4] * 3
    assert not {*places[0]} & {*places[3]}
    pairs = zip(map(values_of, held), before, strict=True)
    assert [torch.equal(now, then) for now, then in pairs] == [True] * 6
    engine = run.engine
    engine.close()
    assert "gradients on the host" not in preamp.count_memory(engine)


def test_a_dropped_engine_sends_nothing_away() -> None:
    run = Run("released", ("O4", "full")).play("iterate 0 1 2")
    weight, engine = next(run.model.parameters()), weakref.ref(run.engine)
    del run
    gc.collect()
    assert engine() is None
    (weight * 2.0).sum().backward()
    assert torch.equal(weight.grad.cpu(), torch.full((256, 16), 2.0))  # pyright: ignore


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
    "new_tensor": lambda grad: grad.new_tensor(grad),
    "part": lambda grad: operator.setitem(grad, 0, 0.0),
    "pickle": pickle.dumps,
    "set_": lambda grad: grad.set_(torch.ones(grad.shape, dtype=grad.dtype).cuda()),
    "set data": lambda grad: setattr(grad, "data", torch.ones(grad.shape, dtype=grad.dtype).cuda()),
    "tensor": torch.tensor,
    "to host": lambda grad: grad.cpu(),
    "to list": lambda grad: grad.tolist(),
    "vmap": lambda grad: torch.vmap(torch.neg)(grad),
}


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("way", LOOKS)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_a_script_that_reads_or_writes_there_is_told(way: str, level: str) -> None:
    """What is left on the device is no number. Nothing changes by that."""
    device, run = (one.play(TAKEN) for one in pair("released", (level, "full")))
    for param in run.model.parameters():  # the last one has one dimension
        with pytest.raises(PreampStateError, match=r"gradient that waits on the host.*Change g"):
            LOOKS[way](param.grad)  # pyright: ignore[reportArgumentType]
    assert "that waits on the host" in repr(next(run.model.parameters()).grad)
    assert_same_program(END, device, run)


def test_no_pointer_is_told() -> None:
    run = Run("released", ("O5", "full")).play("backward")
    for param in run.model.parameters():
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            to_dlpack(param.grad)  # pyright: ignore


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_a_script_may_add_to_them(level: str) -> None:
    """As autograd does, which nobody can tell from it."""
    runs = [one.play(TAKEN) for one in pair("released", (level, "full"))]
    for one in runs:
        for param in one.model.parameters():
            param.grad.add_(torch.full(param.shape, 0.25, dtype=param.dtype).cuda())
    assert_same_program(END, *runs)


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
        for _ in range(2):  # they go one after the other in an accumulation too
            with preamp.scale_loss(net(inputs).float().mean(), optimizer) as loss:
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    # Beside weights and activations there were the gradient at hand and two on their way.
    assert torch.cuda.max_memory_allocated() - held < weights + 3 * weights // 8 + around


@pytest.mark.parametrize("numerics", ["light", "full"])
@every_level
def test_statistics_are_those_of_the_device(kept: Kept, numerics: str) -> None:
    """Of gradients and weights, of weights that a step left unchanged, of a skipped step."""
    runs = pair("released", kept, numerics=numerics, numerics_every=1)
    program = "iterate 0 1; backward 2 inf; step; zero; iterate 3; backward 4 delay; backward 5; "
    program += "step; zero; outside 6; step; zero"
    dynamic = runs[0].engine.policy.is_dynamic
    assert_same_program(program if dynamic else program.replace(" inf", ""), *runs)
    records = [[*run.engine.history.of(NumericsRecord)] for run in runs]
    device, host = ([tensor for record in own for tensor in record.tensors] for own in records)
    assert [record.step for record in records[0]] == [1, 2, 3, 4, 5, 6]
    assert len(device) == 6 * 6 * (2 if numerics == "full" else 1)
    assert [one.rms for one in host] == pytest.approx([one.rms for one in device], rel=1e-5)
    assert [replace(one, rms=0) for one in host] == [replace(one, rms=0) for one in device]


@every_level
def test_an_overflow_is_traced_as_on_the_device(kept: Kept) -> None:
    found: list[list[OverflowRecord]] = []
    for run in pair("released", kept, overflow="trace"):
        run.play("iterate 0 1").back(run.loss(2) * float("inf"))
        run.play(END)
        found.append([cause.to_record() for cause in run.engine.overflow_causes])
    assert repr(found[0]) == repr(found[1])  # nan is unlike itself
    assert [record.trace is not None for record in found[0]] == [True]
