# SPDX-License-Identifier: BSD-3-Clause
"""``initialize``: shapes in and out, what is printed, what is converted, inputs and outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import preamp
from cases.levels import CASTING_FUNCTIONS, HALF_WEIGHTS
from kit.compare import halves_match, same
from kit.loops import weights
from kit.refusals import assert_approved
from kit.run import ALL, MASTERS, PLAIN, Net, Run
from preamp import amp
from preamp.optim import MasterParameter

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DOORS = pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])
LEVELS = pytest.mark.parametrize("level", ALL)


# -- shapes ----------------------------------------------------------------------------------


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.125)


def two() -> list[nn.Module]:
    return [Net(), Net()]


SHAPES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "model": lambda: (Net(),),
    "model, none": lambda: (Net(), None),
    "model, optimizer": lambda: ((model := Net()), sgd(model)),
    "model, no optimizers": lambda: (Net(), []),
    "model, list of one": lambda: ((model := Net()), [sgd(model)]),
    "model, list of two": lambda: ((model := Net()), [sgd(model.first), sgd(model.last)]),
    "list": lambda: (two(),),
    "list, optimizer": lambda: ([model := Net()], sgd(model)),
    "list, list": lambda: ((models := two()), [sgd(model) for model in models]),
    "no models, optimizer": lambda: ([], sgd(Net())),
}


# The form of what comes back depends on the form of what is given; the level does not change it.
@pytest.mark.pairs
@pytest.mark.parametrize("enabled", [True, False])
@LEVELS
@DOORS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_what_is_given_comes_back(
    door: Any, level: str, enabled: bool, shape: str, by_keyword: bool
) -> None:
    given = SHAPES[shape]()
    before = [list(each) if isinstance(each, list) else each for each in given]
    named = dict(zip(("models", "optimizers"), given, strict=False))
    args, kwargs = ((), named) if by_keyword else (given, {})
    result = door.initialize(*args, **kwargs, opt_level=level, enabled=enabled, verbosity=0)
    if "optimizers" in named and given[1] is not None:
        assert type(result) is tuple
    else:
        result = (result,)
    for found, own, kept in zip(result, given, before, strict=False):
        assert found is own
        if isinstance(own, list):
            assert all(a is b for a, b in zip(own, kept, strict=True))


def test_signature_is_apex_s() -> None:
    parameters = inspect.signature(amp.initialize).parameters
    positional = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    names = (
        "models optimizers enabled opt_level cast_model_type patch_torch_functions "
        "keep_batchnorm_fp32 master_weights loss_scale cast_model_outputs num_losses verbosity "
        "min_loss_scale max_loss_scale"
    )
    assert positional == names.split()
    defaults = [parameters[name].default for name in positional[2:]]
    assert defaults == [True, "O1", *[None] * 6, 1, 1, None, 2.0**24]
    assert list(inspect.signature(preamp.initialize).parameters)[:14] == positional


def test_all_arguments_explicitly_with_their_defaults() -> None:
    model = Net()
    optimizer = sgd(model)
    parameters = inspect.signature(amp.initialize).parameters
    arguments = {name: p.default for name, p in list(parameters.items())[2:]}
    amp.initialize(models=model, optimizers=optimizer, **{**arguments, "verbosity": False})
    assert preamp.engine_of(model).policy == preamp.OPT_LEVELS["O1"].replace(scope="thread")


@pytest.mark.parametrize("keyword", ["combine_grad", "cast_batchnorm"])
def test_unknown_keyword_of_another_fork(keyword: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'"):
        amp.initialize(Net(), **{keyword: True})


def test_cudnn_may_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert halves_match(Run("O2", door=amp).play("iterate").model)


# -- printing --------------------------------------------------------------------------------


@LEVELS
def test_what_apex_prints_is_printed(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    amp.initialize(Net(), opt_level=level, loss_scale="128.0")
    assert_approved("printed", level, capsys.readouterr().out)


@pytest.mark.parametrize("verbosity", [0, False, "0"])
@LEVELS
def test_silence(level: str, verbosity: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(level, door=amp, verbosity=verbosity, loss_scale="dynamic")
    assert run.play("backward 0 inf; step").engine.last_step_skipped
    assert capsys.readouterr().out == ""


def test_skipped_step_is_told_by_the_first_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("O2", verbosity=1)
    capsys.readouterr()
    run.play("backward 0 inf; step; zero")
    assert capsys.readouterr().out.count("\n") == 1
    monkeypatch.setattr("preamp.core.log.is_first_rank", lambda: False)
    assert run.play("backward 0 inf; step").engine.last_step_skipped
    assert capsys.readouterr().out == ""


@LEVELS
def test_preamps_own_door_says_one_line(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    Run(level, verbosity=1, backend="reference")
    assert_approved("summaries", level, capsys.readouterr().out)


def test_what_fails_says_nothing_before(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError):
        preamp.initialize(nn.Linear(2, 2).half(), opt_level="O2")
    preamp.initialize(nn.Linear(2, 2), opt_level="O2", verbosity=0)
    for door in (preamp, amp):
        door.initialize(nn.Linear(2, 2), opt_level="O2", enabled=False)
    assert capsys.readouterr().out == ""


# -- conversion ------------------------------------------------------------------------------


class Zoo(nn.Module):
    """One of everything that the levels convert differently, and buffers of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.bn = nn.BatchNorm1d(4)
        self.bn_of_ranks, self.bn_of_volumes = nn.SyncBatchNorm(4), nn.BatchNorm3d(4)
        self.plain_bn = nn.BatchNorm1d(4, affine=False)
        self.ln = nn.LayerNorm(4)
        self.gn = nn.GroupNorm(2, 4)
        self.inorm = nn.InstanceNorm1d(4, affine=True)
        self.rnn = nn.LSTM(4, 4, batch_first=True)
        self.wide = nn.Parameter(torch.full((2,), 0.1, dtype=F64))
        self.register_buffer("f32", torch.full((2,), 0.1))
        self.register_buffer("f64", torch.full((2,), 0.1, dtype=F64))
        self.register_buffer("i64", torch.arange(2))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("z", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("hidden", torch.full((2,), 0.1), persistent=False)


FIXED = {
    "i64": torch.int64,
    "mask": torch.bool,
    "z": torch.complex64,
    **{
        f"{name}.num_batches_tracked": torch.int64
        for name in ("bn", "bn_of_ranks", "bn_of_volumes", "plain_bn")
    },
}


CONVERSIONS: list[tuple[str, dict[str, Any], Any, Any]] = [  # with dtypes of weights, batch norms
    ("O0", {}, F32, F32),
    ("O2", {}, F16, F32),
    ("O3", {}, F16, F16),
    ("O5", {}, BF16, F32),
    ("O2", {"keep_batchnorm_fp32": False}, F16, F16),
    ("O2", {"keep_batchnorm_fp32": "False"}, F16, F16),
    ("O3", {"keep_batchnorm_fp32": "True"}, F16, F32),
    *((level, {}, None, None) for level in CASTING_FUNCTIONS),
    *((level, {"cast_model_type": False}, None, None) for level in ALL),
]


@pytest.mark.parametrize(("level", "options", "weight", "norm"), CONVERSIONS)
def test_conversion(level: str, options: dict[str, Any], weight: Any, norm: Any) -> None:
    model = Zoo()
    before = weights(model)
    preamp.initialize(model, opt_level=level, verbosity=0, **options)
    if weight is None:  # nothing is converted
        assert same(weights(model), before)
        return
    for name, tensor in weights(model).items():
        wanted = norm if name.startswith("bn") else F32 if name == "hidden" else weight
        assert tensor.dtype is FIXED.get(name, wanted), name


@pytest.mark.filterwarnings("ignore:optimizer.step.. was called with gradients that no scale_loss")
@pytest.mark.parametrize("level", MASTERS)
def test_existing_gradients_count(level: str) -> None:
    """A gradient made before initialize is unscaled, and the next step uses it."""
    run = Run(level, model=lambda: nn.Linear(2, 1, bias=False), starts=False)
    run.model.weight.data.fill_(1.0)
    run.model.weight.grad = torch.full_like(run.model.weight, 2.5)
    run.initialize()
    run.play("step")  # at a rate of 0.1
    assert run.model.weight.tolist() == [[0.75, 0.75]]


@pytest.mark.parametrize("level", MASTERS)
def test_which_parameters_have_masters(level: str) -> None:
    run = Run(level)
    named = dict(run.model.named_parameters())
    for param, (name, own) in zip(preamp.master_params(run.optimizer), named.items(), strict=True):
        assert isinstance(param, MasterParameter) is not name.startswith("bn."), name
        assert (param is own) is name.startswith("bn."), name
        assert param.dtype is F32


@pytest.mark.parametrize(("level", "given"), [("O2", False), ("O2", "False"), ("O5", False)])
def test_no_masters_and_a_scale_from_a_flag(level: str, given: Any) -> None:
    run = Run(level, master_weights=given, loss_scale="128.0", door=amp)
    assert not run.engine.has_masters
    assert all(
        a is b
        for a, b in zip(preamp.master_params(run.optimizer), run.model.parameters(), strict=True)
    )
    x = torch.randn(6, 4, requires_grad=True)
    loss = run.model(x).square().mean()
    with amp.scale_loss(loss, run.optimizer) as scaled:
        assert scaled.item() == pytest.approx(128.0 * loss.item())
        scaled.backward()
    assert x.grad.abs().sum() > 0  # of the input: still scaled, as scripts that read it expect


@pytest.mark.parametrize("level", ["O0", "O3"])
def test_master_weights_can_be_asked_for(level: str) -> None:
    run = Run(level, master_weights=True)
    assert run.engine.has_masters is (level == "O3")
    assert halves_match(run.play("iterate").model)


# -- lists of models -------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("is_part", [False, True])
def test_a_module_twice_or_beside_its_own_part(level: str, is_part: bool) -> None:
    run = Run(level, starts=False)
    exact = [param.detach().clone() for param in run.model.parameters()]
    run.initialize(models=[run.model, run.model.first if is_part else run.model])
    if level in MASTERS:
        assert same([param.detach() for param in run.params()], exact)
    assert run.model(torch.ones(2, 4)).dtype is F32
    assert halves_match(run.play("iterate").model)
    state = run.model.state_dict()
    assert all(value.dtype is F32 for key, value in state.items() if "num" not in key)
    run.close()
    assert {p.dtype for p in run.model.parameters()} == {F32}


@LEVELS
def test_model_alone_for_evaluation(level: str) -> None:
    model = Net().eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        expected = model(x)
        preamp.initialize(model, opt_level=level, verbosity=0)
        got = model(x)
    assert got.dtype is F32
    assert torch.allclose(got.float(), expected, atol=0.05, rtol=0.05)
    assert preamp.engine_of(model).optimizers == ()


# -- enabled=False ---------------------------------------------------------------------------


@DOORS
def test_disabled_passes_everything_through(door: Any) -> None:
    run, plain = Run("O9", door=door, enabled=False, loss_scale="abc"), Run(PLAIN)
    assert same(weights(run.model), weights(plain.model))
    assert vars(run.optimizer).keys() - vars(plain.optimizer).keys() <= {"_preamp_link"}
    for index in range(3):
        loss = run.loss(index)
        with door.scale_loss(loss, run.optimizer) as scaled:
            assert scaled is loss
            scaled.backward()
        torch.nn.utils.clip_grad_norm_(door.master_params(run.optimizer), 0.5)
        run.play("step; zero")
        plain.play(f"backward {index}; clip; step; zero")
    assert same(weights(run.model), weights(plain.model))
    assert list(door.master_params(run.optimizer)) == list(run.model.parameters())


@DOORS
def test_disabled_asks_nothing_of_its_arguments(door: Any) -> None:
    """With amp off scripts pass tuples, mocks and wrappers; they come back as they are."""
    model = Net()
    models, optimizers = (model, "text"), MagicMock()
    result = door.initialize(models, optimizers, enabled=False, num_losses="many", verbosity=None)
    assert result[0] is models
    assert result[1] is optimizers
    wrapped = nn.DataParallel(model)
    assert door.initialize(wrapped, enabled=False) is wrapped
    loss = torch.ones(())
    for optimizers in (MagicMock(), (), [], None, "text"):
        amp.initialize("model", optimizers, enabled=False)
        with amp.scale_loss(loss, optimizers) as scaled:
            assert scaled is loss


def test_disabled_state() -> None:
    run = Run("O2", door=amp, enabled=False)
    assert amp.state_dict() == {}
    amp.load_state_dict({})
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 0}})
    assert amp.state_dict() == {}
    with amp.disable_casts():
        assert torch.mm(torch.ones(1, 1), torch.ones(1, 1)).dtype is F32
    assert run.engine.explain() == "preamp is off (enabled=False): every call passes through."
    assert run.engine.state_dict()["steps"]
    assert preamp.clip_grad_norm_(run.optimizer, 1.0).item() == 0.0
    run.close()
    assert "_preamp_link" not in vars(run.model)


