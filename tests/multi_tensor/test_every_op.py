# SPDX-License-Identifier: BSD-3-Clause
"""What holds for every operation of ``amp_C``: one row each, generic tests over all rows."""

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cases.back_ends import defaults
from cases.tolerances import assert_same
from cases.waits import waits_refused
from kit.refusals import assert_refused, refused
from multi_tensor.strategies import DTYPES, new_flag, random_list
from preamp.compat.multi_tensor import amp_C

F16, BF16, F32, F64 = DTYPES
Arguments = Callable[[int, str], tuple[Any, ...]]
SHAPES = [(3,), (), (0,), (2, 3, 2, 2), (1, 2, 2, 2, 3)]


def scalar(value: float, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((1,), value, dtype=dtype, device=device)


@dataclass(frozen=True)
class Row:
    """One operation.

    Attributes:
        name: In ``amp_C``.
        lists: What its lists are called.
        arguments: What follows the lists, for so many tensors on that device.
        optional: Lists that may follow.
    """

    name: str
    lists: Sequence[str]
    arguments: Arguments
    optional: Sequence[str] = ()

    @property
    def op(self) -> Callable[..., Any]:
        return getattr(amp_C, self.name)


MOMENTS = ("grads", "params", "exp_avgs", "exp_avg_sqs")
BETAS = (0.9, 0.99, 1e-3)


def capturable(count: int, device: str) -> tuple[Any, ...]:
    step = scalar(2, device, torch.int32)
    return (scalar(0.1, device), *BETAS, step, 1, 1, 0.1, scalar(0.5, device))


ROWS = [
    Row("multi_tensor_scale", ("in", "out"), lambda n, d: (0.3,)),
    Row("multi_tensor_axpby", ("x", "y", "out"), lambda n, d: (0.3, 0.7, -1)),
    Row("multi_tensor_l2norm", ("x",), lambda n, d: (True,)),
    Row("multi_tensor_l2norm_mp", ("x",), lambda n, d: (True,)),
    Row("multi_tensor_l2norm_scale", ("in", "out"), lambda n, d: (0.3, True)),
    Row("multi_tensor_unscale_l2norm", ("x",), lambda n, d: (scalar(0.5, d), True)),
    Row(
        "multi_tensor_sgd",
        ("grads", "params", "momentum_buffers"),
        lambda n, d: (0.1, 0.9, 0.1, 0.1, False, False, False, 0.5),
        ("copies",),
    ),
    Row("multi_tensor_adam", MOMENTS, lambda n, d: (0.1, *BETAS, 2, 1, 1, 0.1)),
    Row("multi_tensor_adam_capturable", MOMENTS, capturable),
    Row("multi_tensor_adam_capturable_master", (*MOMENTS, "masters"), capturable),
    Row(
        "multi_tensor_lamb",
        MOMENTS,
        lambda n, d: (0.1, *BETAS, 2, 1, 0.1, 1, 1, scalar(4.0, d), 1.0, False),
    ),
]
every_op = pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])


def lists_of(row: Row, layout: str = "contiguous") -> list[list[torch.Tensor]]:
    return [
        random_list(SHAPES, torch.float32, n, layout=layout, positive=True)
        for n in range(len(row.lists))
    ]


def run(row: Row, lists: Any, device: str = "cpu") -> list[torch.Tensor]:
    """Call the operation; return what it returns and its lists."""
    arguments = row.arguments(len(lists[0]), device)
    result = row.op(65536, new_flag(device=device), lists, *arguments)
    return [*(result or ()), *itertools.chain(*lists)]


def test_every_op_has_a_row() -> None:
    named = {row.name for row in ROWS} | {"update_scale_hysteresis"}
    assert named == set(amp_C.__all__)


@every_op
@pytest.mark.parametrize("chunk", [1, 7, 2048 * 32])
@pytest.mark.parametrize(
    ("dtype", "device"), [(F32, "cpu"), (BF16, "cpu"), (F64, "cpu"), (F32, "meta")]
)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_neither_chunks_nor_autograd_nor_defaults_of_the_process_change_anything(
    row: Row, chunk: int, dtype: torch.dtype, device: str, requires_grad: bool
) -> None:
    """Of defaults "meta" stands for a GPU beside tensors on the CPU."""
    lists, flag, arguments = lists_of(row), new_flag(), row.arguments(len(SHAPES), "cpu")
    lists = [[tensor.requires_grad_(requires_grad) for tensor in tensors] for tensors in lists]
    with defaults(dtype, device):
        returned = row.op(chunk, flag, lists, *arguments)
    results = [*(returned or ()), *itertools.chain(*lists)]
    for ours, wanted in zip(results, run(row, lists_of(row)), strict=True):
        assert_same(ours, wanted)
        assert ours.grad_fn is None
        assert ours.is_leaf


