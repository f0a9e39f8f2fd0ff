# SPDX-License-Identifier: BSD-3-Clause
"""How scripts call ``step``: bound early, through schedulers and subclasses, with closures."""

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import BY_NAME, EXACT, LEVEL_NAMES
from cases.models import values
from cases.tolerances import assert_within_budget
from kit.compare import halves_match
from kit.loops import begin, scaled_backward
from kit.pair import Build, Pair, adam, sgd
from kit.refusals import assert_refused, refused
from kit.run import Run
from preamp.engine import serve_imitations
from preamp.fp16_utils import FP16_Optimizer

levels = pytest.mark.parametrize("level", LEVEL_NAMES)


# -- step bound before initialize ------------------------------------------------------------


def with_bound_step(level: str, build: Build, **options: Any) -> tuple[Pair, Any]:
    """A pair, and the step of its optimizer that was looked up before initialize."""
    steps: list[Any] = []

    def remember(params: Any) -> torch.optim.Optimizer:
        optimizer = build(params)
        steps.append(optimizer.step)
        return optimizer

    return Pair(level, remember, **options), steps[0]


@levels
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_step_bound_before_initialize_works_with_a_static_scale(level: str, kind: Any) -> None:
    pair, step = with_bound_step(level, lambda params: kind(params, lr=0.1), loss_scale=8.0)
    for index in range(4):
        pair.backward(index)
        step()
        pair.plain_step()
        pair.zero()
        pair.check(f"step {index}")
    assert (pair.engine.steps_applied, pair.engine.steps_skipped) == (4, 0)


@levels
def test_a_step_bound_before_initialize_is_refused_with_a_dynamic_one(level: str) -> None:
    """It could not be left out. Nothing is lost: the step may be taken in the right way."""
    pair, step = with_bound_step(level, sgd, loss_scale="dynamic")
    pair.backward(0)
    assert_refused("optimizer_calls", "a step from before initialize", step, pair.model)
    pair.step()
    pair.check()
    assert (pair.engine.steps_applied, pair.engine.steps_skipped) == (1, 0)


# -- subclasses ------------------------------------------------------------------------------


class DecayAfter(torch.optim.SGD):
    """Changes the weights once more after ``super().step``."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.5)
        return result


@levels
def test_a_subclass_that_calls_super(level: str) -> None:
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)  # hooks the base class's step, too
    pair = Pair(level, lambda params: DecayAfter(params, lr=0.25), loss_scale="dynamic")
    pair.train(0)
    pair.check()
    pair.overflow()
    pair.optimizer.step()
    assert pair.engine.last_step_skipped
    pair.zero()
    pair.check()
    pair.train(1)
    pair.check()
    assert (pair.engine.steps_applied, pair.engine.steps_skipped) == (2, 1)


class CustomStep(torch.optim.Optimizer):
    """An optimizer with arguments of its own, and a return value."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None, *, factor: float = 1.0) -> str:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad, alpha=-factor * group["lr"])
        return "done"


@levels
def test_arguments_and_result_of_step_pass_through(level: str) -> None:
    pair = Pair(level, CustomStep)
    pair.backward(0)
    assert pair.optimizer.step(factor=4.0) == "done"  # type: ignore[call-arg]
    with preamp.disable_casts():
        pair.plain_optimizer.step(factor=4.0)  # type: ignore[call-arg]
    pair.check()


# -- closures --------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("bound_before", [False, True])
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_closure_is_refused_at_a_dynamic_scale(
    level: str, bound_before: bool, by_keyword: bool
) -> None:
    """Whatever the gradients are, before anything is called or changed."""
    pair, step = with_bound_step(level, adam, loss_scale="dynamic")
    step = step if bound_before else pair.optimizer.step
    pair.backward(0)

    def closure() -> None:
        pytest.fail("the closure was called")

    with refused("optimizer_calls", "a closure at a dynamic scale", pair.model, pair.optimizer):
        step(closure=closure) if by_keyword else step(closure)
    assert (pair.engine.steps_applied, pair.engine.steps_skipped) == (0, 0)
    pair.step()
    pair.check()


@levels
def test_functions_are_cast_inside_a_closure_but_not_inside_the_step(level: str) -> None:
    pair = Pair(level, scope="thread", loss_scale=128.0)
    seen: list[torch.dtype] = []

    def product() -> torch.dtype:
        return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype

    def closure() -> torch.Tensor:
        seen.append(product())
        pair.ours(0)
        return torch.zeros(())

    pair.optimizer.register_step_post_hook(lambda *_: seen.append(product()))
    pair.optimizer.step(closure)
    row = BY_NAME[level]
    assert seen == [row.half if row.casts_functions else torch.float32, torch.float32]


