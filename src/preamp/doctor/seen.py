# SPDX-License-Identifier: BSD-3-Clause
"""What has been seen of a run so far; all detectors look at it, only the examination writes it.

Nothing here keeps a model, an optimizer or a gradient alive.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import Node

from preamp.core.dtypes import is_half
from preamp.core.tensors import host_reaches, local_of, stored_grad, version_of
from preamp.core.torch_private.autograd import terms_of
from preamp.doctor.rule import Place
from preamp.engine import Engine, find_engine
from preamp.engine.session import OptimizerSession


class Origin(Enum):
    """What a gradient is, by the backward that made it and what was done to it since."""

    PLAIN = "plain"
    GRAD_SCALER = "scaled by a grad scaler"
    ENGINE = "of a scaled loss of an engine"
    BY_HAND = "of a loss that the script multiplied by what may be a loss scale"
    UNSCALED = "unscaled by a grad scaler"
    MIXED = "a sum of gradients with different scales"
    USED = "used by a step"
    OTHER = "other"


_SUMS: dict[frozenset[Origin], Origin] = {
    frozenset((Origin.PLAIN, Origin.GRAD_SCALER)): Origin.MIXED,
    frozenset((Origin.UNSCALED, Origin.GRAD_SCALER)): Origin.MIXED,
    frozenset((Origin.BY_HAND, Origin.GRAD_SCALER)): Origin.MIXED,
    frozenset((Origin.PLAIN, Origin.ENGINE)): Origin.MIXED,
    frozenset((Origin.PLAIN, Origin.UNSCALED)): Origin.UNSCALED,
}
"""What gradients become that a backward of another kind adds to."""

LEAST_SCALE = 64.0
"""The least factor that may be a loss scale; below it is a weight."""

State = tuple[int, int, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Source:
    """A backward."""

    origin: Origin
    scaler: weakref.ref[Any] | None = None  # whose scale is on its loss
    updates: int = 0  # how often that one was updated before
    factor: float = 1.0  # what the script multiplied the loss by
    is_mean: bool = False  # whether the loss is a mean that nobody divided
    lines: tuple[Place, ...] = ()  # of the script, the innermost first; left out if not known
    forwards: int = 0  # calls of models before it


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Mark:
    """One parameter's gradient, as the latest backward or step has left it."""

    source: Source  # of the latest backward
    origin: Origin
    state: State
    was_half: bool = False  # whether it was float16 on its way, or a part of it
    backwards: int = 1  # how many have added to it
    is_alike: bool = True  # whether all of those were of one line and undivided means
    is_carried: bool = False  # whether it has in it what an earlier step has used
    dropped: int = 0  # earlier backwards of its line, for the same step, that are not in it
    weights: State | None = None  # a weight as it was at the latest backward

    def added_to(self, known: Mark) -> Mark:
        """The mark of the sum with an earlier gradient."""
        origin = _SUMS.get(frozenset((self.origin, known.origin)), Origin.OTHER)
        if known.origin is Origin.USED:
            return replace(self, is_carried=True)
        one, other = self.source, known.source
        if self.origin is known.origin:
            was_updated = one.scaler == other.scaler and one.updates != other.updates
            origin = Origin.MIXED if was_updated else self.origin
        is_alike = known.is_alike and one.lines == other.lines and one.forwards != other.forwards
        return replace(
            self,
            origin=origin,
            was_half=self.was_half or known.was_half,
            backwards=known.backwards + 1,
            is_alike=is_alike and one.is_mean and other.is_mean,
            is_carried=known.is_carried,
            dropped=known.dropped,
        )

    def repeats(self, known: Mark) -> bool:
        """Whether it takes the place of a like one for another batch, which no step has used."""
        one, other = self.source, known.source
        is_other_batch = one.lines == other.lines and one.forwards != other.forwards
        return is_other_batch and known.origin is not Origin.USED and self.weights == known.weights


