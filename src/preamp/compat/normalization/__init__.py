# SPDX-License-Identifier: BSD-3-Clause
"""The layers and functions of ``apex.normalization``, on torch's own fused functions."""

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
