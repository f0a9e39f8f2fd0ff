# SPDX-License-Identifier: BSD-3-Clause
"""The back end: every op of ``preamp.kernels.ops``."""

from __future__ import annotations

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.places import check_shapes, check_stored, pick
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.triton.elementwise import Elementwise
from preamp.kernels.triton.launch import PLAIN
from preamp.kernels.triton.places import places
from preamp.kernels.triton.reductions import Reductions
from preamp.kernels.triton.updates import lamb_norms, start
from preamp.kernels.update import Update


class Triton(Elementwise, Reductions):
    """Every op in Triton's kernels."""

    name = "triton"

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        check_stored(params, state, update)
        shaped = len(state) - rule.has_numbers
        taken, others = places(
            params, grads, *state[:shaped], update=update, numbers=state[shaped:]
        )
        if others:  # what does not fit is among them, and nothing was changed yet
            beside = [] if update.halves is None else [update.halves]
            check_shapes(params, grads, *state[:shaped], *beside)
        for part in taken:
            start(part, rule)
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            PLAIN.update_(*lists, rule=rule, update=update.at(others))

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        taken, others = places(params, grads, *state, update=update)
        if others or len(taken) != 1:
            return PLAIN.lamb_norms(params, grads, *state, rule=rule, update=update)
        return lamb_norms(taken[0], rule)
