# SPDX-License-Identifier: BSD-3-Clause
"""PA105 to PA108, PA110, PA111 and PA113: a ``GradScaler`` that is not used as a whole."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from preamp.core.torch_private.autograd import leaves_through
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import Origin, Seen, Source

NEVER_SCALED = define_rule(
    id="PA105",
    severity=Severity.ERROR,
    title="A GradScaler unscales gradients that do not carry its scale",
    why="""A GradScaler divides by the scale whether or not the loss was multiplied by it, or the
    gradients divided before. Every update is then too small by that factor, 65,536 at the
    beginning.""",
    how="""scaler.unscale_ or scaler.step was called while gradients were as a backward had left
    them. Their loss had not been multiplied by the scale, neither by the scaler nor by hand. A
    scale of 1 is left out. So are steps in which a scaled loss had gradients for no parameter,
    since another loss may have been made of them. Or the script had divided each gradient by the
    scale, before the scaler did or after it. This is seen on CPUs, where the loss is an undivided
    mean, or at two scales.""",
    do="""Call scaler.scale(loss).backward() in place of loss.backward(), and leave unscaling to
    scaler.unscale_ and scaler.step.""",
)
MIXED = define_rule(
    id="PA106",
    severity=Severity.ERROR,
    title="Gradients with different scales are added up",
    why="""A gradient that carries the loss scale is many thousand times one that does not: nothing
    of the other loss is left in the sum.""",
    how="""A scaler was about to unscale sums of gradients from scaled and unscaled losses, or from
    scaled losses with an update of the scaler between them. Or an unscaled loss was added to a
    scaled one.""",
    do="""Scale every loss of a step, call unscale_ after its last backward, and update once after
    it.""",
)
SCALE_CHANGED = define_rule(
    id="PA107",
    severity=Severity.ERROR,
    title="The loss scale changes between backward and step",
    why="""A scaler unscales by the scale that it has then. After an update that is another number
    than the one the loss was multiplied by.""",
    how="""scaler.unscale_ or scaler.step was called on gradients from before the latest
    scaler.update, or on those of a loss that another scaler had scaled.""",
    do="""Call scaler.update() once, after the last scaler.step of the iteration, and step with the
    scaler that has scaled the loss.""",
)
NEW_SCALER = define_rule(
    id="PA108",
    severity=Severity.WARNING,
    title="The GradScaler is made anew again and again",
    why="""What was learned about the scale is forgotten each time. If the scale to begin with
    overflows, steps are skipped again and again; if it is too small, it never grows.""",
    how="""Three scalers made at one line followed each other in the steps of one optimizer, and
    none of them was used again.""",
    do="Make one GradScaler before the loop.",
)
NOT_SAVED = define_rule(
    id="PA110",
    severity=Severity.WARNING,
    title="A checkpoint has the optimizer's state and no loss scale",
    why="""A run that goes on from it starts with the scale of a new run. Steps are skipped, or
    small gradients are lost until the scale has grown back.""",
    how="""torch.save was given the state of an optimizer, and no file of the run got the state of
    its GradScaler, or of its engine with a dynamic loss scale. Other ways to save are not seen.""",
    do="""Save scaler.state_dict(), amp.state_dict() or engine.state_dict() too, or use
    preamp.save_checkpoint.""",
)
BFLOAT16_SCALER = define_rule(
    id="PA111",
    severity=Severity.INFO,
    title="A GradScaler for bfloat16",
    why="""bfloat16 has the range of float32, so nothing needs scaling. The scaler still reads all
    gradients, and the host waits for it.""",
    how="""A loss scaled by torch's GradScaler reaches parameters through bfloat16, and none through
    float16.""",
    do="Leave the scaler out, or pass enabled=False.",
)

HALF_RESUMED = define_rule(
    id="PA113",
    severity=Severity.WARNING,
    title="A run goes on from a checkpoint of which a part was left",
    why="""Without its state Adam begins with averages of zero, and its first steps are as large as
    those of a new run. Without the loss scale steps are skipped, or small gradients are lost until
    the scale has grown back.""",
    how="""torch.load returned the states of an optimizer and of a scaler, and a model loaded its
    weights. But only one of the two had its load_state_dict called before the first step of the
    other, which was new. If neither was restored, the weights may be all that is wanted.""",
    do="Call load_state_dict of the optimizer and of the scaler too.",
)

_OPTIMIZER_KEYS = {"state", "param_groups"}
_SCALER_WORDS = ("scaler", "loss_scale", "_growth_tracker")
_NEW = 3
_LOOKED_AT = 4


@dataclass(slots=True)
class _Chain:
    """The scalers of one optimizer's steps, one after the other."""

    made: Place | None = None
    scalers: list[weakref.ref[Any]] = field(default_factory=list[weakref.ref[Any]])


