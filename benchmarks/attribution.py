# SPDX-License-Identifier: BSD-3-Clause
"""Overflows with a known cause: architectures × faults × levels × ways to train."""
# ruff: noqa: D101, D102 - what the small models do is in their few lines

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import preamp
from preamp.optimizers import FusedAdam

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
WIDTH = 8


@dataclass(slots=True)
class Score:
    """The outcome of all cases of one kind."""

    kind: str  # what was asked, such as "parameter"
    right: int = 0
    unknown: int = 0  # it was said not to be known
    wrong: list[str] = field(default_factory=list)  # which cases, and what was said of them

    @property
    def cases(self) -> int:
        """All of them."""
        return self.right + self.unknown + len(self.wrong)


class _Scaled(torch.autograd.Function):
    """Multiplies forward by one number, and backward by another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.by = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.by, None, None


class Spoil(nn.Module):
    """Does nothing until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_by = self.backward_by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.forward_by == self.backward_by == 1.0:
            return x
        return cast("Any", _Scaled).apply(x, self.forward_by, self.backward_by)


class Handled(nn.Module):
    """Makes infinities that the model's own code takes away again."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, math.inf) if self.is_on else x + 4.0


class Trap(nn.Module):
    """A logarithm of zero that nobody uses, whose gradient is nan all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * 0.0) if self.is_on else x


