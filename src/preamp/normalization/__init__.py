# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.normalization``."""

from preamp.compat.normalization import FusedLayerNorm as FusedLayerNorm
from preamp.compat.normalization import FusedRMSNorm as FusedRMSNorm
from preamp.compat.normalization import MixedFusedLayerNorm as MixedFusedLayerNorm
from preamp.compat.normalization import MixedFusedRMSNorm as MixedFusedRMSNorm

__all__ = ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"]
