# SPDX-License-Identifier: BSD-3-Clause
"""The update rules: what each kernel is started with. With them the back end is complete."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.ops import Tensors
from preamp.kernels.places import STORED_DTYPES, Group, check_stored, pick, sort
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    Rule,
    SgdRule,
    Update,
    left_out,
)
from preamp.kernels.stored import BLOCK as SLOTS
from preamp.kernels.stored import Format, Stored, scales_shape
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.updates import (
    adagrad_kernel,
    adam_kernel,
    average_norms,
    lamb_kernel,
    lars_kernel,
    novograd_kernel,
    sgd_kernel,
)
from preamp.kernels.triton.elementwise import Elementwise
from preamp.kernels.triton.launch import (
    REFERENCE,
    check_devices,
    given,
    launch,
    moved,
    number,
    scalar,
)
from preamp.kernels.triton.reductions import Reductions, gather, gathered, measure
from preamp.kernels.triton.tables import CHUNK, Table, table


@dataclass(frozen=True, slots=True)
class Places:
    """Places of an update that one launch takes."""

    entries: Table  # rows: parameters, gradients, state, and halves if there are any
    # by the names that kernels know: ``P`` and ``G``, ``M`` and ``V`` for the state, ``H`` for
    # the halves or ``None``, ``N`` for 0-dim state
    dtypes: dict[str, torch.dtype | None]
    math: torch.dtype  # that of the computation
    update: Update  # as given
    written: list[torch.Tensor]  # the tensors that change
    kept: dict[str, Any]  # what kernels are told of lists that are kept in fewer bits
    # as ``entries``, without what is kept, and cut by elements
    plain: Table

    def numbers(self, **values: float) -> dict[str, int]:
        """Keyword arguments: the bits of each value."""
        return {name: number(value, self.math) for name, value in values.items()}

    def empty(self, *shape: int) -> torch.Tensor:
        """Room for intermediate results."""
        return torch.empty(shape, dtype=self.math, device=self.entries.layout.device)

    def corrections(self, wanted: bool, **betas: float) -> dict[str, Any]:
        """Keyword arguments for the kernel's ``correction``, and ``STEP_AT``."""
        step = self.update.step
        arguments = scalar("step", step, self.entries, self.math)
        on_device = arguments["STEP_AT"]
        for name, beta in betas.items():
            if not wanted:
                beta = 0.0  # no correction: 1 - 0 is 1
            if on_device:
                value = math.log(beta) if beta > 0 else -math.inf
            else:
                value = 1.0 - beta ** cast("int", step)
            arguments[name] = number(value, self.math)
        return arguments

    def given_norms(self) -> torch.Tensor | None:
        """``update.norms``, if the rule has been told them."""
        norms = self.update.norms
        return None if norms is None else norms.to(self.math).contiguous()

    def norms(
        self, name: str, factor: torch.Tensor | None = None, *, largest: bool = False
    ) -> torch.Tensor:
        """Norm or largest magnitude of each parameter (``P``) or gradient (``G``) × ``factor``."""
        dtypes = (cast("torch.dtype", self.dtypes[name]), self.math)
        is_split = name == "P" and self.dtypes["H"] is torch.int16
        partials = measure(
            self.plain,
            (0, 3 + ("V" in self.dtypes)) if is_split else "PG".index(name),
            dtypes,
            largest=largest,
            squares=not largest,
            factor=factor,
        )
        return gathered(self.plain, partials[0], largest=largest)

    def launch(self, kernel: Any, **arguments: Any) -> None:
        """Start an update kernel with what all of them take, and note what it wrote."""
        launch(
            kernel,
            (self.entries.chunks,),
            self.entries,
            **given("inv_scale", self.update.inv_scale, self.entries),
            **given("found_inf", self.update.found_inf, self.entries),
            **{name: KINDS[dtype] for name, dtype in self.dtypes.items() if name != "N"},
            MATH=KINDS[self.math],
            CHUNK=CHUNK,
            **(self.kept | arguments),
        )
        torch.autograd.graph.increment_version(self.written)


def places(
    params: Tensors,
    grads: Tensors,
    *state: Tensors,
    update: Update,
    numbers: Sequence[Tensors] = (),
) -> tuple[list[Places], list[int]]:
    """Sort lists, ``numbers`` last, into launches, and name what only the reference can take."""
    check_devices(params)
    stored = update.stored or Stored()
    nothing: list[None] = [None] * len(params)
    lows = update.halves if stored.lows is None else stored.lows
    scales = [row or nothing for row in stored.scales[: len(state)]]
    groups, others = sort(
        *(params, grads, *state, lows or nothing, *numbers, *scales),
        scalars=len(numbers) + len(scales),
        codes=frozenset() if update.stored is None else STORED_DTYPES,
        in_order=any([kind is not Format.PLAIN for kind in stored.formats]),
    )
    names = ("P", "G", *"MV"[: len(state)], "H", *"N"[: len(numbers)])
    return [_places_of(group, names, update) for group in groups], others


