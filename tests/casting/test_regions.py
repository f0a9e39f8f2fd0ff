# SPDX-License-Identifier: BSD-3-Clause
"""Where casts are active: model regions, thread-wide casts, disabled blocks, backward passes."""

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from casting.probe import BF16, CPU, F16, F32, Probe, held, product
from preamp.casting import regions
from preamp.casting.autocast_state import WEIGHT_CACHE_KEEPS_GRADIENTS
from preamp.casting.regions import attach_cast_region, attach_plain_region
from preamp.casting.thread_casts import disable_casts, push_thread_casts, thread_casts_restored

pytestmark = pytest.mark.usefixtures("function_casts")


def test_casts_are_active_inside_the_model_only() -> None:
    model = Probe()
    handle = held(attach_cast_region, model, CPU, BF16)

    inside, outside = model(torch.ones(2, 4)).dtype, product()
    handle.remove()
    removed = model(torch.ones(2, 4)).dtype

    assert (inside, outside, removed) == (BF16, F32, F32)


def test_hooks_copy_and_pickle_with_the_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity())
    held(attach_cast_region, model, CPU, BF16)
    held(attach_plain_region, model[1])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)

    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]

    model[0].weight.data.zero_()
    for duplicate in copies:
        assert duplicate(torch.ones(2, 4)).dtype is BF16
        assert duplicate[0].weight.any()


def test_exception_in_a_forward_ends_the_region() -> None:
    def fail() -> None:
        raise KeyError("planted")

    model = Probe(fail)
    held(attach_cast_region, model, CPU, BF16)

    with pytest.raises(KeyError, match="planted"):
        model(torch.ones(2, 4))

    assert product() is F32


def test_regions_nest_and_recur() -> None:
    seen: list[torch.dtype] = []
    inner = Probe(lambda: seen.append(product()))
    outer = Probe()
    calls = iter([lambda: outer(torch.ones(2, 4)), lambda: inner(torch.ones(2, 4))])
    outer.inside = lambda: (next(calls)(), seen.append(product()))
    held(attach_cast_region, outer, CPU, BF16)
    held(attach_cast_region, inner, CPU, F16)

    outer(torch.ones(2, 4))

    assert seen == [F16, BF16, BF16]


def test_weights_replaced_between_forwards_are_seen() -> None:
    model = Probe()
    held(attach_cast_region, model, CPU, BF16)
    handle = held(push_thread_casts, CPU, BF16)
    outputs = []

    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            model.linear.weight.fill_(value)
            model.linear.bias.zero_()
        outputs.append(model(torch.ones(1, 4))[0, 0].item())
        outputs.append(F.linear(torch.ones(1, 4), model.linear.weight)[0, 0].item())
    handle.remove()

    assert outputs == [4.0, 4.0, 8.0, 8.0, 12.0, 12.0]


@pytest.mark.skipif(not WEIGHT_CACHE_KEEPS_GRADIENTS, reason="this torch's cache is not used")
def test_weight_is_cast_once_in_a_forward() -> None:
    model = Probe()
    outputs: list[torch.Tensor] = []
    model.inside = lambda: outputs.append(model.linear(torch.ones(2, 4)))
    held(attach_cast_region, model, CPU, BF16)

    outputs.append(model(torch.ones(2, 4)))
    nodes: set[Any] = set()
    stack: list[Any] = [output.grad_fn for output in outputs]
    while stack:
        node = stack.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            stack += [parent for parent, _ in node.next_functions]

    casts = [node for node in nodes if type(node).__name__ == "ToCopyBackward0"]
    assert len(casts) == 2  # weight and bias


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("first_use", [torch.no_grad, torch.inference_mode])
def test_gradients_flow_when_a_weight_was_first_used_without_grad(
    dtype: torch.dtype, first_use: Any
) -> None:
    model = Probe()
    model.inside = lambda: first_use()(model.linear)(torch.ones(2, 4))
    held(attach_cast_region, model, CPU, dtype)

    model(torch.ones(2, 4)).float().sum().backward()

    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.tolist() == [[2.0] * 4] * 4


