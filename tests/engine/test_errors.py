# SPDX-License-Identifier: BSD-3-Clause
"""Every error a user can cause: its words, and that nothing has changed after it."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.host_reads import far_from_the_host
from cases.levels import CASTING_FUNCTIONS, HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from engine.harness import batch, loss_of, make, started, train_plain, train_step, weights
from kit.compare import differences, halves_match, picture, same
from kit.run import Net
from preamp import amp
from preamp.core.errors import LossScaleError, PreampPolicyError, PreampStateError
from preamp.optimizers import FusedAdam

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)
MASTERS = pytest.mark.parametrize("level", WITH_MASTERS)
DOORS = pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])


@contextmanager
def refused(error: type[Exception], text: str, *subjects: Any) -> Iterator[None]:
    """The block raises ``error`` with exactly ``text`` and changes nothing."""
    before = picture(*subjects)
    with pytest.raises(error, match=f"^{re.escape(text)}$"):
        yield
    assert differences(before, picture(*subjects)) == []


def used() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and optimizer with state and gradients, so that there is something to disturb."""
    model, optimizer = make(optimizer="adam")
    train_plain(model, optimizer, 0)
    loss_of(model, 1).backward()
    return model, optimizer


def test_the_picture_sees_changes() -> None:
    """The test of the tests: what an initialize does shows up."""
    model, optimizer = used()
    before = picture(model, optimizer)
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    changed = differences(before, picture(model, optimizer))
    assert {"0.first._parameters", "0.first.weight.grad", "1.step", "1.group0.params"} <= {*changed}
    engine = preamp.engine_of(model)
    engine.close()
    model, _ = started("O1")
    assert "torch.mm" in differences(before, picture()) or "torch.exp" in differences(
        before, picture()
    )


# -- arguments of initialize -----------------------------------------------------------------


def of_models(described: str) -> tuple[type[Exception], str]:
    return TypeError, (
        f"models is {described}. Allowed is a torch.nn.Module or a list of them. Pass the model "
        "itself, or [model_a, model_b]."
    )


def of_optimizers(described: str) -> tuple[type[Exception], str]:
    return TypeError, (
        f"optimizers is {described}. Allowed is a torch.optim.Optimizer or a list of them. Pass "
        "the optimizer itself, or [optimizer_a, optimizer_b]."
    )


def of_verbosity(given: str) -> tuple[type[Exception], str]:
    return TypeError, (
        f"verbosity={given} cannot be used. Allowed are 0, 1 and 2, also as a string such as "
        "'1'. Pass 0 to have nothing printed."
    )


def of_num_losses(given: str) -> tuple[type[Exception], str]:
    return ValueError, (
        f"num_losses={given} cannot be used. Allowed is a whole number from 0. Pass how many "
        "losses have a loss scale of their own, usually 1."
    )


TWICE = (
    "The same Adam is listed twice in optimizers. Each optimizer may be given once. Remove "
    "the second mention."
)
ARGUMENTS: list[tuple[Callable[[Any, Any], dict[str, Any]], tuple[type[Exception], str]]] = [
    (lambda model, _: {"models": (model,)}, of_models("a tuple of Net")),
    (lambda model, _: {"models": [model, 3]}, of_models("a list of Net, int")),
    (lambda *_: {"models": None}, of_models("a NoneType")),
    (lambda *_: {"models": "model"}, of_models("a str")),
    (lambda *_: {"models": ()}, of_models("a tuple of nothing")),
    (lambda model, _: {"models": model.parameters()}, of_models("a generator")),
    (lambda _, opt: {"optimizers": (opt,)}, of_optimizers("a tuple of Adam")),
    (lambda _, opt: {"optimizers": iter([opt])}, of_optimizers("a list_iterator")),
    (lambda _, opt: {"optimizers": [opt, None]}, of_optimizers("a list of Adam, NoneType")),
    (lambda _, opt: {"optimizers": {"a": opt}}, of_optimizers("a dict")),
    (lambda *_: {"optimizers": 3}, of_optimizers("an int")),
    (lambda _, opt: {"optimizers": [opt, opt]}, (PreampStateError, TWICE)),
    (lambda *_: {"verbosity": None}, of_verbosity("None")),
    (lambda *_: {"verbosity": "loud"}, of_verbosity("'loud'")),
    (lambda *_: {"verbosity": [1]}, of_verbosity("[1]")),
    (lambda *_: {"num_losses": -1}, of_num_losses("-1")),
    (lambda *_: {"num_losses": 1.0}, of_num_losses("1.0")),
    (lambda *_: {"num_losses": "2"}, of_num_losses("'2'")),
    (lambda *_: {"num_losses": None}, of_num_losses("None")),
    (lambda *_: {"num_losses": True}, of_num_losses("True")),
]


