# SPDX-License-Identifier: BSD-3-Clause
"""Split masters: what training makes of weights is what it makes of them in full storage.

What they are compared with is an engine in full storage whose masters and half weights are brought
to what split ones can hold after each step: at O5 half weights that lie half way, at O2 also
masters below float16's normal range.
"""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVELS, WITH_MASTERS
from engine.harness import everything, loss_of, train_step
from kit.compare import same
from kit.run import Net
from preamp.core.errors import PreampPolicyError, PreampStateError
from preamp.engine import Engine
from preamp.kernels.stored import join, split
from preamp.optim import LARC
from preamp.optim.fused.kinds import KEEP_FEWER_BITS, KINDS
from preamp.optim.master_parameter import PackedMaster
from preamp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedLAMB,
    FusedLARS,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)

levels = pytest.mark.parametrize("level", WITH_MASTERS)
Build = Callable[[Iterable[Any]], Any]

BUILDS: dict[str, Build] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=0.01),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=0.01),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.01),
    "FusedLARS": lambda params: FusedLARS(params, lr=0.1, momentum=0.9),
    "FusedMixedPrecisionLamb": lambda params: FusedMixedPrecisionLamb(params, lr=0.01),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "AdamW, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
    "LARC": lambda params: LARC(FusedSGD(params, lr=0.1, momentum=0.9)),
}
BUILDS |= {kind.__name__: partial(kind, lr=0.01) for kind in KINDS if kind.__name__ not in BUILDS}
PACKED = KEEP_FEWER_BITS


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the matrices of small models have 8 bits."""
    monkeypatch.setattr("preamp.optim.fused.moments.can_be_blocks", lambda shape: len(shape) > 1)


def storages(moments: Any) -> list[preamp.Storage]:
    """Float32 masters and split ones."""
    return [preamp.Storage(masters=kind, moments=moments, seed=3) for kind in ("float32", "split")]


def start(level: str, storage: Any, build: Build = BUILDS["FusedAdam"], **more: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    more = {"opt_level": level, "verbosity": 0, "storage": storage, "backend": "reference"} | more
    return preamp.initialize(model, build(model.parameters()), **more)


def twins(of: Any) -> list[Any]:
    engine = preamp.engine_of(of)
    return [twin for session in engine.sessions.values() for twin in session.masters or ()]


def is_packed(of: Any) -> list[bool]:
    return [isinstance(twin.master, PackedMaster) for twin in twins(of)]


def bring_to_split(of: Any) -> None:
    """Let an engine in full storage have what a split one can hold; torch counts no write."""
    for twin in twins(of):
        if preamp.engine_of(of).policy.storage.masters == "float32":
            half, low = split(twin.master.detach(), twin.half.dtype)
            twin.half.data.copy_(half)
            twin.master.data.copy_(join(half, low))


def iterate(model: nn.Module, optimizer: Any, number: int, level: str) -> None:
    """Two backwards, the second of some infinite, a clip, a step."""
    with preamp.scale_loss(loss_of(model, number), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    loss = loss_of(model, number + 100)
    with preamp.scale_loss(loss, optimizer) as scaled:
        (scaled * float("inf") if number == 2 and level == "O2" else scaled).backward()
    preamp.clip_grad_norm_(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    bring_to_split(optimizer)


def exact(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What a checkpoint would hold."""
    return {
        "half": [twin.half.detach().clone() for twin in twins(optimizer)],
        "model": model.state_dict(),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "engine": preamp.engine_of(optimizer).state_dict(),
    }


@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize(
    ("name", "moments"),
    [
        *((name, "float32") for name in BUILDS if name != "LBFGS"),
        *itertools.product(PACKED, ["bfloat16", "8bit"]),
    ],
)
def test_training_is_that_of_full_storage(level: str, name: str, moments: Any) -> None:
    """With an overflow and clips; moments in fewer bits and their scales have the same bits too."""
    runs = [start(level, storage, BUILDS[name]) for storage in storages(moments)]
    for number in range(5):
        for model, optimizer in runs:
            iterate(model, optimizer, number, level)
        assert same(*[exact(*run) for run in runs])
    _, optimizer = runs[1]
    assert all(is_packed(optimizer))
    kept = {value.dtype for value in optimizer.state[twins(optimizer)[0].master].values()}
    fewer = {"bfloat16": {torch.bfloat16}, "8bit": {torch.int8, torch.uint8}}
    assert moments == "float32" or kept & fewer[moments]


