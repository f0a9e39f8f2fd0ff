# SPDX-License-Identifier: BSD-3-Clause
"""What people's scripts do with Apex, through ``from preamp import amp``; known bugs of Apex."""

import argparse
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
from kit.loops import loss_of, make, masters, weights
from kit.refusals import assert_approved, refused
from kit.run import Net, batch_of
from preamp import amp, fp16_utils, optimizers
from preamp.amp.scaler import LossScaler
from preamp.casting.functions import FUNCTION_CASTS

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


def started(level: str, optimizer: str = "SGD", **arguments: Any) -> Any:
    return amp.initialize(*make(0, optimizer), opt_level=level, verbosity=0, **arguments)


def line(level: str, lr: float, **arguments: Any) -> Any:
    """A model of two weights of one, whose gradient is what the loss multiplies them by."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **arguments)


def backward(loss: torch.Tensor, optimizer: Any, factor: float = 1.0, **scaling: Any) -> None:
    with amp.scale_loss(loss, optimizer, **scaling) as scaled:
        (scaled * factor).backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    optimizer.zero_grad()
    backward(loss_of(model, number), optimizer)
    optimizer.step()


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
    step(model, optimizer, 0)
    assert first()._unskipped == 1
    step(model, optimizer, 1)
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


# -- arguments -------------------------------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("scale", ["128.0", "1.0", 1, 1.0, True])
def test_arguments_from_argparse(level: str, scale: Any) -> None:
    parser = argparse.ArgumentParser()
    for flag in ("--opt_level", "--keep_batchnorm_fp32", "--loss_scale"):
        parser.add_argument(flag, type=str, default=None)
    flags = ["--opt_level", level]
    if level not in ("O1", "O4"):
        flags += ["--keep_batchnorm_fp32", "False"]
    arguments = vars(parser.parse_args(flags)) | {"loss_scale": scale}
    model, optimizer = amp.initialize(*make(), verbosity=False, **arguments)
    assert first().loss_scale() == float(scale)
    step(model, optimizer)
    assert halves_match(model)


# -- loops -----------------------------------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("where", ["inside", "after"])
def test_clipping_the_masters(level: str, where: str) -> None:
    """After the block gradients are unscaled, and the clipped ones are what is applied."""
    model, optimizer = line(level, 1.0, loss_scale=8.0)
    with amp.scale_loss(model.weight.float().sum() * 3, optimizer) as scaled:
        scaled.backward()
        if where == "inside":  # wrong, but it must not crash
            torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1e9)
    if where == "after":
        norm = torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 18.0**0.5 / 6)
        assert norm.item() == pytest.approx(18.0**0.5, rel=1e-3)
    optimizer.step()
    expected = 1.0 - (0.5 if where == "after" else 3.0)
    assert model.weight.flatten().tolist() == pytest.approx([expected] * 2, abs=1e-2)


class Square(nn.Linear):
    """A model with a second derivative; for small integers all of it is exact in half."""

    def __init__(self) -> None:
        super().__init__(2, 1, bias=False)
        self.weight.data.copy_(torch.tensor([[1.0, 2.0]]))

    def penalty(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        x = torch.ones(1, 2, dtype=dtype, requires_grad=True)
        (slope,) = torch.autograd.grad(self(x).square().sum(), x, create_graph=True)
        return slope.square().sum()


@ALL_LEVELS
@pytest.mark.parametrize("blocks", [1, 2])
def test_gradient_penalty_has_the_exact_gradient(level: str, blocks: int) -> None:
    """Two backwards a block, in one block or in two, against float64."""
    oracle, model = Square().double(), Square()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    for _ in range(blocks):
        with amp.scale_loss(model.penalty(), optimizer) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()
        (2 * oracle.penalty(torch.float64)).backward()
    (ours,) = amp.master_params(optimizer)
    assert torch.equal(ours.grad.double(), oracle.weight.grad)


@MASTERS
def test_scaled_gradients_are_reduced_inside_the_block(level: str) -> None:
    model, optimizer = line(level, 0.25, loss_scale=8.0)
    with amp.scale_loss(model.weight.float().sum(), optimizer) as scaled:
        scaled.backward()
        assert model.weight.grad.tolist() == [[8.0, 8.0]]
        model.weight.grad.data.mul_(2.0)  # what an all-reduce over two equal ranks does
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5]]


def test_adversarial_input_gradients() -> None:
    """O2 without masters: ``delta.grad`` is still scaled, and two blocks precede one step."""
    model, optimizer = started("O2", master_weights=False, loss_scale="4.0")
    delta, x = torch.zeros(6, 4, requires_grad=True), batch_of(model, 0)
    model.eval()
    backward(model(x + delta).sum(), optimizer)
    grad = delta.grad.detach().clone()
    optimizer.zero_grad()
    (plain,) = torch.autograd.grad(model(x + delta).sum(), delta)
    assert torch.allclose(grad, plain * 4.0, rtol=0.05, atol=0.02)
    backward(model(x + grad.sign() * 0.1).sum(), optimizer)
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@ALL_LEVELS
def test_two_networks_and_three_losses(level: str) -> None:
    """The adversarial pair: lists of models and optimizers, a scaler for each loss."""
    (d, opt_d), (g, opt_g) = make(0), make(1)
    options: dict[str, Any] = {"num_losses": 3, "loss_scale": "dynamic", "verbosity": 0}
    amp.initialize([d, g], [opt_d, opt_g], opt_level=level, **options)
    for loss_id, (net, opt) in enumerate([(d, opt_d), (d, opt_d), (g, opt_g)]):
        factor = torch.inf if loss_id == 1 else 1.0
        backward(loss_of(net, 0) * 2.0**-8, opt, factor, loss_id=loss_id)
    before = weights(d), weights(g)
    opt_d.step()
    opt_g.step()
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2.0**16, 2.0**15, 2.0**16]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [1, 0, 1]
    assert same(weights(d), before[0])
    assert not same(weights(g)["last.bias"], before[1]["last.bias"])


@ALL_LEVELS
def test_a17_scheduler_built_while_an_overflow_is_pending(level: str) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    before = weights(model)
    backward(loss_of(model.eval(), 0), optimizer, torch.inf)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert same(weights(model), before)


# -- state -----------------------------------------------------------------------------------


@MASTERS
def test_resume_of_language_model_scripts(level: str) -> None:
    """Force the lazy initialization, load the optimizer, copy the saved masters."""
    model, optimizer = started(level, "Adam")
    step(model, optimizer)
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
    step(model, optimizer, 1)
    step(other, second, 1)
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


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_without_a_scale_the_loss_is_widened_all_the_same(level: str) -> None:
    _, optimizer = started(level)
    loss = torch.ones((), dtype=torch.float16, requires_grad=True)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled.dtype is torch.float32
        scaled.backward()
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 1.0, "unskipped": 0}}


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


@ALL_LEVELS
def test_add_param_group(level: str) -> None:
    """A second network, initialized without an optimizer, joins the first one's."""
    _, optimizer = started(level, loss_scale=8.0)
    extra = amp.initialize(nn.Linear(3, 3), opt_level="O3" if level == "O2" else "O0", verbosity=0)
    optimizer.add_param_group({"params": extra.parameters(), "lr": 0.5})
    with torch.no_grad():
        extra.bias.fill_(1.0)
    backward(extra(torch.ones(1, 3)).float().sum(), optimizer)
    optimizer.step()
    assert extra.bias.tolist() == [0.5, 0.5, 0.5]
    assert len(list(amp.master_params(optimizer))) == 10


# -- registration ----------------------------------------------------------------------------


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