@every_op
def test_the_values_of_tensors_are_never_read(row: Row) -> None:
    """Tensors on the meta device have none, so any value that the host asks for raises."""
    lists = [[tensor.to("meta") for tensor in tensors] for tensors in lists_of(row)]
    results = run(row, lists, device="meta")
    assert {tensor.device.type for tensor in results} == {"meta"}
    counts = [torch.zeros(1, dtype=torch.int32, device="meta") for _ in range(2)]
    scale, found_inf = (torch.ones(1, device="meta") for _ in range(2))
    assert amp_C.update_scale_hysteresis(scale, *counts, found_inf, 2.0, 0.5, 1, 1) is scale


@every_op
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_gpu_is_never_waited_for(row: Row) -> None:
    lists = [[tensor.cuda() for tensor in tensors] for tensors in lists_of(row)]
    arguments, flag = row.arguments(len(SHAPES), "cuda"), new_flag(device="cuda")
    with waits_refused():
        row.op(65536, flag, lists, *arguments)
    wanted = lists_of(row)
    run(row, wanted)
    for ours, theirs in zip(itertools.chain(*lists), itertools.chain(*wanted), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)


LOOKS_AT_THE_FLAG = ("sgd", "adam_capturable", "adam_capturable_master")


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "grads" in row.lists], ids=lambda row: row.name
)
def test_a_set_flag_stops_the_steps_that_look_at_it(row: Row) -> None:
    """Of gradients that are not finite too; other steps neither read nor set it."""
    stops = row.name.removeprefix("multi_tensor_") in LOOKS_AT_THE_FLAG
    for flag in (0, 1):
        lists = lists_of(row)
        lists += [[tensor.half() for tensor in lists[0]] for _ in row.optional]
        lists[row.lists.index("grads")][0][0] = torch.inf
        before = [[tensor.clone() for tensor in tensors] for tensors in lists]
        noop_flag = new_flag(flag)
        row.op(65536, noop_flag, lists, *row.arguments(len(SHAPES), "cpu"))
        assert noop_flag.item() == flag
        pairs = zip(itertools.chain(*lists), itertools.chain(*before), strict=True)
        is_kept = all(torch.equal(ours, old) for ours, old in pairs)
        assert is_kept == (stops and bool(flag))


@every_op
def test_the_number_of_lists_is_checked(row: Row) -> None:
    most = len(row.lists) + len(row.optional)
    more = "".join(f", and optionally {name}" for name in row.optional)
    for count in (len(row.lists) - 1, most + 1):
        lists = [[torch.ones(2)] for _ in range(count)]
        words = {"op": row.name, "got": count, "needed": len(row.lists)}
        names = ", ".join(row.lists) + more
        with refused("multi_tensor", "another number of lists", names=names, **words):
            row.op(65536, new_flag(), lists, *row.arguments(1, "cpu"))


@every_op
def test_nothing_is_changed_by_a_call_that_is_refused(row: Row) -> None:
    lists = lists_of(row)
    before = [[tensor.clone() for tensor in tensors] for tensors in lists]
    arguments = row.arguments(len(SHAPES), "cpu")
    with refused("multi_tensor", "a float32 flag of any", op=row.name):
        row.op(65536, torch.zeros(1), lists, *arguments)
    last = lists[-1][-1]
    lists[-1][-1] = torch.ones(5, dtype=torch.int64)
    name = f"{[*row.lists, *row.optional][len(lists) - 1]}[{len(SHAPES) - 1}]"
    with refused("multi_tensor", "an int64 tensor of any", op=row.name, tensor=name):
        row.op(65536, new_flag(), lists, *arguments)
    lists[-1][-1] = last
    for ours, old in zip(itertools.chain(*lists), itertools.chain(*before), strict=True):
        assert_same(ours, old)


