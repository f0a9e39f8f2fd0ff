# SPDX-License-Identifier: BSD-3-Clause
"""Which DistributedDataParallel a forward runs in; torch knows it, but not in public."""

from __future__ import annotations

from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel


def active_data_parallel() -> DistributedDataParallel | None:
    """The wrapper whose forward is under way in this process, if there is one."""
    return getattr(cast("Any", DistributedDataParallel), "_active_ddp_module", None)


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Whether ranks may have different numbers of batches, so that some take no part any more."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def forward_without_reducer(
    wrapper: DistributedDataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the wrapped module as ``wrapper``'s forward does, but leave the reducer idle.

    The wrapper is `active_data_parallel` meanwhile. Gradients of this forward stay local.
    """
    return cast("Any", wrapper)._run_ddp_forward(*inputs, **kwargs)
