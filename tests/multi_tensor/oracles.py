# SPDX-License-Identifier: BSD-3-Clause
"""One step of each rule on one parameter, written from its formula, in float64."""

import torch

T = torch.Tensor


def adam(
    g: T, p: T, m: T, v: T, lr: float, b1: float, b2: float, eps: float, t: int, mode: int,
    bias_correction: int, wd: float,
) -> tuple[T, T, T]:  # fmt: skip
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
    g = g + wd * p if mode == 0 else g
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
    u = (m / c1) / (torch.sqrt(v / c2) + eps) + (wd * p if mode == 1 else 0)
    return p - lr * u, m, v


def sgd(
    g: T, p: T, m: T, wd: float, momentum: float, dampening: float, lr: float, nesterov: bool,
    first_run: bool, wd_after_momentum: bool, scale: float,
) -> tuple[T, T]:  # fmt: skip
    g = g * scale
    if not wd_after_momentum:
        g = g + wd * p
    if momentum:
        m = g if first_run else momentum * m + (1 - dampening) * g
        g = g + momentum * m if nesterov else m
    if wd_after_momentum:
        g = g + wd * p
    return p - lr * g, m


def lamb_update(
    g: T, p: T, m: T, v: T, b1: float, b2: float, eps: float, t: int, bias_correction: int,
    wd: float, grad_averaging: int, mode: int, norm: float, largest: float,
) -> tuple[T, T, T]:  # fmt: skip
    g = g / (norm / largest) if norm > largest > 0 else g
    b3 = 1 - b1 if grad_averaging else 1.0
    if mode == 0:
        g = g + wd * p
    m, v = b1 * m + b3 * g, b2 * v + (1 - b2) * g * g
    c1, c2 = (1 - b1**t, 1 - b2**t) if bias_correction else (1.0, 1.0)
    u = (m / c1) / (torch.sqrt(v / c2) + eps)
    return (u + wd * p if mode == 1 else u), m, v


def lamb_apply(p: T, u: T, lr: float, wd: float, use_nvlamb: bool) -> T:
    size, length = p.square().sum().sqrt().item(), u.square().sum().sqrt().item()
    if (use_nvlamb or wd != 0) and size > 0 and length > 0:
        lr = lr * size / length
    return p - lr * u
