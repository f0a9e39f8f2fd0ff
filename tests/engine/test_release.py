# SPDX-License-Identifier: BSD-3-Clause
"""Gradients applied as soon as they are made: the numbers of training without that, to the bit."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import preamp
from cases.levels import WITH_MASTERS
from kit.compare import same
from kit.refusals import assert_refused, refused
from preamp.engine import release
from preamp.engine import storage as engine_storage
from preamp.engine.release import Release
from preamp.kernels.stored import split
from preamp.optim import LARC
from preamp.optimizers import (
    FusedAdagrad,
    FusedAdam,
    FusedADOPT,
    FusedLAMB,
    FusedLARS,
    FusedLion,
    FusedMixedPrecisionLamb,
    FusedNovoGrad,
    FusedSGD,
)
from preamp.policy.storage import describe_storage

Build = Callable[[Any], Any]

BUILDS: dict[str, Build] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=0.01, weight_decay=0.1),
    "FusedAdam, capturable": lambda params: FusedAdam(params, lr=0.01, capturable=True),
    "FusedAdam, biased": lambda params: FusedAdam(params, lr=0.01, bias_correction=False),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.1, momentum=0.9, dampening=0.5),
    "FusedAdagrad": lambda params: FusedAdagrad(params, lr=0.01),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=0.01),
    "FusedLion": lambda params: FusedLion(params, lr=0.01),
    "FusedADOPT": lambda params: FusedADOPT(params, lr=0.01),
}
LEVELS: dict[str, dict[str, Any]] = {
    "O0": {},
    "O1": {"loss_scale": 100.0},
    "O2": {"loss_scale": 128.0},
    "O3": {},
    "O4": {"scope": "thread"},
    "O5": {},
}
STORAGES: dict[str, dict[str, Any]] = {
    "full": {},
    "split": {"masters": "split"},
    "bfloat16": {"moments": "bfloat16"},
    "8bit": {"moments": "8bit", "seed": 3},
    "compact": {"masters": "split", "moments": "8bit"},
}
COMPACT = {"opt_level": "O5", "storage": preamp.Storage(release_gradients=True)}


class Net(nn.Module):
    """A tied weight, one that only some steps use, a frozen one, vectors, and 8-bit moments."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 128)
        self.first = nn.Linear(128, 128)
        self.norm = nn.LayerNorm(128)
        self.sometimes = nn.Linear(128, 128)
        self.frozen = nn.Linear(128, 128).requires_grad_(False)
        self.runs_again = False

    def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
        hidden: Any = self.table(x)
        again = partial(checkpoint, self.first, use_reentrant=False)
        hidden = again(hidden) if self.runs_again else self.first(hidden)
        hidden = self.frozen(self.norm(torch.relu(hidden)))
        hidden = hidden + self.sometimes(hidden) if uses_all else hidden
        return nn.functional.linear(hidden, self.table.weight)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randint(0, 32, (4, 3), generator=torch.Generator().manual_seed(number))
    made = model(x, uses_all=number % 2 == 0)
    return nn.functional.cross_entropy(made.float().flatten(0, 1), x.flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": vectors, "lr": 0.003, "weight_decay": 0.0},
    ]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients as small as here would all wait for the end of the block."""
    monkeypatch.setattr(release, "TOGETHER", 1)


def start(*, releases: bool = True, build: Build = BUILDS["FusedAdam"], **more: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    storage = preamp.Storage(**STORAGES[more.pop("storage", "full")], release_gradients=releases)
    more = {"opt_level": "O5", "verbosity": 0, "backend": "reference"} | more
    return preamp.initialize(model, build(groups_of(model)), storage=storage, **more)


def backward(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    with preamp.scale_loss(loss_of(model, number), optimizer) as scaled:
        scaled.backward()


def train(model: nn.Module, optimizer: Any, numbers: Any) -> None:
    for number in numbers:
        backward(model, optimizer, number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def exact(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What a checkpoint would hold, the half weights too."""
    return {
        "stored": [param.detach().clone() for param in model.parameters()],
        "model": {name: value.clone() for name, value in model.state_dict().items()},
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "counts": preamp.engine_of(optimizer).steps_applied,
    }


