# SPDX-License-Identifier: BSD-3-Clause
"""What people's scripts do with Apex, through ``from preamp import amp``; known bugs of Apex."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from kit.compare import halves_match, same
from kit.loops import loss_of, make, masters, train_step
from kit.refusals import assert_approved, refused
from kit.run import Net, Run, act
from preamp import amp, fp16_utils, optimizers
from preamp.amp.scaler import LossScaler
from preamp.casting.functions import FUNCTION_CASTS

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


def started(level: str, optimizer: str = "SGD", **arguments: Any) -> Any:
    return amp.initialize(*make(0, optimizer), opt_level=level, verbosity=0, **arguments)


def backward(loss: torch.Tensor, optimizer: Any, factor: float = 1.0, **scaling: Any) -> None:
    with amp.scale_loss(loss, optimizer, **scaling) as scaled:
        (scaled * factor).backward()


def first() -> Any:
    return amp._amp_state.loss_scalers[0]


# -- names that exist ------------------------------------------------------------------------


def test_names() -> None:
    names = (
        "initialize scale_loss master_params state_dict load_state_dict disable_casts _amp_state "
        "half_function float_function promote_function bfloat16_function register_half_function "
        "register_float_function register_promote_function register_bfloat16_function"
    ).split()
    assert set(names) <= set(amp.__all__) & set(amp.__dict__)
    assert LossScaler is amp.LossScaler
    parameters = inspect.signature(amp.scale_loss).parameters
    names = "loss optimizers loss_id model delay_unscale delay_overflow_check".split()
    assert list(parameters) == names
    assert [p.default for p in list(parameters.values())[2:]] == [0, None, False, False]


def test_state_before_initialize() -> None:
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    state = amp._amp_state
    assert state.hard_override is False
    assert state.allow_incoming_model_not_fp32 is False
    assert state.verbosity == 1
    assert state.opt_properties.enabled is False
    assert state.opt_properties.loss_scale == 1.0
    assert state.loss_scalers == []
    model, optimizer = make()
    assert not hasattr(optimizer, "_amp_stash")  # how scripts ask whether it is initialized
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert inspect.isgenerator(amp.master_params(optimizer))


# -- the state object ------------------------------------------------------------------------


def test_scale_window_and_counter_are_written() -> None:
    model, optimizer = started("O2")
    first()._loss_scale = 2**20
    assert first().loss_scale() == preamp.engine_of(model).loss_scale() == 2.0**20
    with amp.scale_loss(model.bn.weight.sum(), optimizer) as scaled:
        assert scaled.item() == 8.0 * 2**20
    first()._loss_scale, first()._scale_seq_len, first()._unskipped = 4.0, 2, 0
    train_step(model, optimizer, 0)
    assert first()._unskipped == 1
    train_step(model, optimizer, 1)
    assert first().loss_scale() == 8.0


@ALL_LEVELS
def test_options_are_read_and_written(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    limits: dict[str, Any] = {"min_loss_scale": 128.0, "max_loss_scale": 1024.0}
    model, optimizer = started(level, loss_scale="dynamic", **limits)
    state, properties = amp._amp_state, amp._amp_state.opt_properties
    assert (properties.enabled, properties.opt_level) == (True, level)
    assert properties.options["cast_model_type"] == preamp.OPT_LEVELS[level].cast_model_type
    assert properties.master_weights is (level in WITH_MASTERS)
    assert properties.options["loss_scale"] == "dynamic"
    assert state.min_loss_scale == first()._min_loss_scale == 128.0
    assert state.max_loss_scale == first()._max_loss_scale == first().loss_scale() == 1024.0
    state.verbosity = 1
    backward(loss_of(model, 0), optimizer, torch.inf)
    optimizer.step()
    assert capsys.readouterr().out.startswith("Gradient overflow.  Skipping step, loss scaler 0 ")


def test_hard_override() -> None:
    amp._amp_state.hard_override = True
    with pytest.warns(UserWarning, match="hard_override is set"):
        amp.initialize(Net(), opt_level="O1", keep_batchnorm_fp32=True, verbosity=0)
    assert amp._amp_state.opt_properties.keep_batchnorm_fp32 is True


def test_handle_is_deactivated() -> None:
    """Tests of frameworks switch O1 off by hand between cases; losses are scaled all the same."""
    original = torch.exp
    _kept_alive = started("O2")
    assert not hasattr(amp._amp_state, "handle")  # of levels without function casts
    model, optimizer = started("O1")
    handle = amp._amp_state.handle
    assert handle.is_active()
    assert model(torch.ones(2, 4)).dtype is torch.float16
    handle._deactivate()
    assert not handle.is_active()
    assert torch.exp is original
    assert model(torch.ones(2, 4)).dtype is torch.float32
    with amp.scale_loss(model.last.bias.sum() * 0 + 1, optimizer) as scaled:
        assert scaled.item() == 2.0**16
        scaled.backward()
    optimizer.step()
    assert len(list(amp.master_params(optimizer))) == 8


def test_a_deactivated_handle_leaves_other_casts_on() -> None:
    _one = started("O1")
    handle = amp._amp_state.handle
    _other = started("O4")
    assert amp._amp_state.handle is not handle
    handle._deactivate()
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


@pytest.mark.parametrize("form", [lambda it: it, lambda it: [it]], ids=["single", "list"])
@pytest.mark.parametrize("kind", [fp16_utils.FP16_Optimizer, optimizers.FP16_Optimizer])
def test_an_fp16_optimizer_is_refused(kind: Any, form: Any) -> None:
    model = nn.Linear(2, 2)
    half = nn.Linear(2, 2).half()
    wrapper = kind(torch.optim.SGD(half.parameters(), lr=0.1), verbose=False)
    with refused("compat", "an FP16_Optimizer in initialize", model, wrapper, wrapper.optimizer):
        amp.initialize(model, form(wrapper), verbosity=0)
    assert amp._amp_state.engine is None
    amp.initialize(model, form(wrapper), enabled=False)


# -- state -----------------------------------------------------------------------------------


@MASTERS
def test_resume_of_language_model_scripts(level: str) -> None:
    """Force the lazy initialization, load the optimizer, copy the saved masters."""
    model, optimizer = started(level, "Adam")
    train_step(model, optimizer, 0)
    saved, saved_masters = copy.deepcopy(optimizer.state_dict()), masters(optimizer)
    half_weights = {
        k: v.to(model.first.weight.dtype).float() if v.is_floating_point() else v
        for k, v in model.state_dict().items()
    }
    other, second = started(level, "Adam")
    other.load_state_dict(half_weights)
    second._lazy_init_maybe_master_weights()
    second._amp_stash.lazy_init_called = True
    second.load_state_dict(saved)
    for param, value in zip(amp.master_params(second), saved_masters, strict=True):
        param.data.copy_(value.data)
    train_step(model, optimizer, 1)
    train_step(other, second, 1)
    assert same(masters(second), masters(optimizer))
    assert halves_match(other)


@ALL_LEVELS
def test_private_names_of_the_optimizer(level: str) -> None:
    model, optimizer = started(level)
    optimizer._amp_lazy_init()
    stash = optimizer._amp_stash
    assert stash.lazy_init_called is True
    if level in WITH_MASTERS:
        halves = [p for n, p in model.named_parameters() if not n.startswith("bn.")]
        wide = stash.all_fp32_from_fp16_params
        assert list(map(id, stash.all_fp16_params)) == list(map(id, halves))
        assert [p.dtype for p in wide] == [torch.float32] * 6
        rounded = [p.detach().to(h.dtype) for p, h in zip(wide, halves, strict=True)]
        assert same(rounded, [h.detach() for h in halves])
        assert len(stash.fp16_groups[0]) == len(stash.fp32_from_fp16_groups[0]) == 6
        kept = [model.bn.weight, model.bn.bias]
        assert list(map(id, stash.all_fp32_from_fp32_params)) == list(map(id, kept))
        assert stash.all_fp32_params == stash.all_fp32_from_fp32_params
    else:
        assert stash.all_fp16_params == []
    # Where gradients are set aside between two backwards is not what it was.
    for name in ("all_fp16_grad_stash", "all_fp32_grad_stash", "all_fp32_from_fp32_grad_stash"):
        assert not hasattr(stash, name)
    assert stash.already_patched is False
    assert stash.params_have_scaled_gradients is False


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_stash_tells_of_skips_and_scaled_gradients(level: str) -> None:
    model, optimizer = started(level)
    stash = optimizer._amp_stash
    backward(loss_of(model, 0), optimizer, delay_unscale=True)
    assert stash.params_have_scaled_gradients is False
    backward(loss_of(model, 0), optimizer, torch.inf)
    assert stash.already_patched is True
    optimizer.step()
    assert stash.already_patched is False


def test_levels_and_options_of_the_frontend() -> None:
    """Levels are frozen policies; Apex had objects that were called with the options to fill."""
    for name, level in amp.frontend.opt_levels.items():
        assert level.brief.startswith(f"{name}:  ")
        assert not callable(level)
    options = amp.frontend.Properties()
    assert (options.enabled, options.loss_scale, options.opt_level) == (False, 1.0, None)
    with refused("compat", "an option that there is not"):
        _ = options.nonsense


def test_module_as_an_object_with_state() -> None:
    """Frameworks pass the module itself where something with ``state_dict`` is wanted."""
    _kept_alive = started("O2")
    saved = amp.state_dict()
    first()._loss_scale = 2.0
    amp.load_state_dict(saved)
    assert amp.state_dict() == saved
    mine: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(destination=mine) is mine
    assert list(mine) == ["mine", "loss_scaler0"]


# -- backward by hand ------------------------------------------------------------------------


def backward_by_hand(model: nn.Module, optimizer: Any, number: int, factor: float = 1.0) -> bool:
    """What ``amp.scale_loss`` did inside Apex; returns whether the step is to be skipped."""
    optimizer._prepare_amp_backward()
    (loss_of(model, number).float() * first().loss_scale() * factor).backward()
    optimizer._post_amp_backward(first())
    return first().update_scale()


@ALL_LEVELS
def test_backward_by_hand(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``_prepare_amp_backward`` and ``_post_amp_backward``, twice for one step; then to inf."""
    model, optimizer = started(level, loss_scale="dynamic")
    other, by_block = started(level, loss_scale="dynamic")
    for number in range(2):
        assert not backward_by_hand(model, optimizer, number)
        backward(loss_of(other, number), by_block)
    for ours, theirs in zip(amp.master_params(optimizer), amp.master_params(by_block), strict=True):
        assert same(ours.grad, theirs.grad)
    model, optimizer = started(level, loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    before = masters(optimizer)
    assert backward_by_hand(model, optimizer, 0, factor=float("inf"))
    optimizer.step()
    assert same(masters(optimizer), before)
    assert "reducing loss scale to 32768.0" in capsys.readouterr().out


# -- the scaler (A-26) -------------------------------------------------------------------------


def test_a26_scale_factor_and_floor() -> None:
    scaler = amp.LossScaler("dynamic", init_scale=16.0, scale_factor=8.0, scale_window=1)
    scaler.update_scale()
    assert scaler.loss_scale() == 128.0
    scaler._has_overflow = True
    assert scaler.update_scale() is True
    assert scaler.loss_scale() == 16.0
    scaler = amp.LossScaler("dynamic", init_scale=2.0**-23)
    for _ in range(5):
        scaler._has_overflow = True
        scaler.update_scale()
    assert scaler.loss_scale() == 2.0**-24


# -- the handle of amp.initialize, and Apex's first interface --------------------------------------


def product() -> torch.dtype:
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def test_a08_disabled_blocks_nest_and_survive_exceptions() -> None:
    _kept_alive = started("O1")
    handle = amp._amp_state.handle
    with handle._disable_casts():
        with pytest.raises(KeyError), handle._disable_casts():
            raise KeyError
        assert product() is torch.float32
        assert not handle.is_active()
    handle._clear_cache()
    assert product() is torch.float16
    assert handle.is_active()


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_a09_models_at_other_levels_are_not_touched(level: str) -> None:
    seen: list[torch.dtype] = []

    class Sees(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(product())
            return super().forward(x)

    _kept_alive = started("O1")
    handle = amp._amp_state.handle
    model = amp.initialize(Sees(2, 2), opt_level=level, verbosity=0)
    model(torch.ones(1, 2))
    handle._deactivate()
    model(torch.ones(1, 2))
    preamp.engine_of(model).close()
    assert seen == [torch.float32, torch.float32]


def test_a10_deactivation_restores_functions_wrapped_twice() -> None:
    original = torch.mm
    amp.register_float_function(torch, "mm")
    try:
        _kept_alive = started("O1")
        handle = amp._amp_state.handle
        assert product() is torch.float32
        handle._deactivate()
    finally:
        FUNCTION_CASTS.extras.pop((id(torch), "mm"))
    assert torch.mm is original
    assert not handle.is_active()


def test_the_first_interface_is_refused_with_the_edited_lines() -> None:
    """Whose handles had ``scale_loss`` and ``wrap_optimizer``, which gave an OptimWrapper."""
    with pytest.raises(preamp.PreampUnavailableError) as got:
        amp.init(enabled=False)
    assert_approved("compat", "amp.init", f"PreampUnavailableError: {got.value}")
    page = (Path(__file__).parents[2] / "docs" / "from-apex.md").read_text(encoding="utf-8")
    lines = [line for line in str(got.value).splitlines() if line[:2] in ("- ", "+ ")]
    assert len(lines) == 5
    assert "\n".join(lines) in page


# -- gradients changed after scale_loss: each sentence of the page on clipping ---------------------


class Even(nn.Module):
    """All weights are 32, and all gradients 8 in a step of one backward or two."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 2), 32.0))

    def forward(self, parts: int) -> torch.Tensor:
        return self.weight.float().sum() * (8 / parts)


@act
def changed_step(run: Run, parts: int, how: str) -> None:
    """The gradient is halved, replaced, clipped or not changed, as by a script after the block."""
    run.zero()
    for _ in range(parts):
        run.back(run.model(parts))
    if how == "halved":
        run.model.weight.grad.mul_(0.5)
    if how == "replaced":
        run.model.weight.grad = run.model.weight.grad * 0.5
    if how == "clipped":
        nn.utils.clip_grad_norm_(run.model.parameters(), 8.0)
    run.step()


HALF = {"O2": "float16", "O5": "bfloat16"}


@pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
@pytest.mark.parametrize("how", ["halved", "replaced", "clipped"])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("before", [0, 12], ids=["at once", "late"])
@pytest.mark.parametrize("loss_scale", [1.0, 64.0])
@ALL_LEVELS
def test_what_becomes_of_a_change(
    level: str, loss_scale: float, before: int, parts: int, how: str, door: Any
) -> None:
    """It counts, or would reach a part of the sum, or what is scaled."""
    run = Run(level, "SGD", Even, door=door, loss_scale=loss_scale)
    run.optimizer.param_groups[0].update(lr=0.0, momentum=0.0)
    run.play(*before * [f"changed_step {parts} not"])
    run.optimizer.param_groups[0]["lr"] = 1.0
    if level in HALF and (loss_scale > 1 or parts == 2):
        name = "a change of a scaled gradient" if loss_scale > 1 else "a change of a part"
        with refused("compat", name, changes=True, half=HALF[level]):
            changed_step(run, parts, how)
        return
    changed_step(run, parts, how)
    taken = 32.0 - next(iter(amp.master_params(run.optimizer))).flatten()[0].item()
    assert taken == pytest.approx(4.0, rel=1e-2 if how == "clipped" else 0.0)