Refused = tuple[str, dict[str, Any], tuple[torch.dtype, ...]]
REFUSED: dict[str, Refused] = {  # the operation, arguments, dtypes of its lists
    "axpby, arg_to_check": ("multi_tensor_axpby", {"arg_to_check": 2}, (F32,) * 3),
    "adam, half exp_avgs": ("multi_tensor_adam", {}, (F16, F16, F16, F32)),
    "adam, half exp_avg_sqs": ("multi_tensor_adam", {}, (F16, F16, F32, F16)),
    "adam, mode": ("multi_tensor_adam", {"mode": 2}, (F32,) * 4),
    "lamb, mode": ("multi_tensor_lamb", {"mode": -1}, (F32,) * 4),
    "capturable, lr": ("multi_tensor_adam_capturable", {"lr": 1}, (F32,) * 4),
    "capturable, step": ("multi_tensor_adam_capturable", {"step": 1}, (F32,) * 4),
    "capturable, inv_scale": ("multi_tensor_adam_capturable", {"inv_scale": 1}, (F32,) * 4),
    "lamb, norm as number": ("multi_tensor_lamb", {"global_grad_norm": 4.0}, (F32,) * 4),
    "lamb, three norms": ("multi_tensor_lamb", {"global_grad_norm": torch.ones(3)}, (F32,) * 4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_op_refuses(name: str) -> None:
    op, changes, dtypes = REFUSED[name]
    row = next(row for row in ROWS if row.name == op)
    lists = [[torch.ones(2, dtype=dtype) for _ in range(2)] for dtype in dtypes]
    given = zip([*inspect.signature(row.op).parameters][3:], row.arguments(2, "cpu"), strict=False)
    arguments = [changes.get(argument, value) for argument, value in given]
    assert_refused("multi_tensor", name, lambda: row.op(65536, new_flag(), lists, *arguments))
    assert all(tensor.tolist() == [1.0, 1.0] for tensors in lists for tensor in tensors)


# -- what fits together, asked of scaling ----------------------------------------------------------


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def scale(lists: Any, flag: Any = None) -> None:
    amp_C.multi_tensor_scale(65536, new_flag() if flag is None else flag, lists, 2.0)


LISTS: dict[str, list[list[Any]]] = {
    "lists of other lengths": [[ones(2), ones(2)], [ones(2)]],
    "empty lists": [[], []],
    "other sizes": [[ones(2), ones(3)], [ones(2), ones(2, 2)]],
    "two devices": [[ones(2)], [torch.ones(2, device="meta")]],
    "other strides": [[ones(2, 3).t()], [ones(3, 2)]],
    "a sparse tensor": [[ones(2).to_sparse()], [ones(2)]],
    "two dtypes in a list": [[ones(2), ones(2)], [ones(2), ones(2, dtype=torch.float16)]],
    "integers": [[ones(2)], [ones(2, dtype=torch.int64)]],
    "something other than a tensor": [[ones(2)], [None]],
}
FLAGS: dict[str, Any] = {
    "a flag of float32": torch.zeros(1),
    "a flag of int64": torch.zeros(1, dtype=torch.int64),
    "a flag of two elements": torch.zeros(2, dtype=torch.int32),
    "a flag on another device": torch.zeros(1, dtype=torch.int32, device="meta"),
    "a number as flag": 7,
}


def values(lists: Sequence[Sequence[Any]]) -> list[list[float]]:
    readable = [t for tensors in lists for t in tensors if t is not None and t.device.type == "cpu"]
    return [t.to_dense().flatten().tolist() for t in readable]


@pytest.mark.parametrize("name", [*LISTS, *FLAGS])
def test_what_does_not_fit(name: str) -> None:
    lists = LISTS.get(name, [[ones(2)], [ones(2)]])
    before = values(lists)
    assert_refused("multi_tensor", name, lambda: scale(lists, FLAGS.get(name)))
    assert values(lists) == before


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_flag_of_one_element_may_have_any_shape(shape: tuple[int, ...]) -> None:
    flag = torch.zeros(shape, dtype=torch.int32)
    scale([[torch.tensor([torch.inf])], [ones(1)]], flag)
    assert flag.item() == 1


def test_tensors_are_paired_by_index_where_shapes_agree_and_else_by_memory() -> None:
    source = torch.arange(48.0).view(2, 3, 2, 4)
    target = torch.zeros_like(source).to(memory_format=torch.channels_last)
    volume = torch.zeros(1, 2, 3, 2, 4).to(memory_format=torch.channels_last_3d)
    scale([[source, source.view(1, 2, 3, 2, 4)], [target, volume]])
    assert torch.equal(target, source * 2)
    assert torch.equal(volume[0], source * 2)
    flat, part = torch.zeros(48), torch.zeros(100)[50:98]  # an offset into its memory
    scale([[target, source.view(6, 8)], [flat, part]])
    assert torch.equal(flat.view(2, 2, 4, 3), target.permute(0, 2, 3, 1) * 2)
    assert torch.equal(part.view_as(source), source * 2)
