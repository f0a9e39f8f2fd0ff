# SPDX-License-Identifier: BSD-3-Clause
"""Random training programs, run by preamp and by plain torch in float64 at once.

A program is a list of calls. Each is made on an initialized model and on a `Toy` without any
engine, whose numbers are chosen such that no arithmetic rounds: gradients are small multiples of a
power of two and do not depend on the weights, but for those of `Toy.q`, which depend on the half
weight that a forward sees. So both must agree to the bit, until a program clips, or where an
optimizer divides. A call that makes no sense where it stands is left out, so that a program that
fails can be cut to the few calls that matter; `World.log` has those that were made.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, LevelCase
from kit.compare import names_of_torch, rebound
from preamp import Storage
from preamp.kernels.stored import (
    Format,
    can_be_blocks,
    decode,
    encode,
    noise,
    round_by_chance,
    split,
)
from preamp.numerics import (
    NumericsRecord,
    OverflowRecord,
    ResumeRecord,
    RunRecord,
    StepRecord,
    read_history,
)
from preamp.optimizers import FusedAdam, FusedSGD

GRAIN = 2.0**-10
"""All gradients are small multiples of it; times 65536 they still fit float16."""
OWNER = {"a": 0, "q": 0, "n": 0, "b": 1, "c": 1}
"""Which of two optimizers has a part of the model."""
NAMES = ("a.weight", "a.bias", "q", "n.weight", "n.bias", "b.weight", "b.bias")
ADDED = ("c.weight", "c.bias")
"""Of a layer that a program may add."""
LOSSES = 2

Build = Callable[[Iterable[Any]], torch.optim.Optimizer]
Parameters = dict[str, nn.Parameter]


class Halving:
    """An optimizer with a method that moves weights in a way that leaves no trace in torch."""

    def halve(self) -> None:
        for group in self.param_groups:  # type: ignore[attr-defined]
            for param in group["params"]:
                param.data.mul_(0.5)


class HalvingSGD(Halving, torch.optim.SGD): ...


class HalvingAdamW(Halving, torch.optim.AdamW): ...


class HalvingFusedSGD(Halving, FusedSGD): ...


class HalvingFusedAdam(Halving, FusedAdam): ...


def _sgd(params: Iterable[Any]) -> torch.optim.Optimizer:
    return HalvingSGD(params, lr=1.0, momentum=0.5)


def _adamw(params: Iterable[Any]) -> torch.optim.Optimizer:
    return HalvingAdamW(params, lr=2.0**-4, eps=2.0**-12, weight_decay=0.0)


class Keeping(Halving, torch.optim.Optimizer):
    """A plain optimizer whose moments have the values that ``storage`` lets them have.

    It counts the steps of a group, those without any gradient too, as Apex's does.
    """

    storage = Storage()

    def numbered(self) -> Iterator[tuple[int, dict[str, Any], Any]]:
        """Parameters with a gradient, behind their numbers and groups."""
        number = 0
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    yield number, group, param
                number += 1

    def keep(self, moment: torch.Tensor, kind: Format, number: int, row: int, step: int) -> None:
        """Let ``moment`` have values that can be kept; those that can be are left as they are."""
        chance = noise(
            moment.numel(),
            start=0,
            step=step,
            row=row,
            seed=self.storage.seed,
            number=number,
            device=moment.device,
        ).view(moment.shape)
        if self.storage.moments == "bfloat16":
            moment.copy_(round_by_chance(moment.float(), chance))
        elif self.storage.moments == "8bit" and can_be_blocks(moment.shape):
            moment.copy_(decode(*encode(moment.float(), kind, chance), kind))


class KeepingSGD(Keeping):
    """SGD with a learning rate of 1 and a momentum of 0.5."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for number, group, param in self.numbered():
            state, latest = self.state[param], group["step"]
            is_first = "momentum_buffer" not in state
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(param))
            self.keep(momentum, Format.SIGNED, number, 0, latest - 1)
            momentum.mul_(0.5).add_(param.grad)
            param.sub_(momentum)
            self.keep(momentum, Format.SIGNED, number, 0, 1 if is_first else latest + 1)


class KeepingAdam(Keeping):
    """Adam without weight decay."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 2.0**-4, "eps": 2.0**-12, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for number, group, param in self.numbered():
            latest, state = group["step"], self.state[param]
            mean = state.setdefault("exp_avg", torch.zeros_like(param))
            square = state.setdefault("exp_avg_sq", torch.zeros_like(param))
            moments = (mean, Format.SIGNED), (square, Format.UNSIGNED)
            for row, (moment, kind) in enumerate(moments):
                self.keep(moment, kind, number, row, latest - 1)
            mean.lerp_(param.grad, 0.1)
            square.lerp_(param.grad.square(), 0.001)
            one, two = (1 - beta**latest for beta in (0.9, 0.999))
            param.sub_(mean / one / ((square / two).sqrt() + group["eps"]), alpha=group["lr"])
            for row, (moment, kind) in enumerate(moments):
                self.keep(moment, kind, number, row, latest)


OPTIMIZERS: dict[str, tuple[Build, Build]] = {
    "SGD": (_sgd, _sgd),
    "FusedSGD": (lambda params: HalvingFusedSGD(params, lr=1.0, momentum=0.5), _sgd),
    "AdamW": (_adamw, _adamw),
    "FusedAdam": (lambda params: HalvingFusedAdam(params, lr=2.0**-4, eps=2.0**-12), KeepingAdam),
}
"""How to build one, and what it has to do."""
STORAGES = {
    "full": Storage(),
    "split": Storage(masters="split"),
    "compact": Storage(masters="split", moments="8bit", seed=3),
    "bfloat16": Storage(masters="split", moments="bfloat16", seed=3),
}
ON_HOST = {f"{name} on the host": replace(kept, place="host") for name, kept in STORAGES.items()}
"""The same with ``place="host"``, which takes fused optimizers."""
RELEASED = {
    f"{name}, released": replace(kept, release_gradients=True) for name, kept in ON_HOST.items()
}
"""With gradients that wait on the host: nobody may read them."""
STORAGES |= ON_HOST | RELEASED


def without_codes(entry: Any) -> dict[str, Any]:
    """An optimizer's state whose moments in 8 bits are float32 tensors, with the same values."""
    found = dict(entry)
    for key in [key for key in entry if f"{key}_scales" in entry]:
        kind = Format.SIGNED if entry[key].dtype is torch.int8 else Format.UNSIGNED
        found[key] = decode(entry[key], found.pop(f"{key}_scales"), kind)
    return found


def storage_at(level: LevelCase, name: str) -> Storage:
    """What of a storage a level can have."""
    storage = STORAGES[name]
    if not level.has_masters:
        storage = replace(storage, masters="float32")
    if level.weight is torch.float16 and not level.has_masters:
        storage = replace(storage, moments="float32")
    return storage


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "save": _saved,
}