@DOORS
@pytest.mark.parametrize(("change", "expected"), ARGUMENTS)
def test_wrong_arguments(
    door: Any, change: Callable[[Any, Any], dict[str, Any]], expected: tuple[type[Exception], str]
) -> None:
    model, optimizer = used()
    given = {"models": model, "optimizers": optimizer, "opt_level": "O2", "verbosity": 0}
    with refused(*expected, model, optimizer):
        door.initialize(**{**given, **change(model, optimizer)})


@ALL_LEVELS
def test_optimizer_of_another_engine(level: str) -> None:
    model, optimizer = started(level, optimizer="adam")
    other = Net()
    text = (
        f"This Adam went through initialize already (opt_level={level!r}). An optimizer belongs "
        "to one engine at a time. Call preamp.engine_of(optimizer).close() first, or build a new "
        "optimizer."
    )
    with refused(PreampStateError, text, model, optimizer, other):
        preamp.initialize(other, optimizer, opt_level="O2", verbosity=0)


@DOORS
@pytest.mark.parametrize(
    ("cast", "dtype"), [(nn.Module.half, "float16"), (nn.Module.bfloat16, "bfloat16")]
)
@ALL_LEVELS
def test_model_that_is_half(door: Any, level: str, cast: Any, dtype: str) -> None:
    model = Net()
    cast(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    text = (
        f"The parameter 'first.weight' of Net is {dtype} before initialize. Models must come with "
        "float32 (or float64) parameters, so that masters can keep them exactly. Call "
        "model.float() first, or do not make the model half (checkpoints may load as they were "
        "stored): initialize casts what the level needs. Or pass allow_half_model=True, and "
        "masters start from the rounded values."
    )
    with refused(PreampStateError, text, model, optimizer):
        door.initialize(model, optimizer, opt_level=level, verbosity=0)


def test_model_with_a_half_buffer_in_a_list() -> None:
    model, other = Net(), nn.Linear(2, 2)
    model.bn.running_mean = model.bn.running_mean.half()
    text = "The buffer 'bn.running_mean' of Net is float16 before initialize. Models must come"
    before = picture(model, other)
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}"):
        preamp.initialize([other, model], opt_level="O2", verbosity=0)
    assert differences(before, picture(model, other)) == []


@MASTERS
def test_model_of_another_engine(level: str) -> None:
    model, optimizer = started(level)
    text = (
        f"The parameter 'first.weight' of Net is {'float16' if level == 'O2' else 'bfloat16'} "
        "before initialize. Models must come with float32 (or float64) parameters, so that "
        "masters can keep them exactly. The model has an engine already: call "
        "preamp.engine_of(model).close() first."
    )
    with refused(PreampStateError, text, model, optimizer):
        preamp.initialize(model, opt_level="O1", verbosity=0)


def test_half_models_on_request() -> None:
    model = Net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    widened = [param.detach().float() for param in model.parameters()]
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0, allow_half_model=True)
    after = [param.detach() for param in preamp.master_params(optimizer)]
    assert all(torch.equal(a, b.float()) for a, b in zip(widened, after, strict=True))
    train_step(model, optimizer, 0)
    assert halves_match(model)


