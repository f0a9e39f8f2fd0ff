# SPDX-License-Identifier: BSD-3-Clause
"""What DistributedDataParallel, Reducer and process groups refuse, on one process."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from torch import nn

from preamp import PreampStateError
from preamp.parallel import DistributedDataParallel, ReduceOp, Reducer, create_syncbn_process_group


@pytest.mark.apex("0 apex.parallel.DistributedDataParallel")
def test_signature_is_that_of_apex() -> None:
    parameters = list(inspect.signature(DistributedDataParallel).parameters.values())
    assert [(p.name, p.default) for p in parameters[1:]] == [
        ("message_size", 10000000),
        ("delay_allreduce", False),
        ("shared_param", None),
        ("allreduce_trigger_params", None),
        ("retain_allreduce_buffers", False),
        ("allreduce_always_fp32", False),
        ("num_allreduce_streams", 1),
        ("allreduce_communicators", None),
        ("gradient_average", True),
        ("gradient_predivide_factor", 1.0),
        ("gradient_average_split_factor", None),
        ("prof", False),
    ]


REFUSED = [
    (
        {"shared_param": True},
        "shared_param=True was passed. The argument means nothing any more and may only be None. "
        "Pass delay_allreduce=True for what it did; shared parameters work without.",
    ),
    (
        {"allreduce_trigger_params": [], "delay_allreduce": True},
        "allreduce_trigger_params was passed together with delay_allreduce=True. It says how "
        "reduction overlaps with backward, which delaying excludes. Leave out one of the two; "
        "without delay_allreduce allreduce_trigger_params is accepted.",
    ),
    (
        {"num_allreduce_streams": 2, "delay_allreduce": True},
        "num_allreduce_streams was passed together with delay_allreduce=True.",
    ),
    (
        {"num_allreduce_streams": 0},
        "num_allreduce_streams=0 cannot be used. Allowed is a whole number from 1. Leave the "
        "argument out.",
    ),
    (
        {"allreduce_communicators": ([None], [None])},
        "allreduce_communicators has 1 group(s) and 1 stream(s) with num_allreduce_streams=1. "
        "Allowed are as many of each as there are streams, and two streams at least. Pass "
        "num_allreduce_streams=len(groups), or leave both arguments out.",
    ),
    (
        {"allreduce_communicators": ([None, None], [None]), "num_allreduce_streams": 2},
        "allreduce_communicators has 2 group(s) and 1 stream(s) with num_allreduce_streams=2.",
    ),
    (
        {"message_size": -1},
        "message_size=-1 cannot be used. Allowed is a number of elements from 0. Leave the "
        "argument out for ten million.",
    ),
    (
        {"gradient_predivide_factor": 0.0},
        "gradient_predivide_factor=0.0 cannot be used. Allowed is a positive number. Leave the "
        "argument out for 1.0, or pass about the square root of the world size.",
    ),
]


@pytest.mark.apex(
    "9.1 shared_param: ValueError",
    "9.1 allreduce_trigger_params",
    "9.1 num_allreduce_streams",
    "9.1 allreduce_communicators",
)
@pytest.mark.parametrize(("arguments", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        DistributedDataParallel(nn.Linear(1, 1), **arguments)


@pytest.mark.apex("9.1 without a process group: an error")
@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("DistributedDataParallel", lambda: DistributedDataParallel(nn.Linear(1, 1))),
        ("Reducer", lambda: Reducer([torch.zeros(1)])),
        ("create_syncbn_process_group", lambda: create_syncbn_process_group(1)),
    ],
)
def test_without_a_process_group(what: str, call: Any) -> None:
    text = (
        f"{what} was used without a process group. It needs an initialized torch.distributed, "
        "with one process at least. Call torch.distributed.init_process_group first; torchrun "
        "starts the processes."
    )
    with pytest.raises(PreampStateError, match=re.escape(text)):
        call()


@pytest.mark.apex("0 apex.parallel.ReduceOp")
def test_reduce_op_is_torchs() -> None:
    assert ReduceOp is torch.distributed.ReduceOp