class Toy(nn.Module):
    """Two linear layers, the weights of a batch norm, and a parameter that its gradient follows.

    A third linear layer, ``c``, may be added later.

    Attributes:
        rounds: The half dtype in which a forward sees ``q`` while it is stored in another.
        rounds_ties_away: Whether it is rounded as split masters are.
    """

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        super().__init__()
        self.a = nn.Linear(width, 2)
        self.b = nn.Linear(width, 2)
        self.n = nn.BatchNorm1d(2)
        self.q = nn.Parameter(torch.zeros(4))
        self.rounds: torch.dtype | None = None
        self.rounds_ties_away = False
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randint(-700, 700, param.shape, generator=generator) * 2.0**-9)

    def present(self, parts: str) -> str:
        """Those of ``parts`` that there are; ``c`` may not be."""
        return parts if hasattr(self, "c") else parts.replace("c", "")

    def forward(self, x: torch.Tensor, parts: str) -> torch.Tensor:
        out = torch.zeros(2, 2, device=x.device)
        for part in self.present(parts):
            if part == "q":
                seen = self.q.detach()
                if self.rounds is not None and self.rounds_ties_away:
                    seen = split(seen.float(), self.rounds)[0].to(seen.dtype)
                elif self.rounds is not None:
                    seen = seen.to(self.rounds).to(seen.dtype)
                out = out + (self.q * (seen * 4).round().clamp(-3, 3)).sum()
            elif part == "n":
                out = out + (self.n.weight - 2 * self.n.bias)
            else:
                out = out + self.get_submodule(part)(x)
        return out


def loss_of(
    model: Toy, parts: str, index: int, dtype: torch.dtype = torch.float32, by: Any = None
) -> torch.Tensor:
    """A loss with exact gradients; ``index`` says which, ``dtype`` is that of the input.

    A model in another one is called ``by`` that.
    """
    generator = torch.Generator().manual_seed(index)
    x = torch.randint(-2, 3, (2, model.a.in_features), generator=generator).float()
    coefficients = torch.randint(1, 4, (2, 2), generator=generator).float() * GRAIN
    there = model.q.device
    out = (by or model)(x.to(there, dtype), parts)
    return (out * coefficients.to(there)).sum()


# -- what a program is made of -------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """Something a script does, by a method of `World` that takes what the call has."""

    method = ""

    def run(self, world: World) -> None:
        """Do it on both sides."""
        getattr(world, self.method)(**vars(self))


@dataclass(frozen=True)
class Backward(Call):
    """A backward, inside ``scale_loss`` unless ``outside``.

    Attributes:
        parts: What the loss depends on.
        both: Whether the block is of both optimizers even if one would do.
        poison: Whether the loss is infinite; at dynamic scales only.
        fails: Whether the body raises after its backward.
        checks_late: Whether a later block adjusts the loss scale, by ``delay_overflow_check``.
        zeroes: Whether the body zeroes the model's gradients first; earlier ones are away then.
    """

    parts: str
    index: int
    loss_id: int = 0
    delay: bool = False
    both: bool = False
    poison: bool = False
    fails: bool = False
    outside: bool = False
    checks_late: bool = False
    zeroes: bool = False

    def run(self, world: World) -> None:
        if self.outside:
            world.plain_backward(self)
        else:
            world.block(self)


@dataclass(frozen=True)
class Step(Call):
    """A step of one optimizer, with a closure that makes its gradients if there is an index."""

    optimizer: int
    closure: int | None = None

    def run(self, world: World) -> None:
        if self.closure is None:
            world.step(self.optimizer)
        else:
            world.step_with_closure(self.optimizer, self.closure)


@dataclass(frozen=True)
class Iteration(Call):
    """A whole iteration of a loop that was written for torch's ``GradScaler``.

    Attributes:
        parts: What the loss depends on.
        max_norm: Where to clip after ``unscale_``; ``None`` calls neither.
        by: Whose clipping that is; preamp's needs no ``unscale_``.
        poison: Whether the loss is infinite; at dynamic scales only.
    """

    parts: str
    index: int
    loss_id: int = 0
    max_norm: float | None = None
    by: Literal["preamp", "torch", "alone"] = "torch"
    poison: bool = False

    def run(self, world: World) -> None:
        world.iteration(self)


@dataclass(frozen=True)
class Zero(Call):
    """Zero or drop gradients: of an optimizer (0, 1), of the model, or of a parameter."""

    method = "zero"
    whose: int | str
    to_none: bool


@dataclass(frozen=True)
class Clip(Call):
    """Clip the gradients of one optimizer, in one of the three ways."""

    method = "clip"
    optimizer: int
    max_norm: float
    by: Literal["preamp", "masters", "model"] = "preamp"


@dataclass(frozen=True)
class Read(Call):
    """Compare the gradient of one parameter, which makes it."""

    method = "read"
    name: str


@dataclass(frozen=True)
class Write(Call):
    """Write to a weight of the model."""

    method = "write"
    name: str
    how: Literal["fill_", "mul_", "assigned", "data.fill_", "rows", "numpy", "exact"]


@dataclass(frozen=True)
class WriteMasters(Call):
    """Write to what an optimizer holds."""

    method = "write_masters"
    optimizer: int
    how: Literal["mul_", "copy_", "assigned", "data.fill_"]


@dataclass(frozen=True)
class Halve(Call):
    """Call a method of an optimizer that writes to ``p.data``."""

    method = "halve"
    optimizer: int


@dataclass(frozen=True)
class Add(Call):
    """Give the model another layer, and an optimizer a group of its parameters."""

    method = "add"


@dataclass(frozen=True)
class Pair(Call):
    """Copy the model, and where there are no masters its optimizers with it, and train the copy."""

    method = "train_copy"
    index: int
    how: Literal["deepcopy", "pickle", "save"] = "deepcopy"


@dataclass(frozen=True)
class Freeze(Call):
    """Freeze a parameter, or let it be trained again."""

    method = "freeze"
    name: str
    trains: bool = False


@dataclass(frozen=True)
class Look(Call):
    """A forward without gradients, a deep copy, or ``state_dict``."""

    method = "look"
    through: Literal["forward", "deepcopy", "state_dict", "exact_weights"]


@dataclass(frozen=True)
class Checkpoint(Call):
    """Save everything, load it, or go on in a new process: from there, or from a file of now."""

    method = "checkpoint"
    how: Literal["save", "load", "restart", "loaded_before", "file"]


@dataclass(frozen=True)
class Again(Call):
    """Close the engine and initialize again, maybe at another level or with split masters."""

    method = "again"
    level: str
    splits: bool = False


def program(text: str) -> list[Call]:
    """Calls in words: ``"Backward ab 1 delay; Zero model to_none; Step 0"``.

    Values stand in the order of a call's attributes; what is true or false is named where it is
    true.
    """
    calls = list[Call]()
    for name, *words in map(str.split, text.split(";")):
        kind = next(kind for kind in Call.__subclasses__() if kind.__name__ == name)
        flags = {field.name: field.name in words for field in fields(kind) if field.type == "bool"}
        calls.append(kind(*[_value(word) for word in words if word not in flags], **flags))
    return calls


def _value(word: str) -> Any:
    """A number where the word is one."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return word


# -- both sides ----------------------------------------------------------------------------------


class Left(Exception):
    """Raised by the body of a block."""


@dataclass(frozen=True)
class Variant:
    """What else there is around a program, which must not change a bit of it.

    Attributes:
        options: Of ``initialize``.
        door: ``preamp`` or ``amp``.
        wraps: What the model is called by.
        between: Called within each block and after each act.
        unread: Within this the host must not read a value that a device may still compute.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    door: Any = preamp
    wraps: Callable[[nn.Module], nn.Module] = lambda model: model
    between: Callable[[], object] | None = None
    unread: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass
