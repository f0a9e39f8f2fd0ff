# SPDX-License-Identifier: BSD-3-Clause
"""The back end: every op of ``preamp.kernels.ops``."""

from __future__ import annotations

import torch

from preamp.core.tensors import devices_of
from preamp.kernels.ops import Tensors
from preamp.kernels.plans import pick
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.triton.elementwise import Elementwise
from preamp.kernels.triton.launch import PLAIN, check_devices
from preamp.kernels.triton.reductions import Reductions
from preamp.kernels.triton.updates import lamb_norms, start
from preamp.kernels.triton.works import Launch
from preamp.kernels.update import Update
from preamp.kernels.works import works_of


class Triton(Elementwise, Reductions):
    """Every op in Triton's kernels."""

    name = "triton"

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        works, others = works_of(Launch, params, grads, *state, rule=rule, update=update)
        check_devices(devices_of(pick(params, others)))
        for work in works:
            start(work)
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            PLAIN.update_(*lists, rule=rule, update=update.at(others))

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        works, others = works_of(Launch, params, grads, *state, rule=rule, update=update)
        if others or len(works) != 1:
            return PLAIN.lamb_norms(params, grads, *state, rule=rule, update=update)
        return lamb_norms(works[0])
