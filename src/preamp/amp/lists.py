# SPDX-License-Identifier: BSD-3-Clause
"""``apex.amp.lists``: what happens to the arguments of which function, to look at."""

from preamp.compat.lists import functional_overrides as functional_overrides
from preamp.compat.lists import tensor_overrides as tensor_overrides
from preamp.compat.lists import torch_overrides as torch_overrides

__all__ = ["functional_overrides", "tensor_overrides", "torch_overrides"]
