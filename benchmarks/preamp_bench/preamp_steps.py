# SPDX-License-Identifier: BSD-3-Clause
"""The update through preamp: its public functions, and its op table alone."""

# torch leaves these functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import preamp
from preamp.kernels import Update, backend
from preamp.kernels.rules import AdamRule, BiasCorrection
from preamp.optimizers import FusedAdam
from preamp_bench.weights import MAX_NORM, SETTINGS, Gradients, StepCase, Weights, Work

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def torch_adamw(parameters: Any) -> torch.optim.Optimizer:
    """Make torch's own AdamW."""
    return torch.optim.AdamW(parameters, **SETTINGS, fused=True)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    """Make preamp's AdamW."""
    return FusedAdam(parameters, **SETTINGS, adam_w_mode=True)


def through_engine(
    level: str, make: MakeOptimizer, storage: str = "full"
) -> Callable[[StepCase, Gradients], Work]:
    """Make a step of a training loop: `preamp.scale_loss`, clipping, ``step``.

    O0 gets a dynamic loss scale, so that it does what GradScaler does.
    """

    def build(case: StepCase, gradients: Gradients) -> Work:
        weights = Weights(case)
        overrides: dict[str, Any] = {"storage": storage}
        if level == "O0":
            overrides["loss_scale"] = "dynamic"
        weights, optimizer = preamp.initialize(
            weights, make(weights.parameters()), opt_level=level, verbosity=0, **overrides
        )
        parameters = list(weights.parameters())
        loss = torch.ones((), device=case.device)

        def step() -> None:
            with preamp.scale_loss(loss, optimizer):
                gradients.attach(parameters)
            if case.clip:
                preamp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()

        return Work(step=step, weights=parameters)

    return build


def through_ops(case: StepCase, gradients: Gradients) -> Work:
    """The ops alone: census, then AdamW on masters with the halves rounded along.

    What the engine adds to this is bookkeeping per tensor.
    """
    ops = backend("auto")
    weights = Weights(case)
    masters = [p.detach().clone() for p in weights.parameters()]
    halves = list(weights.to(case.half).parameters())
    firsts, seconds = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    rule = AdamRule(
        lr=SETTINGS["lr"],
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=SETTINGS["weight_decay"],
        decoupled=True,
        bias_correction=BiasCorrection.MOMENTS,
    )
    unscale = torch.full((), 1 / case.scale, device=case.device)
    steps_done = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps_done
        gradients.attach(halves)
        found_inf, factor = None, unscale
        grads = [half.grad for half in halves if half.grad is not None]
        if case.clip or case.scale != 1.0:
            census = ops.census(grads, case.device, with_norm=case.clip)
            found_inf = census.found_inf
            if census.norm is not None:
                norm = census.norm * unscale
                factor = unscale * (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        steps_done += 1
        update = Update(step=steps_done, inv_scale=factor, found_inf=found_inf, halves=halves)
        ops.update_(masters, grads, firsts, seconds, rule=rule, update=update)
        for half in halves:
            half.grad = None

    return Work(step=step, weights=halves)
