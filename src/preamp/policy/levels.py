# SPDX-License-Identifier: BSD-3-Clause
"""The opt levels, one row each. A new level is a new row."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from preamp.policy.policy import Policy

_ROWS = (
    Policy(opt_level="O0", brief="O0:  Pure FP32 training.", cast_model_type=torch.float32),
    Policy(
        opt_level="O1",
        brief="O1:  Insert automatic casts around Pytorch functions and Tensor methods.",
        patch_torch_functions=True,
        patch_torch_functions_type=torch.float16,
        loss_scale="dynamic",
    ),
    Policy(
        opt_level="O2",
        brief="O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.float16,
        keep_batchnorm_fp32=True,
        master_weights=True,
        loss_scale="dynamic",
    ),
    Policy(
        opt_level="O3",
        brief="O3:  Pure FP16 training.",
        cast_model_type=torch.float16,
        keep_batchnorm_fp32=False,
    ),
    Policy(
        opt_level="O4",
        brief="O4:  Insert automatic BF16 casts around Pytorch functions and Tensor methods.",
        patch_torch_functions=True,
        patch_torch_functions_type=torch.bfloat16,
    ),
    Policy(
        opt_level="O5",
        brief="O5:  BF16 training with FP32 batchnorm and FP32 master weights.",
        cast_model_type=torch.bfloat16,
        keep_batchnorm_fp32=True,
        master_weights=True,
    ),
)

OPT_LEVELS: Mapping[str, Policy] = MappingProxyType({row.opt_level: row for row in _ROWS})
"""Default policy of each opt level, by name. Read-only."""
