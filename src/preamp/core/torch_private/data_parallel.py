# SPDX-License-Identifier: BSD-3-Clause
"""Which DistributedDataParallel a forward runs in; torch knows it, but not in public."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_HALF_NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def active_data_parallel() -> DistributedDataParallel | None:
    """The wrapper whose forward is under way in this process, if there is one."""
    return getattr(cast("Any", DistributedDataParallel), "_active_ddp_module", None)


def is_joining(wrapper: DistributedDataParallel) -> bool:
    """Whether ranks may have different numbers of batches, so that some take no part any more."""
    return bool(getattr(getattr(wrapper, "_join_config", None), "enable", False))


def is_hooked_to_parameters(wrapper: DistributedDataParallel) -> bool:
    """Whether torch's reducer still hears of the gradients of ``wrapper``'s half parameters.

    It hooks what accumulates a gradient, and a parameter that is cast gets a new one of these. The
    dtypes that parameters had when they were wrapped are in what the wrapper logs.
    """
    if not uses_reducer(wrapper):
        return True
    known = str(cast("Any", wrapper)._get_ddp_logging_data().get("dtypes", ""))
    now = {param.dtype for param in parameters_in(wrapper) if param.requires_grad}
    return all(dtype not in now or name in known for dtype, name in _HALF_NAMES.items())


def parameters_in(wrapper: DistributedDataParallel) -> Iterator[nn.Parameter]:
    """The parameters of what is wrapped."""
    return cast("nn.Module", cast("Any", wrapper).module).parameters()


def uses_reducer(wrapper: DistributedDataParallel) -> bool:
    """Whether torch's reducer does the work, not ``delay_allreduce`` of preamp's class."""
    return not getattr(wrapper, "_delays", False)


def forward_without_reducer(
    wrapper: DistributedDataParallel, inputs: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``wrapper``'s forward, as `active_data_parallel`, so that gradients stay local."""
    return cast("Any", wrapper)._run_ddp_forward(*inputs, **kwargs)
