# SPDX-License-Identifier: BSD-3-Clause
"""``apex.normalization.fused_layer_norm``."""

from preamp.compat.normalization.autograd import (
    FusedLayerNormAffineFunction as FusedLayerNormAffineFunction,
)
from preamp.compat.normalization.autograd import (
    FusedLayerNormAffineMixedDtypesFunction as FusedLayerNormAffineMixedDtypesFunction,
)
from preamp.compat.normalization.autograd import FusedLayerNormFunction as FusedLayerNormFunction
from preamp.compat.normalization.autograd import (
    FusedRMSNormAffineFunction as FusedRMSNormAffineFunction,
)
from preamp.compat.normalization.autograd import (
    FusedRMSNormAffineMixedDtypesFunction as FusedRMSNormAffineMixedDtypesFunction,
)
from preamp.compat.normalization.autograd import FusedRMSNormFunction as FusedRMSNormFunction
from preamp.compat.normalization.autograd import manual_rms_norm as manual_rms_norm
from preamp.compat.normalization.functions import fused_layer_norm as fused_layer_norm
from preamp.compat.normalization.functions import fused_layer_norm_affine as fused_layer_norm_affine
from preamp.compat.normalization.functions import fused_rms_norm as fused_rms_norm
from preamp.compat.normalization.functions import fused_rms_norm_affine as fused_rms_norm_affine
from preamp.compat.normalization.functions import (
    mixed_dtype_fused_layer_norm_affine as mixed_dtype_fused_layer_norm_affine,
)
from preamp.compat.normalization.functions import (
    mixed_dtype_fused_rms_norm_affine as mixed_dtype_fused_rms_norm_affine,
)
from preamp.compat.normalization.modules import FusedLayerNorm as FusedLayerNorm
from preamp.compat.normalization.modules import FusedRMSNorm as FusedRMSNorm
from preamp.compat.normalization.modules import MixedFusedLayerNorm as MixedFusedLayerNorm
from preamp.compat.normalization.modules import MixedFusedRMSNorm as MixedFusedRMSNorm

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]
