# SPDX-License-Identifier: BSD-3-Clause
"""The names of ``apex.parallel``; ``LARC`` is a module."""

from preamp.distributed import DistributedDataParallel as DistributedDataParallel
from preamp.distributed import ReduceOp as ReduceOp
from preamp.distributed import Reducer as Reducer
from preamp.distributed import SyncBatchNorm as SyncBatchNorm
from preamp.distributed import convert_syncbn_model as convert_syncbn_model
from preamp.distributed import create_syncbn_process_group as create_syncbn_process_group
from preamp.parallel import LARC as LARC
from preamp.parallel import distributed as distributed
from preamp.parallel import optimized_sync_batchnorm as optimized_sync_batchnorm
from preamp.parallel import sync_batchnorm as sync_batchnorm

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "SyncBatchNorm",
    "convert_syncbn_model",
    "create_syncbn_process_group",
]