# -- inputs ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    x: Any
    n: Any


class Echo(nn.Module):
    """Keeps what its forward was given, and returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: Any = None
        self.answer: Any = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen = (args, kwargs)
        return self.answer


def echo(level: str, **arguments: Any) -> Echo:
    return preamp.initialize(Echo(), opt_level=level, verbosity=0, **arguments)


class Movable:
    """A batch that moves itself, as graphs and boxes do."""

    def __init__(self) -> None:
        self.ids, self.target = torch.tensor([257, 513, 999]), torch.tensor([1001.3])

    def to(self, device: Any) -> Movable:
        self.ids, self.target = self.ids.to(device), self.target.to(device)
        return self


def ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(2, dtype=dtype)


CONTAINERS: list[Callable[[torch.Tensor], Any]] = [  # tests/core/test_pytree.py has all kinds
    lambda x: x,
    lambda x: Pair(x, 3),
    lambda x: {"list": [x, (x, 7), None], "text": "b"},
]
FOR_INPUTS = [*CONTAINERS, lambda x: pack_sequence([x[:, None]])]
LEFT_ALONE = [
    *("fwd", None, 7, torch.arange(2), torch.ones(2) > 0, np.ones(2), nn.Linear(2, 2)),
    *(Movable(), (number for number in range(2))),
]


def tensors_in(thing: Any) -> list[torch.Tensor]:
    """Those of floating numbers."""
    found = [leaf for leaf in tree_leaves(thing) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in found if tensor.is_floating_point()]


def check_containers(found: Iterable[Any], given: Iterable[Any], expected: torch.dtype) -> None:
    """They are of the same types and have the same things, tensors in the ``expected`` dtype."""
    for got, was in zip(found, given, strict=False):
        assert type(got) is type(was)
        assert {tensor.dtype for tensor in tensors_in(got)} == {expected}
        assert len(tensors_in(got)) == len(tensors_in(was))


INPUT_DTYPE = {"O0": F32, "O1": F32, "O2": F16, "O3": F16, "O4": F32, "O5": BF16}


@LEVELS
@pytest.mark.parametrize("by_keyword", [False, True])
def test_inputs(level: str, by_keyword: bool) -> None:
    model = echo(level)
    kinds = [make(ones(F32)) for make in FOR_INPUTS]
    given = [*kinds, *LEFT_ALONE, range(2)]
    model(**{f"n{n}": one for n, one in enumerate(given)}) if by_keyword else model(*given)
    args, kwargs = model.seen
    found = list(kwargs.values()) if by_keyword else list(args)
    assert len(found) == len(given)
    check_containers(found, kinds, INPUT_DTYPE[level])
    assert all(got is one for got, one in zip(found[len(kinds) :], LEFT_ALONE, strict=False))
    assert found[-1] == range(2)


# -- outputs ---------------------------------------------------------------------------------


@LEVELS
@pytest.mark.parametrize("scope", ["model", "thread"])
def test_outputs(level: str, scope: Any) -> None:
    """Models answer in float32; those around which functions are cast too are left alone."""
    model = echo(level, scope=scope)
    expected = F16 if scope == "thread" and level in CASTING_FUNCTIONS else F32

    kinds = [make(ones(F16)) for make in CONTAINERS]
    model.answer = (*kinds, *LEFT_ALONE)
    found = model()
    check_containers(found, kinds, expected)
    assert all(got is one for got, one in zip(found[len(kinds) :], LEFT_ALONE, strict=True))


UNCAST = {"cast_model_type": False}
FORWARDS: list[tuple[str, dict[str, Any], torch.dtype | None, torch.dtype, torch.dtype]] = [
    # level, options, what the model gets of a float64 tensor (or no matter), answers, and gives
    ("O0", {}, F32, F16, F32),
    *((level, {}, F64, F64, F64) for level in CASTING_FUNCTIONS),
    *((level, {}, F64, BF16, F32) for level in CASTING_FUNCTIONS),
    ("O2", UNCAST, F64, F16, F16),
    ("O2", {**UNCAST, "cast_model_outputs": F16}, F64, F32, F16),
    *((level, {"cast_model_outputs": F16}, None, F32, F16) for level in ALL),
    *((level, {"cast_model_outputs": F64}, None, F32, F64) for level in ALL),
]


@pytest.mark.parametrize(("level", "options", "seen", "answer", "out"), FORWARDS)
def test_forwards(
    level: str, options: dict[str, Any], seen: Any, answer: torch.dtype, out: torch.dtype
) -> None:
    model = echo(level, **options)
    model.answer = torch.ones(1, dtype=answer)
    assert model(torch.ones(1, dtype=F64)).dtype is out
    assert seen in (None, model.seen[0][0].dtype)


# -- float32 made inside a half model --------------------------------------------------------


class Inside(nn.Module):
    """Hands a layer a float32 tensor that was not among the model's inputs."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self) -> Any:
        return self.call(self.layer)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "linear": (lambda: nn.Linear(4, 4), lambda m: m(torch.ones(2, 4))),
    "lstm with state": (
        lambda: nn.LSTM(4, 4),
        lambda m: m(torch.ones(2, 1, 4), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4)))[0],
    ),
    "lstm of packed rows": (
        lambda: nn.LSTM(4, 4),
        lambda m: m(pack_sequence([torch.ones(3, 4), torch.ones(1, 4)]))[0].data,
    ),
    "attention with float mask": (
        lambda: nn.MultiheadAttention(4, 2),
        lambda m: m(*[torch.ones(2, 1, 4)] * 3, attn_mask=torch.zeros(2, 2))[0],
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda m: m(torch.ones(2, 1, 4)),
    ),
    "prelu": (lambda: nn.PReLU(), lambda m: m(torch.ones(2, 4))),
    "batch_norm": (lambda: nn.BatchNorm1d(4), lambda m: m(torch.randn(3, 4))),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("level", HALF_WEIGHTS)
def test_float32_inside(level: str, name: str) -> None:
    build, call = LAYERS[name]
    run = Run(level, model=lambda: Inside(build(), call))
    out = run.model()
    assert out.dtype is F32
    run.back(out.sum())
    assert all(param.grad is not None for param in run.params())
    run.model.eval()
    with torch.no_grad():
        assert run.model().isfinite().all()


# -- calling again ---------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_numbers_of_an_optimizer_keep_their_dtype(level: str) -> None:
    """State of the weights' shape is cast with them; NAdam's product of momenta is a number."""
    run = Run(level, "NAdam", starts=False)
    optimizer = run.optimizer
    run.loss().backward()
    run.step()
    products = [state["mu_product"].clone() for state in optimizer.state.values()]
    run.initialize()
    found = list(optimizer.state.values())
    assert {state["exp_avg"].dtype for state in found} == {F32 if level == "O2" else F16}
    assert [state["mu_product"] for state in found] == products
    assert {state["mu_product"].dtype for state in found} == {torch.float32}
