# SPDX-License-Identifier: BSD-3-Clause
"""``apex.parallel.sync_batchnorm``."""

from preamp.distributed import SyncBatchNorm as SyncBatchNorm

__all__ = ["SyncBatchNorm"]