def _places_of(group: Group, names: Sequence[str], update: Update) -> Places:
    stored = update.stored or Stored()
    shaped = group.rows[: len(names)]
    rows = [row for row in shaped if row]
    positions = range(len(group.positions))
    dtypes = dict(zip(names, group.dtypes, strict=False))
    for name, kind in zip("MV", stored.formats, strict=False):
        if kind is Format.BFLOAT16:
            dtypes[name] = torch.int16  # as kernels call it
    kept = {"KEPT": len(rows), "CHANCE": False, "IN_BLOCKS": False, "turn": 0, "seed": 0}
    entries = plain = table(rows, positions)
    turn: dict[str, Any] = {"turn_at": plain.layout, "TURN_AT": False}
    if any([kind is not Format.PLAIN for kind in stored.formats]):
        kept["CHANCE"], kept["seed"] = True, stored.seed
        kept["IN_BLOCKS"] = any([kind.has_scales for kind in stored.formats])
        entries = _kept_table(group, rows, names, stored)
        turn = _turn(update.step, entries)
    return Places(
        entries=entries,
        plain=plain,
        dtypes=dtypes,
        math=math_dtype(cast("torch.dtype", group.dtypes[0])),
        update=update if update.norms is None else update.at(group.positions),
        written=[t for i, row in enumerate(group.rows) if i != 1 for t in row],
        kept=kept | turn,
    )


def _kept_table(
    group: Group, rows: Sequence[list[torch.Tensor]], names: Sequence[str], stored: Stored
) -> Table:
    """Behind ``rows``: scales of both lists, numbers, starts, and lengths of rows."""
    count = len(group.positions)
    columns = group.rows[len(names) :]
    behind = [[t.data_ptr() for t in row] or [0] * count for row in columns]
    behind += [[0] * count for _ in range(2 - len(behind))]
    behind += [pick(stored.numbers, group.positions), pick(stored.starts, group.positions)]
    shapes = [tensor.shape for tensor in rows[0]]
    behind.append([math.prod(shape[1:]) for shape in shapes])
    sizes = None
    if any([kind.has_scales for kind in stored.formats]):
        sizes = [math.prod(scales_shape(shape)) * SLOTS for shape in shapes]
    return table(rows, range(count), behind, sizes)


def _turn(step: int | torch.Tensor, entries: Table) -> dict[str, Any]:
    """The number of the update, as an integer."""
    if isinstance(step, torch.Tensor):
        return {"turn_at": moved(step, entries.layout.device), "TURN_AT": True}
    return {"turn": step, "turn_at": entries.layout, "TURN_AT": False}


class Triton(Elementwise, Reductions):
    """Every op in Triton's kernels."""

    name = "triton"

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        check_stored(params, state, update)
        shaped = len(state) - rule.has_numbers
        taken, others = places(
            params, grads, *state[:shaped], update=update, numbers=state[shaped:]
        )
        for part in taken:
            _start(part, rule)
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            REFERENCE.update_(*lists, rule=rule, update=update.at(others))

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        taken, others = places(params, grads, *state, update=update)
        if others or len(taken) != 1:
            return REFERENCE.lamb_norms(params, grads, *state, rule=rule, update=update)
        return _lamb_norms(taken[0], _lamb_arguments(taken[0], rule))


def _start(part: Places, rule: Rule) -> None:
    """Launch the kernels of ``rule``."""
    rate = scalar("lr", rule.lr, part.entries, part.math)
    match rule:
        case AdamRule():
            part.launch(adam_kernel, **rate, **_adam_arguments(part, rule))
        case LambRule():
            arguments = _lamb_arguments(part, rule)
            norms = part.given_norms()
            if norms is None:
                measures = rule.uses_trust_ratio
                norms = _lamb_norms(part, arguments) if measures else part.empty(2, 1)
            part.launch(lamb_kernel, norms=norms, MEASURE=False, **arguments)
        case SgdRule():
            part.launch(sgd_kernel, **rate, **_sgd_arguments(part, rule))
        case NovoGradRule():
            averages = _novograd_norms(part, rule)
            part.launch(
                novograd_kernel, averages=averages, **rate, **_novograd_arguments(part, rule)
            )
        case AdagradRule():
            part.launch(
                adagrad_kernel,
                **rate,
                **part.numbers(eps=rule.eps, weight_decay=rule.weight_decay),
                DECAYS=rule.weight_decay != 0,
                DECOUPLED=rule.decoupled,
            )
        case LarsRule():
            part.launch(lars_kernel, **rate, **_lars_arguments(part, rule))
        case _:
            left_out(rule)