@pytest.mark.parametrize("level", EXACT)
def test_lbfgs(level: str) -> None:
    run = Run(level, "LBFGS", loss_scale=2.0**8 if level in ("O1", "O2") else None)
    before = run.loss().item()
    run.play(3 * "closure; ")
    assert run.engine.steps_applied == 3
    assert run.loss().item() < before / 2
    assert halves_match(run.model)


# -- rounding gradients: a budget instead of bits --------------------------------------------


class Mlp(nn.Module):
    """A network whose half gradients are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5", "O3"])
def test_a_real_network_is_as_close_to_float64_as_torch_in_half(level: str) -> None:
    """The oracle is float64; the measure is torch's own autocast, or half weights at O3."""
    half = torch.bfloat16 if level in ("O4", "O5") else torch.float16
    model = Mlp()
    low, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    build = lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    optimizers = [build(model), build(low.to(half) if level == "O3" else low), build(exact)]
    preamp.initialize(
        model, optimizers[0], opt_level=level, loss_scale=128.0, scope="model", verbosity=0
    )
    for _ in range(10):
        x, y = torch.randn(32, 8), torch.randn(32, 4)
        scaled_backward((model(x) - y).square().mean(), optimizers[0])
        if level == "O3":
            output = low(x.to(half)).float()
        else:
            with torch.autocast("cpu", half):
                output = low(x).float()
        (output - y).square().mean().backward()
        (exact(x.double()) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs, wanted in zip(values(optimizers[0]), values(low), values(exact), strict=True):
        assert_within_budget(ours, theirs, wanted)


# -- optimizers in another object that forwards to them, as frameworks have them --------------


class Forwards(torch.optim.Optimizer):
    """As Accelerate's: an optimizer by its class, without anything of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)


class Imitates:
    """As Lightning's: it takes the class of the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Imitation", (Imitates, type(optimizer)), {})

    @property
    def optimizer(self) -> Any:
        return self._optimizer

    def step(self, closure: Any = None) -> Any:
        return self._optimizer.step(closure)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class HasGroups:
    """As mmengine's: no optimizer by its class, and without a state."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Lookahead(torch.optim.Optimizer):
    """Shares the groups and has a state: an optimizer by itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups
        self.calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.optimizer.step(closure)


WRAPPERS = [Forwards, Imitates, HasGroups, lambda inner: Forwards(Imitates(inner))]
IDS = ["forwards", "imitates", "has groups", "nested"]


@pytest.mark.parametrize("wrap", WRAPPERS, ids=IDS)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_name_looks_into_a_wrapper(level: str, wrap: Any) -> None:
    pair = Pair(level)
    pair.engine.close()
    wrapped = wrap(pair.optimizer)
    given = preamp.initialize(pair.model, wrapped, opt_level=level, loss_scale=8.0, verbosity=0)
    assert given[1] is wrapped
    pair.engine = preamp.engine_of(wrapped)
    assert preamp.engine_of(pair.optimizer) is pair.engine
    scaled_backward(pair.loss(0), [wrapped])
    pair.theirs(0)
    assert float(preamp.clip_grad_norm_(wrapped, 1e9)) > 0
    scheduler = torch.optim.lr_scheduler.StepLR(pair.optimizer, 1, gamma=1.0)
    pair.step()
    assert preamp.step_scheduler(scheduler, wrapped)
    pair.zero()
    pair.check()
    scaler = preamp.GradScaler(wrapped)
    scaler.scale(pair.loss(1)).backward()
    pair.theirs(1)
    scaler.unscale_(wrapped)
    scaler.step(wrapped if hasattr(wrapped, "step") else pair.optimizer)
    scaler.update()
    pair.plain_step()
    pair.check()
    assert preamp.engine_of(wrapped).state_dict() == pair.engine.state_dict()
    assert len(list(preamp.master_params(wrapped))) == len(list(pair.model.parameters()))


def test_an_optimizer_with_a_state_of_its_own_is_not_looked_through() -> None:
    model = nn.Linear(4, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    outer = begin("O2", model, Lookahead(inner))
    engine = preamp.engine_of(outer)
    assert engine.optimizers == (outer,)
    scaled_backward(model(torch.ones(3, 4)).sum() * torch.inf, outer)
    outer.step()
    assert outer.calls == 0  # a skipped step is a step that did not happen
    assert engine.steps_skipped == 1


def test_an_optimizer_that_scales_by_itself_is_not_looked_through() -> None:
    model = nn.Linear(4, 2).half()
    optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    with refused("optimizer_calls", "FP16_Optimizer", model):
        preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, allow_half_model=True)


@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_an_imitation_drops_gradients_and_adds_groups_as_the_optimizer_does(level: str) -> None:
    pair = Pair(level)
    serve_imitations(pair.engine)
    serve_imitations(pair.engine)  # as for a second model of the same engine
    wrapped: Any = Imitates(pair.optimizer)
    for index in range(6):
        pair.backward(index)
        if index % 2:
            pair.step()
        wrapped.zero_grad()  # drops every second batch unused
        pair.plain_optimizer.zero_grad()
        assert all(param.grad is None for param in pair.model.parameters())
    pair.check()
    late = nn.Parameter(torch.ones(3))
    wrapped.add_param_group({"params": [late]})
    assert id(late) in pair.engine.updated_params()
    with refused("optimizer_calls", "a parameter of another group", pair.model, pair.optimizer):
        wrapped.add_param_group({"params": list(pair.model.parameters())[:1]})


def test_an_imitated_class_is_the_optimizers_own_elsewhere() -> None:
    model = nn.Linear(4, 2)
    inner = begin("O2", model, torch.optim.SGD(model.parameters(), lr=0.5))
    engine = preamp.engine_of(model)
    serve_imitations(engine)
    wrapped: Any = Imitates(inner)
    assert type(pickle.loads(pickle.dumps(inner))) is type(copy.deepcopy(inner)) is torch.optim.SGD
    assert isinstance(wrapped, torch.optim.SGD)
    engine.close()
    assert type(inner) is torch.optim.SGD
    model(torch.ones(3, 4)).sum().backward()
    wrapped.zero_grad()
    assert model.weight.grad is None


# -- optimizers that skip Optimizer.__init__ ----------------------------------------------------


class Skips(torch.optim.Optimizer):
    """As fastai's `OptimWrapper` in trainers: the optimizer inside is not called ``optimizer``."""

    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt = opt

    state = property(lambda self: self.opt.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.opt.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.opt.defaults)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is None
        for group in self.opt.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)  # its own weight decay
        self.opt.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.opt.zero_grad(set_to_none)

    def add_param_group(self, param_group: Any) -> None:
        self.opt.add_param_group(param_group)


