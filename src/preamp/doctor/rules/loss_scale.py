# SPDX-License-Identifier: BSD-3-Clause
"""PA1xx: the loss scale is left on, left out, or passed by; schedules and skipped steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from preamp.core.tensors import local_of, stored_grad
from preamp.core.torch_private.autograd import has_hooks
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import OptimizerFacts, Origin, Seen, Source, largest
from preamp.engine import find_engine

CLIPPED_SCALED = define_rule(
    id="PA101",
    severity=Severity.ERROR,
    title="Gradients are clipped while they carry the loss scale",
    why="""A scaled gradient is many thousand times its real size, so its norm is above any sensible
    limit and every step is clipped. Unscaled afterwards, the update is smaller than intended by
    about the loss scale, and training seems to stand still.""",
    how="""The gradients given to a clipping function of torch.nn.utils are the ones that a backward
    from a scaled loss has left, and nobody but clipping has written to them since. An infinite
    limit only asks for the norm and is left out. Inside a scale_loss block the engine is asked;
    after it, it refuses changes of half gradients itself. Clipping by hand is told
    from the values just before they are unscaled. One in a hundred is exactly the largest
    magnitude, or their norm is the same in three steps. The script must have written to them or
    have hooks on them, or half of all tensors have that magnitude in them.""",
    do="""With torch.amp call scaler.unscale_(optimizer) before clipping. With scale_loss clip after
    the block: preamp.clip_grad_norm_(optimizer, max_norm), or torch's function on
    master_params(optimizer).""",
)
NOT_SCALED = define_rule(
    id="PA102",
    severity=Severity.WARNING,
    title="float16 training without a loss scale",
    why="""Gradients in float16 below 6e-8 become zero, and below 6.1e-5 they lose digits. Most
    networks have many of these. Without a loss scale they are lost before the optimizer sees
    them.""",
    how="""An optimizer step used gradients as a backward without a loss scale had left them,
    clipped or not. They are float16, or were on their way through the graph, as under autocast. So
    it is where a GradScaler begins with a scale of 1 or less and grows by the hundreds of steps.
    The graphs of the first 64 backwards are read. Left out are losses that the script multiplies by
    64 or more, which may be a scale, gradients that it changes afterwards, and the inside of what
    is compiled.""",
    do="""With torch.amp use torch.amp.GradScaler. With preamp or apex call backward inside
    scale_loss. Or train in bfloat16, which needs no loss scale.""",
)
BYPASSED = define_rule(
    id="PA103",
    severity=Severity.ERROR,
    title="optimizer.step() passes by the GradScaler",
    why="""GradScaler.step unscales the gradients and leaves the step out if they overflowed. A
    direct call of optimizer.step does neither. The update is too large by the factor of the loss
    scale, or infinite at the first overflow.""",
    how="""optimizer.step ran outside scaler.step, on gradients that carry the scale or that
    scaler.step used before or afterwards. Or scaler.unscale_ had unscaled them for a step that was
    to follow. The last is an info where no gradient overflowed, since the script may look for that
    by itself.""",
    do="Call scaler.step(optimizer) and then scaler.update() in place of optimizer.step().",
)

_BEFORE_UNSCALE = "before scaler.unscale_(optimizer)"
_SOON = 100  # steps; a scale that grows this often is found before it matters
_LIMITED = 0.01  # share of clamped values that are the limit
_FEWEST_LIMITED = 8
_NORMS = 3
_EARLY = 32  # steps
_FEWEST_IDLE = 6
_SAMPLE = 4096


class Clipping(Detector):
    """Finds PA101."""

    RULES = (CLIPPED_SCALED,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        # How many norms in a row were alike, the last one, and a part of its gradients.
        self._norms: dict[tuple[int, ...], tuple[int, float, torch.Tensor]] = {}
        self._told: set[int] = set()  # parameters whose gradients a function of torch has clipped

    def gradients_unscaled(
        self, params: Sequence[torch.Tensor], scaler: object, scale: Callable[[], float]
    ) -> None:
        """Look whether what the script did to scaled gradients was clipping."""
        if self.seen.steps >= _EARLY:  # all gradients are read
            return
        gradients = self.seen.gradients
        changed = [
            (param, grad.detach())
            for param in params
            if (mark := gradients.last(param)) is not None
            and mark.origin in (Origin.GRAD_SCALER, Origin.ENGINE)
            and (grad := stored_grad(param)) is not None
            and grad.layout is torch.strided
        ]
        key = id(changed[0][0]) if changed else 0
        if not changed or key in self._told or not self.findings.is_new(CLIPPED_SCALED, key):
            return
        own, grads = zip(*changed, strict=True)
        values = [local_of(grad).reshape(-1).float().abs() for grad in grads if grad.numel()]
        sizes = torch.stack([value.max() for value in values])
        limited = sum(int((value == sizes.max()).sum()) for value in values)
        nonzero = sum(int((value != 0).sum()) for value in values)
        norm = float(nn.utils.get_total_norm(values))
        # What is written through .data shows nowhere but in the values.
        is_written = any(gradients.live(param) is None or has_hooks(param) for param in own)
        is_written |= 2 * int((sizes == sizes.max()).sum()) >= max(len(sizes), 3)
        is_limited = is_written and _FEWEST_LIMITED <= limited >= _LIMITED * nonzero
        sample = max(values, key=len)[:_SAMPLE]
        is_normed = self._repeats((len(sample), *map(id, own)), norm, sample)
        if math.isfinite(norm) and norm and (is_limited or is_normed):
            how = f"at {float(sizes.max()):.4g}" if is_limited else f"to a norm of {norm:.4g}"
            how = f"{how}, {_BEFORE_UNSCALE}"
            self._report("The script", own, params, scale(), how, key=id(own[0]))

    def _repeats(self, key: tuple[int, ...], norm: float, values: torch.Tensor) -> bool:
        """Whether the norm was the same in three steps, of gradients that were not."""
        count, last, before = self._norms.get(key, (0, 0.0, values))
        is_same = abs(last - norm) <= 1e-3 * norm
        is_new = float((values - before).square().sum()) > 0.0025 * float(values.square().sum())
        count = 1 + count * is_same if is_new or not count else count
        self._norms[key] = count, norm, values.clone()
        return count >= _NORMS

    def gradients_clipped(self, params: Sequence[torch.Tensor], name: str) -> None:
        """Look whether any of the gradients is scaled."""
        scaled = self.seen.gradients.of(params, Origin.GRAD_SCALER)
        if scaled:
            scale = self.seen.gradients.scale_of(scaled[0])
            self._report(name, scaled, params, scale, _BEFORE_UNSCALE)
            return
        present = [param for param in params if stored_grad(param) is not None]
        for engine in self.seen.engines() if present else ():
            if not engine.scales_losses:
                continue
            for session in engine.sessions.values():
                own = {id(param) for param in session.params()}
                direct = [param for param in present if id(param) in own]
                twins = map(session.table.of_half, () if session.gradients.is_shown else present)
                halves = [twin.half for twin in twins if twin is not None]
                both, scale = [*direct, *halves], engine.loss_scale()
                if both and session.is_open:
                    is_left_open = session.end_backward is not None
                    what = _BEFORE_UNSCALE if is_left_open else "inside a scale_loss block"
                    self._report(name, both, params, scale, what)

    def _report(
        self,
        name: str,
        scaled: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        scale: float,
        how: str,
        key: int | None = None,
    ) -> None:
        place = current_place()
        self._told.update(map(id, scaled))
        self.report(
            CLIPPED_SCALED,
            place if key is None else key,
            f"{name} clips {len(scaled)} of {len(params)} gradients {how}; "
            f"the loss scale on them is {scale:g}.",
            where=place,
            loss_scale=scale,
            scaled_gradients=len(scaled),
            gradients=len(params),
        )


@dataclass(slots=True)
class _UnscaledSteps:
    """Steps of one optimizer after ``scaler.unscale_`` and outside ``scaler.step``."""

    key: int
    where: Place | None
    taken: int = 0
    overflowed: int = 0


class Stepping(Detector):
    """Finds PA102 and PA103."""

    RULES = (NOT_SCALED, BYPASSED)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._unscaled: dict[OptimizerFacts, _UnscaledSteps] = {}

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Look whether the step was taken already, and at the scale at the first one."""
        facts, gradients = self.seen.facts(optimizer), self.seen.gradients
        marked = gradients.marked(self.seen.params(optimizer))
        if marked and not facts.by_scaler and len(gradients.of(marked, Origin.USED)) == len(marked):
            what = f"scaler.step used {len(marked)} gradients that {type(optimizer).__name__}.step"
            what = f"{what} had used already: each update is made twice."
            self.report(BYPASSED, id(optimizer), what, gradients=len(marked))
        if facts.begun + facts.skipped or scaler.get_growth_interval() < _SOON:
            return
        params = [p for p in self.seen.params(optimizer) if gradients.was_half(p)]
        if params and scaler.get_scale() <= 1.0:
            self.report(
                NOT_SCALED,
                id(optimizer),
                f"The GradScaler of {type(optimizer).__name__} begins with a scale of "
                f"{scaler.get_scale():g}, and grows in {scaler.get_growth_interval()} steps first.",
                do="Leave init_scale out: its default, 65536, comes down to what fits by itself.",
                gradients_through_float16=len(params),
                loss_scale=scaler.get_scale(),
            )

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at where the gradients of this step come from."""
        if not self.seen.facts(optimizer).in_scaler:
            params = list(self.seen.params(optimizer))
            self._check_bypass(optimizer, params)
            self._check_plain(optimizer, params)

    def _check_bypass(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        if not self.findings.is_new(BYPASSED, id(optimizer)):
            return
        gradients, facts = self.seen.gradients, self.seen.facts(optimizer)
        name, scaled = facts.name, gradients.of(params, Origin.GRAD_SCALER)
        if scaled:
            scale = gradients.scale_of(scaled[0])
            what = f"{name}.step used {len(scaled)} gradients that carry the scale {scale:g}."
            count = len(scaled)
            self.report(BYPASSED, id(optimizer), what, loss_scale=scale, scaled_gradients=count)
        elif facts.by_scaler and gradients.of(params, Origin.USED):
            what = f"{name}.step used gradients that scaler.step had used already."
            self.report(BYPASSED, id(optimizer), what)
        elif facts.unscaled:
            new = _UnscaledSteps(id(optimizer), current_place())
            steps, size = self._unscaled.setdefault(facts, new), largest(map(stored_grad, params))
            steps.taken += 1
            steps.overflowed += size is not None and not bool(size.isfinite())

    def run_ended(self) -> None:
        """Report steps after ``unscale_``: only an overflow shows whether the script looks."""
        for facts, steps in self._unscaled.items():
            did = "an overflow would be applied, unless the script looks for it."
            if steps.overflowed:
                did = f"{steps.overflowed} of them applied an overflow."
            self.report(
                BYPASSED,
                steps.key,
                f"{facts.name}.step was called after scaler.unscale_ {steps.taken} times; {did}",
                where=steps.where,
                severity=None if steps.overflowed else Severity.INFO,
                steps=steps.taken,
                overflows_applied=steps.overflowed,
            )

    def _check_plain(self, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        if not self.findings.is_new(NOT_SCALED, id(optimizer)):
            return
        engine = find_engine(optimizer)
        if engine is not None and not engine.scales_losses:
            return  # asked for: the policy's loss scale is 1
        plain = self.seen.gradients.of(params, Origin.PLAIN)
        if engine is not None and not plain:
            plain = self.seen.gradients.of(params, Origin.MIXED)
        half = [param for param in plain if param.dtype is torch.float16]
        were_half = [param for param in plain if self.seen.gradients.was_half(param)]
        if not half and not were_half:
            return
        how = "float16 gradients" if half else "gradients of a forward in float16"
        around = "outside scale_loss" if engine is not None else "without a loss scale"
        self.report(
            NOT_SCALED,
            id(optimizer),
            f"{type(optimizer).__name__}.step used {len(half or were_half)} {how}, "
            f"from a backward {around}.",
            float16_gradients=len(half),
            gradients_through_float16=len(were_half),
            gradients=len(plain),
        )


SCHEDULED_SKIP = define_rule(
    id="PA104",
    severity=Severity.WARNING,
    title="The learning-rate schedule runs ahead of the steps",
    why="""After an overflow the optimizer's step is left out, as the first steps of a dynamic loss
    scale often are. Where gradients are accumulated most batches have no step. A schedule that goes
    on all the same runs ahead of the training: warm-up ends too early, and its first, smallest
    rates are never used.""",
    how="""scheduler.step was called although the optimizer had skipped its step since the last
    call. A schedule that is mostly called after several steps, as once in an epoch, is left out.
    Steps that an FP16_Optimizer leaves out are not seen. Or half of all calls followed a backward
    without a step. That is an info if the schedule has neither total_steps nor T_max, and a warning
    if there were more calls than these say. Else nothing is reported, since the schedule may have
    been planned in batches.""",
    do="""Step the schedule once for each step of the optimizer. With torch.amp the scale has shrunk
    after a skip: compare scaler.get_scale() before and after scaler.update(). With preamp call
    preamp.step_scheduler(scheduler, optimizer).""",
)


@dataclass(slots=True)
class _Schedule:
    name: str
    counted: tuple[int, int]
    steps: list[int] = field(default_factory=list[int])  # before each of its calls
    after_skips: int = 0
    where: Place | None = None
    is_fed: bool = False  # whether its optimizer has got gradients since its last call
    idle: int = 0  # calls after gradients without a step
    idle_at: Place | None = None
    planned: int | None = None  # calls, by its arguments


class Scheduling(Detector):
    """Finds PA104."""

    RULES = (SCHEDULED_SKIP,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._known = weakref.WeakKeyDictionary[Any, _Schedule]()
        self._schedules: list[_Schedule] = []

    def backward_ended(self, source: Source, reached: Container[int]) -> None:
        """Note whose schedule's optimizer has got gradients."""
        for scheduler, schedule in tuple(self._known.items()):
            params = self.seen.params(scheduler.optimizer)
            schedule.is_fed = schedule.is_fed or any(id(param) in reached for param in params)

    def schedule_stepped(self, scheduler: Any) -> None:
        """Compare the steps since the last call with what became of them."""
        optimizer = getattr(scheduler, "optimizer", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        counts = self.seen.counts(optimizer)
        schedule = self._known.get(scheduler)
        if schedule is None:  # its constructor, which sets the first learning rate
            schedule = _Schedule(type(scheduler).__name__, counts)
            plans = (getattr(scheduler, name, None) for name in ("total_steps", "T_max"))
            schedule.planned = next((plan for plan in plans if plan is not None), None)
            self._known[scheduler] = schedule
            self._schedules.append(schedule)
            return
        applied, skipped = (now - old for now, old in zip(counts, schedule.counted, strict=True))
        schedule.counted = counts
        schedule.steps.append(applied + skipped)
        if skipped > 0 and applied == 0:
            schedule.after_skips += 1
            schedule.where = schedule.where or current_place()
        elif schedule.is_fed and not schedule.steps[-1]:
            schedule.idle += 1
            schedule.idle_at = schedule.idle_at or current_place()
        schedule.is_fed = False

    def run_ended(self) -> None:
        """Report every schedule that ran ahead."""
        for schedule in self._schedules:
            calls = len(schedule.steps)
            if schedule.after_skips and median(schedule.steps) <= 1:
                self.report(
                    SCHEDULED_SKIP,
                    schedule.where,
                    f"{schedule.name}.step was called {calls} times, "
                    f"{schedule.after_skips} of them after a step that was skipped.",
                    where=schedule.where,
                    calls=calls,
                    after_skipped_steps=schedule.after_skips,
                )
            steps, planned = sum(schedule.steps), schedule.planned
            is_planned = planned is not None and planned >= calls
            if 2 * schedule.idle < max(calls - 1, _FEWEST_IDLE) or is_planned:
                continue
            if steps > 1 and not self.seen.compiles:  # of compiled steps nothing is seen
                where = schedule.idle_at
                what = f"{schedule.name}.step was called {calls} times for {steps} steps"
                what += "." if planned is None else f"; it was made for {planned} calls."
                kind, rule = Severity.INFO if planned is None else None, SCHEDULED_SKIP
                self.report(rule, where, what, where=where, severity=kind, calls=calls, steps=steps)
