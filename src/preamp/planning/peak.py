# SPDX-License-Identifier: BSD-3-Clause
"""What a forward and backward hold and move, from a run on tensors without memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import message
from preamp.core.pytree import map_leaves
from preamp.engine.initialize import create_engine
from preamp.kernels.observe import fake_tensors
from preamp.planning.isolation import untouched_random
from preamp.planning.tracing import Traffic
from preamp.policy import Policy

LossFn = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward.

    Attributes:
        peak: Bytes of all tensors made in it at its worst moment, new gradients included.
        moved: Bytes that its operations read and write; see `Traffic`.
    """

    peak: int
    moved: int


def trace_pass(model: nn.Module, policy: Policy, loss_fn: LossFn, batch: Any) -> Pass:
    """Run ``loss_fn`` and its backward at a policy on a copy without memory.

    A model on the meta device is traced as if on the CPU; it is not changed. Raises `ValueError` if
    the forward looks at values, which such tensors do not have.
    """
    mode = fake_tensors()
    with mode:
        memo = {id(t): _fake(t) for t in (*model.parameters(), *model.buffers())}
        fake_batch = map_leaves(_fake_leaf, batch)
    twin = copy.deepcopy(model, cast("dict[int, Any]", memo))
    with untouched_random(), mode:
        engine = create_engine(twin, None, policy)
        try:
            with Traffic() as traffic:
                cast("Any", loss_fn(twin, fake_batch).float()).backward()
        except Exception as error:
            raise ValueError(
                message(
                    f"A step cannot be traced without running it: {first_line(error)}",
                    "loss_fn(model, batch) returns a scalar loss, and its computation does not "
                    "look at values of tensors, as .item() and if do",
                    "Leave loss_fn and batch out; what stays from step to step is known without",
                )
            ) from error
        finally:
            engine.close()
    return Pass(peak=traffic.peak, moved=traffic.moved)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where there is none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, tensor.requires_grad)
    return like.requires_grad_(tensor.requires_grad)


def _fake_leaf(leaf: Any) -> Any:
    return _fake(leaf) if isinstance(leaf, torch.Tensor) else leaf
