# SPDX-License-Identifier: BSD-3-Clause
"""The update as people write it with torch alone."""

# torch leaves these functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from preamp_bench.weights import MAX_NORM, SETTINGS, Gradients, StepCase, Weights, Work


def grad_scaler(case: StepCase, gradients: Gradients) -> Work:
    """The usual way with float32 weights: `torch.amp.GradScaler` and fused AdamW."""
    parameters = list(Weights(case).parameters())
    optimizer = torch.optim.AdamW(parameters, **SETTINGS, fused=True)
    scaler = torch.amp.GradScaler(case.device.type)
    loss = torch.ones((), device=case.device)

    def step() -> None:
        scaler.scale(loss)
        gradients.attach(parameters)
        if case.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Work(step=step, weights=parameters)


class _Masters:
    """Half parameters, float32 masters, and fused AdamW on these."""

    def __init__(self, case: StepCase) -> None:
        weights = Weights(case)
        self.masters = [nn.Parameter(p.detach().clone()) for p in weights.parameters()]
        self.halves = list(weights.to(case.half).parameters())
        self.optimizer = torch.optim.AdamW(self.masters, **SETTINGS, fused=True)

    def pairs(self) -> Sequence[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(self.masters, self.halves, strict=True))

    @torch.no_grad()
    def update(self) -> None:
        self.optimizer.step()
        for master, half in self.pairs():
            half.copy_(master)


def naive_masters(case: StepCase, gradients: Gradients) -> Work:
    """Masters by hand, every gradient widened into a new tensor, as many scripts do it."""
    work = _Masters(case)

    def step() -> None:
        gradients.attach(work.halves)
        for master, half in work.pairs():
            master.grad = _grad(half).float()
        finite = True
        if case.scale != 1.0:
            finite = all(torch.isfinite(_grad(master)).all() for master in work.masters)
            for master in work.masters:
                _grad(master).mul_(1 / case.scale)
        if case.clip:
            clip_grad_norm_(work.masters, MAX_NORM)
        if finite:
            work.update()
        for parameter in (*work.masters, *work.halves):
            parameter.grad = None

    return Work(step=step, weights=work.halves)


def kept_masters(case: StepCase, gradients: Gradients) -> Work:
    """The same with care: the masters' gradients keep their memory, the norm tells overflow."""
    work = _Masters(case)
    for master in work.masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        gradients.attach(work.halves)
        for master, half in work.pairs():
            _grad(master).copy_(_grad(half)).mul_(1 / case.scale)
        finite = True
        if case.clip:
            finite = bool(clip_grad_norm_(work.masters, MAX_NORM).isfinite())
        elif case.scale != 1.0:
            finite = all(torch.isfinite(_grad(half)).all() for half in work.halves)
        if finite:
            work.update()
        for half in work.halves:
            half.grad = None

    return Work(step=step, weights=work.halves)


def compiled_masters(case: StepCase, gradients: Gradients) -> Work:
    """Masters by hand, and one compiled function that updates a tensor in one pass.

    It takes any length, so it is compiled once for all tensors.
    """
    weights = Weights(case)
    masters = [p.detach().clone() for p in weights.parameters()]
    halves = list(weights.to(case.half).parameters())
    firsts, seconds = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    update = torch.compile(_adamw, dynamic=True)
    steps_done = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal steps_done
        gradients.attach(halves)
        factor = torch.full((), 1 / case.scale, device=case.device)
        if case.clip or case.scale != 1.0:
            norms: list[Tensor] = [
                torch.linalg.vector_norm(_grad(p), dtype=torch.float32) for p in halves
            ]
            norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)) / case.scale
            if not norm.isfinite():
                return
            if case.clip:
                factor *= (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        steps_done += 1
        corrections = torch.tensor([1 - 0.9**steps_done, 1 - 0.999**steps_done]).to(case.device)
        for tensors in zip(masters, halves, firsts, seconds, strict=True):
            update(*tensors, _grad(tensors[1]), factor, corrections)
        for half in halves:
            half.grad = None

    return Work(step=step, weights=halves)


def _adamw(
    master: Tensor,
    half: Tensor,
    first: Tensor,
    second: Tensor,
    gradient: Tensor,
    factor: Tensor,
    corrections: Tensor,
) -> None:
    """AdamW on one tensor, all of it in float32, and the rounded weight."""
    lr, decay = SETTINGS["lr"], SETTINGS["weight_decay"]
    wide = gradient.float() * factor
    first.lerp_(wide, 0.1)
    second.mul_(0.999).addcmul_(wide, wide, value=0.001)
    direction = first / corrections[0] / ((second / corrections[1]).sqrt() + 1e-8)
    master.mul_(1 - lr * decay).sub_(direction * lr)
    half.copy_(master)


def _grad(parameter: Tensor) -> Tensor:
    """The gradient that is known to be there."""
    gradient = parameter.grad
    if gradient is None:
        raise RuntimeError("attach() comes first")
    return gradient
