# SPDX-License-Identifier: BSD-3-Clause
"""Which back end is taken, and what is refused."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import preamp
from cases.back_ends import defaults
from kit.refusals import assert_refused, refused
from preamp.kernels import (
    BACKENDS,
    OP_NAMES,
    Ops,
    Rule,
    Update,
    backend,
    by_device,
    dispatch,
    explain,
)
from preamp.kernels.plain import Plain
from preamp.optimizers import FusedAdam

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", [*BACKENDS, "auto", "reference"])
def test_every_back_end_has_every_op(name: str) -> None:
    if name == "triton":
        pytest.importorskip("triton")
    ops = backend(name)
    assert ops.name == name
    for op in OP_NAMES:
        assert callable(getattr(ops, op))
    with pytest.raises(AttributeError):
        getattr(ops, "no_such_op")  # noqa: B009


@pytest.mark.parametrize("op", OP_NAMES)
def test_a_back_end_without_an_op_fails_by_name(op: str) -> None:
    ops = {name: vars(Plain).get(name, lambda *_: None) for name in OP_NAMES if name != op}
    with pytest.raises(TypeError, match=rf"abstract.*'?{op}"):
        type("Lacking", (Ops,), ops)()


def unknown(p: Any, g: Any, m: Any, size: Any) -> Any:
    return p - size * g, m


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownRule(Rule):
    """A rule that somebody has written, but not put into the table."""

    formulas: ClassVar[Any] = (unknown,)
    leaves_state: ClassVar[bool] = True

    @property
    def terms(self) -> Any:
        return {}, {}


def test_a_back_end_without_a_rule_fails_by_name(ops: Any) -> None:
    param, rule = torch.ones(3), UnknownRule(lr=0.1, weight_decay=0.0)
    with refused("kernels", "an unknown rule", kind=type(ops).__name__):
        ops.update_([param], [param + 1], rule=rule, update=Update())
    assert param.tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("device", "has_triton", "wanted"),
    [
        ("cpu", True, "jit"),
        ("cuda", True, "triton"),
        ("cuda", False, "plain"),
        ("xpu", True, "triton"),
        ("mps", True, "plain"),
        ("meta", True, "plain"),
    ],
)
def test_auto_goes_by_device(
    device: str, has_triton: bool, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "has_triton", lambda: has_triton)
    assert dispatch.choose(torch.device(device))[0] == wanted
    assert explain(device=device).startswith(f"kernels: {wanted} (")


def test_an_interpreter_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.choose(torch.device("cuda"))[0] == "plain"


FEATURES: dict[str, Any] = {  # of the processor, by the words of why numba is not taken
    "no way to tell": RuntimeError("no way to tell"),
    "the processor has no instructions that convert float16": {"f16c": False},
}


@pytest.mark.parametrize("why", [*FEATURES, "is not installed", "cannot be imported"])
def test_why_numba_is_not_taken(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")

    def features() -> Any:
        if isinstance(FEATURES[why], Exception):
            raise FEATURES[why]
        return FEATURES[why]

    if why in FEATURES:
        monkeypatch.setattr(binding, "get_host_cpu_features", features)
        monkeypatch.setattr(binding, "get_default_triple", lambda: "x86_64-unknown-linux")
    else:
        spec = None if why == "is not installed" else object()
        monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda _: spec)
        monkeypatch.setitem(sys.modules, "numba", None)
    found = dispatch.lacks_numba.__wrapped__()
    assert why in str(found)
    monkeypatch.setattr(dispatch, "lacks_numba", lambda: found)
    backend.cache_clear()
    assert dispatch.choose(CPU)[0] == "plain"
    assert str(found) in explain()
    assert_refused("kernels", "no numba", lambda: backend("jit"), why=str(found))


def test_a_back_end_that_does_not_run_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    backend.cache_clear()
    assert_refused("kernels", "no triton", lambda: backend("triton"))


FAR = [torch.ones(1, device="meta")]
REFUSED: dict[str, Callable[[], object]] = {
    "jit elsewhere": lambda: backend("jit").scale_add_(FAR, 2.0, [None]),
    "jit explained elsewhere": lambda: explain("jit", "meta"),
    "an unknown back end": lambda: backend("cudnn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused("kernels", name, REFUSED[name])


@pytest.mark.parametrize("name", ["plain", "reference"])
def test_initialize_takes_the_back_end_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    load = dispatch._load

    def note(name: str) -> Ops:
        loaded.append(name)
        return load(name)

    monkeypatch.setattr(dispatch, "_load", note)
    backend.cache_clear()  # what was used before is loaded
    model = torch.nn.Linear(2, 1)
    optimizer = FusedAdam(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, backend=name)
    with preamp.scale_loss(model(torch.ones(1, 2)).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    engine: Any = preamp.engine_of(model)
    assert set(loaded) == {name}
    assert f"kernels: {name} (asked for by name)" in engine.explain()
    engine.close()
    assert optimizer.backend == "auto"


def test_initialize_refuses_an_unknown_back_end_before_anything_else() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = FusedAdam(model.parameters())
    with refused("kernels", "an unknown back end", model, optimizer):
        preamp.initialize(model, optimizer, opt_level="O2", backend="cudnn")


def test_results_of_two_devices_are_joined_without_an_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two groups of one device stand for two. The default dtype is nobody's business.

    An index made of a list would be copied from ordinary memory, which waits for the device.
    """
    split = {CPU: [0, 3], torch.device("cpu", 0): [1, 2]}
    monkeypatch.setattr(by_device, "_by_device", lambda _: split)
    tensors = [torch.full((2,), float(value)) for value in (1, 2, math.inf)]
    tensors.append(torch.full((2,), 4.0, dtype=torch.float64))

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("torch.tensor")

    monkeypatch.setattr(torch, "tensor", refuse)
    ops = backend("reference")
    with defaults(torch.bfloat16, "cpu"):
        census = ops.census(tensors, CPU)
        norms = ops.l2norms(tensors, None, CPU), ops.l2norm(tensors, [None] * 4, CPU)
        found = [census.found_inf, census.max_abs, *norms]
        found.append(ops.census(tensors, CPU, with_norm=True).norm)
    each = [2**0.5, 8**0.5, math.inf, 32**0.5]
    wanted = [1.0, [1.0, 2.0, math.inf, 4.0], each, math.inf, math.inf]
    for result, value in zip(found, wanted, strict=True):
        assert result is not None
        assert result.dtype is torch.float32
        assert result.tolist() == pytest.approx(value, rel=1e-6)