@levels
@pytest.mark.parametrize("name", PACKED)
def test_fused_steps_make_no_master(level: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(level, "split", BUILDS[name])
    iterate(model, optimizer, 0, level)
    for table in preamp.engine_of(optimizer).sessions[id(optimizer)].tables:
        monkeypatch.setattr(table, "make", lambda: pytest.fail("masters were made"))
    for number in range(1, 4):
        iterate(model, optimizer, number, level)
    monkeypatch.undo()


@levels
@pytest.mark.parametrize("name", ["FusedLARS", "AdamW"])
def test_other_steps_make_and_split_each_master_once(
    level: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = start(level, "split", BUILDS[name])
    iterate(model, optimizer, 0, level)
    (table,) = preamp.engine_of(optimizer).sessions[id(optimizer)].tables
    counts = {"join_": 0, "split_": 0, "cast_copy_": 0}

    def counted(op: str, call: Any, first: list[Any], *rest: Any) -> None:
        counts[op] += len(first)
        call(first, *rest)

    with monkeypatch.context() as patch:
        for op in counts:
            patch.setattr(table.ops, op, functools.partial(counted, op, getattr(table.ops, op)))
        iterate(model, optimizer, 1, level)
    every = len(table)
    assert counts == {"join_": every, "split_": every, "cast_copy_": 0}


@levels
def test_bytes_between_steps(level: str) -> None:
    model, optimizer = start(level, "split")
    engine = preamp.engine_of(optimizer)
    for number in range(2):
        iterate(model, optimizer, number, level)
    with preamp.scale_loss(loss_of(model, 2), optimizer) as scaled:
        scaled.backward()
    kept = preamp.count_memory(engine)
    halves = sum(twin.half.numel() for twin in twins(optimizer))
    wide = sum(p.numel() for p in model.parameters() if p.dtype is torch.float32)
    assert all(is_packed(optimizer))
    assert kept["weights"] == 2 * halves + 4 * wide
    assert kept["masters"] == 2 * halves
    assert kept["gradients"] == 2 * halves + 4 * wide
    assert kept["optimizer state"] == 8 * (halves + wide)


@levels
def test_masters_are_made_when_read_and_packed_at_the_next_step(level: str) -> None:
    model, optimizer = start(level, "split")
    assert not any(is_packed(optimizer))  # the values from before the cast
    iterate(model, optimizer, 0, level)
    want = {id(t.master): t.value() for t in twins(optimizer)}
    param = next(p for p in preamp.master_params(optimizer) if id(p) in want)
    form = (param.shape, param.dtype, param.device, param.numel(), param.requires_grad, param.dim())
    assert form == (want[id(param)].shape, torch.float32, param.device, param.numel(), True, 2)
    assert all(is_packed(optimizer))
    assert torch.equal(param, want[id(param)])
    assert not any(is_packed(optimizer))
    assert all(torch.equal(t.master, want[id(t.master)]) for t in twins(optimizer))
    iterate(model, optimizer, 1, level)
    assert all(is_packed(optimizer))


@levels
@pytest.mark.parametrize(
    "read",
    [
        copy.deepcopy,
        lambda p: pickle.loads(pickle.dumps(p)),
        lambda p: p.detach().clone(),
        lambda p: p.data,
        lambda p: torch._foreach_mul([p], 1.0)[0],  # pyright: ignore
        lambda p: torch.stack([p])[0],
    ],
)
def test_whoever_reads_a_master_gets_its_value(level: str, read: Callable[[Any], Any]) -> None:
    model, optimizer = start(level, "split")
    iterate(model, optimizer, 0, level)
    for twin in twins(optimizer):
        want = twin.value()
        assert torch.equal(read(twin.master), want)
        assert "nan" not in repr(twin.master)


@levels
def test_a_write_to_a_packed_half_weight_drops_what_is_beside_it_once(level: str) -> None:
    model, optimizer = start(level, "split")
    iterate(model, optimizer, 0, level)
    written = next(t for t in twins(optimizer) if t.name == "first.weight")
    with torch.no_grad():
        written.half.clamp_(-0.25, 0.25)
    seen = written.half.detach().float()
    with pytest.warns(UserWarning, match="'first.weight' was written to between two steps"):
        assert torch.equal(model.state_dict()["first.weight"], seen)
    assert is_packed(optimizer) == [t is not written for t in twins(optimizer)]
    iterate(model, optimizer, 1, level)
    assert is_packed(optimizer) == [t is not written for t in twins(optimizer)]
    other = written.master.detach().clone()
    with torch.no_grad():
        written.half[0, 0] = 0.125
    now = model.state_dict()["first.weight"]
    other[0, 0] = 0.125
    assert torch.equal(now, other)  # the elements left alone keep what is beside them
    with torch.no_grad():
        written.master.fill_(0.25)
    model(torch.ones(2, 4))
    assert (written.half == 0.25).all()
    assert "1 stay float32" in preamp.engine_of(model).explain()


@levels
def test_memory_that_a_script_holds_stays_the_masters(level: str) -> None:
    model, optimizer = start(level, "split")
    views = [twin.master.data for twin in twins(optimizer)]
    iterate(model, optimizer, 0, level)
    assert not any(is_packed(optimizer))
    assert all(
        view.data_ptr() == t.master.data_ptr()
        for view, t in zip(views, twins(optimizer), strict=True)
    )
    views.clear()
    iterate(model, optimizer, 1, level)
    assert all(is_packed(optimizer))


@levels
def test_a_backward_through_packed_masters_is_refused(level: str) -> None:
    model, optimizer = start(level, "split")
    penalty = torch.stack([twin.master.square().sum() for twin in twins(optimizer)]).sum()
    iterate(model, optimizer, 0, level)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@levels
def test_a_penalty_on_masters_counts(level: str) -> None:
    runs = [start(level, storage, loss_scale=1.0) for storage in ("full", "split")]
    for model, optimizer in runs:
        iterate(model, optimizer, 0, level)
        with preamp.scale_loss(loss_of(model, 1), optimizer) as scaled:
            scaled.backward()
        torch.stack([twin.master.square().sum() for twin in twins(optimizer)]).sum().backward()
        optimizer.step()
        bring_to_split(optimizer)
    assert same(*[exact(*run) for run in runs])


# -- doors ----------------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("floats", [False, True])
def test_close_gives_exact_weights_back(level: str, floats: bool) -> None:
    model, optimizer = start(level, "split")
    iterate(model, optimizer, 0, level)
    want = model.state_dict()
    held, value = twins(optimizer)[0].master, twins(optimizer)[0].value()
    if floats:
        model.float()
    preamp.engine_of(model).close()
    assert same(dict(want), dict(model.state_dict()))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(held, value)
    assert optimizer.storage.masters == "float32"


# Random programs combine levels and moments freely; here each optimizer needs each of them once.
@pytest.mark.pairs
@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_numbers_do_not_depend_on_when_masters_are_float32(
    level: str, name: str, backend: str, moments: Any
) -> None:
    """Reading them between steps, releasing gradients and resuming change no bit."""

    def started(*, releases: bool) -> Any:
        kept: Any = {"masters": "split", "moments": moments, "seed": 3}
        storage = preamp.Storage(**kept, release_gradients=releases)
        return start(level, storage, BUILDS[name], backend=backend, loss_scale=128.0)

    def trained(*, reads: bool = False, releases: bool = False, resumes: bool = False) -> Any:
        model, optimizer = started(releases=releases)
        for number in range(5):
            train_step(model, optimizer, number)
            if reads:
                assert all([master.isfinite().all() for master in preamp.master_params(optimizer)])
            if resumes and number == 2:
                before, (model, optimizer) = (model, optimizer), started(releases=releases)
                model.load_state_dict(before[0].state_dict())
                optimizer.load_state_dict(before[1].state_dict())
                preamp.load_state_dict(model, preamp.state_dict(before[0]))
        return exact(model, optimizer)

    wanted = trained()
    assert same(wanted, trained(reads=True))
    assert same(wanted, trained(resumes=True))
    if name != "FusedLAMB":  # whose update needs all gradients of a step
        for reads in (False, True):
            assert same(wanted, trained(reads=reads, releases=True))
        assert same(wanted, trained(releases=True, resumes=True))


def test_ties_resume_bitwise() -> None:
    """A half weight is rounded in one way, whenever it is."""
    runs = [start("O5", "split", lambda p: FusedSGD(p, lr=0.125)) for _ in range(2)]
    (model, optimizer), (again, other) = runs
    ties = {name: torch.full_like(v, 1 + 2.0**-8) for name, v in model.state_dict().items()}
    model.load_state_dict(ties)
    away = {float(twin.half.detach().flatten()[0]) for twin in twins(optimizer)}
    assert away == {1 + 2.0**-7}
    again.load_state_dict(model.state_dict())
    for run in runs:
        iterate(run[0], run[1], 0, "O5")
    assert same(exact(model, optimizer), exact(again, other))
    third = start("O5", "split")
    third[0].load_state_dict(model.state_dict())
    assert same(exact(model, optimizer)["half"], exact(*third)["half"])
    iterate(third[0], third[1], 1, "O5")
    assert all(torch.equal(t.half, split(t.value(), t.dtype)[0]) for t in twins(third[1]))


@levels
@pytest.mark.parametrize("to", ["full", "split"])
def test_checkpoints_load_into_another_storage(level: str, to: str, tmp_path: Path) -> None:
    model, optimizer = start(level, "split")
    for number in range(3):
        iterate(model, optimizer, number, level)
    path = tmp_path / "run.safetensors"
    preamp.save_checkpoint(path, model, optimizer)
    assert all(is_packed(optimizer))
    again, other = start(level, to)
    iterate(again, other, 7, level)
    preamp.load_checkpoint(path, again, other)
    for run in ((model, optimizer), (again, other)):
        iterate(*run, 3, level)
        bring_to_split(run[1])
        iterate(*run, 4, level)
    assert same(exact(model, optimizer), exact(again, other))
    preamp.save_checkpoint(path, again, other)
    preamp.load_checkpoint(path, model, optimizer)
    assert same(exact(model, optimizer), exact(again, other))


@levels
def test_what_is_written_without_a_trace_after_loading_counts(level: str) -> None:
    """As a script does that broadcasts what one rank has read."""
    model, optimizer = start(level, "split")
    iterate(model, optimizer, 0, level)
    model.load_state_dict(model.state_dict())
    for param in model.parameters():
        param.data.fill_(0.5)
    iterate(model, optimizer, 1, level)
    full, other = start(level, "full")
    iterate(full, other, 0, level)
    full.load_state_dict(full.state_dict())
    for param in full.parameters():
        param.data.fill_(0.5)
    iterate(full, other, 1, level)
    assert same(exact(model, optimizer), exact(full, other))


class Scale(nn.Module):
    """Multiplies: the forward saves the half weight itself for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@levels
@pytest.mark.parametrize("storage", ["full", "split", "compact"])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("thaws", ["before the forward", "before the step"])
def test_a_weight_that_was_frozen_at_first_trains_later(
    level: str, storage: str, frozen: list[int], thaws: str
) -> None:
    """Its master is made after a forward that saved it; small numbers are exact throughout."""
    models = [nn.Sequential(Scale(), Scale(), Scale(), Scale()) for _ in range(2)]
    for model in models:
        for place in frozen:
            model[place].requires_grad_(False)
    ours, plain = models
    optimizer = FusedSGD(ours.parameters(), lr=2.0**-5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=2.0**-5)
    preamp.initialize(
        ours, optimizer, opt_level=level, storage=storage, loss_scale=128.0, verbosity=0
    )
    for step in range(3):
        if step == 1:
            for model in models if thaws == "before the forward" else ():
                model.requires_grad_(True)
        with preamp.scale_loss(ours(torch.ones(8)).float().sum(), optimizer) as scaled:
            scaled.backward()
        plain(torch.ones(8)).sum().backward()
        if step == 1:
            for model in models:
                model.requires_grad_(True)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        for mine, wanted in zip(ours.parameters(), plain.parameters(), strict=True):
            rounded = preamp.engine_of(ours).exact_value(mine)
            value = mine.detach().float() if rounded is None else rounded.detach()
            torch.testing.assert_close(value, wanted.detach(), rtol=2.0**-6, atol=0)


@levels
@pytest.mark.parametrize("name", ["FusedAdam", "SGD", "LBFGS"])
def test_closures(level: str, name: str) -> None:
    kinds = ("full", "split")
    runs = [start(level, kind, BUILDS[name], loss_scale=128.0) for kind in kinds]
    for number in range(4):
        for model, optimizer in runs:

            def closure(model: Any = model, optimizer: Any = optimizer, at: int = number) -> Any:
                optimizer.zero_grad()
                with preamp.scale_loss(loss_of(model, at), optimizer) as scaled:
                    scaled.backward()
                return scaled

            optimizer.step(closure)
            bring_to_split(optimizer)
    assert same(*[exact(*run) for run in runs])


@levels
def test_who_reads_weights_makes_no_master(level: str) -> None:
    """Forwards, statistics, states and copies."""
    model, optimizer = start(level, "split", numerics="full", numerics_every=1)
    for number in range(2):
        train_step(model, optimizer, number)
        model(torch.ones(2, 4))
        want = {t.name: t.value() for t in twins(optimizer)}
        found = [dict(copy.deepcopy(model).named_parameters()), model.state_dict()]
        for weights in found:
            assert all(torch.equal(weights[name], value) for name, value in want.items())
        assert all(is_packed(optimizer))
    assert len(preamp.engine_of(model).history)


@levels
def test_masters_read_in_inference_mode_train_on(level: str) -> None:
    model, optimizer = start(level, "split")
    iterate(model, optimizer, 0, level)
    with torch.inference_mode():
        assert all(param.isfinite().all() for param in preamp.master_params(optimizer))
    with torch.no_grad():
        for param in preamp.master_params(optimizer):
            param.mul_(0.5)
    iterate(model, optimizer, 1, level)
    assert all(is_packed(optimizer))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_model_trains() -> None:
    found: list[Any] = []
    for storage in ("full", "split"):
        model, optimizer = start("O5", storage)
        compiled: Any = torch.compile(model, backend="eager")
        for number in range(3):
            iterate(compiled, optimizer, number, "O5")
        found.append(exact(model, optimizer))
    assert same(*found)


def test_a_copied_optimizer_has_plain_parameters() -> None:
    model, optimizer = start("O5", "split")
    train_step(model, optimizer, 0)
    copied = copy.deepcopy(optimizer)
    pairs = zip(copied.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
    assert all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)


def test_moving_a_model_loses_nothing() -> None:
    model, optimizer = start("O5", "split")
    iterate(model, optimizer, 0, "O5")
    want = model.state_dict()
    model._apply(lambda tensor: tensor.clone())  # as a move to another device does
    assert same(dict(want), dict(model.state_dict()))
    iterate(model, optimizer, 1, "O5")
    assert all(is_packed(optimizer))
    read: Any = pickle.loads(pickle.dumps(model))
    assert read.double().first.weight.dtype is torch.float64
    assert "_apply" not in vars(copy.deepcopy(model))
    preamp.engine_of(model).close()
    assert "_apply" not in vars(model)


def test_steps_are_not_captured_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start("O5", "split")
    with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    monkeypatch.setattr("preamp.engine.session.is_capturing", lambda device: True)
    with pytest.raises(PreampStateError, match="captured in a CUDA graph with storage"):
        optimizer.step()


# -- refusals -------------------------------------------------------------------------------------

WITHOUT = [row.name for row in LEVELS if not row.has_masters]


@pytest.mark.parametrize("level", WITHOUT)
@pytest.mark.parametrize("storage", ["split", "compact"])
def test_levels_without_masters_refuse_to_split_them(level: str, storage: str) -> None:
    ways = {"split": '"full"', "compact": "preamp.Storage(moments='8bit')"}
    way = f"pass storage={ways[storage]}"
    with pytest.raises(PreampPolicyError, match=re.escape(way)):
        start(level, storage)


def test_masters_of_another_level_may_be_split() -> None:
    _, optimizer = start("O3", "split", master_weights=True)
    assert preamp.engine_of(optimizer).policy.storage.masters == "split"


@pytest.mark.parametrize(
    ("storage", "error", "text"),
    [
        ("splt", ValueError, "The storages with a name are 'full', 'split', 'compact'"),
        ("Compact", ValueError, "Here 'compact' was probably meant"),
        (16, TypeError, "initialize got storage=16"),
    ],
)
def test_unknown_storages(storage: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        start("O5", storage)


@pytest.mark.parametrize("name", [name for name in BUILDS if name not in (*PACKED, "LARC")])
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_moments_of_other_optimizers_are_refused(level: str, name: str) -> None:
    storage = preamp.Storage(moments="8bit")
    with pytest.raises(TypeError, match=re.escape(f"Moments are kept in fewer bits by {_KINDS}")):
        start(level, storage, BUILDS[name])


_KINDS = ", ".join(PACKED)


def test_float16_weights_beyond_its_range_are_named() -> None:
    torch.manual_seed(0)
    model = Net()
    with torch.no_grad():
        model.last.weight[0, 0] = 65520.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = FusedAdam(model.parameters())
    with pytest.raises(PreampStateError, match=r"'last.weight' has a value of magnitude 65520"):
        preamp.initialize(model, optimizer, opt_level="O2", storage="split", verbosity=0)
    assert same(before, dict(model.state_dict()))
    with torch.no_grad():
        model.last.weight[0, 0] = 65519.0  # which float16 rounds to 65504
    preamp.initialize(model, optimizer, opt_level="O2", storage="split", verbosity=0)


def test_weights_that_have_no_split_master_may_be_of_any_size() -> None:
    """Those that stay float32, and those that no optimizer has."""
    model = Net()
    with torch.no_grad():
        model.last.weight[0, 0] = 1e6
        model.first.bias[0] = 1e6
    rest = [p for p in model.parameters() if p is not model.first.bias]
    options: Any = {"opt_level": "O2", "storage": "split", "verbosity": 0}
    preamp.initialize(model, FusedAdam(rest), keep_fp32=["last.weight"], **options)
    assert model.last.weight[0, 0] == 1e6


def test_apex_names_take_a_storage() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = FusedAdam(model.parameters())
    preamp.amp.initialize(model, optimizer, opt_level="O5", storage="split", verbosity=0)
    train_step(model, optimizer, 0)
    assert all(is_packed(optimizer))


def test_engines_say_their_storage() -> None:
    model, optimizer = start("O5", "split")
    assert "  storage = split (default of O5: full)\n" in preamp.engine_of(model).explain()
    train_step(model, optimizer, 0)
    assert "6 of 6 masters are split now" in preamp.engine_of(model).explain()
    assert optimizer.storage == preamp.Storage(masters="split")
    assert isinstance(preamp.engine_of(model), Engine)
    assert everything(model, optimizer)["engine"]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_state_of_ones_own_may_have_any_keys(level: str) -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for param in self.param_groups[0]["params"]:
                self.state[param][0] = param.detach().float() + 1
            return super().step(closure)

    model = Net()
    optimizer = Counting(model.parameters(), lr=0.1)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train_step(model, optimizer, 0)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), state)
