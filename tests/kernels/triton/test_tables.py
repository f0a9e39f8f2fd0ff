# SPDX-License-Identifier: BSD-3-Clause
"""Tables, sorting into launches, and what is refused."""

import gc
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from cases.rules import BF16, F16, F32, ONE_EACH, ROWS, RuleRow
from cases.stored import Case, on
from kit.refusals import assert_refused
from preamp.kernels import Update
from preamp.kernels.plans import planned

CHUNK = 8192


@pytest.mark.parametrize("most", [1, 2**18])
def test_a_layout(part: Any, most: int) -> None:
    """Of more than 2**31 elements too."""
    assert part("tables").CHUNK == CHUNK
    sizes = [0, 1, CHUNK, CHUNK + 1, most * CHUNK + 5]
    layout = part("tables").layout_of(sizes, [4, 3, 2, 1, 0])
    assert layout.dtype == np.int64
    numels, first, positions, owners = np.split(layout, [5, 11, 16])
    assert numels.tolist() == sizes
    assert first.tolist() == [0, 0, 1, 2, 4, 5 + most]
    assert positions.tolist() == [4, 3, 2, 1, 0]
    assert owners.tolist() == [1, 2, 3, 3] + [4] * (most + 1)


def test_tables_are_remembered(part: Any, device: torch.device) -> None:
    tables = part("tables")
    params = [torch.ones(5, device=device) for _ in range(3)]
    grads = [torch.ones(5, device=device) for _ in range(3)]
    first, again = (tables.table(planned(params, grads)[0][0]) for _ in range(2))
    assert again.pointers is first.pointers
    assert again.layout is first.layout
    moved = [grad.clone() for grad in grads]
    later = tables.table(planned(params, moved)[0][0])
    assert later.layout is first.layout
    wanted = [tensor.data_ptr() for tensor in (*params, *moved)]
    assert later.pointers.tolist() == wanted
    assert first.pointers.tolist()[3:] == [grad.data_ptr() for grad in grads]


