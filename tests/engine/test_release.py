# SPDX-License-Identifier: BSD-3-Clause
"""Gradients applied as soon as they are made: the numbers of training without that, to the bit."""

import itertools
from collections.abc import Callable
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
from kit.run import Run, assert_alike, assert_same_program
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


def loss_of(model: Any, number: int) -> torch.Tensor:
    x = torch.randint(0, 32, (4, 3), generator=torch.Generator().manual_seed(number))
    x = x.to(model.table.weight.device)
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


class Training(Run):
    """That model, and one of `BUILDS` with a rate of its own for vectors."""

    def __init__(
        self, level: str = "O5", name: str = "FusedAdam", *, releases: bool = True, **options: Any
    ) -> None:
        kept = preamp.Storage(
            **STORAGES[options.pop("storage", "full")], release_gradients=releases
        )
        options = {"backend": "reference", **LEVELS[level], **options}
        super().__init__(level, model=Net, storage=kept, starts=False, **options)
        self.optimizer = BUILDS[name](groups_of(self.model))
        self.optimizers = [self.optimizer]
        self.initialize()

    def loss(self, index: int = 0) -> torch.Tensor:
        return loss_of(self.model, index)

    def steps(self) -> list[int]:
        return [group.get("step", 0) for group in self.optimizer.param_groups]

    def has_gradients(self) -> list[bool]:
        return [p.grad is not None for p in self.model.parameters() if p.requires_grad]


def both(*given: str, **options: Any) -> list[Training]:
    """The same start twice, the second releasing gradients."""
    return [Training(*given, releases=releases, **options) for releases in (False, True)]


def assert_whole(run: Run) -> None:
    """Every half weight is its rounded master."""
    for table in [run.engine.sessions[id(run.optimizer)].table]:
        for twin in table.twins:
            if table.is_split:
                rounded = split(twin.value(), twin.dtype)[0]
            else:  # itself, since an exact value is the half weight's where it does not round to it
                rounded = twin.master.detach().to(twin.dtype)
            assert torch.equal(rounded, twin.half)


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
    runs = both(level, name, storage=storage)
    for run in runs:
        schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)
        for number in range(4):
            run.model.runs_again = number == 2
            if name == "FusedSGD" and number == 3:
                run.optimizer.most_recent_scale = 4.0
            run.iterate(number)
            schedule.step()
    assert_alike(*runs)


def test_zero_grad_is_harmless() -> None:
    runs = [Training(storage="compact") for _ in range(2)]
    runs[0].play("zero; backward; step; zero filled; backward 1; step; zero; backward 2; step")
    runs[1].play("zero; backward; zero; step; zero filled; backward 1; zero filled; step")
    runs[1].play("zero; backward 2; zero; step")
    assert_alike(*runs)


def test_zeros_from_before_are_no_gradients() -> None:
    run = Training(name="FusedSGD").play("close; outside; initialize")
    with refused("release", "gradients from before", run.model, run.optimizer):
        run.play("backward")
    kept = run.model.sometimes.weight.detach().clone()
    run.play("zero filled; backward 1; step")
    assert not any(run.has_gradients())
    assert torch.equal(run.model.sometimes.weight, kept)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_one_gradient_is_alive_at_a_time(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Training(level, storage="8bit", backend="auto")
    arrive, made, alive = Release.arrive, list[StorageWeakRef](), list[int]()

    def watched(self: Release, leaf: torch.Tensor, grad: torch.Tensor) -> None:
        made.append(StorageWeakRef(grad.untyped_storage()))
        alive.append(sum(not one.expired() for one in made))
        arrive(self, leaf, grad)

    monkeypatch.setattr(Release, "arrive", watched)
    run.play("iterate 0 1")
    assert len(made) == 7 + 5  # all but the frozen ones; the second step does not use two
    assert max(alive) == 1


def raising(run: Run) -> None:
    """A block whose body raises after its backward."""
    with suppress(KeyError), preamp.scale_loss(run.loss(), run.optimizer) as scaled:
        scaled.backward()
        raise KeyError


def test_what_waits_in_a_body_that_raises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "TOGETHER", 1 << 30)
    runs = [Training() for _ in range(2)]
    raising(runs[0])
    assert_same_program("iterate 0 1", *runs)


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
    run = Training("O0")
    run.back(run.model.first.weight.sum())
    run.model.norm.weight.grad = torch.ones_like(run.model.norm.weight)
    assert_refused("release", "a gradient beside the updates", run.step, run.model, run.optimizer)


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
    run = Training()
    monkeypatch.setattr(engine_storage, "has_process_group", lambda: True)
    for call in (run.backward, Training):
        assert_refused("release", "ranks", call, run.model, run.optimizer)


def within(run: Run, loss: torch.Tensor, body: Callable[..., object]) -> None:
    with preamp.scale_loss(loss, run.optimizer) as scaled:
        body(scaled)


