# SPDX-License-Identifier: BSD-3-Clause
"""The methods of ``torch.Tensor``, by what happens to their arguments at O1 and O4."""

import torch

from preamp.compat.lists.names import banned_in, names_of

MODULE = torch.Tensor
FP16_FUNCS = names_of("torch.Tensor", "half")  # at O1
BFLOAT16_FUNCS = names_of("torch.Tensor", "half")  # at O4
FP32_FUNCS = names_of("torch.Tensor", "float")
CASTS = names_of("torch.Tensor", "promote")
SEQUENCE_CASTS = names_of("torch.Tensor", "sequence_promote")
BANNED_FUNCS = banned_in("torch.Tensor")  # with the reason of each
