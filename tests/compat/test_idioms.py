# SPDX-License-Identifier: BSD-3-Clause
"""What people's scripts do with Apex, through ``from preamp import amp``."""

import argparse
import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES, WITH_MASTERS
from kit.compare import halves_match, same
from kit.loops import loss_of, make, masters, weights
from kit.refusals import refused
from kit.run import Net, batch_of
from preamp import amp, fp16_utils, optimizers
from preamp.amp.scaler import LossScaler

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)


def started(level: str, optimizer: str = "SGD", **arguments: Any) -> Any:
    return amp.initialize(*make(0, optimizer), opt_level=level, verbosity=0, **arguments)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 0) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


# -- names that exist ------------------------------------------------------------------------


def test_names() -> None:
    names = (
        "initialize scale_loss master_params state_dict load_state_dict disable_casts _amp_state "
        "half_function float_function promote_function bfloat16_function register_half_function "
        "register_float_function register_promote_function register_bfloat16_function"
    ).split()
    assert set(names) <= set(amp.__all__) & set(amp.__dict__)


def test_scaler_module() -> None:
    assert LossScaler is amp.LossScaler


def test_signature_of_scale_loss() -> None:
    parameters = inspect.signature(amp.scale_loss).parameters
    assert (
        list(parameters)
        == "loss optimizers loss_id model delay_unscale delay_overflow_check".split()
    )
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


def test_master_params_of_any_optimizer() -> None:
    model, optimizer = make()
    assert list(amp.master_params(optimizer)) == list(model.parameters())
    assert inspect.isgenerator(amp.master_params(optimizer))


# -- the state object ------------------------------------------------------------------------


