# SPDX-License-Identifier: BSD-3-Clause
"""Give all ranks the first one's masters, as they get its weights."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from preamp.distributed.flat import flat_dist_call
from preamp.distributed.groups import collectives
from preamp.engine import find_engine


def broadcast_masters(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the float32 masters of ``module``'s parameters from the first rank of ``group``.

    Masters hold what the weights were before ``initialize`` cast them. If each rank drew its own,
    broadcasting the half weights alone would leave the first rank with exact masters and the
    others with rounded ones, and the ranks would drift apart.

    Mutates:
        Masters on all ranks but the first.
    """
    engine = find_engine(module)
    if engine is not None:
        masters = [engine.master_of(param) for param in module.parameters()]
        first = collectives.get_global_rank(group, 0)
        flat_dist_call([m for m in masters if m is not None], collectives.broadcast, (first, group))