def test_a_step_uploads_only_what_changed(
    ops: Any, part: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = part("tables")
    uploads: list[int] = []
    upload = tables._upload
    monkeypatch.setattr(tables, "_upload", lambda *a: (uploads.append(1), upload(*a))[1])
    params = [torch.ones(11, device=device) for _ in range(4)]
    grads = [torch.ones(11, device=device) for _ in range(4)]
    ops.scale_add_(params, 0.5, grads)
    assert len(uploads) <= 2
    uploads.clear()
    ops.scale_add_(params, 0.5, grads)
    assert uploads == []
    kept = [grad.clone() for grad in grads]
    ops.scale_add_(params, 0.5, kept)
    assert uploads == [1]


class Graph:
    """As ``torch.cuda.CUDAGraph`` while it is captured."""

    captured: ClassVar[list[Any]] = []

    @classmethod
    def get_currently_capturing_graph(cls) -> Any:
        if not cls.captured:
            raise RuntimeError("another library captures")
        return cls.captured[0]


@pytest.fixture
def capturing(part: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of tables, as if a graph were captured."""
    tables = part("tables")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(tables, "is_capturing", lambda device: True)
    monkeypatch.setattr(tables, "_read_by_unknown", [])
    monkeypatch.setattr(tables._reserve, "_free", torch.zeros(100, dtype=torch.int64))
    return tables


def test_a_captured_graph_has_tables_of_its_own(
    part: Any, device: torch.device, request: Any, monkeypatch: Any
) -> None:
    [plan], _ = planned([torch.ones(7, device=device)])
    before = part("tables").table(plan)
    captured = request.getfixturevalue("capturing").table(plan)
    monkeypatch.undo()
    after = part("tables").table(plan)
    for name in ("layout", "pointers"):
        assert getattr(after, name) is getattr(before, name)
        assert getattr(captured, name) is not getattr(before, name)
        assert torch.equal(getattr(captured, name), getattr(before, name))


@pytest.mark.parametrize("knows", [True, False])
def test_what_a_graph_reads_lives_as_long_as_it(
    capturing: Any, device: torch.device, knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or as the process, where this torch does not tell which graph is captured."""
    monkeypatch.setattr(Graph, "captured", [Graph()] if knows else [])
    freed: list[str] = []
    take = capturing._reserve.take

    def taken(values: torch.Tensor) -> torch.Tensor:
        pinned = take(values)
        weakref.finalize(pinned, freed.append, "pinned")
        return pinned

    monkeypatch.setattr(capturing._reserve, "take", taken)
    table = capturing.table(planned([torch.ones(7, device=device)])[0][0])
    del table
    assert freed == []
    Graph.captured.clear()
    gc.collect()
    assert freed == (["pinned"] * 2 if knows else [])


def test_graphs_read_what_was_reserved_before(part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = part("tables")
    made: list[int] = []
    empty = torch.empty

    def note(size: int, *, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made.append(size)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", note)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda _: "pinned now")
    reserve = tables._Reserve()
    made.clear()
    values = torch.arange(1000)
    assert reserve.take(values) == "pinned now"
    for size in (1000, 10, 20000, 1000):
        reserve.prepare(size)
    assert made == [2**17, 8 * 20000]
    first, second = reserve.take(values), reserve.take(values + 1)
    assert torch.equal(first, values)
    assert torch.equal(second, values + 1)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    reserve.prepare(20000)  # the next graph has as much
    assert len(made) == 3
    assert torch.equal(first, values)


def test_what_kernels_take(part: Any, device: torch.device) -> None:
    image = torch.ones(2, 3, 4, 5, device=device)
    last = image.to(memory_format=torch.channels_last)
    thin = torch.ones(4, 1, device=device)
    odd = thin.as_strided((4, 1), (1, 77))
    pairs = [
        (image, image, True),
        (last, last.half(), True),
        (image, last, False),
        (last, image, False),
        (image.transpose(0, 3), last.transpose(0, 3), False),
        (image.transpose(0, 3), image.transpose(0, 3), True),
        (image[:, ::2], image[:, ::2], False),
        (thin, odd, True),
        (image[:1].expand(2, 3, 4, 5), image, False),
        (torch.ones((), device=device), torch.ones((), device=device), True),
        (image, torch.ones(2, device=device), False),
        (image.int(), image, False),
        (image.to_sparse(), image, False),
        (image, torch.ones(2, 3, 4, 5, device="meta"), False),
        (torch.ones(2, device=device, dtype=torch.complex64).conj().imag, thin[:2, 0], False),
    ]
    plans, others = planned([first for first, _, _ in pairs], [second for _, second, _ in pairs])
    assert others == [i for i, (_, _, is_taken) in enumerate(pairs) if not is_taken]
    assert {plan.dtypes for plan in plans} == {(F32, F32), (F32, F16)}
    assert sorted(place for plan in plans for place in plan.places) == [
        i for i, (_, _, is_taken) in enumerate(pairs) if is_taken
    ]


class Wrapper(torch.Tensor):
    """As DTensor: a tensor of another one, at no address."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inside.shape, dtype=inside.dtype, device=inside.device
        )

    def __init__(self, inside: torch.Tensor) -> None:
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inner = pytree.tree_map_only(Wrapper, lambda wrapper: wrapper.inside, (args, kwargs or {}))
        return func(*inner[0], **inner[1])


def test_wrappers_are_not_taken_for_memory(ops: Any, part: Any, device: torch.device) -> None:
    """Kernels would write to the address 0."""
    inside = torch.ones(3, device=device)
    wrapper = Wrapper(inside)
    plans, others = planned([wrapper, inside, torch.nn.Parameter(inside)])
    assert others == [0]
    assert plans[0].places == [1, 2]
    ops.scale_add_([wrapper], 3.0, [None])
    assert inside.tolist() == [3.0] * 3


def test_groups_by_dtype(part: Any, device: torch.device) -> None:
    params = [torch.ones(2, device=device) for _ in range(4)]
    halves = [None, params[1].half(), params[2].bfloat16(), None]
    plans, others = planned(params, halves)
    assert others == []
    assert [(plan.dtypes, plan.places) for plan in plans] == [
        ((F32, None), [0, 3]),
        ((F32, F16), [1]),
        ((F32, BF16), [2]),
    ]
    assert [len(row) for row in plans[0].rows] == [2, 0]


@pytest.mark.parametrize("op", ["census", "l2norms", "scale_add_", "cast_copy_", "update_"])
def test_other_devices_are_refused(ops: Any, device: torch.device, op: str) -> None:
    ones = [torch.ones(2, device="meta")]
    calls = {
        "census": lambda: ops.census(ones, device),
        "l2norms": lambda: ops.l2norms(ones, None, device),
        "scale_add_": lambda: ops.scale_add_(ones, 1.0, [None]),
        "cast_copy_": lambda: ops.cast_copy_(ones, ones),
        "update_": lambda: ops.update_(ones, ones, ones, rule=ROWS[-1].rule, update=Update()),
    }
    here = "cpu" if device.type == "cpu" else "cuda and xpu"
    assert_refused("kernels", "triton elsewhere", calls[op], here=here)


# -- how many kernels an op launches ----------------------------------------------------------


IN_QUICK = ("adam_", "lamb_", "novograd_")  # with a number for each tensor, and without


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.op, marks=[] if row.op in IN_QUICK else [pytest.mark.full])
        for row in ONE_EACH
    ],
)
def test_launches_of_rules_do_not_grow_with_the_tensors(
    ops: Any, device: torch.device, row: RuleRow, launches: Any
) -> None:
    counts = []
    for tensors in (1, 50):
        shapes = [(3,)] * (2 + row.states)
        lists = [[torch.ones(s, device=device) for _ in range(tensors)] for s in shapes]
        if row.op == "novograd_":
            lists[-1] = [torch.ones((), device=device) for _ in range(tensors)]
        with launches() as names:
            ops.update_(*lists, rule=row.rule, update=Update())
        counts.append(list(names))
        assert len({tuple(tensor.tolist()) for tensor in lists[0]}) == 1
    assert counts[0] == counts[1]
    assert names.count("update_kernel") == (2 if row.op == "lamb_" else 1)


def test_launches_do_not_grow_with_the_tensors(
    ops: Any, device: torch.device, launches: Any
) -> None:
    """One per dtype signature; a census has a second, over tensors, for what chunks found."""
    grads = [torch.ones(3, dtype=dtype, device=device) for dtype in (F16, F32) for _ in range(60)]
    with launches() as names:
        ops.census(grads, device)
    assert names == ["measure_chunks", "gather_kernel"] * 2
    with launches() as names:
        ops.scale_add_(grads, 0.5, [None] * 120)
    assert names == ["combine_kernel"] * 2
    with launches() as names:
        ops.widen_add(grads[:60], [torch.ones((), device=device)] * 60, [None] * 60)
    assert names == ["combine_kernel"]
    with launches() as names:
        case = on(device, Case.of(ONE_EACH[0], BF16, "8bit", shapes=[(2, 300)] * 3))
        case.run(ops, inv_scale=torch.ones((), device=device))
    assert names == ["update_kernel"]