def test_scale_written_right_after_initialize() -> None:
    model, optimizer = started("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 2**20
    assert amp._amp_state.loss_scalers[0].loss_scale() == 2.0**20
    assert preamp.engine_of(model).loss_scale() == 2.0**20
    with amp.scale_loss(model.bn.weight.sum(), optimizer) as scaled:
        assert scaled.item() == 8.0 * 2**20


def test_window_and_counter_are_written() -> None:
    model, optimizer = started("O2")
    amp._amp_state.loss_scalers[0]._loss_scale = 4.0
    amp._amp_state.loss_scalers[0]._scale_seq_len = 2
    step(model, optimizer, 0)
    assert amp._amp_state.loss_scalers[0]._unskipped == 1
    step(model, optimizer, 1)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 8.0


@ALL_LEVELS
def test_options_are_read(level: str) -> None:
    started(level)
    properties = amp._amp_state.opt_properties
    assert properties.enabled is True
    assert properties.opt_level == level
    assert properties.options["cast_model_type"] == preamp.OPT_LEVELS[level].cast_model_type
    assert properties.master_weights is (level in WITH_MASTERS)
    assert properties.options["loss_scale"] == preamp.OPT_LEVELS[level].loss_scale


def test_range_is_read() -> None:
    started("O2", min_loss_scale=128.0, max_loss_scale=1024.0)
    assert amp._amp_state.min_loss_scale == 128.0
    assert amp._amp_state.max_loss_scale == 1024.0
    assert amp._amp_state.loss_scalers[0]._min_loss_scale == 128.0
    assert amp._amp_state.loss_scalers[0]._max_loss_scale == 1024.0
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1024.0


def test_verbosity_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started("O2")
    amp._amp_state.verbosity = 1
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        (scaled * float("inf")).backward()
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
    assert not hasattr(amp._amp_state, "handle")
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
    started("O1")
    first = amp._amp_state.handle
    started("O4")
    assert amp._amp_state.handle is not first
    first._deactivate()
    assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is torch.bfloat16


def test_levels_without_function_casts_make_no_handle() -> None:
    started("O2")
    assert not hasattr(amp._amp_state, "handle")


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


def test_is_it_initialised() -> None:
    _, optimizer = make()
    assert not hasattr(optimizer, "_amp_stash")
    amp.initialize(Net(), optimizer, verbosity=0)
    assert hasattr(optimizer, "_amp_stash")


# -- arguments from flags --------------------------------------------------------------------


@ALL_LEVELS
def test_strings_from_argparse(level: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--opt-level", type=str)
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    flags = ["--opt-level", level, "--loss-scale", "128.0"]
    if level not in ("O1", "O4"):
        flags += ["--keep-batchnorm-fp32", "False"]
    args = parser.parse_args(flags)
    model, optimizer = make()
    amp.initialize(
        model,
        optimizer,
        opt_level=args.opt_level,
        keep_batchnorm_fp32=args.keep_batchnorm_fp32,
        loss_scale=args.loss_scale,
        verbosity=False,
    )
    assert amp._amp_state.loss_scalers[0].loss_scale() == 128.0
    step(model, optimizer)
    assert halves_match(model)


@pytest.mark.parametrize("given", [1, 1.0, "1.0", True])
def test_scale_of_one(given: Any) -> None:
    model, optimizer = started("O2", loss_scale=given)
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    step(model, optimizer)
    assert halves_match(model)


def test_arguments_from_a_dict() -> None:
    arguments = {"opt_level": "O2", "loss_scale": "dynamic", "min_loss_scale": 1, "verbosity": 0}
    model, optimizer = amp.initialize(*make(), **arguments)
    step(model, optimizer)
    assert amp._amp_state.min_loss_scale == 1.0


# -- loops -----------------------------------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("where", ["inside", "after"])
def test_clipping_the_masters(level: str, where: str) -> None:
    """After the block gradients are unscaled, and the clipped ones are what is applied."""
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
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


class Square(nn.Module):
    """A model with a second derivative; for small integers all of it is exact in half."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False)
        self.linear.weight.data.copy_(torch.tensor([[1.0, 2.0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * y


def penalty_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


@ALL_LEVELS
@pytest.mark.parametrize("blocks", [1, 2])
def test_gradient_penalty_has_the_exact_gradient(level: str, blocks: int) -> None:
    """Two backwards a block, in one block or in two, against float64."""
    oracle, x = Square().double(), torch.ones(1, 2, dtype=torch.float64, requires_grad=True)
    model = Square()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=4.0, verbosity=0)
    for _ in range(blocks):
        loss = penalty_of(model, torch.ones(1, 2, requires_grad=True))
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward(retain_graph=True)
            scaled.backward()
        (2 * penalty_of(oracle, x)).backward()
    (ours,) = amp.master_params(optimizer)
    assert torch.equal(ours.grad.double(), oracle.linear.weight.grad)


@MASTERS
def test_scaled_gradients_are_reduced_inside_the_block(level: str) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=8.0, verbosity=0)
    with amp.scale_loss(model.weight.float().sum(), optimizer) as scaled:
        scaled.backward()
        assert model.weight.grad.tolist() == [[8.0, 8.0]]
        model.weight.grad.data.mul_(2.0)  # what an all-reduce over two equal ranks does
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5]]


def test_adversarial_input_gradients() -> None:
    """O2 without masters: ``delta.grad`` is still scaled, and two blocks precede one step."""
    model, optimizer = started("O2", master_weights=False, loss_scale="4.0")
    delta = torch.zeros(6, 4, requires_grad=True)
    x = batch_of(model, 0)
    model.eval()
    with amp.scale_loss(model(x + delta).sum(), optimizer) as scaled:
        scaled.backward()
    grad = delta.grad.detach().clone()
    optimizer.zero_grad()
    (plain,) = torch.autograd.grad(model(x + delta).sum(), delta)
    assert torch.allclose(grad, plain * 4.0, rtol=0.05, atol=0.02)
    with amp.scale_loss(model(x + grad.sign() * 0.1).sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


@ALL_LEVELS
def test_two_networks_and_three_losses(level: str) -> None:
    """The adversarial pair: lists of models and optimizers, a scaler for each loss."""
    (d, opt_d), (g, opt_g) = make(0), make(1)
    models, optimizers = [d, g], [opt_d, opt_g]
    amp.initialize(models, optimizers, opt_level=level, num_losses=3, verbosity=0,
                   loss_scale="dynamic")  # fmt: skip
    for loss_id, (net, opt) in enumerate([(d, opt_d), (d, opt_d), (g, opt_g)]):
        poison = loss_id == 1
        with amp.scale_loss(loss_of(net, 0) * 2.0**-8, opt, loss_id) as scaled:
            (scaled * float("inf") if poison else scaled).backward()
    before = weights(d), weights(g)
    opt_d.step()
    opt_g.step()
    scales = [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]
    assert scales == [2.0**16, 2.0**15, 2.0**16]
    assert [entry["unskipped"] for entry in amp.state_dict().values()] == [1, 0, 1]
    assert same(weights(d), before[0])
    assert not same(weights(g)["last.bias"], before[1]["last.bias"])


# -- state -----------------------------------------------------------------------------------


@MASTERS
def test_resume_of_language_model_scripts(level: str) -> None:
    """Force the lazy initialization, load the optimizer, copy the saved masters."""
    model, optimizer = started(level, "Adam")
    step(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    saved_masters = [p.detach().clone() for p in amp.master_params(optimizer)]
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
    named = dict(model.named_parameters())
    if level in WITH_MASTERS:
        halves = [p for n, p in named.items() if not n.startswith("bn.")]
        assert all(a is b for a, b in zip(stash.all_fp16_params, halves, strict=True))
        wide = stash.all_fp32_from_fp16_params
        assert [p.dtype for p in wide] == [torch.float32] * 6
        assert same([p.detach().to(h.dtype) for p, h in zip(wide, halves, strict=True)],
                    [h.detach() for h in halves])  # fmt: skip
        assert len(stash.fp16_groups[0]) == len(stash.fp32_from_fp16_groups[0]) == 6
        assert [id(p) for p in stash.all_fp32_from_fp32_params] == [
            id(named["bn.weight"]),
            id(named["bn.bias"]),
        ]
    else:
        assert stash.all_fp16_params == []
    assert stash.already_patched is False
    assert stash.params_have_scaled_gradients is False


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_stash_tells_of_skips_and_scaled_gradients(level: str) -> None:
    model, optimizer = started(level)
    with amp.scale_loss(loss_of(model, 0), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    assert optimizer._amp_stash.params_have_scaled_gradients is False
    with amp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        (scaled * float("inf")).backward()
    assert optimizer._amp_stash.already_patched is True
    optimizer.step()
    assert optimizer._amp_stash.already_patched is False


def test_stash_has_no_lists_of_gradients_set_aside() -> None:
    """Where they are between two backwards is not what it was, so a list would be a wrong one."""
    _, optimizer = started("O2")
    stash = optimizer._amp_stash
    for name in ("all_fp16_grad_stash", "all_fp32_grad_stash", "all_fp32_from_fp32_grad_stash"):
        assert not hasattr(stash, name)
    assert stash.all_fp32_params == stash.all_fp32_from_fp32_params


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


def test_applier_maps_nested_batches() -> None:
    given = {"a": [torch.ones(1), "text"], "b": (torch.zeros(1),)}
    got = amp._initialize.applier(given, lambda x: x + 1)
    assert (got["a"][0].item(), got["a"][1], got["b"][0].item()) == (2.0, "text", 1.0)
    assert given["a"][0].item() == 1.0


def test_module_as_an_object_with_state() -> None:
    """Frameworks pass the module itself where something with ``state_dict`` is wanted."""
    started("O2")
    things = {"amp": amp}
    saved = {name: thing.state_dict() for name, thing in things.items()}
    amp._amp_state.loss_scalers[0]._loss_scale = 2.0
    for name, thing in things.items():
        thing.load_state_dict(saved[name])
    assert amp.state_dict() == saved["amp"]


def test_destination() -> None:
    started("O2")
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
    with amp.scale_loss(extra(torch.ones(1, 3)).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert extra.bias.tolist() == [0.5, 0.5, 0.5]
    assert len(list(amp.master_params(optimizer))) == 10


# -- registration ----------------------------------------------------------------------------


def test_registered_float_function_after_initialize() -> None:
    started("O1")
    x = torch.ones(2, dtype=torch.float16)
    assert torch.sigmoid(x).dtype is torch.float16
    handle = amp.register_float_function(torch, "sigmoid")
    try:
        assert torch.sigmoid(x).dtype is torch.float32
    finally:
        if handle is not None:
            handle.remove()


def test_float_function_as_decorator() -> None:
    started("O1")

    @amp.float_function
    def widen(x: torch.Tensor) -> torch.dtype:
        return x.dtype

    assert widen(torch.ones(1, dtype=torch.float16)) is torch.float32
    with amp.disable_casts():
        assert widen(torch.ones(1, dtype=torch.float16)) is torch.float16


# -- backward by hand ------------------------------------------------------------------------


def backward_by_hand(model: nn.Module, optimizer: Any, number: int, factor: float = 1.0) -> bool:
    """What ``amp.scale_loss`` did inside Apex; returns whether the step is to be skipped."""
    scaler = amp._amp_state.loss_scalers[0]
    optimizer._prepare_amp_backward()
    (loss_of(model, number).float() * scaler.loss_scale() * factor).backward()
    optimizer._post_amp_backward(scaler)
    return scaler.update_scale()


@ALL_LEVELS
def test_backward_by_hand(level: str) -> None:
    """``_prepare_amp_backward`` and ``_post_amp_backward``, twice for one step."""
    model, optimizer = started(level, loss_scale="dynamic")
    other, by_block = started(level, loss_scale="dynamic")
    for number in range(2):
        assert not backward_by_hand(model, optimizer, number)
        with amp.scale_loss(loss_of(other, number), by_block) as scaled:
            scaled.backward()
    mine, wanted = map(amp.master_params, (optimizer, by_block))
    for ours, theirs in zip(mine, wanted, strict=True):
        assert same(ours.grad, theirs.grad)


@ALL_LEVELS
def test_an_overflow_by_hand_skips_the_step(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    amp._amp_state.verbosity = 1
    before = masters(optimizer)
    assert backward_by_hand(model, optimizer, 0, factor=float("inf"))
    optimizer.step()
    assert same(masters(optimizer), before)
    assert "reducing loss scale to 32768.0" in capsys.readouterr().out
