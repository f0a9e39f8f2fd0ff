# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.optimizers``: migrating is ``from preamp.optimizers import FusedAdam``."""

from preamp.compat.flat import FP16_Optimizer as FP16_Optimizer
from preamp.optim.fused.every import FusedAdagrad as FusedAdagrad
from preamp.optim.fused.every import FusedAdam as FusedAdam
from preamp.optim.fused.every import FusedLAMB as FusedLAMB
from preamp.optim.fused.every import FusedLARS as FusedLARS
from preamp.optim.fused.every import FusedMixedPrecisionLamb as FusedMixedPrecisionLamb
from preamp.optim.fused.every import FusedNovoGrad as FusedNovoGrad
from preamp.optim.fused.every import FusedSGD as FusedSGD

__all__ = [
    "FP16_Optimizer",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLARS",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
]
