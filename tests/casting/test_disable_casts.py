# SPDX-License-Identifier: BSD-3-Clause
"""Blocks without casts, and closures that get them back."""

from __future__ import annotations

import pytest
import torch

from casting.probe import BF16, CPU, F32, Probe, held, product
from preamp.casting.regions import attach_cast_region
from preamp.casting.thread_casts import disable_casts, push_thread_casts, thread_casts_restored

pytestmark = pytest.mark.usefixtures("function_casts")


@pytest.mark.apex("10 A-8")
def test_disable_casts_nests_and_survives_exceptions() -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    seen: list[torch.dtype] = []
    with disable_casts():
        with pytest.raises(KeyError), disable_casts():
            raise KeyError
        seen += [product(), model(torch.ones(2, 4)).dtype]
    seen += [product(), model(torch.ones(2, 4)).dtype]
    handle.remove()

    assert seen == [F32, F32, BF16, BF16]


@pytest.mark.apex("0 apex.amp.disable_casts", "2.1 disable_casts")
def test_disable_casts_inside_a_model() -> None:
    seen: list[torch.dtype] = []

    def inside() -> None:
        with disable_casts():
            seen.append(product())
        seen.append(product())

    model = Probe(inside)
    held(attach_cast_region, model, CPU, BF16)

    model(torch.ones(2, 4))

    assert seen == [F32, BF16]


@pytest.mark.apex("2.1 disable_casts")
def test_disable_casts_without_an_engine_leaves_autocast_on() -> None:
    with torch.autocast("cpu", dtype=BF16), disable_casts():
        dtype = product()

    assert dtype is BF16


def test_closure_inside_a_step_sees_the_casts_again() -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    seen: list[torch.dtype] = []
    with disable_casts(), disable_casts():
        with thread_casts_restored():
            seen += [product(), model(torch.ones(2, 4)).dtype]
        seen += [product(), model(torch.ones(2, 4)).dtype]
    with thread_casts_restored():
        seen.append(product())
    handle.remove()

    assert seen == [BF16, BF16, F32, F32, BF16]
