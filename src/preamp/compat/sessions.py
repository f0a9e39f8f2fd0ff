# SPDX-License-Identifier: BSD-3-Clause
"""The session of an optimizer without an engine, as Apex's oldest interfaces have one."""

from __future__ import annotations

import torch

from preamp.core.splits import Splits
from preamp.engine.reductions import Reductions
from preamp.engine.session import OptimizerSession
from preamp.kernels import backend


def session_of(optimizer: torch.optim.Optimizer) -> OptimizerSession:
    """Follow the gradients of ``optimizer``, which is not changed; no masters, no ranks."""
    return OptimizerSession(optimizer, backend(), None, Reductions((), Splits()))
