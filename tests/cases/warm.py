# SPDX-License-Identifier: BSD-3-Clause
"""What a process that tests are forked from imports last, so that forks need not do it each.

At its first kernel numba looks through all types that it knows, for half a second, and each look
for cycles goes through all objects of torch. There is no backward here and no thread: a fork would
miss what they leave.
"""

import gc

import torch

from preamp.kernels import backend
from preamp.kernels.dispatch import lacks_numba

if lacks_numba() is None:
    backend("jit").cast_copy_([torch.ones(1)], [torch.zeros(1)])
gc.collect()
gc.freeze()
