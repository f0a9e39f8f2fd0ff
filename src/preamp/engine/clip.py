# SPDX-License-Identifier: BSD-3-Clause
"""Gradient clipping that knows of masters and costs no extra pass over half gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from preamp.core.errors import PreampStateError, message
from preamp.engine import refusals
from preamp.engine.lookup import bare, engine_of
from preamp.engine.session import OptimizerSession
from preamp.engine.stage import Stage
from preamp.optim import WeightTable

_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the unscaled gradients of everything ``optimizer`` updates, as one vector.

    ``factor = min(1, max_norm / (norm + 1e-6))``, the formula of
    ``torch.nn.utils.clip_grad_norm_``. Half gradients are not touched: the factor joins the one
    that unscales them. Writes to gradients through ``grad.data`` leave no trace in torch, and may
    be missing in the norm; write to ``grad`` itself.

    Args:
        optimizer: An optimizer given to ``preamp.initialize``.
        max_norm: Largest norm that stays as it is.
        norm_type: 2 for the Euclidean norm; any other, ``inf`` included, makes float32 gradients
            of the half ones first.

    Returns:
        float32 scalar tensor: the norm before clipping. Infinite or nan after an overflow, when
        the coming ``step`` is skipped.

    Raises:
        PreampStateError: The optimizer has no engine, or its gradients are still scaled.

    Mutates:
        Gradients. Synchronises with the device: never.
    """
    engine = engine_of(optimizer)
    session = engine.sessions[id(bare(optimizer))]
    if session.gradients.is_open:
        raise refusals.inside_block("clip_grad_norm_")
    if session.gradients.stage is Stage.SCALED:
        raise PreampStateError(
            message(
                "clip_grad_norm_ was called on gradients left scaled by delay_unscale=True",
                "Only unscaled gradients have a norm that means anything",
                "Clip after the last scale_loss of the accumulation, called without delay_unscale",
            )
        )
    found = _collect(session, made=norm_type != 2.0)
    joint = engine.reductions.joint
    if norm_type == 2.0:
        every = [*found.ready, *found.grads]
        norm = session.gradients.known_norm.take(every, found.factors)
        if norm is None:
            by = [*[None] * len(found.ready), *found.factors]
            norm = joint.norm(engine.ops, every, by, found.owners, engine.device)
        engine.recorder.norm_taken(session, norm)
    else:
        norm = joint.norm_of_order(found.ready, norm_type, found.owners, engine.device)
    clip = (max_norm / (norm + _EPS)).clamp(max=1.0)
    with torch.no_grad():
        engine.ops.scale_add_(found.ready, clip, [None] * len(found.ready))
    for table, rows in found.lazy:
        table.replace_factors(rows, clip)
    return norm


@dataclass(slots=True)
class _Found:
    """The gradients of an optimizer, those that are float32 (or have no master) first."""

    ready: list[torch.Tensor]
    owners: list[torch.Tensor]  # of `ready` and then of `grads`
    grads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # half ones
    factors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])  # unscale these
    lazy: list[tuple[WeightTable, list[int]]] = field(
        default_factory=list["tuple[WeightTable, list[int]]"]
    )  # where they are


def _collect(session: OptimizerSession, *, made: bool) -> _Found:
    """Return all gradients; ``made`` says to make float32 ones of the half ones first."""
    direct = [param for param in session.direct_params() if param.grad is not None]
    found = _Found([param.grad for param in direct if param.grad is not None], [*direct])
    halves: list[torch.Tensor] = []
    for table in session.gradients.tables:
        if made:
            table.bring_up_to_date()
        else:
            table.complete()
        rows = table.pending_rows()
        found.lazy.append((table, rows))
        for row in rows:
            grad, record = table.grads[row], table.records[row]
            if grad is not None and record is not None and record.factor is not None:
                found.grads.append(grad)
                found.factors.append(record.factor)
                halves.append(table.halves[row])
        for half, base in zip(table.halves, table.bases(), strict=True):
            if base is not None:
                found.owners.append(half)
                found.ready.append(base)
    found.owners += halves
    return found
