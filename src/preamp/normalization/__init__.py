# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.normalization``."""

from preamp.compat.normalization.modules import FusedLayerNorm as FusedLayerNorm
from preamp.compat.normalization.modules import FusedRMSNorm as FusedRMSNorm
from preamp.compat.normalization.modules import MixedFusedLayerNorm as MixedFusedLayerNorm
from preamp.compat.normalization.modules import MixedFusedRMSNorm as MixedFusedRMSNorm
from preamp.normalization import fused_layer_norm as fused_layer_norm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