def test_weight_cache_stays_off_where_it_loses_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "WEIGHT_CACHE_KEEPS_GRADIENTS", False)
    seen: list[bool] = []
    model = Probe(lambda: seen.append(torch.is_autocast_cache_enabled()))
    held(attach_cast_region, model, CPU, BF16)

    output = model(torch.ones(2, 4))

    assert seen == [False]
    assert output.dtype is BF16


def test_thread_casts_cover_functions_outside_models() -> None:
    handle = held(push_thread_casts, CPU, BF16)
    layer = nn.Linear(4, 4)(torch.ones(2, 4))
    loss = F.cross_entropy(layer, torch.tensor([0, 1]))
    cache = torch.is_autocast_cache_enabled()
    handle.remove()

    assert layer.dtype is BF16
    assert loss.dtype is F32
    assert not cache


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_thread_casts_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    dtypes = [BF16, F16, BF16]
    handles = [held(push_thread_casts, CPU, dtype) for dtype in dtypes]
    left = list(range(3))

    for index in order:
        assert product() is dtypes[left[-1]]
        handles[index].remove()
        handles[index].remove()
        left.remove(index)

    assert product() is F32


def test_thread_casts_respect_the_state_before_them() -> None:
    with torch.autocast("cpu", dtype=F16, cache_enabled=False):
        handle = held(push_thread_casts, CPU, BF16)
        during = product()
        handle.remove()
        after = product()

    assert (during, after) == (BF16, F16)


def test_thread_casts_may_change_inside_a_disabled_block() -> None:
    first = held(push_thread_casts, CPU, BF16)
    with disable_casts():
        first.remove()
        second = held(push_thread_casts, CPU, F16)
        inside = product()
    outside = product()
    second.remove()

    assert (inside, outside) == (F32, F16)


def test_other_threads_have_no_thread_casts() -> None:
    handle = held(push_thread_casts, CPU, BF16)
    seen: list[torch.dtype] = []
    thread = threading.Thread(target=lambda: seen.append(product()))
    thread.start()
    thread.join()
    handle.remove()

    assert seen == [F32]


def test_models_run_in_several_threads_at_once() -> None:
    barrier = threading.Barrier(2, timeout=20)
    models = {dtype: Probe(barrier.wait) for dtype in (BF16, F16)}
    outputs: dict[torch.dtype, tuple[torch.dtype, torch.dtype]] = {}
    for dtype, model in models.items():
        held(attach_cast_region, model, CPU, dtype)

    def run(dtype: torch.dtype) -> None:
        outputs[dtype] = (models[dtype](torch.ones(2, 4)).dtype, product())

    threads = [threading.Thread(target=run, args=(dtype,)) for dtype in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert outputs == {BF16: (BF16, F32), F16: (F16, F32)}


def test_plain_model_is_not_touched_by_thread_casts() -> None:
    plain, caster = Probe(), Probe()
    held(attach_plain_region, plain)
    held(attach_cast_region, caster, CPU, BF16)
    seen: list[torch.dtype] = []
    caster.inside = lambda: seen.append(plain(torch.ones(2, 4)).dtype)
    handle = held(push_thread_casts, CPU, BF16)

    seen.append(plain(torch.ones(2, 4)).dtype)
    caster(torch.ones(2, 4))
    handle.remove()
    caster(torch.ones(2, 4))

    assert seen == [F32, F32, F32]


def test_plain_model_respects_a_region_of_the_users_own() -> None:
    plain = Probe()
    held(attach_plain_region, plain)
    handle = held(push_thread_casts, CPU, BF16)
    with torch.autocast("cpu", dtype=F16):
        output = plain(torch.ones(2, 4))
    handle.remove()

    assert output.dtype is F16


# -- blocks without casts ---------------------------------------------------------------------


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
