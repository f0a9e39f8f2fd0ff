# SPDX-License-Identifier: BSD-3-Clause
"""The functions of ``torch``, by what happens to their arguments at O1 and O4."""

import torch

from preamp.compat.lists.names import banned_in, names_of

__all__ = [  # MODULE is a module, which the alias takes over by name only
    "BANNED_FUNCS",
    "BFLOAT16_FUNCS",
    "CASTS",
    "FP16_FUNCS",
    "FP32_FUNCS",
    "MODULE",
    "SEQUENCE_CASTS",
]

MODULE = torch
FP16_FUNCS = names_of("torch", "half")  # at O1
BFLOAT16_FUNCS = names_of("torch", "half")  # at O4
FP32_FUNCS = names_of("torch", "float")
CASTS = names_of("torch", "promote")
SEQUENCE_CASTS = names_of("torch", "sequence_promote")
BANNED_FUNCS = banned_in("torch")  # with the reason of each