def both(**arguments: Any) -> list[Any]:
    """The same start twice, the second releasing gradients."""
    return [start(releases=releases, **copy.deepcopy(arguments)) for releases in (False, True)]


def assert_rounded(optimizer: Any) -> None:
    """Every half weight is its rounded master, and nothing is taken for written to."""
    for table in preamp.engine_of(optimizer).sessions[id(optimizer)].tables:
        for twin in table.twins:
            value = twin.value().detach()
            rounded = split(value, twin.dtype)[0] if table.packs else value.to(twin.dtype)
            assert torch.equal(rounded, twin.half)
        assert not any(map(table.is_written, range(len(table))))


# -- numbers ---------------------------------------------------------------------------------------


PLACES = [
    (level, storage)
    for level, storage in itertools.product(LEVELS, STORAGES)
    if level in WITH_MASTERS or "masters" not in STORAGES[storage]
]


@pytest.mark.parametrize(
    ("level", "storage", "together"),
    [(*place, n) for place, n in zip(PLACES, itertools.cycle([1, 4096, release.TOGETHER]))],
)
@pytest.mark.parametrize("name", BUILDS)
def test_training_is_that_without(
    level: str, storage: str, together: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many wait for each other takes turns: at each level all numbers come."""
    monkeypatch.setattr(release, "TOGETHER", together)
    runs = both(opt_level=level, build=BUILDS[name], storage=storage, **LEVELS[level])
    for model, optimizer in runs:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for number in range(4):
            train(model, optimizer, (number,))
            schedule.step()
    assert same(*[exact(*run) for run in runs])


@pytest.mark.parametrize("name", ["FusedAdam", "FusedNovoGrad"])
def test_the_fastest_kernels_agree(name: str) -> None:
    runs = both(backend="auto", build=BUILDS[name], storage="compact")
    for model, optimizer in runs:
        train(model, optimizer, range(3))
    assert same(*[exact(*run) for run in runs])


def test_counters_are_those_of_the_step_under_way() -> None:
    model, optimizer = start()
    for done in range(3):
        with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
            scaled.backward()
            assert [group.get("step", 0) for group in optimizer.param_groups] == [done, done]
        optimizer.step()
        assert [group["step"] for group in optimizer.param_groups] == [done + 1, done + 1]


class Run:
    """Two models of one engine, each with an optimizer."""

    def __init__(self, level: str, storage: str, *, releases: bool) -> None:
        torch.manual_seed(0)
        self.models = [Net(), Net()]
        self.optimizers: list[Any] = [
            FusedAdam(groups_of(self.models[0]), lr=0.01, weight_decay=0.1),
            FusedSGD(self.models[1].parameters(), lr=0.1, momentum=0.9),
        ]
        kept = preamp.Storage(**STORAGES[storage], release_gradients=releases)
        options = {"opt_level": level, "verbosity": 0, "backend": "reference", **LEVELS[level]}
        preamp.initialize(self.models, self.optimizers, storage=kept, **options)
        self.number = 0
        self.extra: nn.Parameter | None = None

    def step(self, *which: int) -> None:
        self.number += 1
        loss = torch.stack([loss_of(self.models[index], self.number) for index in which]).sum()
        loss = loss if self.extra is None else loss + self.extra.float().sum()
        with preamp.scale_loss(loss, [self.optimizers[index] for index in which]) as scaled:
            scaled.backward()
        for index in which:
            self.optimizers[index].step()
            self.optimizers[index].zero_grad(set_to_none=True)

    def add(self) -> None:
        if self.extra is None:
            self.extra = nn.Parameter(torch.ones(3, dtype=self.models[0].first.weight.dtype))
            self.optimizers[0].add_param_group({"params": [self.extra], "lr": 0.5})

    @torch.no_grad()
    def write(self) -> None:
        self.models[0].first.weight[0] = 0.25 * self.number

    def load(self) -> None:
        for one in (*self.models, *self.optimizers, preamp.engine_of(self.models[0])):
            one.load_state_dict(copy.deepcopy(one.state_dict()))

    def slow_down(self) -> None:
        for group in self.optimizers[0].param_groups:
            group["lr"] *= 0.5


ACTS: dict[str, Callable[[Run], object]] = {
    "both": lambda run: run.step(0, 1),
    "first": lambda run: run.step(0),
    "a rate": Run.slow_down,
    "a scale of SGD": lambda run: setattr(run.optimizers[1], "most_recent_scale", 4.0),
    "thawed": lambda run: run.models[0].frozen.requires_grad_(True),
    "frozen": lambda run: run.models[1].first.requires_grad_(False),
    "a group": Run.add,
    "written": Run.write,
    "loaded": Run.load,
    "run again": lambda run: setattr(run.models[0], "runs_again", True),
    "read": lambda run: [m.sum() for m in preamp.master_params(run.optimizers[0])],
}


PAIRED_AT = ("O0", "O2", "O5")


def seconds_of(level: str, first: str) -> list[tuple[str, str]]:
    """Which acts follow ``first`` at ``level``, each with a storage: each act at one level."""
    turn = list(ACTS).index(first) + PAIRED_AT.index(level)
    storages = [storage for possible, storage in PLACES if possible == level]
    acts = list(ACTS)[-turn % len(PAIRED_AT) :: len(PAIRED_AT)]
    return [(storages[(turn + number) % len(storages)], act) for number, act in enumerate(acts)]


@pytest.mark.filterwarnings("ignore:The .* weight '0.first.weight' was written to")
@pytest.mark.parametrize("level", PAIRED_AT)
@pytest.mark.parametrize("first", ACTS)
def test_each_thing_may_follow_each_other(level: str, first: str) -> None:
    """Between steps, each pair at one of the levels; storages take turns."""
    for storage, second in seconds_of(level, first):
        runs = [Run(level, storage, releases=releases) for releases in (False, True)]
        for run in runs:
            for name in ("both", first, "both", second, "both"):
                ACTS[name](run)
        for index in range(2):
            made = [exact(run.models[index], run.optimizers[index]) for run in runs]
            assert same(*made), f"{first}, {second}, {storage}"


def test_a_parameter_thawed_within_a_block_is_updated_by_the_step() -> None:
    """It has no hook yet, so its gradient is an ordinary one."""
    runs = both(opt_level="O0")
    for model, optimizer in runs:
        with preamp.scale_loss(loss_of(model, 1), optimizer):
            model.frozen.bias.requires_grad_(True)
            loss_of(model, 1).backward()
        assert model.frozen.bias.grad is not None
        optimizer.step()
    assert same(*[exact(*run) for run in runs])


def test_zero_grad_is_harmless() -> None:
    runs = [start(storage="compact") for _ in range(2)]
    for index, (model, optimizer) in enumerate(runs):
        for number in range(3):
            optimizer.zero_grad(set_to_none=number != 1)
            backward(model, optimizer, number)
            if index:
                optimizer.zero_grad(set_to_none=number == 1)
            optimizer.step()
    assert same(*[exact(*run) for run in runs])


def test_zeros_from_before_are_no_gradients() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 0).backward()
    preamp.initialize(model, optimizer, **COMPACT, verbosity=0, backend="reference")
    with refused("release", "gradients from before", model, optimizer):
        backward(model, optimizer)
    optimizer.zero_grad(set_to_none=False)
    kept = model.sometimes.weight.detach().clone()
    backward(model, optimizer, 1)
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert torch.equal(model.sometimes.weight, kept)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_one_gradient_is_alive_at_a_time(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(opt_level=level, storage="8bit", backend="auto", **LEVELS[level])
    arrive, made, alive = Release.arrive, list[StorageWeakRef](), list[int]()

    def watched(self: Release, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        made.append(StorageWeakRef(grad.untyped_storage()))
        alive.append(sum(not one.expired() for one in made))
        arrive(self, leaf, grad)

    monkeypatch.setattr(Release, "arrive", watched)
    train(model, optimizer, range(2))
    assert len(made) == 7 + 5  # all but the frozen ones; the second step does not use two
    assert max(alive) == 1


def test_small_gradients_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to a bound: two of these weights at once, and the last one at the end of the block."""
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(5)])
    optimizer = FusedAdam(model.parameters())
    storage = preamp.Storage(release_gradients=True)
    model, optimizer = preamp.initialize(
        model, optimizer, opt_level="O5", verbosity=0, storage=storage
    )
    updated: list[int] = []
    alone = FusedAdam.update_alone

    def watched(self: FusedAdam, group: Any, entries: Any) -> None:
        updated.append(len(entries))
        alone(self, group, entries)

    monkeypatch.setattr(FusedAdam, "update_alone", watched)
    monkeypatch.setattr(release, "TOGETHER", 2 * 16 * 16 * 2 - 1)
    with preamp.scale_loss(model(torch.ones(2, 16)).sum(), optimizer) as scaled:
        scaled.backward()
        assert updated == [2, 2]
    assert updated == [2, 2, 1]