class SkipsAndForwards(Skips):
    """The same, with every other name of the one inside."""

    def __getattr__(self, name: str) -> Any:
        return None if name == "opt" else getattr(self.opt, name, None)


class SkipsAlone(torch.optim.Optimizer):
    """Without any inside."""

    def __init__(self, params: Any) -> None:
        self.defaults, self.state = {}, defaultdict(dict)
        self.param_groups = [{"params": list(params)}]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is None
        for param in self.param_groups[0]["params"]:
            param.data.mul_(0.5).sub_(param.grad, alpha=0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad = None


def skips(params: Any) -> Skips:
    return Skips(torch.optim.SGD(params, lr=0.5, momentum=0.5))


BUILDS = pytest.mark.parametrize(
    "build", [skips, lambda params: SkipsAndForwards(skips(params).opt), SkipsAlone]
)


@BUILDS
@pytest.mark.parametrize("scale", [128.0, "dynamic"])
@pytest.mark.parametrize("level", EXACT)
def test_an_optimizer_that_skips_its_base_s_init_trains(level: str, scale: Any, build: Any) -> None:
    pair = Pair(level, build, loss_scale=scale)
    pair.optimizer.param_groups[0]["marked"] = True
    for index in range(2):
        pair.train(index)
        pair.check(f"after step {index}")
    if scale == "dynamic":
        before = [param.detach().clone() for param in pair.model.parameters()]
        pair.overflow()
        pair.optimizer.step()
        pair.zero()
        assert all(map(torch.equal, before, pair.model.parameters()))
        pair.train(2)
        pair.check("after a skipped step")
    assert pair.engine.steps_applied == (3 if scale == "dynamic" else 2)
    held = pair.optimizer.step
    pair.engine.close()
    assert not [name for name in vars(pair.optimizer) if "hook" in name or name == "step"]
    for step in (pair.optimizer.step, held):
        before = [param.detach().clone() for param in pair.model.parameters()]
        for param in pair.model.parameters():
            param.grad = torch.ones_like(param)
        step()
        assert not any(map(torch.equal, before, pair.model.parameters()))


def test_an_optimizer_inside_does_not_speak_for_one_around_it() -> None:
    """The flag that the device would read is given to the optimizer of the engine alone."""
    model = nn.Linear(2, 2)
    inside = preamp.optimizers.FusedAdam(model.parameters(), lr=0.5)
    around = SkipsAndForwards(inside)
    with refused("optimizer_calls", "compact storage around another", model, inside):
        preamp.initialize(model, around, opt_level="O2", storage="compact", verbosity=0)
    preamp.initialize(model, around, opt_level="O2", verbosity=0)
    session = preamp.engine_of(model).sessions[id(around)]
    assert inside._step_supports_amp_scaling
    assert not session.obeys_on_device