CALLS: dict[str, Callable[[Any], object]] = {
    "a clip": Run.clip,
    "a clip of parameters": lambda run: preamp.clip_grad_norm_(run.model.parameters(), 1.0),
    "a GradScaler": lambda run: preamp.GradScaler(run.optimizer),
    "a trace later": lambda run: run.engine.trace_overflow(),
    "a closure": lambda run: run.optimizer.step(lambda: pytest.fail("was called")),
    "LARC later": lambda run: LARC(run.optimizer).step(),
    "a backward in no block": Run.outside,
    "a backward of the loss": lambda run: within(
        run, loss := run.loss(), lambda _: loss.backward()
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
    run = Training(level).play("iterate 0 1")
    before = run.numbers()
    assert_refused("release", name, lambda: CALLS[name](run), run.model, run.optimizer)
    assert same(run.numbers(), before)
    assert not any(run.has_gradients())
    run.play("iterate 2")


def test_a_second_backward_is_refused_until_a_step() -> None:
    run = Training().play("backward; zero")
    with refused("release", "a second backward", run.model, run.optimizer):
        run.play("backward")
    run.play("step; iterate 1")
    with preamp.scale_loss(run.loss(), run.optimizer):  # without any backward
        pass
    run.play("backward")


def test_a_second_gradient_in_a_block_is_refused() -> None:
    run = Training()
    with (
        refused("release", "a second gradient", changes=True),
        preamp.scale_loss(run.loss(), run.optimizer) as scaled,
    ):
        scaled.backward()
        run.outside(1)
    assert not any(run.has_gradients())
    run.play("iterate 1")


def test_reentrant_checkpoints_that_use_a_weight_twice_are_refused() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor, *, uses_all: bool = True) -> torch.Tensor:
            hidden: Any = self.table(x)
            for _ in range(2 if uses_all else 1):
                hidden = checkpoint(self.first, hidden, use_reentrant=True)
            return hidden[..., :32]

    run = Training()
    run.model.__class__ = Twice
    run.play("iterate 1")
    with refused("release", "a weight used twice in a checkpoint", changes=True):
        run.play("backward 0")
    run.play("iterate 1")


def test_gradients_besides_the_updates_are_refused() -> None:
    """A penalty on masters, or what a script assigns."""
    run = Training()
    master = run.engine.master_of(run.model.first.weight)
    run.back(run.loss() + master.square().sum())
    for play in ("zero; step; backward", ""):
        name, subjects = "a gradient beside the updates", (run.model, run.optimizer)
        assert_refused("release", name, run.optimizer.step, *subjects)
        run.play(play)
        run.model.first.weight.grad = torch.ones_like(run.model.first.weight)


def test_a_weight_that_the_graph_needs_later_is_noticed() -> None:
    """Detached, it is read by a node that its gradient does not wait for."""
    run = Training("O0")
    weight = run.model.first.weight
    x = torch.ones(2, 128, requires_grad=True)
    hidden = x * nn.functional.linear(x, weight.detach().clone())
    early = nn.functional.linear(hidden, weight.detach())
    with refused("release", "a weight that the graph needs later", changes=True):
        run.back(nn.functional.linear(early, weight).sum())
    run.play("iterate 1")


# -- trouble ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["full", "compact"])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_body_that_raises(steps: int, storage: str) -> None:
    """What was updated stays; the next step is like any other, and has the same number."""
    run = Training(storage=storage).play(steps * "iterate;")
    before = run.numbers()["stored"]
    raising(run)
    assert not same(before, run.numbers()["stored"])
    assert_whole(run)
    assert run.steps() == [steps, steps]
    assert_whole(run.play("iterate 0 1"))
    assert run.steps() == [steps + 2, steps + 2]


def test_files_are_refused_until_a_step_and_undo_what_has_no_step(tmp_path: Path) -> None:
    """As after a loss that is not finite: what was updated cannot be taken back otherwise."""
    run, path = Training(storage="compact").play("iterate 0 1"), tmp_path / "run"
    run.save(path)
    before = run.play("zero").numbers()
    run.play("backward 2")
    with refused("release", "a file between backward and step", run.model, run.optimizer):
        run.save(path)  # weights are new, and not counted yet
    run.load(path)
    assert same(run.numbers(), before)
    run.play("iterate 2")
    with (
        preamp.scale_loss(run.loss(), run.optimizer),
        refused("release", "a file in a block", run.model, run.optimizer),
    ):
        run.save(path)


# -- words -----------------------------------------------------------------------------------------


def test_it_is_told() -> None:
    text = Training(storage="compact").engine.explain()
    assert "each gradient is applied as soon as it is made, and then dropped" in text
    assert "release_gradients=True" in text
    said = describe_storage("split", "8bit", release_gradients=True)
    assert said == "Storage(masters='split', moments='8bit', release_gradients=True)"
    assert describe_storage("split", "8bit") == "compact"


def test_the_flag_is_true_or_false() -> None:
    with refused("release", "no truth value"):
        preamp.Storage(release_gradients="yes")  # pyright: ignore[reportArgumentType]
