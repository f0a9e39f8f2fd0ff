# SPDX-License-Identifier: BSD-3-Clause
"""``apex.parallel.optimized_sync_batchnorm``."""

from preamp.distributed import SyncBatchNorm as SyncBatchNorm

__all__ = ["SyncBatchNorm"]