class Base(nn.Module):
    """What all architectures have: a fault between two layers, and one that is handled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.spoil = Spoil()
        self.handled = Handled()
        self.trap = Trap()
        self.own_by = 1.0
        self.last = nn.Linear(WIDTH, WIDTH)

    def begin(self, x: torch.Tensor) -> torch.Tensor:
        x = self.spoil(torch.tanh(self.first(x)))
        x = torch.minimum(x, self.handled(x.detach())) * self.own_by
        return torch.where(torch.zeros_like(x).bool(), self.trap(x), x)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.begin(x)))


class Mlp(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Residual(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def order(self) -> Sequence[int]:
        return range(3)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order():
            x = x + F.relu(self.layers[index](self.norms[index](x)))
        return x


class Shuffled(Residual):
    """Blocks in another order in each step."""

    calls = 0

    def order(self) -> Sequence[int]:
        self.calls += 1
        return list(itertools.permutations(range(3)))[self.calls * 5 % 6]


class Shared(Mlp):
    """One layer three times, with what is used once in between."""

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.layers(self.first(x))) * 0.5


class Attention(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        mask = torch.full((x.shape[0], x.shape[0]), -math.inf, dtype=x.dtype).triu(1)
        return x + self.out((q @ k.T + mask).softmax(-1) @ v)


class Recurrent(Base):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x[None])[0][0]


class Convolution(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x[:, None])).mean(1)


class Heads(Mlp):
    """Another head in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.calls = 0

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.heads[self.calls // 2 % 2](self.layers(x))


class Checkpointed(Mlp):
    reentrant = False

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", checkpoint(self.layers, x, use_reentrant=self.reentrant))


class Reentrant(Checkpointed):
    reentrant = True


class Frozen(Mlp):
    """The first layers are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)


ARCHITECTURES: dict[str, Callable[[], Base]] = {
    kind.__name__.lower(): kind
    for kind in (
        Mlp, Residual, Shuffled, Shared, Attention, Recurrent, Convolution, Heads, Checkpointed,
        Reentrant, Frozen,
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Truth:
    """What is to be said: the module and the phase; empty for what runs outside of them."""

    module: str
    phase: str


@dataclass(frozen=True, slots=True)
class Case:
    """One training run in which something overflows in its last step."""

    architecture: str
    fault: str
    level: str
    way: str  # how it is trained

    @property
    def name(self) -> str:
        return f"{self.architecture}, {self.fault}, {self.level}, {self.way}"


class Run:
    """A model in training, and what really happened to its gradients."""

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = ARCHITECTURES[case.architecture]()
        self.backbone = nn.Sequential(nn.Linear(WIDTH, WIDTH), Spoil())
        make: Any = FusedAdam if case.way == "fused" else torch.optim.SGD
        self.optimizer = make(self.model.parameters(), lr=1e-3)
        self.scaler: Any = None
        self.uses_backbone = "backbone" in case.fault
        options: dict[str, Any] = {"loss_scale": 1.0} if case.way == "static" else {}
        if case.way != "static":
            options["loss_scale"] = "dynamic"
        if case.fault == "output cast":
            options["cast_model_outputs"] = torch.float16
        preamp.initialize(
            [self.model, self.backbone], self.optimizer, opt_level=case.level, verbosity=0,
            overflow="trace", num_losses=2, **options,
        )  # fmt: skip
        self.engine = preamp.engine_of(self.optimizer)
        for scaler in self.engine.scalers:
            if scaler.is_dynamic:
                scaler.set_scale(2.0)
        if case.way == "grad scaler":
            self.scaler = preamp.GradScaler(self.optimizer)
        self.made: list[tuple[str, bool]] = []
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                cast_hook: Any = param
                cast_hook.register_post_accumulate_grad_hook(
                    lambda p, name=name: self.made.append((name, not bool(p.grad.isfinite().all())))
                )
        self.data_by = self.loss_by = 1.0
        self.first_value: float | None = None
        self.has_teacher = case.fault == "teacher"

    @property
    def culprit(self) -> str | None:
        """The first parameter that had such a gradient."""
        return next((f"0.{name}" for name, is_bad in self.made if is_bad), None)

    def loss(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(4, WIDTH, generator=generator) * self.data_by
        if self.first_value is not None:
            x[0, 0] = self.first_value
        x = torch.from_numpy(x.numpy())  # as a loader hands it over, that nobody has heard of
        if self.uses_backbone:
            with torch.no_grad():
                x = self.backbone(x)
            if self.case.fault == "backbone, then pooled":
                x = x.reshape(4, 2, -1).mean(1).repeat(1, 2)
        out, targets = self.model(x).float(), torch.randn(4, WIDTH, generator=generator)
        if self.has_teacher:
            with torch.no_grad():
                targets = self.backbone(x)
        return (out - targets).square().mean() * self.loss_by

    def backward(self, index: int, **options: Any) -> None:
        loss = self.loss(index)
        if self.scaler is not None:
            self.scaler.scale(loss).backward()
            return
        if self.case.way == "losses":
            options["loss_id"] = index % 2
        with preamp.scale_loss(loss, self.optimizer, **options) as scaled:
            scaled.backward()

    def step(self, index: int, fault: Callable[[Run], object] | None = None) -> None:
        """Train one step, the fault in the last of its parts."""
        parts = 3 if self.case.way in ("accumulated", "delayed", "middle") else 1
        at = 1 if self.case.way == "middle" else parts - 1
        for part in range(parts):
            self.made.clear() if not self.has_begun else None
            if part == at and fault is not None:
                fault(self)
                self.has_begun = True
            delays = self.case.way == "delayed" and part < parts - 1
            self.backward(3 * index + part, **({"delay_unscale": True} if delays else {}))
            if part == at and fault is not None and self.case.way == "middle":
                self.repair()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()

    has_begun = False

    def repair(self) -> None:
        self.model.spoil.forward_by = self.model.spoil.backward_by = 1.0
        self.model.handled.is_on = False
        self.model.own_by, self.model.trap.is_on = 1.0, False
        self.data_by, self.loss_by, self.first_value = 1.0, 1.0, None
        for param in self.model.parameters():
            if not param.isfinite().all():
                with torch.no_grad():
                    param.fill_(0.5)


def _set(**values: float) -> Callable[[Run], object]:
    def fault(run: Run) -> None:
        for name, value in values.items():
            owner: Any = run if hasattr(run, name) else run.model.spoil
            setattr(owner, name, value)

    return fault


def _handle(run: Run) -> None:
    run.model.handled.is_on = True


def _both(*faults: Callable[[Run], object]) -> Callable[[Run], object]:
    return lambda run: [fault(run) for fault in faults]


def _weight(name: str, value: float) -> Callable[[Run], object]:
    def fault(run: Run) -> None:
        with torch.no_grad():
            run.model.get_parameter(name).fill_(value)

    return fault


def _gradient(name: str) -> Callable[[Run], object]:
    def fault(run: Run) -> None:
        hook: Any = run.model.get_parameter(name)
        hook.register_hook(lambda grad: torch.full_like(grad, math.inf))

    return fault


def _backbone(run: Run) -> None:
    spoil: Any = run.backbone[1]
    spoil.forward_by = math.inf


def _validate(run: Run) -> None:
    with torch.no_grad():
        run.model(torch.full((4, WIDTH), math.inf))


def _own(run: Run) -> None:
    run.model.own_by = math.inf


def _trap(run: Run) -> None:
    run.model.trap.is_on = True


UNKNOWN = Truth("", "")
FAULTS: dict[str, tuple[Callable[[Run], object], Truth]] = {
    "forward inf": (_set(forward_by=math.inf), Truth("0.spoil", "forward")),
    "forward nan": (_set(forward_by=math.nan), Truth("0.spoil", "forward")),
    "backward inf": (_set(backward_by=math.inf), Truth("0.spoil", "backward")),
    "backward nan": (_set(backward_by=math.nan), Truth("0.spoil", "backward")),
    "weight": (_weight("first.weight", math.nan), Truth("0.first", "forward")),
    "late weight": (_weight("last.bias", math.inf), Truth("0.last", "forward")),
    "parameter": (_gradient("last.weight"), UNKNOWN),
    "early parameter": (_gradient("first.bias"), UNKNOWN),
    "loss": (_set(loss_by=math.nan), Truth("", "forward")),
    "data inf": (_set(data_by=math.inf), Truth("0", "data")),
    "data nan": (_set(data_by=math.nan), Truth("0", "data")),
    "data cast": (_set(data_by=1e6), Truth("0", "input cast")),
    "handled, backward": (_both(_handle, _set(backward_by=math.inf)), Truth("0.spoil", "backward")),
    "handled, parameter": (_both(_handle, _gradient("last.weight")), UNKNOWN),
    "handled, loss": (_both(_handle, _set(loss_by=math.inf)), Truth("", "forward")),
    "handled, forward": (
        _both(_handle, _weight("last.bias", math.nan)),
        Truth("0.last", "forward"),
    ),
    "backbone": (_backbone, Truth("1.1", "forward")),
    "trap": (_trap, Truth("0.trap", "backward")),
    "own code": (_own, Truth("0", "forward")),
    "one value of data": (_set(first_value=-math.inf), Truth("0", "data")),
    "one value cast": (_set(first_value=7e4), Truth("0", "input cast")),
    "validation, backward": (
        _both(_validate, _set(backward_by=math.inf)),
        Truth("0.spoil", "backward"),
    ),
    "validation, data": (_both(_validate, _set(data_by=math.nan)), Truth("0", "data")),
    "teacher": (_backbone, Truth("1.1", "forward")),
    "backbone, then pooled": (_backbone, Truth("1.1", "forward")),
    "large loss": (_set(loss_by=1e6), Truth("0", "output cast backward")),
    "output cast": (_set(loss_by=1e5), Truth("0", "output cast backward")),
}
WAYS = (
    "plain", "accumulated", "middle", "delayed", "losses", "grad scaler", "fused", "static",
)  # fmt: skip


_STAYING = ("backbone", "backbone, then pooled", "teacher", "parameter", "early parameter")


def _applies(case: Case) -> bool:
    if case.fault in ("data cast", "one value cast", "large loss") and case.level not in (
        "O1",
        "O2",
        "O3",
    ):
        return False  # bfloat16 has float32's range
    if case.fault == "output cast" and (case.level not in ("O0",) or case.way == "static"):
        return False
    return not (case.way == "middle" and case.fault in _STAYING)


def _truth(case: Case) -> Truth:
    truth = FAULTS[case.fault][1]
    if (
        case.fault in ("data cast", "one value cast") and case.level == "O1"
    ):  # functions are cast one by one
        return Truth("0.first", truth.phase)
    return truth


def cases() -> Iterator[Case]:
    """All of them."""
    for combination in itertools.product(ARCHITECTURES, FAULTS, LEVELS, WAYS):
        case = Case(*combination)
        if _applies(case):
            yield case


def run(case: Case) -> tuple[preamp.OverflowCause | None, str | None]:
    """Train it; returns what was said, and which parameter was really the first."""
    one = Run(case)
    try:
        for index in range(2):
            one.step(index)
        one.step(2, FAULTS[case.fault][0])
        causes = one.engine.overflow_causes
        return (causes[-1] if causes else None), one.culprit
    finally:
        one.engine.close()


def judge(case: Case, score: Score, module: Score) -> None:
    """Run a case and count what was said."""
    cause, culprit = run(case)
    if cause is None:
        if culprit is not None:
            score.wrong.append(f"{case.name}: nothing was said, though {culprit}")
            module.wrong.append(f"{case.name}: nothing was said")
        return
    own = cause.parameters[: cause.candidates]
    if cause.parameters[:1] == (culprit,) and len(own) == 1:
        score.right += 1
    elif culprit in own and len(own) > 1:
        score.unknown += 1
    else:
        score.wrong.append(f"{case.name}: {own}, and it was {culprit}")
    truth, trace = _truth(case), cause.trace
    said = UNKNOWN if trace is None else Truth(trace.module, trace.phase)
    if said == truth:
        module.right += 1
    elif trace is None:
        module.unknown += 1
    else:
        module.wrong.append(f"{case.name}: {said.phase} of {said.module!r}")


PROGRAMS = ("gan", "gan, two losses", "sum", "retained", "twice", "random", "penalty", "list")
"""Training loops whose backwards differ from step to step, or have several roots."""


class _Pair:
    """Two models that are trained in turns, or together."""

    def __init__(self, program: str, level: str, damaged: Sequence[str]) -> None:
        torch.manual_seed(1)
        self.program = program
        self.models = [Mlp(), Residual()]
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in self.models]
        preamp.initialize(
            self.models, self.optimizers, opt_level=level, verbosity=0, loss_scale="dynamic",
            num_losses=2,
        )  # fmt: skip
        self.engine = preamp.engine_of(self.optimizers[0])
        for scaler in self.engine.scalers:
            scaler.set_scale(2.0)
        self.made: list[tuple[str, bool]] = []
        self.is_armed = False
        for index, model in enumerate(self.models):
            for name, param in model.named_parameters():
                own, hook = f"{index}.{name}", cast("Any", param)
                if own in damaged:
                    hook.register_hook(lambda grad: grad * (math.inf if self.is_armed else 1.0))
                hook.register_post_accumulate_grad_hook(partial(self._note, own))

    def _note(self, name: str, param: torch.Tensor) -> None:
        self.made.append((name, not bool(cast("Any", param.grad).isfinite().all())))

    def losses(self, step: int) -> list[torch.Tensor]:
        """The terms whose sum, or each of which, is trained."""
        first, second = self.models
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        fake = first(x)
        if self.program.startswith("gan"):
            return [second(fake.detach() if step % 2 else fake).float().square().mean()]
        terms = [fake.float().square().mean(), second(x).float().mean()]
        return terms[::-1] if self.program == "random" and step % 2 else terms

    def step(self, step: int) -> None:
        """Train one step."""
        terms, used = self.losses(step), self.optimizers
        loss_id = step % 2 if self.program == "gan, two losses" else 0
        if self.program == "list":
            scaler = preamp.GradScaler(used)
            for scaled in scaler.scale(terms):
                scaled.backward()
            for optimizer in used:
                scaler.step(optimizer)
            scaler.update()
        else:
            if self.program == "penalty":
                penalties = (p.float().square().sum() for p in self.models[1].parameters())
                terms.append(cast("torch.Tensor", sum(penalties)))
            with preamp.scale_loss(sum(terms, torch.zeros(())), used, loss_id) as scaled:
                scaled.backward(retain_graph=self.program in ("retained", "twice"))
                if self.program == "twice":
                    scaled.backward()
            for optimizer in used:
                optimizer.step()
        for optimizer in used:
            optimizer.zero_grad()


def order_cases() -> Iterator[tuple[str, str, tuple[str, str]]]:
    """Programs, levels, and two parameters whose gradients become infinite."""
    layers = ("first.weight", "layers.0.bias", "layers.2.weight", "last.bias")
    names = [f"{index}.{name}" for index in range(2) for name in layers]
    return itertools.product(PROGRAMS, LEVELS, itertools.combinations(names, 2))


def judge_order(program: str, level: str, damaged: tuple[str, str], score: Score) -> None:
    """Run one, and count whether the first parameter was named."""
    pair = _Pair(program, level, damaged)
    try:
        for step in range(4):
            pair.is_armed = step == 3
            pair.made.clear()
            pair.step(step)
        culprit = next((name for name, is_bad in pair.made if is_bad), None)
        causes = pair.engine.overflow_causes
        own = causes[0].parameters[: causes[0].candidates] if causes else ()
        if own[:1] == (culprit,) and len(own) == 1:
            score.right += 1
        elif culprit in own:
            score.unknown += 1
        elif causes or culprit is not None:
            score.wrong.append(f"{program}, {level}, {damaged}: {own}, and it was {culprit}")
    finally:
        pair.engine.close()


def scores(every: int, offset: int) -> list[Score]:
    """How many are right: of the first parameters, and of modules."""
    parameter, module = Score("parameter"), Score("module")
    for case in itertools.islice(cases(), offset, None, every):
        judge(case, parameter, module)
    order = Score("changing backwards")
    for one in itertools.islice(order_cases(), offset, None, every):
        judge_order(*one, order)
    return [parameter, module, order]