class Notes:
    """What the record of a coming step has to say; ``None`` where that is nobody's business."""

    losses: dict[int, float] | None = field(default_factory=dict[int, float])
    norm: float | None = None
    made: dict[int, dict[str, float]] | None = field(default_factory=dict[int, dict[str, float]])


@functools.cache
def estimated(level: str, kind: str, storage: str, frozen: tuple[str, ...]) -> dict[str, int]:
    """Bytes of a `Toy` by ``preamp.estimate``."""
    model = Toy(width=2048 if STORAGES[storage].moments == "8bit" else 3)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizer = OPTIMIZERS[kind][0](model.parameters())
    kept = storage_at(BY_NAME[level], storage)
    policy = preamp.OPT_LEVELS[level].replace(storage=kept, loss_scale=1.0)
    return preamp.estimate(model, policy, optimizer).categories


class World:
    """A model under preamp, the same in plain torch, and what is known of where they stand.

    Attributes:
        ours: The initialized model.
        plain: What it is compared with; float64, at O3 float16.
        engine: The engine of ``ours``.
        log: The calls made so far, as one would write them.
        exact: Whether both have to agree to the bit.
    """

    def __init__(
        self,
        level: str,
        optimizer: str = "SGD",
        loss_scale: Any = None,
        *,
        frozen: Iterable[str] = (),
        storage: str = "full",
        device: str = "cpu",
        variant: Variant | None = None,
        given: Any = None,
    ) -> None:
        self.storage, self.moments = storage, STORAGES[storage].moments
        self.splits = STORAGES[storage].masters == "split"
        self.releases = storage in RELEASED
        self.device, self.variant = device, variant or Variant()
        self.kind, self.loss_scale = optimizer, loss_scale
        self.log: list[str] = []
        self.exact = "SGD" in optimizer
        self.was_half = False  # whether float16 arithmetic has made any of the weights
        width = 2048 if self.moments == "8bit" else 3  # 8 bits are for matrices of some size
        self.ours, self.plain = Toy(width=width).to(device), Toy(width=width).to(device).double()
        for name in frozen:
            for model in (self.ours, self.plain):
                model.get_parameter(name).requires_grad_(False)
        build, build_plain = OPTIMIZERS[optimizer]
        if self.moments != "float32" and optimizer == "FusedSGD":
            build_plain = KeepingSGD
        self.opts = [build(_owned(self.ours, i)) for i in (0, 1)]
        self.plain_opts = [build_plain(_owned(self.plain, i)) for i in (0, 1)]
        self.saved: tuple[Any, Any] | None = None
        if given is not None:
            self.load(*given)
        self.initialize(level)

    def initialize(self, level: str) -> None:
        self.row = BY_NAME[level]
        arguments = f"opt_level={level!r}, loss_scale={self.loss_scale!r}, num_losses={LOSSES}"
        frozen = [n for n, p in self.ours.named_parameters() if not p.requires_grad]
        self.log.append(
            f"initialize(model, [{self.kind}(a, q, n), {self.kind}(b)], {arguments}, "
            f"storage={self.storage!r})" + (f"  # frozen: {frozen}" if frozen else "")
        )
        self.before, kept = self.given(), self.identities()
        self.called: Any = None
        self.variant.door.initialize(
            self.ours,
            self.opts,
            opt_level=level,
            loss_scale=self.loss_scale,
            num_losses=LOSSES,
            verbosity=0,
            storage=storage_at(self.row, self.storage),
            **self.variant.options,
        )
        assert self.identities() == kept, "parameters or groups are others"
        self.called = self.variant.wraps(self.ours)
        self.torch = names_of_torch()
        self.steps: list[tuple[int, bool, dict[int, float] | None, Notes]] = []
        self.recorded = 0  # how many of them are not of an earlier engine
        self.notes = [Notes(), Notes()]
        self.bytes = estimated(level, self.kind, self.storage, tuple(sorted(frozen)))
        self.frozen: list[str] | None = frozen
        for optimizer in self.plain_opts:
            if isinstance(optimizer, Keeping):
                optimizer.storage = storage_at(self.row, self.storage)
        self.engine: Any = preamp.engine_of(self.ours)
        self.is_dynamic = self.engine.policy.is_dynamic
        self.is_scaled = self.is_dynamic or self.engine.loss_scale() != 1.0
        self.convert_plain()
        self.overflowed: list[bool | Literal["maybe"]] = [False, False]
        self.is_stale = [False, False]  # a skipped step has left its gradients
        self.spent: set[str] = set()
        self.unscaled: set[str] = set()  # with a master, and a half gradient made outside of blocks
        self.halved = [0, 0]
        self.has_delayed = [False, False]
        self.started = False
        self.half_written, self.master_written = [False, False], [False, False]

    def identities(self) -> list[int]:
        """What schedulers, wrappers and loops hold on to."""
        groups = [group for optimizer in self.opts for group in optimizer.param_groups]
        lists = [thing for group in groups for thing in (group, group["params"])]
        return [id(thing) for thing in (*self.ours.parameters(), *self.ours.buffers(), *lists)]

    def convert_plain(self) -> None:
        """Bring what is compared with to the dtype in which the level's optimizer works."""
        half = self.row.weight is not torch.float32
        dtype = torch.float16 if half and not self.row.has_masters else torch.float64
        self.plain.to(dtype)
        self.plain.rounds = self.row.weight if self.row.has_masters else None
        self.plain.rounds_ties_away = self.splits
        for optimizer in self.plain_opts:
            for param, state in optimizer.state.items():
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == param.shape:
                        state[key] = value.to(dtype)
        self.round_frozen()

    def round_frozen(self) -> None:
        """What has no master is rounded, and so is its state."""
        for name, param in self.ours.named_parameters():
            if param.dtype is not torch.float32 and self.master(name) is None:
                mine = self.plain.get_parameter(name)
                mine.data = mine.detach().to(param.dtype).to(mine.dtype)
                state: Any = self.plain_opts[OWNER[name[0]]].state.get(mine, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == mine.shape:
                        state[key] = value.to(param.dtype).to(value.dtype)

    # -- lookups -------------------------------------------------------------------------------

    def rounded(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A master as a half weight."""
        return split(value.float(), dtype)[0] if self.splits else value.to(dtype)

    def master(self, name: str) -> torch.Tensor | None:
        return self.engine.master_of(self.ours.get_parameter(name))

    def value(self, name: str) -> torch.Tensor:
        """The exact value of a weight."""
        param = self.ours.get_parameter(name)
        exact = self.engine.exact_value(param)
        return param.detach() if exact is None else exact.detach()

    def both(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        return self.ours.get_parameter(name), self.plain.get_parameter(name)

    def names(self, optimizer: int | None = None) -> list[str]:
        names = names_of(self.ours)
        return [n for n in names if optimizer is None or OWNER[n[0]] == optimizer]

    def grads(self, optimizer: int) -> dict[str, torch.Tensor]:
        """What the coming step of plain torch would use."""
        params = {n: self.plain.get_parameter(n) for n in self.names(optimizer)}
        return {n: p.grad for n, p in params.items() if p.grad is not None and n not in self.spent}

    def holds(self, optimizer: int) -> bool:
        return any(bool(grad.any()) for grad in self.grads(optimizer).values())

    def refused(self, call: Callable[[], object]) -> bool:
        try:
            call()
        except preamp.PreampStateError:
            return True
        return False

    # -- backward ------------------------------------------------------------------------------

    def plain_backward(self, call: Backward) -> None:
        """Outside of any block: nothing of a loss scale may be left."""
        call = replace(call, parts=self.ours.present(call.parts))
        params = [n for n in self.names() if n[0] in call.parts]
        if not any(self.ours.get_parameter(n).requires_grad for n in params):
            return
        owners = {OWNER[part] for part in call.parts}
        if any(self.overflowed[i] or self.is_stale[i] for i in owners):
            return
        if any(self.master(n) is not None and self.both(n)[0].grad is not None for n in params):
            return
        for name in params:
            if self.master(name) is not None:
                self.read(name)  # or a gradient dropped unseen could not be told from a rewrite
        self.log.append(f"loss({call.parts!r}, {call.index}).backward()")
        self.our_loss(call.parts, call.index).backward()
        self.forget(*owners)
        self.unscaled.update(n for n in params if self.master(n) is not None)
        self.master_written, self.started = [False, False], True
        self.drop_spent(params)
        self.theirs(call.parts, call.index)

    def our_loss(self, parts: str, index: int) -> torch.Tensor:
        return loss_of(self.ours, parts, index, by=self.called)

    def theirs(self, parts: str, index: int, *, poison: bool = False) -> None:
        with preamp.disable_casts():
            loss = loss_of(self.plain, parts, index, self.plain.q.dtype)
            (loss * math.inf if poison else loss).backward()

    def drop_spent(self, names: Iterable[str]) -> None:
        for name in self.spent.intersection(names):
            self.spent.discard(name)
            self.plain.get_parameter(name).grad = None

    def block(self, call: Backward) -> None:
        call = replace(call, parts=self.ours.present(call.parts))
        if not any(self.both(n)[0].requires_grad for n in self.names() if n[0] in call.parts):
            return
        owners = sorted({OWNER[part] for part in call.parts} | ({0, 1} if call.both else set()))
        for i in owners:
            if self.is_stale[i]:
                self.zero(i, to_none=True)
        poison = call.poison and self.is_dynamic
        self.log.append(
            f"with scale_loss(loss({call.parts!r}, {call.index}){' * inf' if poison else ''}, "
            f"{[f'opt{i}' for i in owners]}, loss_id={call.loss_id}"
            f"{', delay_unscale=True' if call.delay else ''}"
            f"{', delay_overflow_check=True' if call.checks_late else ''}) as scaled: "
            f"scaled.backward()" + ("; raise" if call.fails else "")
        )
        self.begin(owners)
        loss = self.our_loss(call.parts, call.index) * (math.inf if poison else 1.0)
        self.master_written, self.started = [False, False], True
        collect: Any = (list, tuple, iter)[call.index % 3]  # any collection of them
        opts = collect([self.opts[i] for i in owners])
        late = {"delay_overflow_check": True} if call.checks_late else {}
        scaling: Any = {"loss_id": call.loss_id, "delay_unscale": call.delay, **late}
        try:
            with (
                self.variant.unread(),
                self.variant.door.scale_loss(loss, opts, **scaling) as scaled,
            ):
                self.between()
                if call.zeroes and len(owners) == 2:  # else it reaches gradients of no block
                    self.log.append("    model.zero_grad(set_to_none=False)  # within the block")
                    self.ours.zero_grad(set_to_none=False)
                scaled.backward()
                if call.fails:
                    raise Left
        except Left:
            self.forget(*owners)
            return
        was = {name: grad.clone() for i in owners for name, grad in self.grads(i).items()}
        self.theirs(call.parts, call.index, poison=poison)
        self.note(owners, call.loss_id, loss, was, is_clear=not poison)
        self.halved[call.loss_id] += poison
        self.has_delayed[call.loss_id] |= call.delay or call.checks_late
        for i in owners if poison else ():
            # Whether zeros from before are fresh gradients later is nobody's business.
            zeros = any(not bool(grad.any()) for grad in self.grads(i).values())
            self.overflowed[i] = "maybe" if zeros else True

    def forget(self, *optimizers: int) -> None:
        for i in optimizers:
            self.notes[i] = Notes(None, None, None)

    def note(
        self, owners: list[int], loss_id: int, loss: Any, was: dict[str, Any], *, is_clear: bool
    ) -> None:
        """For the records: a loss, and the largest element of what it adds to each gradient."""
        for i in owners:
            notes, scale = self.notes[i], self.engine.loss_scale(loss_id)
            notes.norm = None
            if notes.losses is not None:
                notes.losses[loss_id] = loss.detach().item()
            if not is_clear or scale == 1.0:  # or one may be of several
                notes.made = None
            elif notes.made is not None:
                more = {n: grad - was.get(n, 0.0) for n, grad in self.grads(i).items()}
                notes.made[loss_id] = {n: float(grad.abs().max()) for n, grad in more.items()}

    def begin(self, owners: list[int]) -> None:
        """What becomes of earlier gradients."""
        for i in owners:
            self.drop_spent(self.names(i))
            self.unscaled -= set(self.names(i))
            maybe = self.overflowed[i] == "maybe"
            if not (self.grads(i) if maybe else self.holds(i)):
                self.overflowed[i] = False

    def iteration(self, call: Iteration) -> None:
        """With a ``GradScaler`` of its own, which unscales, clips, steps and updates."""
        parts = self.ours.present(call.parts)
        trained = [n for n in self.names() if n[0] in parts and self.both(n)[0].requires_grad]
        owners = sorted({OWNER[n[0]] for n in trained})
        if not owners or any(self.overflowed[i] or self.is_stale[i] for i in (0, 1)):
            return
        poison = call.poison and self.is_dynamic
        self.log.append(
            f"GradScaler of {[f'opt{i}' for i in owners]}, loss_id={call.loss_id}: "
            f"scale(loss({parts!r}, {call.index}){' * inf' if poison else ''}).backward()"
        )
        self.begin(owners)
        scaler = preamp.GradScaler([self.opts[i] for i in owners], call.loss_id)
        loss = self.our_loss(parts, call.index) * (math.inf if poison else 1.0)
        self.master_written, self.started = [False, False], True
        scaler.scale(loss).backward()
        self.theirs(parts, call.index, poison=poison)
        for i in owners:
            self.overflowed[i] = poison
            self.forget(i)
            if call.max_norm is not None:
                if call.by != "alone":
                    scaler.unscale_(self.opts[i])
                if not poison:
                    self.clip_unscaled(i, call.max_norm, call.by)
        for i in owners:
            self.step(i, scaler)
        scaler.update()
        self.halved[call.loss_id] += poison

    def clip_unscaled(self, i: int, max_norm: float, by: str) -> None:
        """Torch's clip takes the norm of half gradients in their dtype."""
        first = "" if by == "alone" else f"unscale_(opt{i}); "
        self.log.append(f"{first}{by}.clip_grad_norm_(opt{i}, {max_norm})")
        grads = self.grads(i).values()
        norm = float(torch.stack([grad.double().norm() for grad in grads]).norm()) if grads else 0.0
        if by == "torch":
            nn.utils.clip_grad_norm_(_owned(self.ours, i), max_norm)
        else:
            found = float(preamp.clip_grad_norm_(self.opts[i], max_norm))
            assert math.isclose(found, norm, rel_tol=2.0**-6), f"norm {found} is not {norm}"
            self.notes[i].norm = found
        factor = min(1.0, max_norm / (norm + 1e-6))
        is_near = math.isclose(norm, max_norm, rel_tol=2.0**-6)
        if factor != 1.0 or is_near:
            self.exact = False
            self.was_half |= by == "torch" and self.row.weight is not torch.float32
        for grad in grads:
            grad.mul_(factor)

    # -- steps ---------------------------------------------------------------------------------

    def step(self, i: int, scaler: preamp.GradScaler | None = None) -> None:
        if self.is_stale[i]:
            self.zero(i, to_none=True)
        self.log.append(f"opt{i}.step()" if scaler is None else f"scaler.step(opt{i})")
        if scaler is not None:
            scaler.step(self.opts[i])
        else:
            with self.variant.unread() if "Fused" in self.kind else nullcontext():
                self.opts[i].step()
        skipped = self.overflowed[i]
        if skipped == "maybe" or (skipped and not self.holds(i)):
            skipped = self.engine.last_step_skipped  # what overflowed was dropped or zeroed since
        assert self.engine.last_step_skipped == skipped, "skipped" if not skipped else "applied"
        self.end_notes(i, skipped=bool(skipped), has_scale=scaler is None)
        if not skipped:
            self.plain_step(i)
        self.is_stale[i] = skipped
        self.end_step(i)

    def end_notes(self, i: int, *, skipped: bool, has_scale: bool = True) -> None:
        scales = {loss_id: self.engine.loss_scale(loss_id) for loss_id in range(LOSSES)}
        self.steps.append((i, skipped, scales if has_scale else None, self.notes[i]))
        self.recorded += 1
        self.notes[i] = Notes()

    def plain_step(self, i: int) -> None:
        hidden = {n: self.plain.get_parameter(n) for n in self.names(i) if n in self.spent}
        grads = {name: param.grad for name, param in hidden.items()}
        for param in hidden.values():
            param.grad = None
        with preamp.disable_casts():
            self.plain_opts[i].step()
        for name, param in hidden.items():
            param.grad = grads[name]

    def end_step(self, i: int) -> None:
        self.overflowed[i] = False
        for name in self.names(i):
            if self.master(name) is not None and self.plain.get_parameter(name).grad is not None:
                self.spent.add(name)
        if not self.is_stale[i]:
            self.half_written[i] = self.master_written[i] = False
        self.check(i)

    def step_with_closure(self, i: int, index: int) -> None:
        parts = "aqn" if i == 0 else "b"
        if not any(self.both(n)[0].requires_grad for n in self.names(i) if n[0] in parts):
            return  # as of layers that were added, which are not in this loss
        self.log.append(f"opt{i}.step(closure of loss({parts!r}, {index}))")

        def closure() -> torch.Tensor:
            self.opts[i].zero_grad(set_to_none=True)  # what FusedSGD does not do by itself
            loss = self.our_loss(parts, index)
            with self.variant.door.scale_loss(loss, self.opts[i]) as scaled:
                scaled.backward()
            return loss

        if self.refused(lambda: self.opts[i].step(closure)):  # type: ignore[arg-type]
            assert self.is_dynamic, "a step with a closure was refused"
            return
        assert not self.is_dynamic, "a closure at a dynamic scale"
        self.forget(i)
        self.end_notes(i, skipped=False)
        self.started = True
        self.plain_opts[i].zero_grad()
        self.spent -= set(self.names(i))
        self.theirs(parts, index)
        self.plain_step(i)
        self.is_stale[i] = False
        self.end_step(i)

    # -- gradients -----------------------------------------------------------------------------

    def zero(self, whose: int | str, *, to_none: bool) -> None:
        how = "None" if to_none else "zeros"
        names = [whose] if isinstance(whose, str) and whose != "model" else self.names()
        names = self.names(whose) if isinstance(whose, int) else names
        if isinstance(whose, int):
            self.log.append(f"opt{whose}.zero_grad()  # {how}")
            self.opts[whose].zero_grad(set_to_none=to_none)
            self.overflowed[whose] = False
            self.notes[whose] = Notes()
        elif whose == "model":
            self.log.append(f"model.zero_grad(set_to_none={to_none})")
            self.ours.zero_grad(set_to_none=to_none)
        else:
            self.log.append(f"model.{whose}.grad" + (" = None" if to_none else ".zero_()"))
            _clear(self.ours.get_parameter(whose), to_none=to_none)
        for name in names:
            _clear(self.plain.get_parameter(name), to_none=to_none)
            self.spent.discard(name)
            if isinstance(whose, str):
                self.forget(OWNER[name[0]])
        if whose == "model":
            self.is_stale = [False, False]
        elif isinstance(whose, int):
            self.is_stale[whose] = False

    def clip(self, optimizer: int, max_norm: float, by: str) -> None:
        i = optimizer
        if self.overflowed[i] or self.is_stale[i] or not _finite(self.grads(i)):
            return
        if by == "model" and self.row.has_masters:
            self.clip_halves(i, max_norm)
            return
        params: dict[str, Callable[[], Any]] = {
            "preamp": lambda: self.opts[i],
            "masters": lambda: preamp.master_params(self.opts[i]),
            "model": lambda: _owned(self.ours, i),
        }
        function = preamp.clip_grad_norm_ if by == "preamp" else nn.utils.clip_grad_norm_
        self.log.append(f"{by}.clip_grad_norm_(opt{i}, {max_norm})")
        with self.variant.unread() if by == "preamp" else nullcontext():
            norm = function(params[by](), max_norm)
        grads = self.grads(i).values()
        exact = torch.stack([grad.double().norm() for grad in grads]).norm() if grads else 0.0
        wanted = float(exact)
        unfrozen = self.row.has_masters and any(self.master(name) is None for name in self.grads(i))
        half = self.plain.q.dtype is torch.float16 or unfrozen  # whose master is yet to be made
        assert math.isclose(norm.item(), wanted, rel_tol=2.0**-7 if half else 2.0**-18)
        self.notes[i].norm = norm.item() if by == "preamp" else None
        norm.zero_()  # it is the script's own
        factor = min(1.0, max_norm / (wanted + 1e-6))
        if factor != 1.0:
            self.exact = False
            for grad in grads:
                grad.mul_(factor)

    def clip_halves(self, i: int, max_norm: float) -> None:
        """By the model's own gradients, which still carry the loss scale at these levels."""
        held = [
            p for p in _owned(self.ours, i) if p.dtype is not torch.float32 and p.grad is not None
        ]
        fresh = [
            n
            for n in self.grads(i)
            if self.master(n) is not None and self.both(n)[0].grad is not None
        ]
        if not self.unscaled.isdisjoint(fresh):  # which may be clipped so
            return
        if not fresh or not self.is_scaled:
            return
        before = {n: self.both(n)[0].grad.clone() for n in fresh}  # type: ignore[union-attr]
        self.log.append(f"torch.clip_grad_norm_(parameters of opt{i}, {max_norm})")
        nn.utils.clip_grad_norm_(held, max_norm)
        if self.variant.door is not preamp:
            return  # Apex has made gradients of masters by then
        if not any(bool(was.any()) for was in before.values()):
            # Zeros where earlier gradients are, multiplied by whatever: may be refused.
            if not self.refused(lambda: [p.grad for p in preamp.master_params(self.opts[i])]):
                return
        self.log.append(f"opt{i}.step()  # refused")
        assert self.refused(self.opts[i].step), "a step on gradients clipped while scaled"
        self.check(i)  # what the script wrote to half weights may have been taken in
        self.zero(i, to_none=True)

    def read(self, name: str) -> None:
        i = OWNER[name[0]]
        if self.overflowed[i] or self.is_stale[i] or self.releases:
            return
        param, wanted = self.both(name)
        master = self.master(name)
        held = param if master is None else master
        self.log.append(f"{'master' if master is not None else 'model'}.{name}.grad")
        self.compare(held.grad, self.grads(i).get(name), f"gradient of {name}")
        del wanted

    # -- weights -------------------------------------------------------------------------------

    def write(self, name: str, how: str) -> None:
        param, plain = self.both(name)
        has_master = self.master(name) is not None
        if has_master and self.master_written[OWNER[name[0]]]:
            return  # whose write counts is nobody's business
        self.log.append(f"model.{name}.{how}")
        if how == "exact":
            self.write_exactly(param, plain)
            return
        before = self.value(name).to(param.device, torch.float64)
        for side in (param, plain):
            _write(side, how, 0.375)
        if param.dtype != plain.dtype and param.dtype is not torch.float32:
            self.half_written[OWNER[name[0]]] |= has_master
            if has_master and self.splits:
                plain.data = self.value(name).to(param.device).double()
            elif has_master:
                value = param.detach().double()
                rounded = self.rounded(before, param.dtype).double()
                plain.data = torch.where(rounded == value, before, value)
            else:
                plain.data = param.detach().double()

    @torch.no_grad()
    def write_exactly(self, param: nn.Parameter, plain: nn.Parameter) -> None:
        """Within ``exact_weights``, where a master loses nothing."""
        with self.engine.exact_weights():
            param.mul_(0.5)
        plain.mul_(0.5)
        if self.engine.master_of(param) is None:
            plain.copy_(param)

    def halve(self, optimizer: int) -> None:
        i = optimizer
        if self.half_written[i] or self.has_split(i):
            return
        self.log.append(f"opt{i}.halve()")
        for optimizer in (self.opts[i], self.plain_opts[i]):
            optimizer.halve()  # type: ignore[attr-defined]
        self.master_written[i] |= any(self.master(name) is not None for name in self.names(i))

    def add(self) -> None:
        is_half = self.row.weight is not torch.float32
        if is_half or hasattr(self.ours, "c"):  # half models take no new layers
            return
        self.log.append("model.c = Linear(...); opt1.add_param_group(model.c.parameters())")
        layer = nn.Linear(self.ours.a.in_features, 2, device=self.device)
        with torch.no_grad():
            for param in layer.parameters():
                param.copy_(torch.arange(param.numel()).view(param.shape) * 2.0**-9)
        self.plain.c = copy.deepcopy(layer).to(self.plain.q.dtype)
        self.ours.c = layer
        for model, opts in ((self.ours, self.opts), (self.plain, self.plain_opts)):
            opts[1].add_param_group({"params": list(model.c.parameters())})
        self.saved = None
        self.check(1)

    def train_copy(self, index: int, how: str) -> None:
        """A copy is float32 and has no gradients; it trains as plain torch does."""
        if self.plain.q.dtype is torch.float16:
            return
        how = how if self.device == "cpu" else "deepcopy"  # no pretended memory is saved
        self.log.append(f"a {how} of all, one step on loss('abqn', {index})")
        build, is_alone = OPTIMIZERS[self.kind][0], self.row.has_masters
        ours, opts = COPIES[how]((self.ours, [] if is_alone else self.opts))
        plain, plain_opts = copy.deepcopy((self.plain, self.plain_opts))
        plain.rounds = None
        for i, optimizer in enumerate(self.opts if is_alone else ()):
            opts.append(build(_owned(ours, i)))
            opts[i].storage = getattr(optimizer, "storage", None)  # of the state that comes
            opts[i].load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for made, theirs in zip((*opts, *plain_opts), (*self.opts, *self.plain_opts), strict=True):
            made.storage = getattr(theirs, "storage", None)
        assert not is_alone or all(p.grad is None for p in ours.parameters()), "copied gradients"
        for model, optimizers in ((ours, opts), (plain, plain_opts)):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            with preamp.disable_casts():
                loss_of(model, "abqnc", index, model.q.dtype).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name in self.names():
            found, wanted = ours.get_parameter(name), plain.get_parameter(name)
            assert found.dtype is torch.float32, f"copied {name} is {found.dtype}"
            self.compare(found, wanted, f"copied {name}")

    def has_split(self, i: int) -> bool:
        """Whether masters of an optimizer are split, and so nobody's to write to."""
        return self.splits and any(self.master(name) is not None for name in self.names(i))

    def write_masters(self, optimizer: int, how: str) -> None:
        i = optimizer
        if self.half_written[i] or self.has_split(i):
            return
        self.log.append(f"opt{i}'s parameters.{how}")
        for name in self.names(i):
            param, plain = self.both(name)
            master = self.master(name)
            if master is None and param.dtype != plain.dtype and param.dtype is not torch.float32:
                continue
            held = param if master is None else master
            _write(held, how, 0.625 + 2.0**-12)  # not a half number
            _write(plain, how, 0.625 + 2.0**-12)
            self.master_written[i] |= master is not None

    def freeze(self, name: str, *, trains: bool) -> None:
        self.log.append(f"model.{name}.requires_grad_({trains})")
        for side in self.both(name):
            side.requires_grad_(trains)
        if self.frozen != self.frozen_now():
            self.frozen = None  # what has been made for it by then stays

    def look(self, through: str) -> None:
        self.log.append(through)
        if through == "forward":
            with torch.no_grad():
                self.ours(torch.zeros(2, self.ours.a.in_features, device=self.device), "abqnc")
            self.master_written = [False, False]
            self.check_halves()
            return
        if through == "exact_weights":
            with self.engine.exact_weights():
                found = {n: p.detach().clone() for n, p in self.ours.named_parameters()}
                self.ours(torch.zeros(2, self.ours.a.in_features, device=self.device), "abqnc")
        elif through == "deepcopy":
            found = {n: p.detach() for n, p in copy.deepcopy(self.ours).named_parameters()}
        else:
            found = {n: v for n, v in self.ours.state_dict().items() if n in self.names()}
            self.half_written = [False, False]
            self.master_written = [False, False]
        for name, value in found.items():
            self.compare(value, self.plain.get_parameter(name), f"{through} {name}")

    # -- checkpoints and engines -----------------------------------------------------------------

    def checkpoint(self, how: str) -> None:
        if how == "loaded_before" and (hasattr(self.ours, "c") or self.moments != "float32"):
            how = "restart"  # the new model has no such layer, or storage, yet
        if how == "save":
            self.log.append("save")
            self.saved = (
                copy.deepcopy(
                    (
                        self.ours.state_dict(),
                        [opt.state_dict() for opt in self.opts],
                        self.engine.state_dict(),
                    )
                ),
                copy.deepcopy(
                    (self.plain.state_dict(), [opt.state_dict() for opt in self.plain_opts])
                ),
            )
            self.saved_halved, self.saved_steps = (
                list(self.halved),
                (list(self.steps), self.recorded),
            )
            return
        if how == "file":
            self.zero("model", to_none=True)
            self.checkpoint("save")
        if self.saved is None:
            return
        self.log.append(how)
        if how == "file":
            with tempfile.TemporaryDirectory() as folder:
                preamp.save_checkpoint(f"{folder}/run", self.ours, self.opts)
                self.restart()
                preamp.load_checkpoint(f"{folder}/run", self.ours, self.opts, rng=False)
        elif how != "load":
            self.restart(loads=how == "loaded_before")
        (ours, opts, engine), (plain, plain_opts) = copy.deepcopy(self.saved)
        if how in ("load", "restart"):
            self.load(ours, opts)
        self.plain.load_state_dict(plain)
        for optimizer, state in zip(self.plain_opts, plain_opts, strict=True):
            optimizer.load_state_dict(state)
        if how != "file":
            self.engine.load_state_dict(engine)
        self.halved = list(self.saved_halved)
        steps, recorded = self.saved_steps
        self.steps, self.recorded = list(steps), 0 if self.recorded == 0 else recorded
        self.forget(0, 1)
        self.has_delayed = [True, True]  # a scale may yet fall for what was found before
        self.half_written, self.master_written = [False, False], [False, False]
        self.round_frozen()
        self.check()

    def load(self, ours: Any, opts: Any) -> None:
        for optimizer, state in zip(self.opts, opts, strict=True):
            optimizer.load_state_dict(state)
        self.ours.load_state_dict(ours)

    def restart(self, *, loads: bool = False) -> None:
        level, saved = self.row.name, (self.saved, self.saved_halved, self.saved_steps)
        exact, was_half, has_added = self.exact, self.was_half, hasattr(self.ours, "c")
        self.engine.close()
        log = self.log
        places: Any = {"storage": self.storage, "device": self.device, "variant": self.variant}
        given = copy.deepcopy(saved[0][0][:2]) if loads and saved[0] and not has_added else None
        self.__init__(level, self.kind, self.loss_scale, given=given, **places)  # type: ignore[misc]
        self.log = [*log, *self.log]
        if has_added:
            self.add()
        self.exact, self.was_half = exact, was_half
        self.saved, self.saved_halved, self.saved_steps = saved

    def again(self, level: str, *, splits: bool) -> None:
        if level == "O3" and not self.exact:
            return  # float16 state of what differs by a rounding
        kept, wanted = (storage_at(row, self.storage) for row in (self.row, BY_NAME[level]))
        if kept.moments != wanted.moments == self.moments:
            return  # float32 moments are not rounded to fewer bits
        self.log.append("engine.close()")
        self.engine.close()
        self.check_closed()
        for name in self.names():
            param, plain = self.both(name)
            self.compare(param.detach(), plain.detach(), f"closed {name}")
            i = OWNER[name[0]]
            if not (self.overflowed[i] or self.is_stale[i] or name in self.spent):
                finite = plain.grad is None or bool(plain.grad.isfinite().all())
                if finite:
                    self.compare(param.grad, plain.grad, f"closed, gradient of {name}")
            param.grad = plain.grad = None
        self.was_half |= self.plain.q.dtype is torch.float16
        self.saved = None
        if self.moments == "float32":
            splits = splits and "Fused" in self.kind
            before, self.storage, self.splits = self.storage, "split" if splits else "full", splits
            self.storage += " on the host" if before in ON_HOST else ""
        self.initialize(level)

    # -- what is so after every act ------------------------------------------------------------

    def hold(self) -> None:
        """Counters and records tell of the steps, bytes are as estimated, torch is as it was."""
        skips = [skipped for _, skipped, *_ in self.steps]
        counts = self.engine.steps_applied, self.engine.steps_skipped
        assert counts == (skips.count(False), skips.count(True)), f"{counts} of {skips}"
        if {"numerics", "history"} & self.variant.options.keys():
            self.check_records()
        else:  # skipped steps alone leave records
            kinds = {type(record) for record in self.engine.history}
            assert kinds <= {RunRecord, OverflowRecord, ResumeRecord}, kinds
        now = names_of_torch()
        names = {
            owner: changed for owner in now if (changed := rebound(self.torch[owner], now[owner]))
        }
        assert not names, f"changed: {names}"
        self.between()
        held = preamp.count_memory(self.engine)
        if not hasattr(self.ours, "c"):
            assert [held[n] - self.bytes[n] for n in ("weights", "buffers")] == [0, 0], held
        if not hasattr(self.ours, "c") and self.frozen == self.frozen_now():
            masters = [
                sum(b.get(f"masters{at}", 0) for at in ("", " on the host"))
                for b in (held, self.bytes)
            ]
            assert masters[0] in (0, masters[1]), held  # none before the optimizer has any

    def between(self) -> None:
        """What goes on beside may change torch."""
        if self.variant.between is not None:
            self.variant.between()
            self.torch = names_of_torch()

    def frozen_now(self) -> list[str]:
        return [n for n, p in self.ours.named_parameters() if not p.requires_grad]

    def check_records(self) -> None:
        """Of the steps that this engine has made, the last of them in full."""
        history, steps = self.engine.history, self.steps[len(self.steps) - self.recorded :]
        records = history.of(StepRecord)
        if not steps:
            return
        found, wanted = [(r.optimizer, r.skipped) for r in records], [step[:2] for step in steps]
        assert found == wanted, f"records: {found} are not {wanted}"
        numbers = [
            [s[0] for s in self.steps[: n + 1]].count(i) for n, (i, *_) in enumerate(self.steps)
        ]
        overflows = [
            (i, n) for (i, skipped, *_), n in zip(self.steps, numbers, strict=True) if skipped
        ]
        told = [(r.optimizer, r.step) for r in history.of(OverflowRecord)]
        assert told == overflows[len(overflows) - len(told) :], f"overflows: {told}, {overflows}"
        assert len(told) == [skipped for _, skipped, *_ in steps].count(True)
        last, (i, _, scales, notes) = records[-1], steps[-1]
        if path := self.variant.options.get("history"):
            assert [r for r in read_history(path) if isinstance(r, StepRecord)][-1] == last
        assert scales in (None, last.scales), f"record of scales {scales}: {last}"
        if notes.losses is not None:
            assert (last.losses, last.norm) == (notes.losses, notes.norm), f"record: {last}"
        measured = [
            r for r in history.of(NumericsRecord) if (r.step, r.optimizer) == (last.step, i)
        ]
        if notes.made is not None and measured:
            largest = {
                (record.loss_id, tensor.name): tensor.max_abs / tensor.scale
                for record in measured
                for tensor in record.tensors
                if tensor.what == "gradient"
            }
            made = {(k, n): v for k, grads in notes.made.items() for n, v in grads.items() if v}
            close = functools.partial(math.isclose, rel_tol=1e-6)
            wrong = {at: v for at, v in made.items() if not close(largest.get(at, math.nan), v)}
            assert not wrong, f"measured {largest}, not {wrong}"

    def given(self) -> dict[str, Any]:
        """All that a close gives back, by identity, whatever the numbers are by now."""
        seen: dict[str, Any] = {}
        for number, optimizer in enumerate(self.opts):
            attributes = {k: v for k, v in vars(optimizer).items() if not k.startswith("_kept")}
            seen[f"{number}"] = {k: [*v] if "hooks" in k else None for k, v in attributes.items()}
            seen[f"{number}.params"] = [id(p) for g in optimizer.param_groups for p in g["params"]]
        for name, module in self.ours.named_modules():
            known = {k: v for k, v in vars(module).items() if k != "_buffers"}
            seen[name] = {k: [*v] if isinstance(v, dict) else id(v) for k, v in known.items()}
            params = module.named_parameters(name, recurse=False)
            seen |= {at: (id(p), p.dtype, p.device) for at, p in params}
        return seen

    def check_closed(self) -> None:
        after = self.given()
        changed = {n: (v, after[n]) for n, v in self.before.items() if v != after[n]}
        assert not changed or hasattr(self.ours, "c"), f"closed: {changed}"

    # -- comparisons ---------------------------------------------------------------------------

    def compare(self, ours: torch.Tensor | None, wanted: torch.Tensor | None, where: str) -> None:
        assert (ours is None) == (wanted is None), f"{where}: {ours} is not {wanted}"
        if ours is None or wanted is None:
            return
        a, b = ours.detach().cpu().double(), wanted.detach().cpu().double()
        if self.exact:
            assert torch.equal(a, b), f"{where}: {a} is not {b}"
        else:
            half = wanted.dtype is torch.float16 or self.was_half
            keeps = self.moments != "float32"  # where a rounding may let chance decide otherwise
            rel = 2.0**-6 if keeps else 2.0**-7 if half else 2.0**-13
            far = (a - b).abs() > rel * b.abs().clamp(min=2.0**-3)
            assert far.sum() <= (far.numel() // 256 if keeps else 0), f"{where}: {a} is not {b}"

    def check_halves(self, *optimizers: int) -> None:
        """Every half weight is its rounded master, but where the script has written to one."""
        for name in self.names():
            param, master, i = self.both(name)[0], self.master(name), OWNER[name[0]]
            written = self.half_written[i] or self.master_written[i]
            if master is not None and i in (optimizers or (0, 1)) and not written:
                rounded = self.rounded(self.value(name), param.dtype).to(param.device)
                assert torch.equal(param, rounded), f"half {name}: {param} is not {rounded}"

    def check(self, *optimizers: int) -> None:
        """Weights of the optimizers, of both if none is named, and half weights are right."""
        for name in self.names():
            i = OWNER[name[0]]
            if i in (optimizers or (0, 1)) and not self.half_written[i]:
                plain = self.plain.get_parameter(name)
                self.compare(self.value(name), plain, name)
        self.check_halves(*optimizers)

    def finish(self) -> None:
        """Compare everything at the end of a program."""
        for name in self.names():
            self.read(name)
        for i in (0, 1):
            self.step(i)
        self.look("state_dict")
        self.check()
        if "SGD" in self.kind:
            self.check_momentum()
        if self.is_dynamic:
            for loss_id in range(LOSSES):
                scale, least = self.engine.loss_scale(loss_id), 2.0 ** (16 - self.halved[loss_id])
                assert least <= scale <= 2.0**16, f"loss scale {scale} of loss {loss_id}"
                assert scale == least or self.has_delayed[loss_id], f"loss scale {scale}"

    def check_momentum(self) -> None:
        for i in (0, 1):
            for name in self.names(i):
                param, plain = self.both(name)
                master = self.master(name)
                held = param if master is None else master
                state = without_codes(self.opts[i].state.get(held, {}))
                ours = state.get("momentum_buffer")
                wanted = self.plain_opts[i].state.get(plain, {}).get("momentum_buffer")
                is_far = self.device != "cpu" or self.variant.unread is not nullcontext
                if is_far and wanted is None and ours is not None:
                    wanted = torch.zeros_like(plain)  # of steps that the device has skipped
                self.compare(ours, wanted, f"momentum of {name}")


def names_of(model: Toy) -> tuple[str, ...]:
    """The names of its parameters."""
    return (*NAMES, *ADDED) if hasattr(model, "c") else NAMES


def _owned(model: Toy, optimizer: int) -> list[nn.Parameter]:
    return [model.get_parameter(n) for n in names_of(model) if OWNER[n[0]] == optimizer]


def _finite(grads: dict[str, torch.Tensor]) -> bool:
    return all(bool(grad.isfinite().all()) for grad in grads.values())


def _clear(param: torch.Tensor, *, to_none: bool) -> None:
    if to_none:
        param.grad = None
    elif param.grad is not None:
        param.grad.zero_()


@torch.no_grad()
def _write(param: torch.Tensor, how: str, value: float) -> None:
    if how == "fill_":
        param.fill_(value)
    elif how == "mul_":
        param.mul_(0.5)
    elif how == "copy_":
        param.copy_(torch.full_like(param, value))
    elif how == "assigned":
        param.data = torch.full_like(param, value + 0.25)
    elif how == "rows":
        param.data[:1] = value
    elif how == "numpy":
        param.data.cpu().view(-1).view(torch.int8).numpy()[:] = 0
    else:
        param.data.fill_(value)


def run(
    program: Iterable[Call],
    level: str,
    optimizer: str = "SGD",
    loss_scale: Any = None,
    *,
    frozen: Iterable[str] = (),
    storage: str = "full",
    device: str = "cpu",
    variant: Variant | None = None,
) -> World:
    """Run a program; what went wrong is told together with the calls up to there."""
    places: Any = {"storage": storage, "device": device, "variant": variant}
    world = World(level, optimizer, loss_scale, frozen=frozen, **places)
    try:
        for call in program:
            call.run(world)
            world.hold()
        world.finish()
        world.engine.close()
        world.check_closed()
    except (AssertionError, preamp.PreampStateError, RuntimeError) as error:
        raise AssertionError("\n".join([*world.log, f"=> {error}"])) from error
    finally:
        world.engine.close()
    return world


def values_of(world: World) -> list[torch.Tensor]:
    """Weights and moments after a `run`, and the loss scales.

    Moments that are not there are zeros: a device makes them in a step that it then skips.
    """
    found: list[torch.Tensor] = [param.detach().cpu() for param in world.ours.parameters()]
    for optimizer in world.opts:
        for param in itertools.chain(*(group["params"] for group in optimizer.param_groups)):
            state: Any = without_codes(optimizer.state.get(param, {}))
            moments = [state.get(key) for key in getattr(optimizer, "moments", ())]
            found += [torch.zeros(param.shape) if m is None else m.cpu() for m in moments]
    scales = [world.engine.loss_scale(number) for number in range(LOSSES)]
    return [*found, torch.tensor(scales)]
