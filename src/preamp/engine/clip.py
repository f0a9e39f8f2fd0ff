# SPDX-License-Identifier: BSD-3-Clause
"""Gradient clipping that knows of masters and costs no extra pass over half gradients."""

from __future__ import annotations

import torch

from preamp.core.errors import PreampStateError, message
from preamp.engine import refusals
from preamp.engine.lookup import bare, engine_of
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
    owners = [param for param in session.direct_params() if param.grad is not None]
    ready = [param.grad for param in owners if param.grad is not None]
    lazy: list[tuple[WeightTable, list[int]]] = []
    grads: list[torch.Tensor] = []
    factors: list[torch.Tensor] = []
    halves: list[torch.Tensor] = []
    for table in session.gradients.tables:
        if norm_type == 2.0:
            table.complete()
        else:
            table.bring_up_to_date()
        rows = table.pending_rows()
        lazy.append((table, rows))
        for row in rows:
            grad, record = table.grads[row], table.records[row]
            if grad is not None and record is not None and record.factor is not None:
                grads.append(grad)
                factors.append(record.factor)
                halves.append(table.halves[row])
        for half, base in zip(table.halves, table.bases(), strict=True):
            if base is not None:
                owners.append(half)
                ready.append(base)
    owners += halves
    joint = engine.reductions.joint
    if norm_type == 2.0:
        norm = session.gradients.known_norm.take([*ready, *grads], factors)
        if norm is None:
            every, by = [*ready, *grads], [*[None] * len(ready), *factors]
            norm = joint.norm(engine.ops, every, by, owners, engine.device)
        engine.recorder.norm_taken(session, norm)
    else:
        norm = joint.norm_of_order(ready, norm_type, owners, engine.device)
    clip = (max_norm / (norm + _EPS)).clamp(max=1.0)
    with torch.no_grad():
        engine.ops.scale_add_(ready, clip, [None] * len(ready))
    for table, rows in lazy:
        table.replace_factors(rows, clip)
    return norm