def _corrections(
    part: Places, rule: AdamRule | LambRule | NovoGradRule, wanted: bool
) -> dict[str, Any]:
    return part.corrections(wanted, correction1=rule.beta1, correction2=rule.beta2)


def _adam_arguments(part: Places, rule: AdamRule) -> dict[str, Any]:
    corrects = rule.bias_correction is not BiasCorrection.NONE
    return {
        **_corrections(part, rule, corrects),
        **part.numbers(
            beta1=rule.beta1,
            beta1_left=1 - rule.beta1,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
        "MOMENTS": rule.bias_correction is BiasCorrection.MOMENTS,
        "STEP_SIZE": rule.bias_correction is BiasCorrection.STEP_SIZE,
        "EPS_INSIDE_SQRT": rule.eps_inside_sqrt,
    }


def _sgd_arguments(part: Places, rule: SgdRule) -> dict[str, Any]:
    decays = rule.weight_decay != 0
    return {
        **part.corrections(False),
        **part.numbers(
            momentum=rule.momentum, share=1 - rule.dampening, weight_decay=rule.weight_decay
        ),
        "HAS_MOMENTUM": rule.momentum != 0,
        "NESTEROV": rule.nesterov,
        "DECAYS_BEFORE": decays and not rule.decays_after_momentum,
        "DECAYS_AFTER": decays and rule.decays_after_momentum,
    }


def _novograd_arguments(part: Places, rule: NovoGradRule) -> dict[str, Any]:
    return {
        **_corrections(part, rule, rule.bias_correction),
        **part.numbers(
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "INSIDE_MOMENT": rule.decays_inside_moment,
    }


def _lars_arguments(part: Places, rule: LarsRule) -> dict[str, Any]:
    p_norms = g_norms = part.entries.layout
    known = part.given_norms()
    if known is not None:
        p_norms, g_norms = known
    elif rule.uses_trust_ratio:
        p_norms, g_norms = part.norms("P"), part.norms("G", part.update.inv_scale)
    return {
        **part.numbers(
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            trust_coefficient=rule.trust_coefficient,
            eps=rule.eps,
        ),
        "p_norms": p_norms,
        "g_norms": g_norms,
        "NESTEROV": rule.nesterov,
        "TRUST_RATIO": rule.uses_trust_ratio,
    }


def _lamb_arguments(part: Places, rule: LambRule) -> dict[str, Any]:
    """What both launches take."""
    return {
        **scalar("lr", rule.lr, part.entries, part.math),
        **_corrections(part, rule, rule.bias_correction),
        **part.numbers(
            beta1=rule.beta1,
            beta3=1 - rule.beta1 if rule.grad_averaging else 1.0,
            beta2=rule.beta2,
            beta2_left=1 - rule.beta2,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
        ),
        "DECAYS": rule.weight_decay != 0,
        "DECOUPLED": rule.decoupled,
        "CORRECTS": rule.bias_correction,
        "TRUST_RATIO": rule.uses_trust_ratio,
    }


def _lamb_norms(part: Places, arguments: dict[str, Any]) -> torch.Tensor:
    norms, partials = part.empty(2, part.entries.count), part.empty(2, part.entries.chunks)
    part.launch(lamb_kernel, norms=partials, MEASURE=True, CHANCE=False, **arguments)
    for sums, results in zip(partials, norms, strict=True):
        gather(part.entries, sums, results, largest=False)
    return norms


def _novograd_norms(part: Places, rule: NovoGradRule) -> torch.Tensor:
    """Blend the gradients' norms into the averages; also stores these."""
    known = part.given_norms()
    if known is None:
        measured = part.norms("G", part.update.inv_scale, largest=rule.uses_max_norm)
    else:
        measured = known[0]
    averages = torch.empty_like(measured)
    launch(
        average_norms,
        (part.entries.count,),
        part.entries,
        norms=measured,
        averages=averages,
        **part.numbers(beta2=rule.beta2, beta2_left=1 - rule.beta2),
        **given("found_inf", part.update.found_inf, part.entries),
        N=KINDS[part.dtypes["N"]],
        ROW=3 if part.dtypes["H"] is None else 4,
        MATH=KINDS[part.math],
        USES_MAX=rule.uses_max_norm,
    )
    return averages
