# SPDX-License-Identifier: BSD-3-Clause
"""The update rules: torch's fused kernels where a rule is theirs, else the reference's formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import dtype_of
from preamp.kernels.blocks.cut import (
    REFERENCE,
    Block,
    Column,
    InBlocks,
    Plan,
    Workspace,
    blocks_of,
    check_lengths,
    check_shapes,
    copy_,
    copy_where_wanted,
    flatten,
    geometry_of,
    plan_of,
    regular,
    shapes_of,
)
from preamp.kernels.blocks.norms import norms_of
from preamp.kernels.joining import cat, stack
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.formulas import apply, measured, number_of, order_of, takes_norms
from preamp.kernels.reference.update import Slot
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    Rule,
    Scalar,
    SgdRule,
    Update,
    norms_at,
)

_torch: Any = torch
_PARAM, _GRAD, _STATE = 0, 1, 2  # columns; halves come last

Fused = Callable[[Sequence[Any], Sequence[Any], Sequence[Sequence[Any]]], None]
"""A kernel of torch's on parameters, gradients and state."""


class Updates(InBlocks):
    """The update rules."""

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        """See `preamp.kernels.ops.Ops.update_`."""
        if not params:
            return
        is_near = self._is_near(params[0])
        if is_near and update.found_inf is not None:
            if update.found_inf.item() != 0:
                return
            update = replace(update, found_inf=None)
        work = Work(rule, update, params, grads, *state)
        if work.odd:
            lists = ([column[i] for i in work.odd] for column in (params, grads, *state))
            REFERENCE.update_(*lists, rule=rule, update=update.at(work.odd))
        if not work.columns[_PARAM]:
            return
        fused = fused_kernel(rule, update) if is_near and work.is_wide else None
        if fused is not None:
            _run_fused(work, work.plan(self._large(near=is_near)), fused)
        else:
            _run_formula(work, work.plan(self._small(near=is_near)), is_near)

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        """See `preamp.kernels.ops.Ops.lamb_norms`."""
        rule = replace(rule, uses_trust_ratio=True)
        work = Work(rule, update, params, grads, *state)
        if work.odd:
            return REFERENCE.lamb_norms(params, grads, *state, rule=rule, update=update)
        found = torch.zeros(2, len(params), dtype=work.dtype, device=params[0].device)
        plan = work.plan(self._small(near=self._is_near(params[0])))
        for cut in plan.cuts:
            norms = work.measured(blocks_of(plan, cut, work.columns))
            for row, values in zip(found, norms, strict=True):
                copy_([row[place] for place in cut.places], values.unbind())
        return found


class Work:
    """The lists of one update, with what cannot be walked through in blocks taken out.

    Attributes:
        columns: Parameters, gradients, state of their shapes …, halves; contiguous.
        numbers: State of one number for each parameter, if the rule has any.
        odd: The places left out of them.
        rule: As given.
        update: As given.
        dtype: Of the computation.
        is_wide: Whether parameters and state have it.
    """

    def __init__(
        self, rule: Rule, update: Update, params: Tensors, grads: Tensors, *state: Tensors
    ) -> None:
        """Sort; nothing is written."""
        self.rule, self.update = rule, update
        self.dtype = math_dtype(params[0].dtype)
        self.numbers: list[torch.Tensor] = []
        if rule.has_numbers:
            self.numbers, state = list(state[-1]), state[:-1]
            check_lengths(params, self.numbers)
        halves: Column = [None] * len(params) if update.halves is None else update.halves
        given: tuple[Column, ...] = (params, grads, *state, halves)
        self._norms = update.norms
        geometry = geometry_of(*(given if update.halves is not None else given[:-1]))
        if geometry is not None:
            self.columns, self.odd, self._shapes = given, list[int](), geometry.shapes
            wide = (geometry.dtypes[_PARAM], *geometry.dtypes[_STATE : _STATE + len(state)])
        else:
            check_lengths(*given)
            shapes = check_shapes(*given)
            self.columns, self.odd = regular(*given)
            self._shapes = shapes if self.columns is given else shapes_of(self.columns[_PARAM])
            wide = [
                set(map(dtype_of, self.columns[i]))
                for i in (_PARAM, *range(_STATE, len(given) - 1))
            ]
        self.is_wide = all(dtypes == {self.dtype} for dtypes in wide)
        if self.odd:
            odd = set(self.odd)
            kept = [place for place in range(len(params)) if place not in odd]
            self._norms = norms_at(update.norms, kept)
            self.numbers = [n for place, n in enumerate(self.numbers) if place not in odd]

    def plan(self, most: int) -> Plan:
        """How the columns are cut into blocks of so many elements."""
        return plan_of(self._shapes, most)

    def norms(self, places: Sequence[int], blocks: list[Block]) -> Sequence[torch.Tensor]:
        """The norms of a cut's tensors that the rule needs, a vector each: given, or measured."""
        given = self.given_norms(places)
        return self.measured(blocks) if given is None else given.unbind()

    def given_norms(self, places: Sequence[int]) -> torch.Tensor | None:
        """``update.norms`` of some tensors, if the rule has been told them."""
        norms = norms_at(self._norms, places)
        return None if norms is None else norms.to(self.dtype)

    def measured(self, blocks: list[Block]) -> list[torch.Tensor]:
        """The same, measured."""
        order = order_of(self.rule)
        found: list[tuple[torch.Tensor, ...]] = []
        for block in blocks:
            slot = BlockSlot(block, self.dtype, self.update)
            values = measured(slot, self.rule, self.update.step)
            found.append(tuple(slot.norms(value, order) for value in values))
        if len(found) == 1:
            return list(found[0])
        # Several blocks are those of one tensor.
        return [stack(norms_of([cat(pieces)], order)) for pieces in zip(*found, strict=True)]

    def store_numbers(self, own: Sequence[torch.Tensor], values: Any) -> None:
        """Round a vector into 0-dim tensors."""
        if self.update.found_inf is not None:
            skips = self.update.found_inf.to(values.device) != 0
            before = stack(own)  # as they are stored: rounding a widened nan may change its bits
            values = torch.where(skips, before, values.to(before.dtype))
        copy_(own, values.unbind())


