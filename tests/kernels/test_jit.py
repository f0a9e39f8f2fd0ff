# SPDX-License-Identifier: BSD-3-Clause
"""What only the compiled kernels have: conversions of their own, threads, and code on the disk.

That they compute what the other back ends do is in the tests of every back end.
"""

import functools
import math
import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from cases.back_ends import JIT, PLAIN, REFERENCE
from cases.rules import BF16, F16, F32, ONE_EACH
from cases.selection import examples
from cases.stored import STORAGES, Case, assert_bits
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp.kernels import Update
from preamp.kernels.jit import loops
from preamp.kernels.jit import ops as jit_ops
from preamp.kernels.jit.formats import Layout
from preamp.kernels.rules import AdamRule, BiasCorrection

CPU = torch.device("cpu")
ADAM = AdamRule(
    lr=0.01, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True,
    bias_correction=BiasCorrection.MOMENTS,
)  # fmt: skip


def rounded(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    target = torch.empty_like(source, dtype=dtype)
    JIT.cast_copy_([source], [target])
    return target


# -- conversions -----------------------------------------------------------------------------------


def lower_halves(first: int) -> torch.Tensor:
    """Of words whose first three lower bits, which float16 keeps, are ``first``.

    Of the 13 bits that it drops, or bfloat16 besides the three, each alone, all below it, and both
    of these with the bit that is half a unit.
    """
    alone = [1 << bit for bit in range(13)]
    dropped = {0, *alone, *(bit - 1 for bit in alone), 0x1FFF}
    dropped |= {0x1000 | bits for bits in dropped}
    return torch.tensor([first << 13 | bits for bits in sorted(dropped)])


@pytest.mark.parametrize("first", range(8))
def test_float32_rounds_as_torch_does(first: int) -> None:
    """All upper halves of words, so all exponents; rounding asks of the rest whether it is zero."""
    upper = torch.arange(2**16)[:, None] << 16
    bits = (upper | lower_halves(first)).flatten()
    values = bits.to(torch.uint32).view(torch.int32).view(F32)
    for half in (F16, BF16):
        assert_same(rounded(values, half), values.to(half))


def test_subnormals_and_signs_of_zeros_stay() -> None:
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 0.0, -0.0])
    targets = [torch.ones(4)]
    JIT.axpby_(targets, 1.0, [tiny], 0.0, [None])
    assert targets[0].tolist() == tiny.tolist()
    assert torch.signbit(targets[0]).tolist() == [False, True, False, True]


# -- chunks and threads ----------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 3 * loops.CHUNK), max_size=8), threads=st.integers(1, 9))
@settings(max_examples=examples(100))
def test_chunks_cover_everything_once(sizes: list[int], threads: int) -> None:
    chunks = loops.cut(sizes)
    seen = [np.zeros(size, int) for size in sizes]
    for owner, start, length in chunks.table.T:
        assert 0 < length <= loops.CHUNK
        seen[owner][start : start + length] += 1
    assert all((of_one == 1).all() for of_one in seen)
    ends = chunks.shares(threads)
    assert ends == sorted(ends)
    assert (ends[0], ends[-1], len(ends)) == (0, chunks.table.shape[1], threads + 1)


def lists(seed: int, shapes: Any, half: torch.dtype = BF16) -> list[list[torch.Tensor]]:
    """Parameters, half gradients, two moments, halves."""
    generator = torch.Generator().manual_seed(seed)
    made = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    made[3] = [tensor.abs() for tensor in made[3]]
    grads = [tensor.to(half) for tensor in made[1]]
    return [made[0], grads, made[2], made[3], [p.to(half) for p in made[0]]]


def updated(ops: Any, seed: int, shapes: Any) -> list[torch.Tensor]:
    p, g, m, v, halves = lists(seed, shapes)
    ops.update_(p, g, m, v, rule=ADAM, update=Update(step=3, halves=halves))
    return [*p, *m, *v, *halves]