def test_half_models_on_request_through_the_state() -> None:
    amp._amp_state.allow_incoming_model_not_fp32 = True
    amp.initialize(Net().half(), opt_level="O2", verbosity=0)


@DOORS
@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_model_in_a_wrapper_of_ranks(door: Any, kind: Any) -> None:
    model, optimizer = used()
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    wrapped.module = model
    text = (
        f"A model is wrapped in {kind.__name__} already. initialize changes dtypes, which the "
        "wrapper must see afterwards. Call preamp.initialize on the bare model first, then "
        f"{kind.__name__}(model)."
    )
    with refused(PreampStateError, text, model, optimizer):
        door.initialize([Net(), wrapped], optimizer, opt_level="O2", verbosity=0)


# -- a failure halfway -----------------------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("nth", [0, 1])
def test_a_failure_in_the_last_hooks_takes_all_back(
    level: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two models and optimizers; test_interrupts stops at every line, of one."""
    model, optimizer = used()
    model.register_buffer("constant", torch.full((2,), 0.1), persistent=False)
    other, second = make(1, "sgd")
    models, optimizers = [model, other], [optimizer, second]
    options = {"keep_fp32": [nn.LayerNorm, "last"]} if level in HALF_WEIGHTS else {}
    before = picture(*models, *optimizers)
    hooks = sys.modules["preamp.engine.initialize"].OptimizerHooks
    attach, calls = hooks.attach, list[object]()

    def fail(self: Any, undo: Any) -> None:
        calls.append(self)
        if len(calls) > nth:
            raise KeyboardInterrupt
        attach(self, undo)

    with monkeypatch.context() as patch:
        patch.setattr(hooks, "attach", fail)
        with pytest.raises(KeyboardInterrupt):
            preamp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    assert differences(before, picture(*models, *optimizers)) == []
    preamp.initialize(models, optimizers, opt_level=level, verbosity=0, **options)
    train_step(model, optimizer, 2)


def test_failed_amp_initialize_keeps_the_current_engine() -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    engine = amp._amp_state.engine
    with pytest.raises(PreampPolicyError):
        amp.initialize(Net(), opt_level="O8", verbosity=0)
    assert amp._amp_state.engine is engine
    assert amp._amp_state.opt_properties.opt_level == "O2"


# -- scale_loss ------------------------------------------------------------------------------


def enter(door: Any, loss: Any, optimizers: Any, **arguments: Any) -> None:
    with door.scale_loss(loss, optimizers, **arguments) as scaled:
        scaled.backward()


def test_scale_loss_before_initialize() -> None:
    model, optimizer = used()
    text = (
        "scale_loss was given an Adam that was not initialized. It takes optimizers that went "
        "through preamp.initialize. Call model, optimizer = preamp.initialize(model, optimizer, "
        "opt_level=…) before the training loop."
    )
    loss = loss_of(model, 0)
    with refused(PreampStateError, text, model, optimizer):
        enter(preamp, loss, optimizer)


def test_amp_scale_loss_before_initialize() -> None:
    model, optimizer = used()
    text = (
        "amp.scale_loss was called before amp.initialize. It takes optimizers that went through "
        "amp.initialize. Call model, optimizer = amp.initialize(model, optimizer, opt_level=…) "
        "before the training loop; enabled=False turns amp off."
    )
    loss = loss_of(model, 0)
    with refused(PreampStateError, text, model, optimizer):
        enter(amp, loss, optimizer)


@DOORS
def test_scale_loss_with_a_foreign_optimizer(door: Any) -> None:
    model, optimizer = make()
    door.initialize(model, optimizer, opt_level="O2", verbosity=0)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    name = "amp.initialize" if door is amp else "preamp.initialize"
    text = (
        "scale_loss was given an SGD that was not initialized. It takes optimizers that went "
        f"through {name}. Call model, optimizer = {name}(model, optimizer, opt_level=…) before "
        "the training loop."
    )
    loss = loss_of(model, 0)
    with refused(PreampStateError, text, model, optimizer, stranger):
        enter(door, loss, [optimizer, stranger])


@DOORS
def test_scale_loss_over_two_engines(door: Any) -> None:
    one, first = door.initialize(*make(0), opt_level="O2", verbosity=0)
    two, second = door.initialize(*make(1), opt_level="O2", verbosity=0)
    loss = loss_of(one, 0) + loss_of(two, 0)
    name = "amp.initialize" if door is amp else "preamp.initialize"
    text = (
        "scale_loss was given optimizers of different engines. One backward has one loss scale, "
        f"so its optimizers must come from one {name} call. Initialize them together: "
        f"{name}([model_a, model_b], [optimizer_a, optimizer_b], …)."
    )
    with refused(PreampStateError, text, one, first, two, second):
        enter(door, loss, [first, second])


def test_scale_loss_without_optimizers() -> None:
    text = (
        "scale_loss was given no optimizer. It needs every optimizer whose parameters get "
        "gradient from the loss. Pass the optimizer that preamp.initialize returned, or a list of "
        "them."
    )
    with refused(PreampStateError, text):
        enter(preamp, torch.ones(()), [])


@pytest.mark.parametrize(
    ("given", "kind"), [("optimizer", "a str"), (None, "a NoneType"), (3, "an int")]
)
def test_scale_loss_with_something_else(given: Any, kind: str) -> None:
    text = f"scale_loss was given {kind} that"
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}"):
        enter(preamp, torch.ones(()), given)


# The loss is refused before the engine looks at its level, so that these two do not interact.
@pytest.mark.pairs
@DOORS
@ALL_LEVELS
@pytest.mark.parametrize(
    ("loss", "described"),
    [
        (1.5, "a float"),
        (None, "a NoneType"),
        ((torch.ones(()),), "a tuple"),
        (torch.ones((), dtype=torch.int64), "a torch.int64 tensor"),
        (torch.ones((), dtype=torch.complex64), "a torch.complex64 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_that_is_none(door: Any, level: str, loss: Any, described: str) -> None:
    model, optimizer = used()
    door.initialize(model, optimizer, opt_level=level, verbosity=0)
    text = (
        f"scale_loss was given {described} as the loss. The loss must be a floating-point tensor. "
        "Pass the tensor that backward() will be called on, not loss.item() or a tuple."
    )
    with refused(TypeError, text, model, optimizer):
        enter(door, loss, optimizer)


@DOORS
@pytest.mark.parametrize(("count", "loss_id"), [(1, 1), (3, 3), (2, -1), (0, 0)])
def test_wrong_loss_id(door: Any, count: int, loss_id: int) -> None:
    model, optimizer = used()
    door.initialize(model, optimizer, opt_level="O2", num_losses=count, verbosity=0)
    allowed = f"Allowed are 0 to {count - 1}" if count else "There is none"
    text = (
        f"loss_id={loss_id} with {count} loss scaler(s). {allowed}. Pass num_losses to "
        "preamp.initialize, one for each loss with a scale of its own."
    )
    loss = loss_of(model, 0)
    with refused(IndexError, text, model, optimizer):
        enter(door, loss, optimizer, loss_id=loss_id)


def test_loss_scale_of_a_wrong_loss_id() -> None:
    model, optimizer = started("O2")
    text = (
        "loss_id=5 with 1 loss scaler(s). Allowed are 0 to 0. Pass num_losses to "
        "preamp.initialize, one for each loss with a scale of its own."
    )
    with refused(IndexError, text, model, optimizer):
        preamp.engine_of(model).loss_scale(5)


# -- sparse gradients ------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids)).sum()


@MASTERS
def test_sparse_gradient_of_a_master(level: str) -> None:
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    text = (
        "The gradient of 'table.weight' is sparse and the parameter has a float32 master. Masters "
        "take dense gradients; sparse ones work at O0, O1 and O4. Build the embedding with "
        "sparse=False, or choose O1 (O4 for bfloat16)."
    )
    with refused(PreampStateError, text, model, optimizer):
        enter(preamp, model(torch.tensor([1, 1, 2])), optimizer)
    enter(preamp, model.out.weight.float().sum() * 2.0**-8, optimizer)
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}$"):
        enter(preamp, model(torch.tensor([1, 1, 2])), optimizer)
    grads = [param.grad for param in preamp.master_params(optimizer) if param.grad is not None]
    assert same(grads, [torch.full((1, 3), 2.0**-8)])  # the earlier one is still there
    assert preamp.engine_of(model).loss_scale() == 2.0**16


# -- step, clip, groups ----------------------------------------------------------------------


def left_scaled(level: str) -> tuple[Any, Any]:
    model, optimizer = started(level, loss_scale=8.0)
    with preamp.scale_loss(loss_of(model, 0), optimizer, delay_unscale=True) as scaled:
        scaled.backward()
    return model, optimizer


@ALL_LEVELS
@pytest.mark.parametrize("by_class", [False, True])
def test_step_with_scaled_gradients(level: str, by_class: bool) -> None:
    model, optimizer = left_scaled(level)
    text = (
        "optimizer.step() with gradients left scaled by delay_unscale=True. The last scale_loss "
        "before a step must unscale. Call scale_loss without delay_unscale for the last backward "
        "before step()."
    )
    with refused(PreampStateError, text, model, optimizer):
        type(optimizer).step(optimizer) if by_class else optimizer.step()


@ALL_LEVELS
def test_clip_of_scaled_gradients(level: str) -> None:
    model, optimizer = left_scaled(level)
    text = (
        "clip_grad_norm_ was called on gradients left scaled by delay_unscale=True. Only unscaled "
        "gradients have a norm that means anything. Clip after the last scale_loss of the "
        "accumulation, called without delay_unscale."
    )
    with refused(PreampStateError, text, model, optimizer):
        preamp.clip_grad_norm_(optimizer, 1.0)


def test_engine_of_a_stranger() -> None:
    text = (
        "This Net has no engine. Models and optimizers have one from preamp.initialize until "
        "Engine.close. Pass it to preamp.initialize first, and keep the same object."
    )
    for ask in (
        preamp.engine_of,
        preamp.state_dict,
        lambda model: preamp.load_state_dict(model, {}),
        lambda model: preamp.clip_grad_norm_(model, 1.0),
    ):
        with refused(PreampStateError, text):
            ask(Net())


@MASTERS
@pytest.mark.parametrize("form", [lambda p: [p], lambda p: p, lambda p: iter([p])])
def test_group_with_a_known_parameter(level: str, form: Callable[[Any], Any]) -> None:
    model, optimizer = started(level)
    text = (
        "Parameter 'first.weight' is in this optimizer already. A parameter may appear in one "
        "parameter group only. Leave it out of the new group."
    )
    with refused(ValueError, text, model, optimizer):
        optimizer.add_param_group({"params": form(model.first.weight)})


@MASTERS
def test_half_gradient_changed_in_place(level: str) -> None:
    model, optimizer = started(level, loss_scale=128.0)
    with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    model.first.weight.grad.mul_(0.5)
    half = "float16" if level == "O2" else "bfloat16"
    text = (
        f"The {half} gradient of 'first.weight' was changed in place or replaced after scale_loss, "
        "while it was still multiplied by the loss scale. After scale_loss the unscaled gradients "
        "are those of preamp.master_params(optimizer); on the model's parameters they may be read, "
        "zeroed or set to None. Clip with preamp.clip_grad_norm_(optimizer, max_norm) or with "
        "torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), max_norm), and call every "
        "backward inside scale_loss."
    )
    before = weights(model)
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}$"):
        optimizer.step()
    assert same(weights(model), before)
    preamp.engine_of(model).close()
    assert model.first.weight.grad is None


@MASTERS
def test_model_made_float_after_initialize(level: str) -> None:
    model, optimizer = started(level)
    model.float()
    before = weights(model)
    text = (
        "The half parameter 'first.weight' became float32 after initialize. A model with master "
        "weights keeps the dtypes that initialize gave it. Call preamp.engine_of(model).close() "
        "before model.float()."
    )
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}$"):
        optimizer.step()
    assert same(weights(model), before)


@MASTERS
def test_assigning_load(level: str) -> None:
    model, optimizer = started(level)
    text = (
        "load_state_dict(assign=True) on a model with master weights. Parameters must keep their "
        "identity: the optimizer's masters belong to them. Load without assign=True, or load "
        "before preamp.initialize."
    )
    state = Net().state_dict()
    with refused(PreampStateError, text, model, optimizer):
        model.load_state_dict(state, assign=True)


# -- state -----------------------------------------------------------------------------------

ENTRY = {"loss_scale": 4.0, "unskipped": 1}
BAD_STATES: list[tuple[dict[str, Any], str]] = [
    ({}, "The state of 0 entries lacks ['loss_scaler0', 'loss_scaler1'] and has nothing"),
    ({"loss_scaler0": ENTRY}, "The state of 1 entries lacks ['loss_scaler1'] and has nothing"),
    (
        {f"loss_scaler{i}": ENTRY for i in range(3)},
        "The state of 3 entries lacks nothing and has ['loss_scaler2'] beyond them. Needed are "
        "exactly ['loss_scaler0', 'loss_scaler1'], one for each of num_losses. Call initialize "
        "with the num_losses of the run that saved it; nothing was loaded.",
    ),
    (
        {"loss_scaler0": ENTRY, "loss_scaler1": ENTRY, "extra": 1},
        "The state of 3 entries lacks nothing and has ['extra'] beyond them.",
    ),
    (
        {"loss_scaler0": ENTRY, "loss_scaler1": {"loss_scale": 2.0}},
        "A loss scaler's state {'loss_scale': 2.0} cannot be read.",
    ),
    (
        {"loss_scaler0": ENTRY, "loss_scaler1": {**ENTRY, "unskipped": "many"}},
        "A loss scaler's state {'loss_scale': 4.0, 'unskipped': 'many'} cannot be read.",
    ),
]


@pytest.mark.parametrize(("state", "text"), BAD_STATES)
def test_engine_state_that_does_not_fit(state: dict[str, Any], text: str) -> None:
    model, optimizer = started("O2", num_losses=2)
    engine = preamp.engine_of(model)
    engine.scaler(1).set_scale(32.0)
    before = engine.state_dict()
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        preamp.load_state_dict(optimizer, state)
    assert engine.state_dict() == before


@pytest.mark.parametrize(
    "steps", [[{"applied": 1}], [3], 5, [{"applied": "x", "skipped": 0, "skips_in_row": 0}]]
)
def test_engine_state_with_unreadable_counters(steps: Any) -> None:
    model, optimizer = started("O2")
    engine = preamp.engine_of(model)
    before = engine.state_dict()
    state = {"loss_scaler0": ENTRY, "steps": steps}
    text = f"The step counters {steps!r} cannot be read."
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        preamp.load_state_dict(optimizer, state)
    assert engine.state_dict() == before


def test_amp_state_before_initialize() -> None:
    text = (
        "amp.load_state_dict was called before amp.initialize. Loss scalers exist from "
        "amp.initialize on. Load models and optimizers in any order, but amp's state after "
        "amp.initialize."
    )
    with refused(PreampStateError, text):
        amp.load_state_dict({"loss_scaler0": ENTRY})


@pytest.mark.parametrize("key", ["scaler0", "loss_scaler", "loss_scalerx", "model", 0])
def test_amp_state_with_unknown_keys(key: Any) -> None:
    model, optimizer = make()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = amp.state_dict()
    text = (
        f"The state has unknown keys [{key!r}]. Allowed are loss_scaler0, loss_scaler1, …. Pass "
        "what amp.state_dict() returned; nothing was loaded."
    )
    with refused(PreampStateError, text, model, optimizer):
        amp.load_state_dict({"loss_scaler0": ENTRY, key: ENTRY})
    assert amp.state_dict() == before


def test_unknown_option() -> None:
    text = "opt_properties has no option 'colour'; it has ['enabled', 'opt_level', "
    with pytest.raises(AttributeError, match=f"^{re.escape(text)}"):
        _ = amp._amp_state.opt_properties.colour


# -- scaling that cannot go on ---------------------------------------------------------------


def damage(model: nn.Module, optimizer: torch.optim.Optimizer, *, in_loss: bool) -> None:
    optimizer.zero_grad()
    loss = model.last.weight.float().sum()
    with preamp.scale_loss(loss * float("inf") if in_loss else loss, optimizer) as scaled:
        (scaled * float("inf")).backward()
    optimizer.step()


def test_too_many_skips_from_the_loss_itself() -> None:
    model, optimizer = started("O2", max_consecutive_skips=1)
    text = (
        "1 optimizer steps in a row skipped; the loss itself was infinite or nan before scaling "
        "(loss 0), so no loss scale can help. The forward must yield a finite loss. To learn in "
        "which module and line it begins, pass overflow='trace' to preamp.initialize. Look for the "
        "first non-finite activation in the forward: a log or division by zero, a float16 "
        "activation above 65504, a learning rate that is too high."
    )
    with pytest.raises(LossScaleError, match=f"^{re.escape(text)}$"):
        damage(model, optimizer, in_loss=True)


@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("door", ["scale_loss", "GradScaler"])
@pytest.mark.parametrize("fused", [False, True])
def test_the_stack_of_too_many_skips_ends_at_the_line_that_stepped(
    fused: bool, door: str, in_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host learns of the skip in the step after it."""
    if fused:
        far_from_the_host(monkeypatch)
    model = nn.Linear(4, 2)
    optimizer: Any = (FusedAdam if fused else torch.optim.SGD)(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"max_consecutive_skips": 1, "verbosity": 0}
    preamp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic", **options)
    scaler = preamp.GradScaler(optimizer)

    def train() -> None:
        for _ in range(2):
            loss = model(torch.ones(3, 4)).float().sum() * (float("inf") if in_loss else 1.0)
            by = 1.0 if in_loss else float("inf")
            if door == "GradScaler":
                (scaler.scale(loss) * by).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                with preamp.scale_loss(loss, optimizer) as scaled:
                    (scaled * by).backward()
                optimizer.step()

    with pytest.raises(LossScaleError) as caught:
        train()
    frames = traceback.extract_tb(caught.value.__traceback__)
    inner = [frame for frame in frames if "/preamp/" in frame.filename]
    assert frames[-1 - len(inner)].name == "train"
    assert ".step(" in (frames[-1 - len(inner)].line or "")
    assert [frame.name for frame in inner] == ["step"]  # the method that was called
    assert "pass overflow='trace' to preamp.initialize" in str(caught.value)


def test_too_many_skips_are_told_by_what_was_watched() -> None:
    model, optimizer = started("O2", max_consecutive_skips=1, overflow="trace")
    with torch.no_grad():
        model.last.weight.fill_(float("inf"))
    told = (
        r"no loss scale can help\. .*'last.weight' was inf in float16 already when the forward of"
    )
    with preamp.scale_loss(loss_of(model, 0), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(LossScaleError, match=told):
        optimizer.step()


def test_no_limit_on_skips() -> None:
    model, optimizer = started("O2", max_consecutive_skips=None, min_loss_scale=1.0)
    for _ in range(60):
        damage(model, optimizer, in_loss=False)
    assert preamp.engine_of(model).loss_scale() == 1.0


def test_training_can_go_on_after_the_error() -> None:
    model, optimizer = started("O2", max_consecutive_skips=1)
    with pytest.raises(LossScaleError):
        damage(model, optimizer, in_loss=False)
    before = weights(model)
    train_step(model, optimizer, 0)
    assert not same(weights(model), before)
    assert not preamp.engine_of(model).last_step_skipped


# -- lazy modules ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@DOORS
@ALL_LEVELS
@pytest.mark.parametrize(
    ("lazy", "name"),
    [
        (lambda: nn.LazyLinear(2), "1.weight"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "1.running_mean"),
    ],
)
def test_lazy_modules(door: Any, level: str, lazy: Any, name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), lazy())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    text = (
        f"{name!r} of Sequential is not initialized: a lazy module gets its shapes in its first "
        "forward. initialize takes models whose parameters and buffers have their memory. Run one "
        "forward on a batch first, then build the optimizer and call preamp.initialize."
    )
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}$"):
        door.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model[0].weight.dtype is torch.float32
    assert torch.equal(model[0].weight, before)
    with pytest.raises(PreampStateError):
        preamp.engine_of(model)
    model(torch.randn(5, 3))
    door.initialize(model, optimizer, opt_level=level, verbosity=0)
    model(torch.randn(5, 3))


