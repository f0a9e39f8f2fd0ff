# SPDX-License-Identifier: BSD-3-Clause
"""Where torch has no half kernel, the error says which module it was, and the ways out."""

import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from kit.refusals import assert_approved

Call = Callable[[torch.Tensor], torch.Tensor]

CALLS: dict[str, Call] = {
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "svd": lambda x: torch.linalg.svdvals(x),
    "cdist": lambda x: torch.cdist(x, x),
    "quantile": lambda x: torch.quantile(x, 0.5, -1),
    "inverse": lambda x: (x @ x.mT).inverse(),
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


def assert_told(name: str, model: nn.Module, level: str) -> None:
    """The words of torch, and around them those of the book."""
    model = preamp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(RuntimeError) as caught:
        model(torch.eye(4)[None])
    preamp.engine_of(model).close()
    cause = caught.value.__cause__
    torchs = str(cause).strip().rstrip(".")
    assert isinstance(cause, RuntimeError)  # of torch; since 2.7 a class below it
    assert type(caught.value) is type(cause)
    half, wide = ("bfloat16", "O4") if level in ("O4", "O5") else ("float16", "O1")
    assert_approved("casting", name, str(caught.value), half=half, wide=wide, cause=torchs)


@NEEDS_POSITIONS
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("name", CALLS)
def test_it_names_the_module_the_function_and_the_ways_out(name: str, level: str) -> None:
    assert_told(name, Net(CALLS[name]), level)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_the_ways_out_are_ways_out(call: Call) -> None:
    kept = preamp.initialize(Net(call), opt_level="O2", keep_fp32=Mixer, verbosity=0)
    kept(torch.eye(4)[None])
    preamp.engine_of(kept).close()
    cast = preamp.initialize(Net(call), opt_level="O4", verbosity=0)
    assert cast(torch.eye(4)[None]).dtype is torch.float32


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_half_parameters_beside_a_float32_input_are_told_as_well(level: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x[0].float(), None, None, x[0, 0], x[0, 1], True)

    assert_told("half parameters", Net(call), level)


def test_in_the_model_s_own_forward_the_call_has_to_move() -> None:
    assert_told("in the model itself", Mixer(lambda x: torch.cdist(x, x)), "O2")


@NEEDS_POSITIONS
def test_under_casts_a_function_without_a_row_can_be_registered() -> None:
    assert_told("under casts", Net(lambda x: torch.special.zeta(x, x)), "O4")


def test_sparse_products_name_the_ways_out() -> None:
    call: Call = lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x[0])  # noqa: E731
    assert_told("a sparse product", Net(call), "O5")


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
