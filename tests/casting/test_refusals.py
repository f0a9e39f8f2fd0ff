# SPDX-License-Identifier: BSD-3-Clause
"""Where torch has no half kernel, the error says which module it was, and the ways out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp

Call = Callable[[torch.Tensor], torch.Tensor]

CALLS: dict[str, tuple[Call, str]] = {
    "fft": (lambda x: torch.fft.rfft(x).abs(), "torch.fft.rfft"),
    "svd": (lambda x: torch.linalg.svdvals(x), "torch.linalg.svdvals"),
    "cdist": (lambda x: torch.cdist(x, x), "torch.cdist"),
    "quantile": (lambda x: torch.quantile(x, 0.5, -1), "torch.quantile"),
    "inverse": (lambda x: (x @ x.mT).inverse(), "(x @ x.mT).inverse"),
}
NEEDS_POSITIONS = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="an older Python does not know where in a line it is"
)


class Mixer(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer(x))


class Net(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(4, 4), Mixer(call))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts(x)


def _refused(model: nn.Module, level: str) -> BaseException:
    model = preamp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.eye(4)[None])
    preamp.engine_of(model).close()
    return caught.value


@NEEDS_POSITIONS
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("kind", CALLS)
def test_it_names_the_module_the_function_and_the_ways_out(kind: str, level: str) -> None:
    call, name = CALLS[kind]
    error = _refused(Net(call), level)
    half, wide = ("bfloat16", "O4") if level == "O5" else ("float16", "O1")
    owner, _, function = name.rpartition(".")
    adds = f"({owner}, {function!r})" if owner.startswith("torch") else ""
    for part in (
        f"{name} at ",
        "test_refusals.py:",
        "in parts.1 (Mixer), cannot run: ",
        f"Not every function of torch takes {half}, alone or beside float32. ",
        "Pass keep_fp32=Mixer to initialize, call the function on tensor.float(), or use "
        f"opt_level={wide!r}, ",
        f"others by register_float_function{adds}.",
    ):
        assert part in str(error)
    assert type(error) is type(error.__cause__)
    assert str(error.__cause__) in str(error)


@pytest.mark.parametrize("kind", CALLS)
def test_the_ways_out_are_ways_out(kind: str) -> None:
    call, _ = CALLS[kind]
    kept = preamp.initialize(Net(call), opt_level="O2", keep_fp32=Mixer, verbosity=0)
    kept(torch.eye(4)[None])
    preamp.engine_of(kept).close()
    cast = preamp.initialize(Net(call), opt_level="O4", verbosity=0)
    assert cast(torch.eye(4)[None]).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_half_parameters_beside_a_float32_input_are_told_as_well(level: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x[0].float(), None, None, x[0, 0], x[0, 1], True)

    error = _refused(Net(call), level)
    assert str(error.__cause__) in str(error) != str(error.__cause__)
    assert "Pass keep_fp32=Mixer to initialize" in str(error)


def test_in_the_model_s_own_forward_the_call_has_to_move() -> None:
    error = _refused(Mixer(lambda x: torch.cdist(x, x)), "O2")
    assert "in the model (Mixer)" in str(error)
    assert "Move the call to a module of its own and name its type in keep_fp32=" in str(error)


@NEEDS_POSITIONS
def test_under_casts_a_function_without_a_row_can_be_registered() -> None:
    def zeta(x: torch.Tensor) -> torch.Tensor:
        return torch.special.zeta(x, x)

    error = _refused(Net(zeta), "O4")
    way_out = "Call register_float_function(torch.special, 'zeta'), so that it runs in float32"
    assert way_out in str(error)
    assert isinstance(error.__cause__, RuntimeError)  # of torch; since 2.7 a class below it


class _Failing(nn.Module):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(4, 4), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error", [ValueError("Half"), RuntimeError("no such thing"), RuntimeError("halfway")], ids=str
)
def test_other_errors_are_left_alone(error: Exception) -> None:
    words = error.args
    model = preamp.initialize(_Failing(error), opt_level="O2", verbosity=0)
    with pytest.raises(type(error), match=re.escape(words[0])) as caught:
        model(torch.ones(4))
    assert caught.value is error
    assert error.args is words
    assert error.__cause__ is None


@pytest.mark.parametrize(
    "name",
    ["Half", "c10::BFloat16", "torch.HalfTensor", "CPUBFloat16Type", "BFloat16Type", "HalfType"],
)
def test_all_of_torch_s_names_of_half_tensors_are_known(name: str) -> None:
    error = RuntimeError(f"expected all tensors of torch.FloatTensor, found {name}")
    model = preamp.initialize(_Failing(error), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match="in the model") as caught:
        model(torch.ones(4))
    assert caught.value is error
    assert f"found {name}" in str(error.__cause__)


def test_sparse_products_name_the_ways_out() -> None:
    error = _refused(Net(lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x[0])), "O5")
    assert "parts.1 (Mixer), cannot run: " in str(error)


def test_an_error_with_a_cause_and_one_that_is_being_handled_are_left_alone() -> None:
    error = RuntimeError("Half")
    error.__cause__ = KeyError()
    model = preamp.initialize(_Failing(error), opt_level="O2", verbosity=0)
    with pytest.raises(RuntimeError, match=r"^Half$"):
        model(torch.ones(4))

    class Quiet(nn.Module):
        def forward(self, x: torch.Tensor) -> None:
            return None

    quiet = preamp.initialize(Quiet(), opt_level="O2", verbosity=0)
    handled = RuntimeError("Half")
    try:
        raise handled
    except RuntimeError:
        quiet(torch.ones(4))
    assert handled.args == ("Half",)