def _run_formula(work: Work, plan: Plan, is_near: bool) -> None:
    """Apply the reference's formula to one block after the other."""
    rule, update = work.rule, work.update
    lr = rule.lr
    if isinstance(lr, torch.Tensor):
        lr = lr.to(work.columns[_PARAM][0].device, work.dtype)
    if rule.has_numbers:
        for place, shape in enumerate(shapes_of(work.columns[_PARAM])):
            if shape.numel() == 0:  # in no block; its norm is zero and may be the first one
                number, given = work.numbers[place], work.given_norms([place])
                norms = [number.new_zeros(1) if given is None else given[0]]
                kept = number.to(work.dtype)
                work.store_numbers([number], number_of(rule, lr, norms, kept))

    def run(spaces: Sequence[Workspace]) -> None:
        for cut in plan.cuts:
            blocks = blocks_of(plan, cut, work.columns, spaces)
            own = [work.numbers[place] for place in cut.places] if work.numbers else []
            kept = stack(own).to(work.dtype) if own else None
            norms = work.norms(cut.places, blocks) if takes_norms(rule) else ()
            number = number_of(rule, lr, norms, kept)
            for block in blocks:
                slot = BlockSlot(block, work.dtype, update)
                apply(slot, rule, update.step, block.spread(number))
            if own:
                work.store_numbers(own, number)

    if is_near:
        with plan.workspaces(work.dtype, len(work.columns)) as spaces:
            run(spaces)
    else:
        run(())


def _run_fused(work: Work, plan: Plan, fused: Fused) -> None:
    """Apply a kernel of torch's to one block after the other, and round the halves."""
    inv_scale = work.update.inv_scale
    if inv_scale is not None:
        inv_scale = inv_scale.to("cpu", work.dtype)
    is_half = work.columns[_GRAD][0].dtype is not work.dtype
    with plan.workspaces(work.dtype) as (space,):
        for cut in plan.cuts:
            for block in blocks_of(plan, cut, work.columns):
                params, grads, *state, halves = block.columns
                if inv_scale is not None or is_half:
                    grads = _wide_gradients(block, cut.index, space, inv_scale)
                fused(params, grads, state)
                copy_where_wanted(halves, params)
    # torch's fused kernels do not tell autograd that they write.
    written = [work.columns[_PARAM], *work.columns[_STATE:-1]]
    torch.autograd.graph.increment_version([t for column in written for t in column])


