# SPDX-License-Identifier: BSD-3-Clause
"""torch's DistributedDataParallel behind Apex's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from preamp.core.errors import bad_state, bad_value
from preamp.core.torch_private.data_parallel import forward_without_reducer
from preamp.distributed.delayed import Averaging, DelayedReduction, reduce_bucket
from preamp.distributed.groups import default_group, require_group
from preamp.engine import find_engine
from preamp.engine.agreement import compare_ranks

_MB = 1024 * 1024


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Averages gradients over all ranks during ``backward``.

    A ``torch.nn.parallel.DistributedDataParallel`` with the constructor of ``apex.parallel``:
    everything torch's class can do is there, ``no_sync`` included. Wrap the model after
    ``preamp.initialize``, so that the gradients that travel have the dtype they are made in.
    Parameters are broadcast from rank 0 at construction, with their float32 masters if there are
    any; buffers are not, neither then nor later.

    With the defaults torch's reducer divides by the number of ranks and sums. With
    ``allreduce_always_fp32``, ``gradient_average=False`` or ``gradient_predivide_factor`` a
    communication hook computes

        gradient = (Σ gradient / predivide) · predivide / world_size

    without the last two factors if ``gradient_average=False``.

    As with torch's class, a backward is reduced only if it is the first one after a forward: a
    second one through the same output, or through an earlier output, adds this rank's gradients
    alone. ``delay_allreduce=True`` reduces every backward.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: bool | None = None,
        allreduce_trigger_params: Sequence[nn.Parameter] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[dist.ProcessGroup], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        """Wrap ``module``.

        Args:
            module: A module with parameters that require grad. gloo, which serves CPUs, sums
                float16, float32, float64 and, in current torch, bfloat16; where it refuses
                bfloat16, ``allreduce_always_fp32=True`` gets by.
            message_size: Elements in a bucket; 0 gives each parameter one of its own. torch counts
                bytes, so this is taken times the mean element size of what requires grad.
            delay_allreduce: Reduce everything in one go at the end of every ``backward``, without
                torch's reducer. Parameters may go without gradient, on some ranks or all; several
                backwards may follow one forward, and several forwards precede one backward. Costs
                an exchange of which parameters have one, which synchronises, and a flat copy of
                the gradients. torch's ``join`` and ``register_comm_hook`` are refused then.
            shared_param: Refused, as in Apex.
            allreduce_trigger_params: Accepted. Which parameters close a bucket is a matter of
                timing, and torch's reducer finds its own.
            retain_allreduce_buffers: Gradients become views of the buckets
                (``gradient_as_bucket_view``). The buckets themselves stay torch's.
            allreduce_always_fp32: Sum half gradients in float32, and round once.
            num_allreduce_streams: Accepted from 1; more of them was a matter of timing.
            allreduce_communicators: ``(groups, streams)``, one pair per stream. The groups have
                the same ranks, so the first one does all the work.
            gradient_average: Divide the sum by the number of ranks.
            gradient_predivide_factor: Divide by this much before the sum and, when averaging,
                multiply by it afterwards: large worlds sum float16 gradients without overflow.
            gradient_average_split_factor: Accepted; Apex never read it.
            prof: Accepted; torch.profiler shows this class's ranges always.

        Raises:
            ValueError: A combination of arguments that Apex refuses as well, or a negative
                ``message_size``, or a ``gradient_predivide_factor`` that is not positive.
            PreampStateError: torch.distributed is not initialized, or the ranks do not train the
                same thing.
            RuntimeError: From torch: nothing in ``module`` requires grad.

        Mutates:
            ``module``: parameters and their masters on all ranks but the first.
        """
        _refuse_old(shared_param, delay_allreduce, allreduce_trigger_params, num_allreduce_streams)
        groups = _checked_groups(allreduce_communicators, num_allreduce_streams)
        _check_numbers(message_size, gradient_predivide_factor)
        require_group("DistributedDataParallel")
        compare_ranks(find_engine(module), module, groups[0] if groups else default_group())
        with warnings.catch_warnings():
            # Its successor still broadcasts buffers at construction.
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            cast("Any", super()).__init__(
                module,
                broadcast_buffers=False,
                process_group=groups[0] if groups else None,
                bucket_cap_mb=_bucket_mb(module, message_size),
                gradient_as_bucket_view=retain_allreduce_buffers,
            )
        self._averages = gradient_average
        self._predivide = float(gradient_predivide_factor)
        self._always_fp32 = allreduce_always_fp32
        self._delays = delay_allreduce
        self._retains = retain_allreduce_buffers
        self._hook_reduction()

    def _hook_reduction(self) -> None:
        group = cast("Any", self).process_group
        is_torchs = self._averages and self._predivide == 1.0 and not self._always_fp32
        averaging = Averaging(
            before=1.0 / self._predivide,
            after=self._predivide / group.size() if self._averages else 1.0,
            in_float32=self._always_fp32,
            group=group,
        )
        if self._delays:
            if is_torchs:
                averaging = replace(averaging, before=1.0 / group.size(), after=1.0)
            self._delayed = DelayedReduction(self, averaging, makes_views=self._retains)
        elif not is_torchs:
            cast("Any", super()).register_comm_hook(averaging, reduce_bucket)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the wrapped module, and prepare for the reduction of its backward."""
        if not self._delays:
            return cast("Any", super()).forward(*inputs, **kwargs)
        with torch.profiler.record_function("DistributedDataParallel.forward"):
            return forward_without_reducer(self, inputs, kwargs)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let torch's reducer call ``hook(state, bucket)`` for each bucket, as in torch's class.

        Raises:
            PreampStateError: With ``delay_allreduce``, which does without the reducer.
        """
        self._refuse_if_delayed("register_comm_hook")
        cast("Any", super()).register_comm_hook(state, hook)

    def join(self, *args: Any, **kwargs: Any) -> Any:
        """Let ranks have different numbers of batches, as in torch's class.

        Raises:
            PreampStateError: With ``delay_allreduce``, which does without the reducer.
        """
        self._refuse_if_delayed("join")
        return cast("Any", super()).join(*args, **kwargs)

    def _refuse_if_delayed(self, name: str) -> None:
        if self._delays:
            raise bad_state(
                f"{name} was called with delay_allreduce=True",
                "It belongs to torch's reducer, which delaying does without",
                "Leave delay_allreduce out",
            )

    def disable_allreduce(self) -> None:
        """Let gradients pile up locally, for accumulation; call before the forward, as `no_sync`.

        What piled up is reduced with the first backward after `enable_allreduce`. With
        ``delay_allreduce`` it is the moment of the backward that counts.
        """
        self.require_backward_grad_sync = False

    def enable_allreduce(self) -> None:
        """Reduce gradients again, from the next forward on."""
        self.require_backward_grad_sync = True

    def __getstate__(self) -> Any:
        """Leave out what belongs to this process; torch refuses any but the default group."""
        state = cast("dict[str, Any]", super().__getstate__())
        del state["_comm_hooks"]
        state.pop("_delayed", None)
        return state

    def __setstate__(self, state: Any) -> None:
        """Become a working wrapper again, in a process with a default process group."""
        cast("Any", super()).__setstate__({**state, "_comm_hooks": []})
        self._hook_reduction()


def _refuse_old(
    shared_param: Any, delay_allreduce: bool, trigger_params: Any, num_streams: int
) -> None:
    if shared_param is not None:
        raise bad_value(
            f"shared_param={shared_param!r} was passed",
            "The argument means nothing any more and may only be None",
            "Pass delay_allreduce=True for what it did; shared parameters work without",
        )
    if not delay_allreduce:
        return
    given = {
        "allreduce_trigger_params": trigger_params is not None,
        "num_allreduce_streams": num_streams > 1,
    }
    for name, is_given in given.items():
        if is_given:
            raise bad_value(
                f"{name} was passed together with delay_allreduce=True",
                "It says how reduction overlaps with backward, which delaying excludes",
                f"Leave out one of the two; without delay_allreduce {name} is accepted",
            )


def _checked_groups(communicators: Any, num_streams: int) -> Sequence[dist.ProcessGroup]:
    if num_streams < 1:
        raise bad_value(
            f"num_allreduce_streams={num_streams!r} cannot be used",
            "Allowed is a whole number from 1",
            "Leave the argument out",
        )
    if communicators is None:
        return ()
    groups, streams = communicators
    if num_streams < 2 or not len(groups) == len(streams) == num_streams:
        raise bad_value(
            f"allreduce_communicators has {len(groups)} group(s) and {len(streams)} "
            f"stream(s) with num_allreduce_streams={num_streams}",
            "Allowed are as many of each as there are streams, and two streams at least",
            "Pass num_allreduce_streams=len(groups), or leave both arguments out",
        )
    return groups


def _check_numbers(message_size: int, predivide: float) -> None:
    if message_size < 0:
        raise bad_value(
            f"message_size={message_size!r} cannot be used",
            "Allowed is a number of elements from 0",
            "Leave the argument out for ten million",
        )
    if not predivide > 0:
        raise bad_value(
            f"gradient_predivide_factor={predivide!r} cannot be used",
            "Allowed is a positive number",
            "Leave the argument out for 1.0, or pass about the square root of the world size",
        )


def _bucket_mb(module: nn.Module, message_size: int) -> float:
    """Bucket size in torch's unit."""
    params = [param for param in module.parameters() if param.requires_grad]
    elements = sum(param.numel() for param in params)
    total = sum(param.numel() * param.element_size() for param in params)
    return message_size * total / max(elements, 1) / _MB
