# SPDX-License-Identifier: BSD-3-Clause
"""Batch norm across ranks, in plain torch operations: the same on every device."""

from preamp.distributed.sync_batchnorm.module import SyncBatchNorm as SyncBatchNorm
from preamp.distributed.sync_batchnorm.module import convert_syncbn_model as convert_syncbn_model