def test_results_of_several_devices_keep_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    split = {torch.device("cpu"): [0, 2], torch.device("cpu", 0): [1]}
    monkeypatch.setattr(by_device, "_by_device", lambda _: split)
    halves = [torch.full((2,), float(place)).half() for place in range(3)]
    factors = [torch.tensor(by) for by in (1.0, 10.0, 100.0)]
    addends = [torch.full((2,), by) for by in (0.5, 0.25, 0.125)]
    wide = backend().widen_add(halves, factors, [*addends[:2], None])
    assert [tensor.tolist() for tensor in wide] == [[0.5] * 2, [10.25] * 2, [200.0] * 2]
    backend().axpby_(addends, 2.0, halves, 1.0, [addends[0], None, addends[2]])
    assert [tensor[0].item() for tensor in addends] == [0.5, 2.0, 4.125]
    backend().cast_copy_(halves, addends)
    assert [tensor[0].item() for tensor in addends] == [0.0, 1.0, 2.0]
    backend().scale_add_(addends, 3.0, [None, None, addends[1].clone()])
    assert [tensor[0].item() for tensor in addends] == [0.0, 3.0, 7.0]


def test_lists_on_two_devices_are_split() -> None:
    """The meta device stands for a second one; its values are nobody's."""
    ops = backend()
    with pytest.raises(NotImplementedError):
        ops.census([torch.ones(2), torch.ones(2, device="meta")], CPU)
    here, there = torch.full((2,), 3.0), torch.ones(2, device="meta")
    ops.scale_add_([here, there], 2.0, [None, None])
    assert here.tolist() == [6.0, 6.0]
