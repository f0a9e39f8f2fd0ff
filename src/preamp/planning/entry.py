# SPDX-License-Identifier: BSD-3-Clause
"""What users call; what it takes loads with the first call, so that importing preamp stays light.

Dozens of records and torch's tracing tools would be a quarter of the time of ``import preamp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from preamp.policy import Policy

if TYPE_CHECKING:
    from preamp.planning.layout import Factory
    from preamp.planning.memory import MemoryEstimate, Sharding
    from preamp.planning.optimizers import OptimizerLike
    from preamp.planning.peak import LossFn
    from preamp.planning.report import PlanReport


def estimate(
    model: nn.Module | Factory | float,
    opt_level: str | Policy = "O1",
    optimizer: OptimizerLike | None = "AdamW",
    *,
    world_size: int = 1,
    sharding: Sharding = "none",
    loss_fn: LossFn | None = None,
    batch: Any = None,
) -> MemoryEstimate:
    """Tell how much memory training takes on one rank, without allocating it.

    Gradients are counted as dense, and for every trainable parameter. With ``loss_fn`` a forward
    and a backward are traced on tensors without memory; what a kernel allocates inside of itself,
    an optimizer's temporary tensors and an allocator's rounding are not known. Not counted either
    are what data-parallel wrappers keep for communication (buckets, gathered weights) and the
    batch.

    Args:
        model: A float32 module on any device, a function without arguments that makes one (called
            under ``torch.device("meta")``), or a number of parameters, taken as one tensor.
            Not mutated.
        opt_level: A level, or a `Policy` with overrides such as
            ``OPT_LEVELS["O2"].replace(keep_batchnorm_fp32=False)``.
        optimizer: A name (``"FusedAdam"``, ``"SGD(momentum=0.9)"``), a class, a function of the
            parameters, an optimizer, or ``None``. An optimizer has its own parameters, anything
            else all of the model's. Its state is found by one step on tensors of a few elements.
        world_size: Ranks.
        sharding: ``"none"``: every rank has everything. ``"zero1"``: each tensor's master and
            optimizer state are shared out, as by ``preamp.parallel.shard_optimizer``.
            ``"fsdp"``: weights and gradients too. Tensors are split by elements; told is what
            the rank with the largest shares has.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss; adds ``activations`` and
            ``peak``, for one rank without sharding.
        batch: For ``loss_fn``: tensors, or containers of them.

    Returns:
        The estimate.

    Raises:
        PreampPolicyError: The level is not known.
        TypeError: Wrong kind of model or optimizer.
        ValueError: A half model, an optimizer whose state follows from more than the parameters'
            shapes, a wrong number of ranks, or a ``loss_fn`` that cannot be traced.
    """
    from preamp.planning import memory

    return memory.estimate(
        model,
        opt_level,
        optimizer,
        world_size=world_size,
        sharding=sharding,
        loss_fn=loss_fn,
        batch=batch,
    )


def plan(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    levels: Sequence[str] | None = None,
    steps: int = 4,
    verify_steps: int = 8,
) -> PlanReport:
    """Recommend an opt level and a loss scale to start with, by watching and trying.

    Some float32 steps on a copy record the magnitudes of module outputs, of what operations inside
    of modules compute, of gradients, weights, buffers and updates. From these follows what would
    overflow, vanish or stall at each level, since one forward at the level shows what is half
    there. The best two levels are then tried on further copies and their losses compared with
    float32's. Nothing of the caller's changes: model, optimizer, buffers and random states are as
    before, also if the call raises.

    Args:
        model: A float32 module as it is before `initialize`, in training mode, on its device.
        loss_fn: ``loss_fn(model, batch)`` returns a scalar loss; it uses the model it is given.
        batch: Whatever ``loss_fn`` takes; used for every step, and not to be changed by it.
        optimizer: Over the model's parameters; AdamW with a learning rate of 1e-3 if left out. Its
            own state, learning rate included, is where the steps start.
        levels: Which to look at; O1 to O5 and `PURE_BFLOAT16` if left out.
        steps: float32 steps to watch.
        verify_steps: Steps to try levels with; 0 tries none.

    Returns:
        The report; ``print`` shows it.

    Raises:
        ValueError: A half model, one without anything to train, one that cannot be copied or that
            the loss does not use, a loss that is no finite scalar, gradients that are all zero,
            an optimizer of another model or one that needs a closure, or a wrong number of
            steps.
        TypeError: ``model`` is no module, ``optimizer`` no optimizer, or ``loss_fn`` cannot be
            called with a model and a batch.
        PreampPolicyError: A level is not known.
        PreampStateError: The model is initialized already.
    """
    from preamp.planning import planner

    return planner.plan(
        model, loss_fn, batch, optimizer, levels=levels, steps=steps, verify_steps=verify_steps
    )