@pytest.mark.parametrize("size", [1023, 1024, 1025, loops.CHUNK - 1, loops.CHUNK + 1, 300_000])
def test_any_number_of_threads_has_the_same_bits(threads: Any, size: int) -> None:
    shapes = [(size,), (3,), (size // 2,)]
    threads(1)
    wanted = updated(JIT, 1, shapes)
    grads = lists(2, shapes)[1]
    norms = {JIT.l2norm(grads, [None] * 3, CPU).item()}
    for count in (2, 3, 8):
        threads(count)
        for ours, exact in zip(updated(JIT, 1, shapes), wanted, strict=True):
            assert torch.equal(ours, exact)
        norms.add(JIT.l2norm(grads, [None] * 3, CPU).item())
    assert len(norms) == 1


def test_each_operation_is_rounded_on_its_own() -> None:
    """To the bit, in numpy's float32; torch's roots are not those of IEEE on every processor."""
    f, ours = np.float32, lists(1, [(2000,)])
    p, g, m, v, _ = ([tensor.float().numpy().copy() for tensor in column] for column in ours)
    grad = g[0] * f(0.5)
    first = f(0.9) * m[0] + f(1 - 0.9) * grad
    second = f(0.99) * v[0] + f(1 - 0.99) * grad * grad
    root = np.sqrt(second * f(1 / (1 - 0.99**3))) + f(1e-8)
    wanted = p[0] - f(0.01) * (first * f(1 / (1 - 0.9**3)) / root + f(0.1) * p[0])
    told = Update(step=3, inv_scale=torch.tensor(0.5), halves=ours[4])
    JIT.update_(*ours[:4], rule=ADAM, update=told)
    for column, exact in ((ours[0], wanted), (ours[2], first), (ours[3], second)):
        assert column[0].numpy().tobytes() == exact.tobytes()
    assert torch.equal(ours[4][0], ours[0][0].to(BF16))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_has_threads_of_its_own(threads: Any) -> None:
    """Only preamp's: those that torch itself had are missed by its own operations there."""
    threads(2)
    shapes = [(300_000,)]
    wanted = [tensor.view(torch.int16).numpy() for tensor in updated(JIT, 1, shapes)]
    p, g, m, v, halves = lists(1, shapes)
    child = os.fork()
    if not child:  # no test goes on here
        code = 1
        try:
            signal.alarm(60)
            JIT.update_(p, g, m, v, rule=ADAM, update=Update(step=3, halves=halves))
            found = [tensor.view(torch.int16).numpy() for tensor in (*p, *m, *v, *halves)]
            same = [(a == b).all() for a, b in zip(found, wanted, strict=True)]
            code = int(not all(same))
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    again = [tensor.view(torch.int16).numpy() for tensor in updated(JIT, 1, shapes)]
    assert all((a == b).all() for a, b in zip(again, wanted, strict=True))


def walk(kernel: Any, chunks: loops.Chunks) -> None:
    values = torch.empty(chunks.numel)
    loops.walk(kernel, chunks, [[values]], np.array([[values.data_ptr()]]))


@pytest.mark.parametrize("of_the_caller", [False, True])
def test_an_error_in_a_thread_is_raised_and_all_have_ended(
    of_the_caller: bool, threads: Any
) -> None:
    """The caller's own thread has the first chunks."""
    threads(3)
    chunks = loops.cut([loops.CHUNK * 30])
    ended: list[int] = []
    others_may_end = threading.Event()

    def kernel(first: int, last: int, *_: Any) -> None:
        if first and of_the_caller:
            assert others_may_end.wait(60)
        ended.append(first)
        if of_the_caller == (first == 0):
            threading.Timer(0.2, others_may_end.set).start()
            raise RuntimeError("oh")

    with pytest.raises(RuntimeError, match="oh"):
        walk(kernel, chunks)
    assert len(ended) == 3


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers")
def test_an_interrupt_is_raised_when_all_threads_have_ended(threads: Any) -> None:
    """It comes while the caller waits for the others."""
    threads(2)
    ended: list[int] = []
    is_interrupted = threading.Event()

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def kernel(first: int, *_: Any) -> None:
        if first:
            assert is_interrupted.wait(60)
            time.sleep(0.1)
            ended.append(first)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            walk(kernel, loops.cut([loops.CHUNK * 30]))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(ended) == 1


# -- what autograd is told, and what no kernel can take --------------------------------------------


def test_tensors_without_memory_are_left_to_torch() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        JIT.scale_add_([y], 2.0, [None])
        return y

    assert torch.func.functionalize(doubled)(torch.ones(3)).tolist() == [2.0] * 3
    freed = torch.ones(100)
    JIT.census([freed], CPU)  # guards know it from now on
    cast("Any", freed.untyped_storage()).resize_(0)
    for ops in (JIT, PLAIN):
        with pytest.raises(RuntimeError, match=r"not allocated|has no memory"):
            ops.census([freed], CPU)
    with FakeTensorMode():
        assert JIT.l2norms([torch.ones(3)], None, CPU).shape == (1,)


def test_factors_of_one_element_are_numbers() -> None:
    found: list[list[torch.Tensor]] = []
    for ops in (JIT, REFERENCE):
        p, g, m, v, _ = lists(1, [(3,), (2,)])
        told = Update(step=1, inv_scale=torch.tensor([0.5]))
        ops.update_(p, g, m, v, rule=replace(ADAM, lr=torch.tensor([0.01])), update=told)
        found.append(p)
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
    targets = [torch.zeros(4) for _ in range(3)]
    with refused("kernels", "fewer factors than tensors"):
        JIT.axpby_(targets, torch.ones(2), targets, 1.0, [None] * 3)


def test_a_view_that_negates_is_not_read_as_it_lies() -> None:
    strided = torch.randn(4, dtype=torch.complex64).conj().imag
    dense = cast("Any", torch)._neg_view(torch.randn(4))
    for negated in (strided, dense):
        assert negated.is_neg()
        assert_same(JIT.l2norm([negated], [None], CPU), REFERENCE.l2norm([negated], [None], CPU))
        target = torch.zeros(4)
        for _ in range(3):
            JIT.cast_copy_([negated], [target])
            assert_same(target, negated.resolve_neg())


# -- far elements ---------------------------------------------------------------------------------

FAR = 25_600 * 100_000
"""Elements before the first one: more than 2**31, and whole rows of each of `FAR_SHAPES`."""

FAR_SHAPES = ((48, 200), (9, 1024))


def walk_far_away(
    kernel: Any, chunks: Any, rows: Any, at: np.ndarray, *arguments: Any, walk: Any
) -> None:
    """As if ``FAR`` elements, which nothing works on, were before those of every tensor."""
    table, places = chunks.table.copy(), at.copy()
    table[1] += FAR
    for number, tensors in enumerate(rows):
        for place, tensor in enumerate(tensors):
            shape = rows[0][place].shape
            if tensor.shape == shape:
                places[number, place] -= FAR * tensor.itemsize
            else:  # a scale for every 128 elements of a row, or what is left of them
                places[number, place] -= FAR // shape[1] * -(-shape[1] // 128) * 4
    told = [
        one._replace(starts=one.starts - FAR) if isinstance(one, Layout) else one
        for one in arguments
    ]
    walk(kernel, replace(chunks, table=table), rows, places, *told)


@pytest.mark.parametrize(("half", "kind"), STORAGES)
def test_updates_beyond_31_bits(half: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elements behind the first 2**31 of a tensor, without the memory for those before them."""
    row = next(row for row in ONE_EACH if row.op == "adam_")
    case = Case.of(row, half, kind, shapes=FAR_SHAPES)
    wanted = case.run(JIT)
    monkeypatch.setattr(jit_ops, "walk", functools.partial(walk_far_away, walk=jit_ops.walk))
    assert_bits(case.run(JIT).kept, wanted.kept)


def test_other_ops_beyond_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[torch.Tensor]:
        wide = [torch.linspace(-3.0, 5.0, math.prod(shape)).view(shape) for shape in FAR_SHAPES]
        half = [tensor.half() for tensor in wide]
        census, largest = JIT.census(half, CPU, with_norm=True), JIT.census(half, CPU).max_abs
        assert largest is not None
        JIT.axpby_(wide, 2.0, wide, 0.5, half)
        lows = [torch.empty_like(tensor, dtype=torch.int16) for tensor in wide]
        JIT.split_(wide, half, lows)
        return [census.found_inf, census.norm, largest, *wide, *half, *lows]

    wanted = results()
    monkeypatch.setattr(jit_ops, "walk", functools.partial(walk_far_away, walk=jit_ops.walk))
    for ours, other in zip(results(), wanted, strict=True):
        assert torch.equal(ours, other)
