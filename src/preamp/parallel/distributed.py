# SPDX-License-Identifier: BSD-3-Clause
"""``apex.parallel.distributed``."""

from preamp.distributed import DistributedDataParallel as DistributedDataParallel
from preamp.distributed import Reducer as Reducer
from preamp.distributed import flat_dist_call as flat_dist_call

__all__ = ["DistributedDataParallel", "Reducer", "flat_dist_call"]
