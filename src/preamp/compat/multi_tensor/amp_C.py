# SPDX-License-Identifier: BSD-3-Clause
"""The names of Apex's compiled module ``amp_C``.

Every list operation takes a chunk size, a no-op flag and a list of equally long lists first, by
position. The chunk size has no effect. Tensors at the same place of each list have equally many
elements; those of one list share a dtype; all are dense, contiguous or channels_last, and lie on
one device with the flag. What does not fit raises ``RuntimeError`` before anything is changed.
Operations work on raw data: they record nothing for autograd, and requiring a gradient changes
nothing. None waits for the device.
"""

from preamp.compat.multi_tensor.hysteresis import update_scale_hysteresis as update_scale_hysteresis
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm as multi_tensor_l2norm
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm_mp as multi_tensor_l2norm_mp
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm_scale as multi_tensor_l2norm_scale
from preamp.compat.multi_tensor.norms import (
    multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm,
)
from preamp.compat.multi_tensor.scale import multi_tensor_axpby as multi_tensor_axpby
from preamp.compat.multi_tensor.scale import multi_tensor_scale as multi_tensor_scale

__all__ = [
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_scale",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
