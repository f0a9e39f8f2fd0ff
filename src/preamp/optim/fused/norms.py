# SPDX-License-Identifier: BSD-3-Clause
"""The norms that update rules need, over all ranks that hold parts of the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.splits import Splits
from preamp.core.tensors import locals_of
from preamp.kernels import Ops, Rule, Update, lamb_norms
from preamp.kernels.rules import LambRule, LarsRule, NovoGradRule
from preamp.kernels.vectors import max_norm, norm
from preamp.optim.fused.entries import Entries
from preamp.optim.rank_norms import complete_, total_norm


def global_norm(every: Sequence[Entries], ops: Ops, splits: Splits) -> torch.Tensor:
    """L2 norm over unscaled gradients, float32 (float64 if one is), on the first's device."""
    rows = [row for entries in every for row in entries.rows()]
    _, grads, _, factors, *_ = zip(*rows, strict=True)
    owners = [owner for entries in every for owner in entries.owners]
    return total_norm(ops, grads, factors, owners, splits, rows[0][0].device)


def clip_factor(
    every: Sequence[Entries],
    max_norm: float,
    inv_scale: torch.Tensor | None,
    ops: Ops,
    splits: Splits,
) -> torch.Tensor | None:
    """What unscales gradients and clips them to a global norm, in one factor.

    Returns a scalar on the device of the first parameter, or ``None`` where there is nothing to do.
    ``max_norm`` is that of the unscaled gradients, 0 for no clipping.
    """
    if max_norm == 0 or not any(entries.params for entries in every):
        return inv_scale
    norm = global_norm(every, ops, splits)
    one = torch.ones_like(norm)
    scale = one if inv_scale is None else inv_scale.to(norm.device)
    norm = norm * scale
    return torch.where(norm > max_norm, max_norm / norm, one) * scale


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `Ops.update_`."""

    batch: Entries
    lists: Sequence[Sequence[torch.Tensor]]  # what it updates, gradients and state
    rule: Rule
    update: Update


def norms_of_wholes(calls: Sequence[Call], ops: Ops, splits: Splits) -> Sequence[Call]:
    """Tell rules that take norms those of whole tensors, where this rank holds parts of some.

    Its parts are measured here, and completed by one all-reduce for each group of ranks and each
    kind of norm. Other rules measure by themselves.
    """
    asking = [c for c in calls if c.rule.takes_norms and splits.concern(c.batch.owners)]
    found: dict[int, torch.Tensor] = {}
    for largest in (False, True) if asking else ():
        some = [call for call in asking if _is_max(call.rule) is largest]
        over = [[splits.of(owner) for owner in call.batch.owners] for call in some]
        split = [(call, own) for call, own in zip(some, over, strict=True) if any(own)]
        columns = [_measured(call, ops) for call, _ in split]
        complete_(columns, [own for _, own in split], splits, largest=largest)
        found |= {id(call): norms for (call, _), norms in zip(split, columns, strict=True)}
    if not found:
        return calls
    return [replace(call, update=replace(call.update, norms=found.get(id(call)))) for call in calls]


def _is_max(rule: Rule) -> bool:
    return isinstance(rule, NovoGradRule) and rule.uses_max_norm


def _measured(call: Call, ops: Ops) -> torch.Tensor:
    """The norms of a call's tensors that its rule needs, ``(k, n)``, of this rank's parts."""
    params, grads, by = call.batch.params, call.batch.grads, call.update.inv_scale
    if isinstance(call.rule, LambRule):
        return lamb_norms(*call.lists, rule=call.rule, update=call.update)
    norms = norms_of_parts(grads, by, params, ops, largest=_is_max(call.rule))
    if isinstance(call.rule, LarsRule):
        if call.update.halves is not None and call.update.halves_lead:
            ops.take_over_(params, cast("Any", call.update.halves))
        return torch.stack([norms_of_parts(params, None, params, ops), norms])
    return norms[None]


def norms_of_parts(
    tensors: Sequence[torch.Tensor],
    factor: torch.Tensor | None,
    params: Sequence[torch.Tensor],
    ops: Ops,
    *,
    largest: bool = False,
) -> torch.Tensor:
    """Norm of this rank's part of each ``tensor * factor``, ``(n,)``, in ``params``' arithmetic."""
    dtype, device = math_dtype(params[0].dtype), params[0].device
    if dtype is torch.float32 and not largest:
        return ops.l2norms(tensors, factor, device)
    measure = max_norm if largest else norm
    wide = [part.detach().to(dtype) for part in locals_of(tensors)]
    return torch.stack([measure(part if factor is None else part * factor) for part in wide])
