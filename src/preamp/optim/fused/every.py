# SPDX-License-Identifier: BSD-3-Clause
"""All fused optimizers; apart from the package, so that `import preamp` need not load them."""

from preamp.optim.fused.adagrad import FusedAdagrad as FusedAdagrad
from preamp.optim.fused.adam import FusedAdam as FusedAdam
from preamp.optim.fused.lamb import FusedLAMB as FusedLAMB
from preamp.optim.fused.lars import FusedLARS as FusedLARS
from preamp.optim.fused.mixed_precision_lamb import (
    FusedMixedPrecisionLamb as FusedMixedPrecisionLamb,
)
from preamp.optim.fused.novograd import FusedNovoGrad as FusedNovoGrad
from preamp.optim.fused.sgd import FusedSGD as FusedSGD