class ScalerUse(Detector):
    """Finds PA105 to PA108, and PA111."""

    RULES = (NEVER_SCALED, MIXED, SCALE_CHANGED, NEW_SCALER, BFLOAT16_SCALER)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._chains = weakref.WeakKeyDictionary[torch.optim.Optimizer, _Chain]()
        self._looked_at = 0
        self._divided: set[float] = set()  # scales that the script has divided gradients by
        # Of each scaler, after how many updates a scaled loss had gradients for no parameter.
        self._handed_on = weakref.WeakKeyDictionary[Any, int]()

    def backward_ended(self, source: Source, reached: Collection[int]) -> None:
        """Note scaled gradients that came to no parameter: the script may go on from them."""
        scaler = None if source.scaler is None else source.scaler()
        if source.origin is Origin.GRAD_SCALER and scaler is not None and not reached:
            self._handed_on[scaler] = source.updates

    def scaled_backward_begins(
        self, scaler: torch.amp.GradScaler, roots: Sequence[torch.Tensor]
    ) -> None:
        """Look for bfloat16 in the first few graphs."""
        self._looked_at += 1
        if self._looked_at > _LOOKED_AT or type(scaler).__module__.partition(".")[0] == "preamp":
            return
        count = len(leaves_through(roots, torch.bfloat16))
        if count and not leaves_through(roots, torch.float16):
            what = f"{count} gradients come through bfloat16, and none through float16."
            self.report(BFLOAT16_SCALER, "scaler", what, parameters=count)

    def gradients_unscaled(
        self, params: Sequence[torch.Tensor], scaler: object, scale: Callable[[], float]
    ) -> None:
        """Look at what the gradients are that are about to be unscaled."""
        marks = [mark for p in params if (mark := self.seen.gradients.live(p)) is not None]
        # Where some are unscaled already, those that came afterwards need no scale.
        is_unscaled = any(mark.origin is Origin.UNSCALED for mark in marks)
        plain = [mark for mark in marks if mark.origin in (Origin.PLAIN, Origin.BY_HAND)]
        mixed = [mark for mark in marks if mark.origin is Origin.MIXED]
        place = current_place()
        # What a scaled loss left at a detached tensor scales the loss that is made of it.
        updates = self.seen.updates.get(scaler, 0)
        is_unscaled |= self._handed_on.get(scaler, -1) == updates
        if plain and not is_unscaled and scale() != 1.0:
            count, factor = len(plain), plain[0].source.factor
            what = f"{count} of {len(marks)} gradients are about to be divided by {scale():g}; "
            what += f"their loss was multiplied by {factor:g}."
            self.report(NEVER_SCALED, place, what, loss_scale=scale(), gradients=count)
        elif not marks:
            self._check_divided(params, scale)
        if mixed:
            what = (
                f"{len(mixed)} of {len(marks)} gradients are sums of several backwards with "
                f"different scales; the loss scale is now {scale():g}."
            )
            self.report(MIXED, place, what, gradients=len(mixed), loss_scale=scale())
        late = [
            mark
            for mark in marks
            if mark.origin in (Origin.GRAD_SCALER, Origin.UNSCALED) and mark.source.scaler
            if mark.source.scaler() is not scaler or mark.source.updates != updates
        ]
        if late:
            is_own = all(mark.source.scaler and mark.source.scaler() is scaler for mark in late)
            since = "before scaler.update" if is_own else "another scaler"
            what = f"{len(late)} gradients are from {since}; the scale is {scale():g}."
            self.report(SCALE_CHANGED, place, what, gradients=len(late), loss_scale=scale())

    def _check_divided(self, params: Sequence[torch.Tensor], scale: Callable[[], float]) -> None:
        """Look whether the script has divided by the scale what it has written to."""
        gradients = self.seen.gradients
        known = [(p, mark) for p in params if (mark := gradients.last(p)) is not None]
        ratios = [gradients.divided_by(p) for p, _ in known]
        if not ratios or any(map(math.isnan, ratios)):  # as on GPUs: the scale need not be read
            return
        value = scale()
        if value == 1.0 or not all(math.isclose(ratio, value, rel_tol=1e-5) for ratio in ratios):
            return
        self._divided.add(value)
        # A sum over as many elements is divided by their number.
        if len(self._divided) > 1 or all(mark.source.is_mean for _, mark in known):
            what = f"The script has divided {len(known)} gradients by {value:g}, the loss scale, "
            what += "which the scaler does too."
            do = "Leave the division out: scaler.unscale_ and scaler.step do it."
            count = len(known)
            self.report(NEVER_SCALED, "divided", what, do=do, loss_scale=value, gradients=count)

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Count the scalers that took over from each other."""
        made = self.seen.scalers_made.get(scaler)
        chain = self._chains.setdefault(optimizer, _Chain(made))
        if made is None or (chain.scalers and chain.scalers[-1]() is scaler):
            return
        if made != chain.made or any(known() is scaler for known in chain.scalers):
            chain = self._chains[optimizer] = _Chain(made)
        chain.scalers.append(weakref.ref(scaler))
        if len(chain.scalers) >= _NEW:
            what = f"{_NEW} scalers were made here for steps of one {type(optimizer).__name__}."
            self.report(NEW_SCALER, made, what, where=made, scalers=_NEW)


class Saving(Detector):
    """Finds PA110 and PA113."""

    RULES = (NOT_SAVED, HALF_RESUMED)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._where: Place | None = None
        self._lacks = self._has_scaler = self._is_used = False
        # States in files that were read, and not restored, until the first step that follows.
        self._unread: set[str] = set()
        self._read_at: Place | None = None
        self._has_weights = self._has_state = False  # whether any were restored since

    def loaded(self, content: object) -> None:
        """Look what a run may go on from."""
        kinds = set(_kinds_in(content))
        if "optimizer" in kinds:
            self._read_at = current_place()
            self._unread |= kinds

    def weights_loaded(self, module: nn.Module) -> None:
        """Note that there are weights from before."""
        self._has_weights = bool(self._unread)

    def state_restored(self, thing: object) -> None:
        """Note that a part is not left."""
        self._has_state = bool(self._unread)
        self._unread.discard("optimizer" if isinstance(thing, torch.optim.Optimizer) else "scaler")

    def scaler_steps(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Note that there is a state to be saved."""
        self._is_used = True
        self._go_on(optimizer, is_new_scaler=not self.seen.updates.get(scaler, 0))

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Look what was left of the checkpoint."""
        self._go_on(optimizer, is_new_scaler=False)

    def _go_on(self, optimizer: torch.optim.Optimizer, *, is_new_scaler: bool) -> None:
        facts, left = self.seen.facts(optimizer), self._unread
        if not self._has_weights:
            return
        left -= {"optimizer"} if facts.applied + facts.skipped else set()
        left -= set() if is_new_scaler else {"scaler"}
        if left and self._has_state:
            what = f"The run loaded weights from it, and not the state of the {min(left)}."
            self.report(HALF_RESUMED, "start", what, where=self._read_at, left=min(left))
        self._unread, self._has_weights, self._has_state = set(), False, False

    def saved(self, content: object) -> None:
        """Look for the states of optimizers and of loss scales."""
        self._is_used |= any(s.is_dynamic for e in self.seen.engines() for s in e.scalers)
        kinds = set(_kinds_in(content))
        self._has_scaler |= "scaler" in kinds
        if "optimizer" in kinds and self._is_used and not self._lacks:
            self._lacks, self._where = True, current_place()

    def run_ended(self) -> None:
        """Report if there was no scaler's state in any file."""
        if self._lacks and not self._has_scaler:
            what = "It has the optimizer's state; no file of this run has the scaler's."
            self.report(NOT_SAVED, "checkpoint", what, where=self._where)


def _kinds_in(content: object, depth: int = 0) -> Iterator[str]:
    """What states are in something that is saved, nested six deep at most."""
    parts: list[object] = []
    if isinstance(content, torch.amp.GradScaler):
        yield "scaler"
    elif isinstance(content, torch.optim.Optimizer):
        yield "optimizer"
    elif isinstance(content, Mapping):
        rest = dict(cast("Mapping[Any, object]", content))
        if rest.keys() >= _OPTIMIZER_KEYS:
            yield "optimizer"
            rest = {key: part for key, part in rest.items() if key not in _OPTIMIZER_KEYS}
        if any(word in str(key) for key in rest for word in _SCALER_WORDS):
            yield "scaler"
        parts = list(rest.values())
    elif isinstance(content, (list, tuple)):
        parts = list(cast("Sequence[object]", content))
    for part in parts if depth <= 6 else ():
        yield from _kinds_in(part, depth + 1)
