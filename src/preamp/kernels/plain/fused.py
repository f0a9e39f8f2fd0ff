# SPDX-License-Identifier: BSD-3-Clause
"""torch's fused kernels for CPUs, where a rule is theirs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from preamp.kernels.rules import AdagradRule, AdamRule, BiasCorrection, Rule, SgdRule
from preamp.kernels.update import Scalar, Update

_torch: Any = torch

Fused = Callable[[Sequence[Any], Sequence[Any], Sequence[Sequence[Any]]], None]
"""A kernel on parameters, gradients and state, which it does not tell autograd of."""


def fused_kernel(rule: Rule, update: Update) -> Fused | None:
    """The kernel of torch's that computes ``rule`` on a CPU, if there is one."""
    if isinstance(rule, AdamRule):
        if rule.eps_inside_sqrt or rule.bias_correction is BiasCorrection.STEP_SIZE:
            return None
        op = _torch._fused_adamw_ if rule.decoupled else _torch._fused_adam_
        # At step infinity the corrections 1 - beta**step are 1.
        corrects = rule.bias_correction is BiasCorrection.MOMENTS
        step = _constant(_number(update.step) if corrects else math.inf)
        options = {
            **{"lr": _number(rule.lr), "beta1": rule.beta1, "beta2": rule.beta2, "eps": rule.eps},
            **{"weight_decay": rule.weight_decay, "amsgrad": False, "maximize": False},
        }
        return lambda p, g, s: op(p, g, *s, [], [step] * len(p), **options)
    if isinstance(rule, SgdRule) and not rule.decays_after_momentum:
        options = {
            "lr": _number(rule.lr),
            **{"weight_decay": rule.weight_decay, "momentum": rule.momentum},
            **{"dampening": rule.dampening, "nesterov": rule.nesterov, "maximize": False},
            "is_first_step": rule.momentum != 0 and _number(update.step) == 1,
        }
        return lambda p, g, s: _torch._fused_sgd_(p, g, s[0] if rule.momentum else [], **options)
    if isinstance(rule, AdagradRule) and not (rule.decoupled and rule.weight_decay != 0):
        step = _constant(1.0)  # of no consequence: it only counts for a decay of the learning rate
        options = {
            **{"lr": _number(rule.lr), "lr_decay": 0.0, "weight_decay": rule.weight_decay},
            **{"eps": rule.eps, "maximize": False},
        }
        return lambda p, g, s: _torch._fused_adagrad_(p, g, *s, [step] * len(p), **options)
    return None


def _constant(value: float) -> torch.Tensor:
    """A number as torch's fused kernels take the step, whatever the default dtype and device."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _number(value: Scalar) -> float:
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
