# SPDX-License-Identifier: BSD-3-Clause
"""PA2xx: weights in half precision, and optimizers that update them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from preamp.core.dtypes import dtype_name, is_half
from preamp.core.tensors import find_again, stored_grad
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import OptimizerFacts, Seen, sample_of
from preamp.numerics import FORMATS

EPS_IS_ZERO = define_rule(
    id="PA201",
    severity=Severity.ERROR,
    title="The optimizer's eps is zero in float16",
    why="""torch's optimizers compute in the dtype of the parameter. Adam's default eps of 1e-8 is
    less than the smallest positive float16, 6e-8, so it is zero there. A weight whose gradient is
    zero, or small enough for its square to be, is then divided by zero and becomes nan.""",
    how="""An optimizer of torch.optim that divides by a root plus eps updates float16 parameters,
    and eps rounds to zero in float16: 0 <= eps <= 2**-25. Left out are fused optimizers, which
    compute in float32, and subclasses with a step of their own. So is Adagrad if its initial
    accumulator value is above that, since its sum of squares is then never zero.""",
    do="""Update float32 masters (preamp's O2), or keep the weights in float32 and use autocast.
    Where float16 weights are wanted, pass eps=1e-4 or a fused optimizer.""",
)
UPDATE_IS_LOST = define_rule(
    id="PA202",
    severity=Severity.ERROR,
    title="Updates are zero, or below the resolution of the weights",
    why="""A half weight can change only in steps of its last digit: about 1/2000 of itself in
    float16, 1/256 in bfloat16. An update of less than half of that rounds away, every time anew,
    however many steps are taken. Training slows down or stops without an error.""",
    how="""Up to a million half weights without a master are compared before and after steps 1, 2,
    4, 8 and so on. Looked at are those with a gradient, at a learning rate that is not zero.
    Reported if more than half of them stayed bit for bit what they were, in the majority of these
    steps and in the last. Up to nine tenths are a warning. The report says as well how many have
    not moved since the first step. Optimizers whose step is not torch's or preamp's own may keep
    what is rounded away, and are left out. In float32, or at a rate of zero, it is reported if no
    weight with a gradient has moved by step 8. Masters of preamp are not looked at.""",
    do="""Look at the learning rate. Update float32 masters (preamp's O2, or O5 for bfloat16, and no
    model.half() or model.bfloat16() before), or use autocast over float32 weights. A larger rate
    helps only while training can bear it.""",
)
HALF_AVERAGE = define_rule(
    id="PA204",
    severity=Severity.WARNING,
    title="An average of weights is kept in half, and stands still",
    why="""An average moves by a small share of a small difference. In half that is less than the
    last digit and rounds away: the average stays where it started, however far the model moves.""",
    how="""Half tensors of the shapes of parameters, computed in place in the second step (add_,
    lerp_, copy_ and the like) outside of optimizers. Reported if most of their values stay bit for
    bit what they were between steps 4, 8, 16 and so on, while the model's move. Averages that are
    new tensors in every step are not seen.""",
    do="Average in float32: copy.deepcopy(model).float(), or a deep copy of a model at O2 or O5.",
)

_DIVIDE_BY_ROOT = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
)
_MOST = 0.9
_FEWEST = 256
_SAMPLED = 1 << 20
_LOOKS = 4  # the last of them at step 8
_AVERAGES = 16
_WRITES = 128  # in the second step, which averages are at the beginning of


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer's update is torch's or preamp's; subclasses may have their own."""
    owner = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
    return owner.__module__.partition(".")[0] in ("torch", "preamp")


class Eps(Detector):
    """Finds PA201."""

    RULES = (EPS_IS_ZERO,)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the groups; their options may change between steps."""
        if not isinstance(optimizer, _DIVIDE_BY_ROOT) or not _is_known(optimizer):
            return
        if not self.findings.is_new(EPS_IS_ZERO, id(optimizer)):
            return
        form = FORMATS["float16"]
        for group in optimizer.param_groups:
            params: list[torch.Tensor] = group["params"]
            half = [p for p in params if p.dtype is torch.float16 and stored_grad(p) is not None]
            if half and is_eps_zero(group):
                count, eps = sum(param.numel() for param in half), group["eps"]
                self.report(
                    EPS_IS_ZERO,
                    id(optimizer),
                    f"{type(optimizer).__name__} updates {count:,} float16 weights with "
                    f"eps={eps:g}; the smallest positive float16 is {form.smallest_subnormal:.3g}.",
                    eps=eps,
                    smallest_positive=form.smallest_subnormal,
                    weights=count,
                )


def is_eps_zero(options: Mapping[str, Any]) -> bool:
    """Whether an optimizer divides float16 weights by a root plus an eps that is zero there.

    ``options`` are those of one of its groups. Fused optimizers compute in float32, and a sum of
    squares that does not begin at zero never is.
    """
    added = options["eps"], options.get("initial_accumulator_value", 0.0)
    largest_lost = FORMATS["float16"].smallest_subnormal / 2  # zero is even
    return not options.get("fused") and all(0 <= value <= largest_lost for value in added)


_Sample = tuple[torch.Tensor, torch.Tensor, float]
"""A parameter, some of its values, and its learning rate."""


@dataclass(slots=True)
class _Watched:
    """Samples of one optimizer's half weights."""

    before: list[_Sample] = field(default_factory=list[_Sample])  # of the step under way
    shares: list[float] = field(default_factory=list[float])
    # The weights before the first step that was looked at, and how many are still the same.
    first: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    unmoved: float = 1.0
    largest_lr: float = 0.0
    has_moved: bool = False  # whether any weight has, in half or not
    looks: int = 0  # at weights with gradients, before that
    weights: int = 0
    dtype: torch.dtype = torch.float16


class LostUpdates(Detector):
    """Finds PA202."""

    RULES = (UPDATE_IS_LOST,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._watched = defaultdict[OptimizerFacts, _Watched](_Watched)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy some weights, at steps that are powers of two; half ones once any has moved."""
        facts = self.seen.facts(optimizer)
        if facts.begun & (facts.begun - 1) or not _is_known(optimizer):
            return
        watched = self._watched[facts]
        watched.before.clear()
        room = _SAMPLED
        for group in optimizer.param_groups:
            for param in group["params"]:
                grad = stored_grad(param)
                rate = float(group.get("lr", 1.0))
                if room <= 0 or grad is None or not param.is_floating_point():
                    continue
                if watched.has_moved and not (is_half(param) and rate):
                    continue
                if grad.layout is not torch.strided or not param.is_contiguous():
                    continue
                sample = param.detach().view(-1)[:room].clone()
                room -= sample.numel()
                watched.before.append((param, sample, rate))
                if watched.first.setdefault(id(param), sample).shape != sample.shape:
                    watched.first[id(param)] = sample  # of another one with its id

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the weights that stayed what they were."""
        watched = self._watched[self.seen.facts(optimizer)]
        if not watched.before:
            return
        moved_by = stayed = still = 0
        is_idle = False
        for param, sample, rate in watched.before:
            grad = stored_grad(param)
            if grad is None or grad.shape != param.shape:
                continue
            values = grad.detach().reshape(-1)[: sample.numel()]
            has_gradient = (values != 0) & values.isfinite()
            current = param.detach().view(-1)[: sample.numel()]
            is_first = current == watched.first[id(param)]
            watched.largest_lr = max(watched.largest_lr, rate)
            watched.has_moved |= not bool(is_first.all())
            is_idle |= bool(has_gradient.any())
            if not is_half(param) or not rate:
                continue
            moved_by += int(has_gradient.sum())
            stayed += int((has_gradient & (current == sample)).sum())
            still += int((has_gradient & is_first).sum())
            watched.dtype = param.dtype
        watched.before.clear()
        watched.looks += is_idle
        if moved_by:
            watched.shares.append(stayed / moved_by)
            watched.unmoved = still / moved_by
            watched.weights = max(watched.weights, moved_by)

    def run_ended(self) -> None:
        """Report optimizers most of whose updates were lost."""
        for facts, watched in self._watched.items():
            shares, rate = watched.shares, watched.largest_lr
            if not watched.has_moved and watched.looks >= _LOOKS and not shares:
                steps = 2 ** (watched.looks - 1)
                what = f"Weights with gradients are what they were {steps} steps before or more; "
                what += f"the largest learning rate was {rate:g}."
                do = "Look at the schedule: the rate is zero."
                if rate:
                    do = "Look at the learning rate, and at what writes to weights or gradients."
                made = facts.made
                self.report(UPDATE_IS_LOST, facts, what, where=made, do=do, steps=steps, lr=rate)
            if len(shares) < 2 or median(shares) <= 0.5 or shares[-1] <= 0.5:
                continue
            share = median(shares)
            self.report(
                UPDATE_IS_LOST,
                facts,
                f"{share:.0%} of {watched.weights:,} {dtype_name(watched.dtype)} weights with a "
                f"gradient did not change in a step, at learning rates up to {rate:g}; median of "
                f"{len(shares)} steps. {watched.unmoved:.0%} have not moved since the first.",
                where=facts.made,
                severity=None if share >= _MOST else Severity.WARNING,
                stalled_share=share,
                unmoved_share=watched.unmoved,
                weights=watched.weights,
                lr=rate,
                steps_looked_at=len(shares),
            )


@dataclass(slots=True)
class _Average:
    """A half tensor that may be an average of parameters of its shape."""

    find: Callable[[], torch.Tensor | None]  # as long as the script keeps it
    values: torch.Tensor  # a sample of it at the last look
    shape: torch.Size
    where: Place | None
    looks: int = 0
    still: int = 0  # looks at which it had not moved while a parameter had


def _same_share(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one == other.to(one.dtype)).float().mean())


class Averages(Detector):
    """Finds PA204."""

    RULES = (HALF_AVERAGE,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._found: dict[int, _Average] = {}
        self._params: dict[int, torch.Tensor] = {}  # samples at the last look
        self._looked_at = 0

    def written(self, target: torch.Tensor) -> None:
        """Keep a few tensors that may be averages."""
        self._looked_at += 1
        params, key = self.seen.all_params(), target.data_ptr()
        is_full = self._looked_at > _WRITES or len(self._found) >= _AVERAGES
        if is_full or key in self._found or target.numel() < _FEWEST:
            return
        own = (t for param in params for t in (param, stored_grad(param)) if t is not None)
        if key in {tensor.data_ptr() for tensor in own}:
            return
        if any(param.shape == target.shape for param in params):
            values, shape = sample_of(target), target.shape
            self._found[key] = _Average(find_again(target), values, shape, current_place())
            self._params = self._params or {id(param): sample_of(param) for param in params}

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare at some steps, when the average of the step before is there."""
        number = self.seen.steps + 1
        if number < 4 or number & (number - 1) or not self._found:
            return
        params = self.seen.all_params()
        samples = {id(param): sample_of(param) for param in params}
        for average in self._found.values():
            tensor = average.find()
            if tensor is None:
                continue
            before, average.values = average.values, sample_of(tensor)
            keys = [id(param) for param in params if param.shape == average.shape]
            known = [key for key in keys if key in self._params]
            has_moved = any(_same_share(samples[key], self._params[key]) < 0.5 for key in known)
            is_copy = any(_same_share(average.values, samples[key]) >= 0.5 for key in keys)
            average.looks += 1
            average.still += has_moved and not is_copy and _same_share(average.values, before) > 0.5
        self._params = samples

    def run_ended(self) -> None:
        """Report averages that stood still from look to look."""
        still = [a for a in self._found.values() if a.still >= 2 and a.still >= a.looks - 1]
        if still:
            dtype, count = dtype_name(still[0].values.dtype), sum(a.shape.numel() for a in still)
            what = f"{len(still)} {dtype} tensors with {count:,} values stand still."
            self.report(HALF_AVERAGE, "averages", what, where=still[0].where, tensors=len(still))
