# SPDX-License-Identifier: BSD-3-Clause
"""``amp.init``: Apex's first interface, and its known bugs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from preamp import amp
from preamp.casting.functions import CAST_REPORTS, FUNCTION_CASTS
from preamp.casting.patches import PATCHES
from preamp.compat.handle import AmpHandle, NoOpHandle, OptimWrapper
from preamp.fp16_utils import FP16_Optimizer

HALVES = [torch.float16, torch.bfloat16]
OVERFLOW = 3e38


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    handle = getattr(amp._amp_state, "handle", None)
    if handle is not None:
        handle.deactivate()
    assert not PATCHES._patched


def one_weight(count: int = 1) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Weights of 1; a loss of n times their sum has the gradient n."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(count)]
    return weights, torch.optim.SGD(weights, lr=1.0)


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def backward(
    owner: Any, weights: list[nn.Parameter], factor: float = 1.0, *optimizer: Any
) -> float:
    loss = torch.stack([weight.sum() for weight in weights]).sum() * factor
    with owner.scale_loss(loss, *optimizer) as scaled:
        scaled.backward()
    return (scaled / loss).item()


# -- casts ------------------------------------------------------------------------------------


@pytest.mark.apex(
    "0 apex.amp.init",
    "0 apex.amp.handle.AmpHandle",
    "4.1 amp.init(…)",
    "4.1 patch_type=torch.bfloat16",
    "A handle._deactivate() in tests",
)
@pytest.mark.parametrize("patch_type", HALVES)
def test_casts_hold_until_deactivated(patch_type: torch.dtype) -> None:
    handle = amp.init(patch_type=patch_type)

    during = [product(), F.softmax(torch.ones(2, dtype=patch_type), 0).dtype]
    active = handle.is_active()
    handle._deactivate()
    handle._deactivate()

    assert isinstance(handle, AmpHandle)
    assert during == [patch_type, torch.float32]
    assert active
    assert not handle.is_active()
    assert product() is torch.float32


@pytest.mark.apex("4.1 handle: is_active, _disable_casts, _deactivate")
def test_user_functions_are_cast() -> None:
    seen = amp.half_function(lambda x: x.dtype)
    handle = amp.init()
    inside = seen(torch.ones(1))
    with handle._disable_casts():
        disabled = seen(torch.ones(1))
    handle._deactivate()

    assert [inside, disabled, seen(torch.ones(1))] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.apex("4.1 amp.init(…)")
def test_banned_functions() -> None:
    half, target = torch.full((1,), 0.5, dtype=torch.float16), torch.ones(1)
    amp.init()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy got a float16 tensor"):
        F.binary_cross_entropy(half, target)

    amp.init(allow_banned=True)

    assert F.binary_cross_entropy(half, target).dtype is torch.float32


@pytest.mark.apex("4.1 handle: is_active, _disable_casts, _deactivate")
def test_verbose_prints_casts(capsys: pytest.CaptureFixture[str]) -> None:
    handle = amp.init(verbose=True)
    torch.exp(torch.ones(1, dtype=torch.float16))

    assert handle.verbose
    assert capsys.readouterr().out == "Half->Float (exp)\n"


@pytest.mark.apex("4.1 handle: cache, has_cache, remove_cache, _clear_cache", "10 A-7")
def test_weights_changed_between_forwards_are_seen() -> None:
    amp.init(enable_caching=True)
    weight = nn.Parameter(torch.ones(1, 1))
    outputs = []
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        outputs.append(F.linear(torch.ones(1, 1), weight).item())

    assert outputs == [1.0, 2.0]


@pytest.mark.apex("4.1 handle: cache, has_cache, remove_cache, _clear_cache")
def test_cache_is_the_users() -> None:
    handle = amp.init()
    param = nn.Parameter(torch.ones(1))
    handle.cache[param] = param.detach().half()
    handle.remove_cache(param)
    handle.remove_cache(param)
    assert handle.cache == {}
    handle.cache[param] = param.detach().half()
    handle._clear_cache()

    assert handle.has_cache
    assert handle.cache == {}
    assert not amp.init(enable_caching=False).has_cache


@pytest.mark.apex("4.1 handle: is_active, _disable_casts, _deactivate")
def test_saved_functions_come_back() -> None:
    class Owner:
        value = "first"

    handle = amp.init()
    for new in ("second", "third"):
        handle._save_func(Owner, "value", Owner.value)
        Owner.value = new
    handle._deactivate()

    assert Owner.value == "first"


@pytest.mark.apex("4.1 handle: is_active, _disable_casts, _deactivate", "10 A-8")
def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    handle = amp.init()
    seen = []
    with handle._disable_casts():
        with pytest.raises(KeyError), handle._disable_casts():
            raise KeyError
        seen += [product(), handle.is_active()]
    seen += [product(), handle.is_active()]

    assert seen == [torch.float32, False, torch.float16, True]


@pytest.mark.apex("10 A-9")
@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a09_models_at_other_levels_are_not_touched(level: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(product())
            return self.linear(x)

    seen: list[torch.dtype] = []
    handle = amp.init()
    model = amp.initialize(Net(), opt_level=level, verbosity=0)
    model(torch.ones(1, 2))
    handle._deactivate()
    model(torch.ones(1, 2))
    preamp.engine_of(model).close()

    assert seen == [torch.float32, torch.float32]


@pytest.mark.apex("10 A-9")
def test_a09_a_second_init_replaces_the_first() -> None:
    original = torch.exp
    first = amp.init()
    second = amp.init(patch_type=torch.bfloat16)

    assert not first.is_active()
    assert product() is torch.bfloat16
    assert torch.exp.__wrapped__ is original
    second._deactivate()
    assert torch.exp is original


@pytest.mark.apex("10 A-10")
def test_a10_deactivation_restores_functions_wrapped_twice() -> None:
    original = torch.mm
    amp.register_float_function(torch, "mm")
    try:
        handle = amp.init()
        dtype = product()
        handle._deactivate()
    finally:
        for install in (FUNCTION_CASTS, CAST_REPORTS):
            install.discard((id(torch), "mm"))

    assert dtype is torch.float32
    assert torch.mm is original
    assert not handle.is_active()


# -- handle.scale_loss ------------------------------------------------------------------------


@pytest.mark.apex(
    "4.1 handle.scale_loss(loss, optimizer)", "B 16: amp.init, handle.scale_loss, wrap_optimizer"
)
def test_losses_are_scaled_and_gradients_unscaled() -> None:
    weights, optimizer = one_weight()
    handle = amp.init()

    scales = [backward(handle, weights, 3.0, optimizer) for _ in range(2)]

    assert scales == [2.0**16] * 2
    assert weights[0].grad.item() == 6.0
    optimizer.step()
    assert weights[0].item() == -5.0


def test_a_parameter_left_out_of_a_later_loss_keeps_its_gradient() -> None:
    handle = amp.init()
    weights, optimizer = one_weight(2)
    backward(handle, weights, 3.0, optimizer)
    backward(handle, weights[1:], 4.0, optimizer)
    assert [weight.grad.item() for weight in weights] == [3.0, 7.0]

    wrapper = handle.wrap_optimizer(optimizer, num_loss=2)
    backward(wrapper, weights[:1], 5.0)
    backward(wrapper, weights[1:], 6.0)
    assert [weight.grad.item() for weight in weights] == [8.0, 13.0]


def test_static_scale() -> None:
    weights, optimizer = one_weight()

    assert backward(amp.init(loss_scale=128.0), weights, 3.0, optimizer) == 128.0
    assert weights[0].grad.item() == 3.0


def test_scale_one_is_no_arithmetic() -> None:
    weights, optimizer = one_weight()
    loss = weights[0].sum()
    with warnings.catch_warnings(), amp.init(loss_scale=1).scale_loss(loss, optimizer) as scaled:
        warnings.simplefilter("error")
        scaled.backward()

    assert scaled is loss
    assert weights[0].grad.item() == 1.0


@pytest.mark.apex("4.1 handle.scale_loss(loss, optimizer)")
def test_overflow_skips_one_step_and_halves_the_scale(capsys: pytest.CaptureFixture[str]) -> None:
    weights, optimizer = one_weight()
    handle = amp.init()
    step = optimizer.step

    backward(handle, weights, OVERFLOW, optimizer)
    backward(handle, weights, OVERFLOW, optimizer)
    optimizer.step()
    assert weights[0].item() == 1.0
    assert capsys.readouterr().out == "Gradient overflow, skipping update\n"
    optimizer.zero_grad()

    assert optimizer.step == step
    assert backward(handle, weights, 1.0, optimizer) == 2.0**14
    optimizer.step()
    assert weights[0].item() == 0.0


@pytest.mark.parametrize("built", ["before", "during"])
def test_schedulers_live_with_a_skipped_step(built: str) -> None:
    weights, optimizer = one_weight()
    handle = amp.init()

    def build() -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    scheduler = build() if built == "before" else None
    for _ in range(2):
        backward(handle, weights, OVERFLOW, optimizer)
        scheduler = scheduler or build()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert weights[0].item() == 1.0

    backward(handle, weights, 1.0, optimizer)
    optimizer.step()

    assert weights[0].item() == 0.75


def test_exception_in_the_block_restores_gradients() -> None:
    weights, optimizer = one_weight()
    handle = amp.init()
    backward(handle, weights, 3.0, optimizer)
    loss = weights[0].sum()

    def fail() -> None:
        with handle.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()

    assert weights[0].grad.item() == 3.0
    assert "backward" not in vars(loss)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_the_script_drops_in_the_block_are_gone(to_none: bool) -> None:
    weights, optimizer = one_weight()
    handle = amp.init()
    backward(handle, weights, 3.0, optimizer)
    with handle.scale_loss(weights[0].sum() * 4.0, optimizer) as scaled:
        optimizer.zero_grad(set_to_none=to_none)
        scaled.backward()

    assert weights[0].grad.item() == 4.0


@pytest.mark.apex("4.1 handle.scale_loss(loss, optimizer)")
def test_backward_on_the_unscaled_loss_warns() -> None:
    weights, optimizer = one_weight()
    loss = weights[0].sum()

    with amp.init().scale_loss(loss, optimizer):
        with pytest.warns(UserWarning, match=re.escape("backward() was called on the unscaled")):
            loss.backward()
    weights[0].grad = None
    weights[0].sum().backward()

    assert weights[0].grad.item() == 1.0


def test_deactivated_handle_passes_losses_through() -> None:
    weights, optimizer = one_weight()
    handle = amp.init()
    handle._deactivate()

    assert backward(handle, weights, 3.0, optimizer) == 1.0


def test_half_parameters() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    handle = AmpHandle(loss_scale=1024.0)

    for _ in range(2):
        with handle.scale_loss((weight * 2.0).sum(), optimizer) as scaled:
            scaled.backward()

    assert weight.grad.item() == 4.0


# -- wrapped optimizers -----------------------------------------------------------------------


@pytest.mark.apex(
    "4.1 handle.wrap_optimizer(optimizer, num_loss)",
    "10 A-20",
    "B 16: amp.init, handle.scale_loss, wrap_optimizer",
)
def test_a20_wrapped_optimizer_unscales_gradients() -> None:
    weights, inner = one_weight()
    optimizer = amp.init().wrap_optimizer(inner)

    assert backward(optimizer, weights, 3.0) == 2.0**16
    assert weights[0].grad.item() == 3.0
    assert weights[0].item() == 1.0
    optimizer.step()
    assert weights[0].item() == -2.0


@pytest.mark.apex("4.1 handle.wrap_optimizer(optimizer, num_loss)")
def test_losses_have_scales_of_their_own_in_turn() -> None:
    weights, inner = one_weight()
    optimizer = amp.init().wrap_optimizer(inner, num_loss=2)

    for factor in (1.0, OVERFLOW):
        backward(optimizer, weights, factor)
    optimizer.step()
    assert weights[0].item() == 1.0
    optimizer.zero_grad()
    scales = [backward(optimizer, weights, factor) for factor in (1.0, 2.0)]
    optimizer.step()

    assert scales == [2.0**16, 2.0**15]
    assert weights[0].item() == -2.0


def test_failed_block_does_not_use_up_a_turn() -> None:
    weights, inner = one_weight()
    optimizer = amp.init().wrap_optimizer(inner)
    with pytest.raises(KeyError), optimizer.scale_loss(weights[0].sum()):
        raise KeyError

    backward(optimizer, weights)
    optimizer.step()

    assert weights[0].item() == 0.0


@pytest.mark.apex("0 apex.amp.opt.OptimWrapper")
def test_wrapper_forwards_everything_else() -> None:
    _, inner = one_weight()
    optimizer = amp.init().wrap_optimizer(inner)
    optimizer.param_groups[0]["lr"] = 0.5

    assert isinstance(optimizer, OptimWrapper)
    assert inner.param_groups[0]["lr"] == 0.5
    assert optimizer.state_dict() == inner.state_dict()
    assert repr(optimizer) == repr(inner)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = optimizer.no_such_name


# -- turned off -------------------------------------------------------------------------------


@pytest.mark.apex(
    "0 apex.amp.handle.NoOpHandle",
    "4.1 amp.init(enabled=False)",
    "4.1 NoOpHandle",
    "B 16: amp.init, handle.scale_loss, wrap_optimizer",
)
def test_disabled_init_changes_nothing() -> None:
    original = torch.mm
    weights, inner = one_weight()
    amp.init()
    handle = amp.init(enabled=False)
    optimizer = handle.wrap_optimizer(inner)

    assert isinstance(handle, NoOpHandle)
    assert torch.mm is original
    assert product() is torch.float32
    assert not handle.is_active()
    assert not handle.has_cache
    assert not handle.verbose
    assert handle.cache == {}
    assert backward(handle, weights, 3.0, inner) == 1.0
    assert backward(optimizer, weights, 3.0) == 1.0
    assert optimizer.step(lambda: 5.0) == 5.0
    assert weights[0].item() == -5.0
    handle.remove_cache(weights[0])
    handle._clear_cache()
    handle._save_func(torch, "mm", None)
    handle._deactivate()
    with handle._disable_casts():
        assert torch.mm is original


# -- refused ----------------------------------------------------------------------------------


def _after_wrapping() -> None:
    handle = amp.init()
    weights, optimizer = one_weight()
    handle.wrap_optimizer(optimizer)
    backward(handle, weights, 1.0, optimizer)


def _too_many_losses() -> None:
    weights, inner = one_weight()
    optimizer = amp.init().wrap_optimizer(inner)
    for _ in range(2):
        backward(optimizer, weights)


def _closure() -> None:
    amp.init().wrap_optimizer(one_weight()[1]).step(lambda: 1.0)


def _owned_by_an_engine() -> None:
    handle = amp.init()
    model = nn.Linear(1, 1)
    model, optimizer = amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O0", verbosity=0
    )
    with handle.scale_loss(torch.ones(1), optimizer):
        pass


def _entered(handle: Any, optimizer: Any) -> None:
    with handle.scale_loss(torch.ones((), requires_grad=True), optimizer):
        pass


def _no_loss() -> None:
    with amp.init().scale_loss(1.0, one_weight()[1]):
        pass


REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (
        _after_wrapping,
        preamp.PreampStateError,
        "handle.scale_loss() after handle.wrap_optimizer(). A wrapped optimizer scales its own "
        "losses, with scales of their own. Use `with optimizer.scale_loss(loss) as scaled_loss` "
        "on what wrap_optimizer returned, and wrap every optimizer.",
    ),
    (
        _too_many_losses,
        preamp.PreampStateError,
        "scale_loss was entered 2 times since the last step. This optimizer was wrapped for 1 "
        "loss(es) a step. Pass num_loss to wrap_optimizer, or call optimizer.step() in between.",
    ),
    (
        _closure,
        NotImplementedError,
        "step() of a wrapped optimizer was given a closure. It takes none. Use amp.initialize and "
        "amp.scale_loss, which run closures.",
    ),
    (
        _owned_by_an_engine,
        preamp.PreampStateError,
        "A handle was given an SGD that amp.initialize took over. Handles scale for optimizers "
        "that amp.initialize has not seen. Use amp.scale_loss(loss, optimizer) without amp.init, "
        "or amp.init alone.",
    ),
    (
        lambda: _entered(amp.init(), FP16_Optimizer(one_weight()[1], verbose=False)),
        preamp.PreampStateError,
        "A handle was given an FP16_Optimizer. Handles scale for optimizers that do not scale by "
        "themselves. Call optimizer.backward(loss) instead of scale_loss, or leave FP16_Optimizer "
        "out.",
    ),
    (
        lambda: _entered(amp.init(), [one_weight()[1], one_weight()[1]]),
        TypeError,
        "scale_loss of a handle got a list for an optimizer. It takes the one optimizer whose "
        "parameters get gradient. For several optimizers use amp.initialize and amp.scale_loss.",
    ),
    (_no_loss, TypeError, "scale_loss was given a float as the loss."),
    (
        lambda: amp.init(patch_type=torch.float32),
        RuntimeError,
        "patch_type=torch.float32 is not possible. Casts go to torch.float16 or torch.bfloat16. "
        "Leave it out for torch.float16.",
    ),
    (
        lambda: amp.init(loss_scale="static"),
        ValueError,
        "loss_scale='static' is not possible. It is 'dynamic' or a positive number. Leave it out "
        "for 'dynamic'.",
    ),
    (lambda: amp.init(loss_scale=0.0), ValueError, "loss_scale=0.0 is not possible."),
    (
        lambda: amp.init().wrap_optimizer(one_weight()[1], num_loss=0),
        ValueError,
        "num_loss=0 is not possible. It is the number of losses between two steps, 1 or more. "
        "Count the scale_loss blocks before each optimizer.step().",
    ),
]


@pytest.mark.apex(
    "4.1 amp.init(…)",
    "4.1 handle.scale_loss of an optimizer that initialize has",
    "4.1 handle.wrap_optimizer(optimizer, num_loss)",
)
@pytest.mark.parametrize(("call", "error", "text"), REFUSED)
def test_refused(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


def test_refused_init_leaves_the_earlier_handle_on() -> None:
    handle = amp.init()
    with pytest.raises(ValueError, match="loss_scale"):
        amp.init(loss_scale=-1.0)

    assert handle.is_active()