def _wide_gradients(
    block: Block, index: int, space: Workspace, inv_scale: torch.Tensor | None
) -> Sequence[torch.Tensor]:
    """Gradients as torch's fused kernels take them: unscaled, in the computation's precision.

    They lie in ``space``, which the next block overwrites.
    """
    grads = block.columns[_GRAD]
    if index >= 0:
        views = space.views(index)
        copy_(views, grads)
        wide = space.memory[: block.numel]
    else:
        wide = space.memory[: block.numel]
        views = [wide.view(grads[0].shape)]
        if inv_scale is not None and grads[0].dtype is wide.dtype:
            torch.mul(grads[0], inv_scale, out=views[0])
            return views
        copy_(views, grads)
    if inv_scale is not None:
        wide.mul_(inv_scale)
    return views


def fused_kernel(rule: Rule, update: Update) -> Fused | None:
    """The kernel of torch's that computes ``rule`` on a CPU, if there is one."""
    if isinstance(rule, AdamRule):
        if rule.eps_inside_sqrt or rule.bias_correction is BiasCorrection.STEP_SIZE:
            return None
        op = _torch._fused_adamw_ if rule.decoupled else _torch._fused_adam_
        # At step infinity the corrections 1 - beta**step are 1.
        corrects = rule.bias_correction is BiasCorrection.MOMENTS
        step = _constant(number(update.step) if corrects else math.inf)
        options = {
            **{"lr": number(rule.lr), "beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.eps},
            **{"weight_decay": rule.weight_decay, "amsgrad": False, "maximize": False},
        }
        return lambda p, g, s: op(p, g, *s, [], [step] * len(p), **options)
    if isinstance(rule, SgdRule) and not rule.decays_after_momentum:
        options = {
            **{"lr": number(rule.lr), "weight_decay": rule.weight_decay, "momentum": rule.momentum},
            **{"dampening": rule.dampening, "nesterov": rule.nesterov, "maximize": False},
            "is_first_step": rule.momentum != 0 and number(update.step) == 1,
        }
        return lambda p, g, s: _torch._fused_sgd_(p, g, s[0] if rule.momentum else [], **options)
    if isinstance(rule, AdagradRule) and not (rule.decoupled and rule.weight_decay != 0):
        step = _constant(1.0)  # of no consequence: it only counts for a decay of the learning rate
        options = {
            **{"lr": number(rule.lr), "lr_decay": 0.0, "weight_decay": rule.weight_decay},
            **{"eps": rule.eps, "maximize": False},
        }
        return lambda p, g, s: _torch._fused_adagrad_(p, g, *s, [step] * len(p), **options)
    return None


def _constant(value: float) -> torch.Tensor:
    """A number as torch's fused kernels take the step, whatever the default dtype and device."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def number(value: Scalar) -> float:
    """A hyper-parameter as a number."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


class BlockSlot(Slot):
    """A block as the reference's formulas take it."""

    def __init__(self, block: Block, dtype: torch.dtype, update: Update) -> None:
        """Load; nothing is written before `store`."""
        self._block = block
        self._found_inf = update.found_inf
        self.p = block.flat(_PARAM, dtype)
        self.g = block.flat(_GRAD, dtype)
        if update.inv_scale is not None:
            self.g = self.g * self.scalar(update.inv_scale)
        states = range(_STATE, len(block.columns) - 1)
        self.state = tuple(block.flat(column, dtype) for column in states)

    def norms(self, values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        """The norm of each of the block's tensors, of which ``values`` has the elements."""
        return stack(norms_of(self._block.split(values), order))

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """See `Slot.store`."""
        for column, values in enumerate(state, _STATE):
            self._write(column, values)
        self._write(_PARAM, p)
        self._copy_to_halves()

    def _write(self, column: int, values: torch.Tensor) -> None:
        if self._found_inf is not None:
            # As it is stored: rounding a widened nan may change its bits.
            before = flatten(self._block.columns[column])
            values = torch.where(self._skips(), before, values.to(before.dtype))
        self._block.write(column, values)

    def _copy_to_halves(self) -> None:
        params, halves = self._block.columns[_PARAM], self._block.columns[-1]
        kinds = {None if half is None else half.dtype for half in halves}
        if self._found_inf is None:
            copy_where_wanted(halves, params)
        elif len(kinds) == 1 and None not in kinds:
            self._write(len(self._block.columns) - 1, flatten(params).to(halves[0].dtype))
        else:
            for half, param in zip(halves, params, strict=True):
                if half is not None:
                    half.copy_(torch.where(self._skips(), half, param.to(half.dtype)))

    def _skips(self) -> torch.Tensor:
        flag = cast("torch.Tensor", self._found_inf)
        return flag.to(self.p.device) != 0
