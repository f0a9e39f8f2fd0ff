# SPDX-License-Identifier: BSD-3-Clause
"""Where torch has no half kernel, the error says which module it was, and the ways out."""

import re
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
MORE_CALLS: dict[str, Call] = {
    "half parameters": lambda x: F.batch_norm(x[0].float(), None, None, x[0, 0], x[0, 1], True),
    "sparse": lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x[0]),
}
"""Which O4 does not cast either."""


class Mixer(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(4, 4), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer(x))


def within(call: Call) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), Mixer(call))


def assert_told(name: str, model: nn.Module, level: str, module: str = "1 (Mixer)") -> None:
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
    words = {"half": half, "wide": wide, "cause": torchs, "module": module}
    assert_approved("casting", name, str(caught.value), **words)


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("name", [*CALLS, *MORE_CALLS])
def test_it_names_the_module_and_the_ways_out(name: str, level: str) -> None:
    assert_told("no half kernel", within({**CALLS, **MORE_CALLS}[name]), level)


def test_other_modules_and_casts_of_functions() -> None:
    assert_told("no half kernel", Mixer(CALLS["cdist"]), "O2", "The model (Mixer)")
    assert_told("no half kernel under casts", within(lambda x: torch.special.zeta(x, x)), "O4")


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_the_ways_out_are_ways_out(call: Call) -> None:
    kept = preamp.initialize(within(call), opt_level="O2", keep_fp32=Mixer, verbosity=0)
    kept(torch.eye(4)[None])
    preamp.engine_of(kept).close()
    cast = preamp.initialize(within(call), opt_level="O4", verbosity=0)
    assert cast(torch.eye(4)[None]).dtype is torch.float32


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
    with pytest.raises(RuntimeError, match=r"The model \(_Failing\)") as caught:
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
