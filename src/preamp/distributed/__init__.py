# SPDX-License-Identifier: BSD-3-Clause
"""Training on several processes: data parallelism, synchronised batch norm."""

from torch.distributed import ReduceOp as ReduceOp

from preamp.distributed.ddp import DistributedDataParallel as DistributedDataParallel
from preamp.distributed.groups import create_syncbn_process_group as create_syncbn_process_group
from preamp.distributed.reducer import Reducer as Reducer
from preamp.distributed.reducer import flat_dist_call as flat_dist_call
from preamp.distributed.sync_batchnorm import SyncBatchNorm as SyncBatchNorm
from preamp.distributed.sync_batchnorm import convert_syncbn_model as convert_syncbn_model
