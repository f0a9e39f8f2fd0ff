# SPDX-License-Identifier: BSD-3-Clause
"""The names of Apex's compiled module ``amp_C``.

Every list operation takes a chunk size, a no-op flag and a list of equally long lists first, by
position. The chunk size has no effect. Tensors at the same place of each list have equally many
elements; those of one list share a dtype; all are dense, contiguous or channels_last, and lie on
one device with the flag. What does not fit raises ``RuntimeError`` before anything is changed.
Operations work on raw data: they record nothing for autograd, and requiring a gradient changes
nothing. None waits for the device.
"""

from preamp.compat.multi_tensor.adam import multi_tensor_adam as multi_tensor_adam
from preamp.compat.multi_tensor.adam import (
    multi_tensor_adam_capturable as multi_tensor_adam_capturable,
)
from preamp.compat.multi_tensor.adam import (
    multi_tensor_adam_capturable_master as multi_tensor_adam_capturable_master,
)
from preamp.compat.multi_tensor.hysteresis import update_scale_hysteresis as update_scale_hysteresis
from preamp.compat.multi_tensor.lamb import multi_tensor_lamb as multi_tensor_lamb
from preamp.compat.multi_tensor.lamb import multi_tensor_lamb_mp as multi_tensor_lamb_mp
from preamp.compat.multi_tensor.lamb import (
    multi_tensor_lamb_stage1_cuda as multi_tensor_lamb_stage1_cuda,
)
from preamp.compat.multi_tensor.lamb import (
    multi_tensor_lamb_stage2_cuda as multi_tensor_lamb_stage2_cuda,
)
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm as multi_tensor_l2norm
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm_mp as multi_tensor_l2norm_mp
from preamp.compat.multi_tensor.norms import multi_tensor_l2norm_scale as multi_tensor_l2norm_scale
from preamp.compat.multi_tensor.norms import (
    multi_tensor_unscale_l2norm as multi_tensor_unscale_l2norm,
)
from preamp.compat.multi_tensor.scale import multi_tensor_axpby as multi_tensor_axpby
from preamp.compat.multi_tensor.scale import multi_tensor_scale as multi_tensor_scale
from preamp.compat.multi_tensor.steps import multi_tensor_adagrad as multi_tensor_adagrad
from preamp.compat.multi_tensor.steps import multi_tensor_lars as multi_tensor_lars
from preamp.compat.multi_tensor.steps import multi_tensor_novograd as multi_tensor_novograd
from preamp.compat.multi_tensor.steps import multi_tensor_sgd as multi_tensor_sgd

__all__ = [
    "multi_tensor_adagrad",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_lars",
    "multi_tensor_novograd",
    "multi_tensor_scale",
    "multi_tensor_sgd",
    "multi_tensor_unscale_l2norm",
    "update_scale_hysteresis",
]