class Gradients:
    """The gradients of parameters, as the latest backward left them.

    A gradient counts as coming from a backward only as long as nobody has written to it since, so
    a script that unscales by hand is never mistaken.
    """

    def __init__(self) -> None:
        # By id: a thousand parameters are looked up in every step. One that takes a dead one's id
        # has another gradient.
        self._marks: dict[int, Mark] = {}
        self._before: dict[int, State] = {}
        self._aside: dict[int, Mark] = {}

    def backward_begins(self, params: Iterable[torch.Tensor]) -> None:
        """Remember the gradients of ``params``, to see which ones the backward writes."""
        self._before = {id(p): state for p in params if (state := _state(p)) is not None}

    def backward_ends(
        self, params: Iterable[torch.Tensor], source: Source, was_half: Container[int] = ()
    ) -> set[int]:
        """Mark what the backward has written to the ``params`` given to `backward_begins`.

        ``was_half`` has the ``id`` of each parameter whose gradient was float16 on its way; those
        of all that were written to are returned.
        """
        weights: State | None = None
        reached: set[int] = set()
        for param in params:
            key, state = id(param), _state(param)
            before = self._before.get(key)
            if state is None or state == before:
                continue
            weights = weights or (key, version_of(param), _digest(param))
            mark = Mark(
                source=source,
                origin=source.origin,
                state=state,
                was_half=key in was_half,
                weights=weights,
            )
            known = self._marks.get(key)
            # What a script has written to since is new: most scripts set it to zero.
            if known is not None and before is not None and known.state == before:
                mark = mark.added_to(known)
            elif known is not None and key not in self._aside and mark.repeats(known):
                is_zero = before is None or (before[2] != "" and float(before[2]) == 0.0)
                mark = replace(mark, dropped=is_zero * (known.dropped + 1))
            self._marks[key] = mark
            reached.add(key)
        self._before = {}
        return reached

    def block_begins(self, params: Iterable[torch.Tensor]) -> None:
        """An engine is about to take the gradients of ``params`` away until `block_ends`."""
        self._aside = {id(p): mark for p in params if (mark := self.live(p)) is not None}

    def block_ends(self, params: Iterable[torch.Tensor]) -> None:
        """The engine has unscaled new gradients of ``params``, and added the earlier ones."""
        for param in params:
            mark, state = self.last(param), _state(param)
            if mark is None or state is None or mark.origin is not Origin.ENGINE:
                continue
            mark, known = replace(mark, state=state), self._aside.get(id(param))
            self._marks[id(param)] = mark if known is None else mark.added_to(known)
        self._aside = {}

    def live(self, param: torch.Tensor) -> Mark | None:
        """The mark of a gradient that nobody has written to."""
        mark = self.last(param)
        return mark if mark is not None and mark.state == _state(param) else None

    def last(self, param: torch.Tensor) -> Mark | None:
        """The mark that the latest backward has left, or the step that used its gradient."""
        return self._marks.get(id(param))

    def divided_by(self, param: torch.Tensor) -> float:
        """What the gradient of ``param`` was divided by since its backward; nan if not known."""
        mark, grad = self.last(param), stored_grad(param)
        state = "" if grad is None else _digest(grad)
        if mark is None or not state or not mark.state[2] or float(state) == 0.0:
            return math.nan
        return float(mark.state[2]) / float(state)

    def marked(self, params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of ``params`` whose gradient is as a backward has left it."""
        return [param for param in params if self.live(param) is not None]

    def become(self, params: Iterable[torch.Tensor], origin: Origin | None = None) -> None:
        """What was written to the gradients is known: they are of this kind now, or as before."""
        for param in params:
            mark, state = self._marks.pop(id(param), None), _state(param)
            if state is not None:
                kind = origin or (Origin.OTHER if mark is None else mark.origin)
                mark = mark or Mark(source=Source(origin=kind), origin=kind, state=state)
                self._marks[id(param)] = replace(mark, origin=kind, state=state)

    def of(self, params: Iterable[torch.Tensor], origin: Origin) -> list[torch.Tensor]:
        """Those of ``params`` whose gradient is of this kind, and nobody has written to it."""
        return [p for p in params if (mark := self.live(p)) is not None and mark.origin is origin]

    def was_half(self, param: torch.Tensor) -> bool:
        """Whether the gradient of ``param``, or a part of it, was float16 on its way."""
        mark = self.last(param)
        return mark is not None and mark.was_half

    def scale_of(self, param: torch.Tensor) -> float:
        """The scale that a ``GradScaler`` has put on the gradient of ``param``; nan if not known.

        Synchronises.
        """
        mark = self.last(param)
        scaler = None if mark is None or mark.source.scaler is None else mark.source.scaler()
        return math.nan if scaler is None else float(scaler.get_scale())


def _state(param: torch.Tensor) -> State | None:
    """What changes when the gradient is replaced or written to; ``None`` without a dense one."""
    grad = stored_grad(param)
    if grad is None or grad.layout is not torch.strided:
        return None
    return grad.data_ptr(), version_of(grad), _digest(grad)


def _digest(grad: torch.Tensor) -> str:
    """Of some values, since writes through ``grad.data`` raise no version; on CPUs only."""
    grad = local_of(grad.detach())
    if not host_reaches(grad) or not grad.numel():
        return ""
    flat = grad.flatten() if grad.is_contiguous() else grad[0].flatten()
    return str(flat[:: max(1, flat.numel() // 256)].abs().double().sum().item())


@torch.no_grad()
def largest(tensors: Iterable[torch.Tensor | None]) -> torch.Tensor | None:
    """The largest magnitude in dense floating ``tensors``, on the first one's device.

    nan if any is; ``None`` if there is none. Does not synchronise.
    """
    dense = [
        local_of(tensor.detach())
        for tensor in tensors
        if tensor is not None and tensor.layout is torch.strided and tensor.is_floating_point()
        if tensor.numel() and tensor.device.type != "meta"
    ]
    return nn.utils.get_total_norm(dense, math.inf) if dense else None


def sample_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the first few thousand values, in one row."""
    return tensor.detach().reshape(-1)[:4096].clone()


_PENDING = 64

Moment = tuple[int, int]
"""The number of a step, and how many steps all optimizers together had taken before."""


class Streak:
    """How many of the latest events were bad; counted on their device, without waiting."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._latest: torch.Tensor | int = 0
        self._restored: set[int] = set()  # after how many events weights were restored

    def add(self, is_bad: torch.Tensor, moment: Moment) -> None:
        """Count an event; the flag is a boolean scalar on any device."""
        self._moments.append(moment)
        self._latest = (self._latest + 1) * is_bad

    def correct(self, is_bad: torch.Tensor) -> None:
        """The latest event, if there was one, was bad or not after all."""
        if self._moments:
            self._latest = (self._latest + (self._latest == 0)) * is_bad

    def end(self) -> None:
        """The latest event was not bad after all."""
        self._latest = 0

    def restore(self) -> None:
        """The script has put back what it had before."""
        self._restored.add(self.total)

    @property
    def is_mended(self) -> bool:
        """Whether the bad ones that came last ended in one restoration. Synchronises."""
        during = {number for number in self._restored if number > self.total - self.latest}
        return self.latest < self.total and during == {self.total}

    @property
    def total(self) -> int:
        """How many events there were."""
        return len(self._moments)

    @property
    def latest(self) -> int:
        """How many bad ones came last without a good one between. Synchronises."""
        return int(self._latest)

    @property
    def began(self) -> Moment:
        """The moment of the first of them. Synchronises."""
        return self._moments[-self.latest]


@dataclass(slots=True, eq=False)
class OptimizerFacts:
    """What became of one optimizer; detectors keep what they know of it by these."""

    name: str  # of its class
    made: Place | None = None  # the line that built it
    lines: tuple[Place, ...] = ()  # of the script that led there, the innermost first
    begun: int = 0  # calls of ``step`` that reached it
    applied: int = 0  # those of them that updated weights
    skipped: int = 0  # calls that a ``GradScaler`` kept from it, or that it skipped by itself
    is_inside: bool = False  # whether a step is under way, or has failed
    # Whether a ``GradScaler`` has unscaled its gradients and not stepped yet.
    unscaled: bool = False
    in_scaler: bool = False  # whether a ``GradScaler.step`` is under way that is to step it
    by_scaler: bool = False  # whether its latest step was one of ``GradScaler.step``


def _session_of(optimizer: torch.optim.Optimizer) -> OptimizerSession | None:
    engine = find_engine(optimizer)
    return None if engine is None else engine.sessions.get(id(optimizer))


class Seen:
    """The objects of a run."""

    def __init__(self) -> None:
        # Every optimizer, with what became of it.
        self.optimizers = weakref.WeakKeyDictionary[torch.optim.Optimizer, OptimizerFacts]()
        # Modules that were called by the script, not by another module, with gradients on.
        self.roots = weakref.WeakKeyDictionary[nn.Module, None]()
        self.gradients = Gradients()  # where gradients come from
        # The latest scaled losses whose backward has not run, by their node in the graph, since
        # a loss that is added to another one does not live on: scaler, whether an undivided mean.
        self.scaled: dict[Node, tuple[Any, bool]] = {}
        # How often each ``GradScaler`` was updated.
        self.updates = weakref.WeakKeyDictionary[Any, int]()
        # The line that built each ``GradScaler``.
        self.scalers_made = weakref.WeakKeyDictionary[Any, Place | None]()
        # Of losses that the script has multiplied by a loss scale, whose it was, by their lines.
        self._by_hand: dict[tuple[Place, ...], weakref.ref[Any] | None] = {}
        self.forwards = 0  # calls of models by the script
        self.steps = 0  # of optimizers so far; those that an engine skips are not among them
        self.skipped = 0  # those of them that were left out
        self.compiles = False  # whether the script has called ``torch.compile``
        self.has_optimizers = False  # whether the script has built any; evaluations do not
        self.zeroed = 0  # calls of ``Optimizer.zero_grad``
        self.reads_gradients = False  # whether the script computes with gradients but no step

    def facts(self, optimizer: torch.optim.Optimizer) -> OptimizerFacts:
        """What is known of ``optimizer``; it may have been unpickled, and never built."""
        return self.optimizers.setdefault(optimizer, OptimizerFacts(type(optimizer).__name__))

    def params(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """The model's parameters that ``optimizer`` updates: halves in place of their masters."""
        session = _session_of(optimizer)
        if session is not None and session.table.has_masters:
            yield from session.direct_params()
            yield from session.table.halves
            return
        for group in getattr(optimizer, "param_groups", ()):  # none if its constructor failed
            yield from group["params"]

    def behind(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        """The half parameters of a model that the script has made copies of for ``optimizer``."""
        own = [param for group in optimizer.param_groups for param in group["params"]]
        if find_engine(optimizer) is not None or not self.roots:
            return []
        owned = {id(p) for other in tuple(self.optimizers) for p in self.params(other)}
        for root in tuple(self.roots):
            params = [p for p in root.parameters() if p.requires_grad]
            if not {id(p) for p in own}.isdisjoint(map(id, params)):
                return []
            halves = [p for p in params if is_half(p) and id(p) not in owned]
            shapes = {p.shape for p in halves}
            is_total = sum(p.numel() for p in own) == sum(p.numel() for p in halves)
            if halves and (is_total or all(p.shape in shapes for p in own)):
                return halves
        return []

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """A step has used the gradients that ``optimizer`` has, or has copies of."""
        used = [*self.params(optimizer), *self.behind(optimizer)]
        self.gradients.become(used, Origin.USED)

    def all_params(self) -> list[torch.Tensor]:
        """The parameters of all optimizers and of the models that were called, each once."""
        params = [p for optimizer in tuple(self.optimizers) for p in self.params(optimizer)]
        params += [p for root in tuple(self.roots) for p in root.parameters()]
        return list({id(param): param for param in params}.values())

    def counts(self, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
        """How many steps of ``optimizer`` were applied so far, and how many skipped."""
        session = _session_of(optimizer)
        if session is not None:
            return session.steps_applied, session.steps_skipped
        facts = self.facts(optimizer)
        return facts.applied, facts.skipped

    def now(self) -> Moment:
        """The step under way, its number from 1; those that were skipped count."""
        counts = (sum(self.counts(optimizer)) for optimizer in tuple(self.optimizers))
        return max(counts, default=0) + 1, self.steps

    def take_scaler(self, roots: Sequence[torch.Tensor]) -> tuple[Any, bool, bool]:
        """The scaler of the loss that a backward from ``roots`` starts from; asked for once.

        Scripts add up scaled losses or divide one, so the graph below ``roots`` is looked at.
        Further, whether the loss is a mean that nobody divided, and whether something was added
        that is not scaled. The scaler is ``None`` if there is none.
        """
        terms = [node for root in roots for node in terms_of(root, self.scaled)]
        known = [self.scaled.pop(node) for node in terms if node in self.scaled]
        if not known:
            return None, False, False
        is_whole = all(root.grad_fn in terms for root in roots)
        return known[0][0], is_whole and all(mean for _, mean in known), len(known) < len(terms)

    def scaler_by_hand(
        self, factors: Iterable[float], lines: tuple[Place, ...], *, waits: bool
    ) -> Any:
        """The ``GradScaler`` whose scale is one of ``factors``, or ``None``.

        Without ``waits`` it is the one that it was before in these ``lines``, and the scale is
        asked for, which synchronises, where they are new.
        """
        large = [factor for factor in factors if factor >= LEAST_SCALE]
        if not large:
            return None
        if waits or lines not in self._by_hand:
            found = (scaler for scaler in tuple(self.updates) if scaler.get_scale() in large)
            scaler = next(found, None)
            self._by_hand[lines] = None if scaler is None else weakref.ref(scaler)
        known = self._by_hand[lines]
        return None if known is None else known()

    def note_scaled(self, loss: torch.Tensor, scaler: Any, *, mean: bool) -> None:
        """``scaler`` has made ``loss``, perhaps of an undivided mean."""
        # A loss that is not in the graph is scaled for its value only.
        if loss.grad_fn is not None:
            self.scaled[loss.grad_fn] = scaler, mean
            if len(self.scaled) > _PENDING:  # those that no backward ever starts from
                del self.scaled[next(iter(self.scaled))]

    def engines(self) -> list[Engine]:
        """The open engines of all optimizers."""
        found = {id(e): e for o in tuple(self.optimizers) if (e := find_engine(o)) is not None}
        return list(found.values())

    def name(self, thing: torch.Tensor | nn.Module) -> str:
        """The qualified name of a parameter or module below the roots."""
        for root in tuple(self.roots):
            modules = cast("Iterator[tuple[str, object]]", root.named_modules())
            for name, own in chain(root.named_parameters(), modules):
                if own is thing:
                    return name or type(root).__name__
        if isinstance(thing, nn.Module):
            return type(thing).__name__
        return f"a parameter of shape {tuple(thing.shape)}"
