# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.multi_tensor_apply``."""

from preamp.compat.multi_tensor.applier import MultiTensorApply as MultiTensorApply
from preamp.compat.multi_tensor.applier import multi_tensor_applier as multi_tensor_applier
from preamp.compat.multi_tensor.applier import (
    multi_tensor_applier_l2norm as multi_tensor_applier_l2norm,
)

__all__ = ["MultiTensorApply", "multi_tensor_applier", "multi_tensor_applier_l2norm"]