def test_what_waits_in_a_body_that_raises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "TOGETHER", 1 << 30)
    plain, run = (start() for _ in range(2))
    with suppress(KeyError), preamp.scale_loss(loss_of(run[0], 0), run[1]) as scaled:
        scaled.backward()
        raise KeyError
    for model, optimizer in (plain, run):
        train(model, optimizer, range(2))
    assert same(exact(*plain), exact(*run))


def small(count: int = 1) -> list[Any]:
    """Models and optimizers of one engine, whose gradients all wait."""
    models = [nn.Linear(8, 8, bias=False) for _ in range(count)]
    optimizers = [FusedAdam(model.parameters(), lr=0.1) for model in models]
    storage = preamp.Storage(release_gradients=True)
    preamp.initialize(models, optimizers, opt_level="O5", verbosity=0, storage=storage)
    return list(zip(models, optimizers, strict=True))


@pytest.mark.parametrize("raises", [False, True])
def test_blocks_within_blocks_keep_what_waits(
    raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the inner one that ends well, and of the outer one in any case."""
    monkeypatch.setattr(release, "TOGETHER", 1 << 30)
    (one, first), (two, second) = small(2)
    before = [one.weight.detach().clone(), two.weight.detach().clone()]
    with preamp.scale_loss(one(torch.ones(2, 8)).sum(), first) as outer:
        outer.backward()
        with suppress(KeyError), preamp.scale_loss(two(torch.ones(2, 8)).sum(), second) as inner:
            inner.backward()
            if raises:
                raise KeyError
        assert torch.equal(two.weight, before[1]) is raises
    assert not torch.equal(one.weight, before[0])


def test_threads_have_what_waits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "TOGETHER", 1 << 30)

    def run(model: nn.Module, optimizer: Any) -> None:
        for number in range(40):
            loss = model(torch.full((2, 8), 0.1 * number)).float().square().mean()
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    found: list[list[torch.Tensor]] = []
    for together in (False, True):
        torch.manual_seed(0)
        pairs = small(2)
        if together:
            with ThreadPoolExecutor(2) as pool:
                for done in [pool.submit(run, *pair) for pair in pairs]:
                    done.result()
        else:
            for pair in pairs:
                run(*pair)
        found.append([model.weight.detach().clone() for model, _ in pairs])
    assert same(*found)


@pytest.mark.parametrize("raises", [False, True])
def test_the_graph_of_a_block_is_let_go(raises: bool) -> None:
    ((model, optimizer),) = small()
    hidden = model(torch.ones(2, 8))
    alive = weakref.ref(hidden)
    with suppress(KeyError), preamp.scale_loss((hidden * 1.0).sum(), optimizer) as scaled:
        scaled.backward()
        if raises:
            raise KeyError
    if not raises:
        optimizer.step()
    del hidden, scaled
    gc.collect()
    assert alive() is None


def test_gradients_that_no_update_can_take_are_refused() -> None:
    model = nn.Embedding(8, 4, sparse=True)
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, **(COMPACT | {"opt_level": "O0"}), verbosity=0)
    ((dense, other),) = small()
    with (
        refused("release", "a sparse gradient", model, optimizer),
        preamp.scale_loss(model(torch.tensor([1, 2])).sum(), optimizer) as scaled,
    ):
        scaled.backward()
    with (
        refused("release", "a graph of the gradient", dense, other),
        preamp.scale_loss(dense(torch.ones(2, 8)).square().sum(), other) as scaled,
    ):
        scaled.backward(create_graph=True)


def test_a_gradient_given_to_a_parameter_without_one_is_refused() -> None:
    model, optimizer = start(opt_level="O0")
    with preamp.scale_loss(model.first.weight.sum(), optimizer) as scaled:
        scaled.backward()
    other = next(p for p in model.parameters() if p is not model.first.weight and p.requires_grad)
    other.grad = torch.ones_like(other)
    assert_refused("release", "a gradient beside the updates", optimizer.step, model, optimizer)


def test_bytes_of_a_parameter() -> None:
    model = nn.Linear(256, 4096, bias=False)
    optimizer = FusedAdam(model.parameters())
    storage = preamp.Storage(masters="split", moments="8bit", release_gradients=True)
    policy = preamp.OPT_LEVELS["O5"].replace(storage=storage)
    estimated = preamp.estimate(model, policy, optimizer)
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0, storage=storage)
    counted = dict[str, int]()
    for _ in range(2):
        loss = model(torch.ones(2, 256)).float().square().mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        counted = preamp.count_memory(preamp.engine_of(model))
        optimizer.step()
    assert counted["gradients"] == estimated.gradients == 0
    assert sum(counted.values()) - counted["loss scaler"] == 6.0625 * 256 * 4096
    assert estimated.categories == counted


# -- what is refused -------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Build, dict[str, Any]]] = {
    "LAMB": (FusedLAMB, {}),
    "LARS": (lambda params: FusedLARS(params, lr=0.1), {}),
    "mixed LAMB": (FusedMixedPrecisionLamb, {}),
    "AdamW of torch": (torch.optim.AdamW, {}),
    "early Adam": (lambda params: FusedAdam(params, max_grad_norm=1.0), {}),
    "LARC": (lambda params: LARC(FusedSGD(params, lr=0.1)), {}),
    "two of the same parameters": (
        lambda params: [FusedSGD(each, lr=0.1) for each in itertools.tee(params)],
        {"opt_level": "O4"},
    ),
    "a dynamic scale": (BUILDS["FusedAdam"], {"opt_level": "O2"}),
    "numerics": (BUILDS["FusedAdam"], {"numerics": "light"}),
    "a trace": (BUILDS["FusedAdam"], {"overflow": "trace"}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_initialize_refuses(name: str) -> None:
    build, more = REFUSED[name]
    model = Net()
    optimizer = build(model.parameters())
    with refused("release", name, model):
        preamp.initialize(model, optimizer, **(COMPACT | more), verbosity=0)
    assert_refused("release", "no engine", lambda: preamp.engine_of(model), model)
    loss_of(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)


def test_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start()
    monkeypatch.setattr(engine_storage, "has_process_group", lambda: True)
    for call in (lambda: backward(model, optimizer), start):
        assert_refused("release", "ranks", call, model, optimizer)


def within(optimizer: Any, loss: torch.Tensor, body: Callable[..., object], **how: Any) -> None:
    with preamp.scale_loss(loss, optimizer, **how) as scaled:
        body(scaled)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "a clip": lambda _, optimizer: preamp.clip_grad_norm_(optimizer, 1.0),
    "a clip of parameters": lambda model, _: preamp.clip_grad_norm_(model.parameters(), 1.0),
    "a delayed unscaling": lambda model, optimizer: within(
        optimizer, loss_of(model, 0), lambda _: pytest.fail("entered"), delay_unscale=True
    ),
    "a GradScaler": lambda _, optimizer: preamp.GradScaler(optimizer),
    "a trace later": lambda _, optimizer: preamp.engine_of(optimizer).trace_overflow(),
    "a closure": lambda _, optimizer: optimizer.step(lambda: pytest.fail("was called")),
    "LARC later": lambda _, optimizer: LARC(optimizer).step(),
    "a backward in no block": lambda model, _: loss_of(model, 0).backward(),
    "a backward of the loss": lambda model, optimizer: within(
        optimizer, loss := loss_of(model, 0), lambda _: loss.backward()
    ),
}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        *((name, level) for name in CALLS for level in ("O1", "O2")),
        *((name, level) for name in CALLS for level in ("O0", "O5") if "of the loss" not in name),
    ],
)
def test_calls_are_refused(name: str, level: str) -> None:
    model, optimizer = start(opt_level=level, **LEVELS[level])
    train(model, optimizer, range(2))
    before = exact(model, optimizer)
    assert_refused("release", name, lambda: CALLS[name](model, optimizer), model, optimizer)
    assert same(exact(model, optimizer), before)
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, (2,))


def test_a_second_backward_is_refused_until_a_step() -> None:
    model, optimizer = start()
    backward(model, optimizer)
    optimizer.zero_grad()
    with refused("release", "a second backward", model, optimizer):
        backward(model, optimizer)
    optimizer.step()
    train(model, optimizer, (1,))
    with preamp.scale_loss(loss_of(model, 0), optimizer):  # without any backward
        pass
    backward(model, optimizer)


def test_a_second_gradient_in_a_block_is_refused() -> None:
    model, optimizer = start()
    with (
        refused("release", "a second gradient", changes=True),
        preamp.scale_loss(loss_of(model, 0), optimizer) as scaled,
    ):
        scaled.backward()
        loss_of(model, 1).backward()
    assert all(param.grad is None for param in model.parameters())
    train(model, optimizer, (1,))


def test_reentrant_checkpoints_that_use_a_weight_twice_are_refused() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
            hidden: Any = self.table(x)
            for _ in range(2 if uses_all else 1):
                hidden = checkpoint(self.first, hidden, use_reentrant=True)
            return hidden[..., :32]

    model = Twice()
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, **COMPACT, verbosity=0, backend="reference")
    train(model, optimizer, (1,))
    with refused("release", "a weight used twice in a checkpoint", changes=True):
        backward(model, optimizer, 0)
    train(model, optimizer, (1,))


def test_gradients_besides_the_updates_are_refused() -> None:
    """A penalty on masters, or what a script assigns."""
    model, optimizer = start()
    master = preamp.engine_of(model).master_of(model.first.weight)
    assert master is not None
    with preamp.scale_loss(loss_of(model, 0) + master.square().sum(), optimizer) as scaled:
        scaled.backward()
    assert_refused("release", "a gradient beside the updates", optimizer.step, model, optimizer)
    optimizer.zero_grad()
    optimizer.step()
    backward(model, optimizer)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    assert_refused("release", "a gradient beside the updates", optimizer.step, model, optimizer)


def test_a_weight_that_the_graph_needs_later_is_noticed() -> None:
    """Detached, it is read by a node that its gradient does not wait for."""
    model, optimizer = start(opt_level="O0")
    first = model.first
    x = torch.ones(2, 128, requires_grad=True)
    hidden = x * nn.functional.linear(x, first.weight.detach().clone())
    early = nn.functional.linear(hidden, first.weight.detach())
    loss = nn.functional.linear(early, first.weight).sum()
    with (
        refused("release", "a weight that the graph needs later", changes=True),
        preamp.scale_loss(loss, optimizer) as scaled,
    ):
        scaled.backward()
    train(model, optimizer, (1,))


# -- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["full", "compact"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_body_that_raises(steps: int, storage: str) -> None:
    """What was updated stays; the next step is like any other, and has the same number."""
    model, optimizer = start(storage=storage)
    train(model, optimizer, range(steps))
    before = [param.detach().clone() for param in model.parameters()]
    with suppress(KeyError), preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
        raise KeyError
    assert not same(before, [param.detach() for param in model.parameters()])
    assert_rounded(optimizer)
    assert [group.get("step", 0) for group in optimizer.param_groups] == [steps, steps]
    train(model, optimizer, range(2))
    assert_rounded(optimizer)
    assert [group["step"] for group in optimizer.param_groups] == [steps + 2, steps + 2]


def test_between_backward_and_step_weights_are_whole() -> None:
    model, optimizer = start(storage="compact")
    for number in range(3):
        backward(model, optimizer, number)
        assert_rounded(optimizer)
        after = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()
        assert same(after, model.state_dict())


def test_close_takes_the_hooks_off() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    preamp.engine_of(model).close()
    loss_of(model, 0).backward()
    assert all(param.grad is not None for param in model.parameters() if param.requires_grad)
    optimizer.step()


def test_copies_have_no_hooks() -> None:
    model, optimizer = start(opt_level="O0")
    train(model, optimizer, range(2))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(twin, 0).backward()
        assert twin.first.weight.grad is not None
    assert same(copy.deepcopy(optimizer).state_dict(), optimizer.state_dict())
    assert pickle.loads(pickle.dumps(optimizer)).storage.release_gradients


def test_a_model_that_changes_over_has_the_hooks_of_one_engine() -> None:
    model, first = start(opt_level="O0")
    train(model, first, range(2))
    second = FusedAdam(model.parameters())
    preamp.initialize(model, second, opt_level="O0", verbosity=0)
    backward(model, second)
    assert model.first.weight.grad is not None


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    model, optimizer = start(storage="compact")
    train(model, optimizer, range(2))
    backward(model, optimizer, 2)
    path = tmp_path / "run.safetensors"
    with refused("release", "a file between backward and step", model, optimizer):
        preamp.save_checkpoint(path, model, optimizer)  # weights are new, and not counted yet
    optimizer.step()
    preamp.save_checkpoint(path, model, optimizer)
    other, others = start(storage="compact")
    train(other, others, range(1))
    preamp.load_checkpoint(path, other, others)
    runs = [(model, optimizer), (other, others)]
    for one, its in runs:
        train(one, its, range(3, 5))
    assert same(*[exact(one, its) for one, its in runs])
    with (
        preamp.scale_loss(loss_of(model, 0), optimizer),
        refused("release", "a file in a block", model, optimizer),
    ):
        preamp.save_checkpoint(path, model, optimizer)


def test_who_loads_instead_of_a_step_goes_back(tmp_path: Path) -> None:
    """As after a loss that is not finite: what was updated cannot be taken back otherwise."""
    model, optimizer = start(storage="split")
    train(model, optimizer, range(2))
    preamp.save_checkpoint(tmp_path / "run", model, optimizer)
    before = exact(model, optimizer)
    backward(model, optimizer, 2)
    preamp.load_checkpoint(tmp_path / "run", model, optimizer)
    assert same(exact(model, optimizer), before)
    train(model, optimizer, (2,))


# -- words -----------------------------------------------------------------------------------------


def test_it_is_told() -> None:
    _, optimizer = start(storage="compact")
    text = preamp.engine_of(optimizer).explain()
    assert "each gradient is applied as soon as it is made, and then dropped" in text
    assert "release_gradients=True" in text
    said = describe_storage("split", "8bit", release_gradients=True)
    assert said == "Storage(masters='split', moments='8bit', release_gradients=True)"
    assert describe_storage("split", "8bit") == "compact"


def test_the_flag_is_true_or_false() -> None:
    with refused("release", "no truth value"):
        preamp.Storage(release_gradients="yes")  # pyright: ignore[reportArgumentType]