# -- what torch.jit has compiled -------------------------------------------------------------


@DOORS
@pytest.mark.parametrize("level", HALF_WEIGHTS)
@pytest.mark.parametrize("by", [torch.jit.script, lambda net: torch.jit.trace(net, batch(0)[0])])
@pytest.mark.parametrize("is_part", [False, True])
def test_scripted_models_are_not_cast(door: Any, level: str, by: Any, is_part: bool) -> None:
    model = by(nn.Linear(4, 3))
    if is_part:
        model = nn.Sequential(nn.Linear(4, 4), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    what = "'1' of Sequential" if is_part else "The model"
    text = (
        f"{what} is a ScriptModule of Linear, at opt_level={level!r}. Where weights are cast to "
        "half, so is what each layer gets, and compiled code has no layers that could be told "
        'apart. Pass the model from before torch.jit, or opt_level="O1", or "O4" for bfloat16.'
    )
    with refused(PreampStateError, text, model, optimizer):
        door.initialize(model, optimizer, opt_level=level, verbosity=0)


# -- devices without autocast ----------------------------------------------------------------


@DOORS
@pytest.mark.parametrize("level", CASTING_FUNCTIONS)
@pytest.mark.parametrize("partly", [False, True])
def test_devices_without_autocast(door: Any, level: str, partly: bool) -> None:
    """Refused before torch is asked for the casts of such a device, by any engine."""
    other, own = make()
    door.initialize(other, own, opt_level=level, verbosity=0)
    model = nn.Sequential(nn.Linear(3, 4, device="cpu" if partly else "meta"))
    model.append(nn.Linear(4, 2, device="meta"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    text = (
        f"'{int(partly)}.weight' of Sequential is on the device 'meta', for which torch has no "
        f"autocast, at opt_level={level!r}. Functions are cast on the kinds of device that the "
        "parameters are on when initialize is called. Move the model where it will run first "
        "(model.to_empty(device=...) if it is on 'meta', and load its weights), then build the "
        "optimizer and call preamp.initialize."
    )
    with pytest.raises(PreampStateError, match=f"^{re.escape(text)}$"):
        door.initialize(model, optimizer, opt_level=level, verbosity=0)
    with pytest.raises(PreampStateError):
        preamp.engine_of(model)
    train_step(other, own, 1)
    model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    door.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert model(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("level", sorted({*LEVEL_NAMES} - {*CASTING_FUNCTIONS}))
def test_models_without_memory_may_be_cast_and_filled_later(level: str) -> None:
    model = nn.Linear(3, 4, device="meta")
    preamp.initialize(model, opt_level=level, verbosity=0)
    model.to_empty(device="cpu")
    model.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.zeros(4)})
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 4), 3.0))
