# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists``: which functions are cast how, to be edited before ``amp.initialize``."""

from preamp.amp.lists import functional_overrides as functional_overrides
from preamp.amp.lists import tensor_overrides as tensor_overrides
from preamp.amp.lists import torch_overrides as torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
