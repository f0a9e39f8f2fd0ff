# SPDX-License-Identifier: BSD-3-Clause
"""Estimates against the counted bytes of real engines: equal, not close; and what is refused."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from distributed.storage_checks import Net
from kit.refusals import assert_approved, assert_refused
from preamp import optimizers
from preamp.memory.estimates import fitting
from preamp.memory.optimizers import (
    NAMES,
    Call,
    Updated,
    optimizer_factory,
    parse_call,
    state_bytes,
)
from preamp.optim import LARC

LEVELS = tuple(preamp.OPT_LEVELS)
SPECIAL = {
    "LBFGS": "keeps a history of the whole model: refused",
    "Muon": "takes matrices only: a test of its own",
    "SparseAdam": "takes sparse gradients only: a test of its own",
}
GENERAL = [name for name in NAMES if name not in SPECIAL]


def test_every_optimizer_of_preamp_and_torch_is_known() -> None:
    fused = {name for name in dir(optimizers) if name.startswith("Fused")}
    torchs = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    }
    assert set(NAMES) == fused | torchs - {"Optimizer"}


TOKENS = torch.arange(7)


class Mixed(nn.Module):
    """Embedding with a tied head, batch norm, buffers, a frozen and a 0-dim parameter."""

    table: torch.Tensor
    wide: torch.Tensor
    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.conv = nn.Conv1d(1, 3, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("table", torch.ones(3, 3))
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))
        self.register_buffer("counter", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.plain_norm(self.norm(self.linear(self.tokens(tokens)))) * self.gain
        return self.head(x).float().mean() + self.conv(x[:, None]).float().square().mean()


def counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    *inputs: torch.Tensor,
    **overrides: Any,
) -> dict[str, int]:
    """What a real engine holds between the second backward and its step."""
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **overrides)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(1.0)  # no step may be skipped: it makes the state
    for step in range(2):
        with preamp.scale_loss(model(*inputs).float().mean(), optimizer) as scaled:
            scaled.backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = preamp.count_memory(engine)
    engine.close()
    return found


class Views(nn.Module):
    """Two parameters and a buffer in one storage, which has room left over."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        flat = torch.ones(100)
        self.a = nn.Parameter(flat[:10])
        self.b = nn.Parameter(flat[10:30].view(4, 5).t())
        self.register_buffer("seen", flat[30:40])

    def forward(self) -> torch.Tensor:
        return self.a.sum() + self.b.sum() + self.seen.sum()


def groups(model: Any) -> torch.optim.Optimizer:
    """An optimizer has its own parameters and groups."""
    some = [model.linear.weight, model.frozen], [model.tokens.weight, model.norm.weight]
    dicts: Any = [{"params": some[0], "momentum": 0.9}, {"params": some[1], "lr": 0.2}]
    return torch.optim.SGD(dicts, lr=0.1)


OPTIONS = (
    "SGD(lr=0.1, momentum=0.9)",
    "SGD(lr=0.1)",
    "Adam(amsgrad=True)",
    "AdamW(fused=True)",
    "RMSprop(momentum=0.5, centered=True)",
    "FusedAdam(capturable=True)",
    "FusedAdam(capturable=True, master_weights=True)",
    "FusedAdam(max_grad_norm=1.0)",
    "FusedSGD(lr=0.1, momentum=0.9)",
    "torch.optim:Adadelta(lr=0.5)",
)
ROWS: dict[str, tuple[Any, Any, tuple[torch.Tensor, ...]]] = {  # model, optimizer, inputs
    **{name: (Mixed, name, (TOKENS,)) for name in (*GENERAL, *OPTIONS)},
    "groups": (Mixed, groups, (TOKENS,)),
    "a shared storage counts once and whole": (Views, "Adam", ()),
}
if hasattr(torch.optim, "Muon"):
    ROWS["Muon"] = (partial(nn.Linear, 3, 5, bias=False), "Muon", (torch.ones(2, 3),))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ROWS)
def test_estimate_equals_the_count(name: str, level: str) -> None:
    make, given, inputs = ROWS[name]
    model = make()
    optimizer = given(model) if callable(given) else None
    before = {key: value.clone() for key, value in model.state_dict().items()}
    estimate = preamp.estimate(model, level, optimizer or given)
    assert optimizer is None or not optimizer.state
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    optimizer = optimizer or optimizer_factory(given)(model.parameters())
    assert estimate.categories == counted(model, optimizer, level, *inputs)
    assert estimate.total == sum(estimate.categories.values())


STORAGES = ("split", "compact", preamp.Storage(moments="8bit"), preamp.Storage(moments="bfloat16"))
STORING = ("FusedAdam", "FusedSGD(lr=0.1, momentum=0.9)", "FusedNovoGrad", "FusedAdagrad")


# A level says in what dtype state is and whether masters take bytes of their own, an optimizer
# which state there is, a storage what becomes of each moment. Any two of these meet.
@pytest.mark.pairs
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("text", [*STORING, "FusedLAMB", "FusedAdam(max_grad_norm=1.0)", "AdamW"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_storages_count(storage: Any, text: str, level: str) -> None:
    model, policy = Net(0), preamp.OPT_LEVELS[level]
    instead = {"split": '"full"', "compact": "preamp.Storage(moments='8bit')"}.get(storage)
    moments = "8bit" if storage == "compact" else getattr(storage, "moments", None)
    words: dict[str, Any] = {"level": repr(level), "storage": f'"{storage}"', "instead": instead}
    count = partial(preamp.estimate, model, policy.replace(storage=storage), text)
    if instead and not policy.master_weights:
        assert_refused("memory", "masters of a level without", count, model, **words)
        return
    if text == "AdamW":
        words = {"what": f"moments={moments!r}" if moments else "masters='split'"}
        assert_refused("memory", "a foreign optimizer in fewer bits", count, model, **words)
        return
    estimate = count()
    optimizer = optimizer_factory(text)(model.parameters())
    found = counted(model, optimizer, level, torch.ones(2, 8, 3, 3), storage=storage)
    assert estimate.categories == found
    assert not estimate.master_gradients


def test_released_gradients_are_not_in_the_peak() -> None:
    def peak(*, releases: bool) -> int:
        storage = preamp.Storage(place="host", release_gradients=releases)
        policy = preamp.OPT_LEVELS["O5"].replace(storage=storage)
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
        options: Any = {"loss_fn": lambda model, x: model(x).mean(), "batch": torch.ones(1, 64)}
        found = preamp.estimate(model, policy, "FusedAdam", **options).peak
        assert found is not None
        return found

    one = 64 * 64 * 2
    assert 6 * one < peak(releases=False) - peak(releases=True) < 8 * one


def test_sparse_adam_keeps_dense_averages() -> None:
    tensor = Updated((7, 4), torch.float32)
    found = state_bytes(optimizer_factory("SparseAdam"), [tensor])
    model = nn.Embedding(7, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    model(TOKENS).sum().backward()
    optimizer.step()
    assert found.bytes == sum(
        value.untyped_storage().nbytes()
        for value in optimizer.state[model.weight].values()
        if isinstance(value, torch.Tensor)
    )


def test_larc_adds_no_state_and_no_optimizer_has_none() -> None:
    model = nn.Linear(3, 5)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped: Any = LARC(inner)
    assert preamp.estimate(model, "O2", wrapped) == preamp.estimate(model, "O2", inner)
    assert preamp.estimate(model, "O2", None).optimizer == "none"


def test_counters_of_the_given_optimizer_stay() -> None:
    model = nn.Linear(2, 2)
    optimizer = optimizers.FusedAdam(model.parameters(), capturable=True)
    before = [value.clone() for value in optimizer.param_groups[0].values() if _is_tensor(value)]
    preamp.estimate(model, "O0", optimizer)
    after = [value for value in optimizer.param_groups[0].values() if _is_tensor(value)]
    assert before
    assert all(map(torch.equal, before, after))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@pytest.mark.parametrize("keep", [False, True])
def test_overrides_come_as_a_policy(keep: bool) -> None:
    policy = preamp.OPT_LEVELS["O2"].replace(keep_batchnorm_fp32=keep)
    model = Mixed()
    estimate = preamp.estimate(model, policy, "Adam")
    optimizer = torch.optim.Adam(model.parameters())
    expected = counted(model, optimizer, "O2", TOKENS, keep_batchnorm_fp32=keep)
    assert estimate.categories == expected


@pytest.mark.parametrize("level", LEVELS)
def test_a_factory_and_the_meta_device_give_the_same(level: str) -> None:
    expected = preamp.estimate(Mixed(), level)
    assert preamp.estimate(Mixed, level) == expected
    with torch.device("meta"):
        model = Mixed()
    assert preamp.estimate(model, level) == expected


def test_a_large_factory_is_not_allocated() -> None:
    large = partial(nn.Linear, 10**6, 10**6)
    estimate = preamp.estimate(large, "O2", "FusedAdam")
    assert estimate.parameters == 10**12 + 10**6
    assert estimate.weights == 2 * estimate.parameters


def test_a_learning_rate_beyond_float16_changes_no_size() -> None:
    model = nn.Linear(4, 3)
    made = [torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9) for lr in (0.1, 1e6)]
    usual, large = (preamp.estimate(model, "O3", optimizer) for optimizer in made)
    assert large == usual


def test_counting_makes_nothing() -> None:
    model = nn.Linear(8, 16, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    preamp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    with preamp.scale_loss(model(torch.ones(4, 8)).mean(), optimizer) as scaled:
        scaled.backward()
    engine = preamp.engine_of(model)
    first = preamp.count_memory(engine)
    assert first["gradients"] == 2 * 128
    assert preamp.count_memory(engine) == first
    assert preamp.count_memory(model) == preamp.count_memory(optimizer) == first
    (master,) = preamp.master_params(optimizer)
    assert master.grad is not None  # now it exists, and is counted
    assert preamp.count_memory(engine)["gradients"] == 6 * 128


def on_host(**storage: Any) -> preamp.Policy:
    return preamp.OPT_LEVELS["O5"].replace(storage=preamp.Storage(place="host", **storage))


def make_layers(sizes: tuple[int, ...]) -> nn.Module:
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(str(number), nn.Parameter(torch.empty(size)))
    return model


# -- sizes by hand: those of real engines are counted above ----------------------------------------


def of_matrix(rows: int, columns: int = 2**10) -> Callable[[], nn.Module]:
    return partial(nn.Linear, columns, rows, bias=False)


def released(**storage: Any) -> preamp.Policy:
    return on_host(release_gradients=True, **storage)


COMPACT = preamp.OPT_LEVELS["O5"].replace(storage="compact")
SPLIT = preamp.OPT_LEVELS["O5"].replace(storage="split")
SHARED: dict[str, Any] = {"world_size": 2, "sharding": "fsdp"}
UNLIKE = partial(make_layers, (2**23, 2**22, 2**22))
# fmt: off
SIZES: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {  # model, level, optimizer, ranks
    "7e9 parameters at O1": (7e9, "O1", "FusedAdam", {}),
    "7e9 parameters at O2": (7e9, "O2", "FusedAdam", {}),
    "7e9 parameters at O3": (7e9, "O3", "FusedAdam", {}),  # averages are float32 here too
    "7e9 parameters at O5": (7e9, "O5", "FusedAdam", {}),
    "gradients of masters that are read": (1000, "O2", "AdamW", {}),
    "float32 gradients that are read": (1000, "O1", "AdamW", {}),
    "four ranks": (1001, "O2", "Adam", {"world_size": 4}),
    "shared by four ranks": (1001, "O2", "Adam", {"world_size": 4, "sharding": "fsdp"}),
    "2^28 in full": (2**28, "O5", "FusedAdam", {}),
    "2^28 split": (2**28, SPLIT, "FusedAdam", {}),
    "2^28 compact": (2**28, COMPACT, "FusedAdam", {}),
    "2^28 on two ranks": (2**28, "O5", "FusedAdam", {"world_size": 2}),
    "2^28 shared by two ranks": (2**28, "O5", "FusedAdam", SHARED),
    "the host has it in full": (2**28, on_host(), "FusedAdam", {}),
    "the host has it split": (2**28, on_host(masters="split"), "FusedAdam", {}),
    "the host has it compact": (
        2**28, on_host(masters="split", moments="8bit"), "FusedAdam", {}),
    "hosts of two ranks": (2**28, on_host(), "FusedAdam", SHARED),
    # Moments of weights that stay float32 are on the host too.
    "half of it in float32": (
        lambda: nn.Sequential(of_matrix(8, 8)(), of_matrix(8, 8)()),
        on_host().replace(keep_fp32=["1.*"]), "FusedAdam", {}),
    # What is on the way takes powers of two, and runs of the size of the largest tensor, at most.
    "nothing on the way": (
        lambda: make_layers((64,)).requires_grad_(requires_grad=False), on_host(), "FusedAdam", {}),
    "much on the way": (of_matrix(2**15), on_host(), "FusedAdam", {}),
    "a power of two on the way": (of_matrix(2**10), on_host(), "FusedAdam", {}),
    "a little more on the way": (of_matrix(1100), on_host(), "FusedAdam", {}),
    "unlike ones on the way": (UNLIKE, on_host(), "FusedAdam", {}),
    # Two gradients at once where these go to wait; of one size, buffers serve both.
    "a power of two waits": (of_matrix(2**10), released(), "FusedAdam", {}),
    "a little more waits": (of_matrix(1100), released(), "FusedAdam", {}),
    "unlike ones wait": (UNLIKE, released(), "FusedAdam", {}),
}
# fmt: on


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    model, level, optimizer, ranks = SIZES[name]
    found = preamp.estimate(model, level, optimizer, **ranks).to_json()
    smaller = [f"{storage} {size:,}" for storage, size in found.pop("smaller").items()]
    sizes = [f"{key} {value:,}" for key, value in found.items() if isinstance(value, int) and value]
    assert_approved("memory_sizes", name, "; ".join([*sizes, *smaller]))


GIB = 2**30
# fmt: off
FITS: dict[str, tuple[float, float, dict[str, Any]]] = {  # GiB of the card and of the host
    "all on 48": (48, 0, {}),
    "what fits 40": (40, 0, {}),
    "what fits 24": (24, 0, {}),
    "what fits 48 and 64": (48, 64, {}),
    "what fits 20 and 32": (20, 32, {}),
    "what fits 12 and 12": (12, 12, {}),
    "what fits 12 and 64": (12, 64, {}),
    "what fits two ranks": (20, 32, {"world_size": 2}),  # which release no gradients
    "what fits AdamW": (40, 64, {"optimizer": "AdamW"}),
    "what fits 11 and 64": (11, 64, {}),
    "what fits 11 and 34": (11, 34, {}),
    "what fits 11 and 18": (11, 18, {}),
    "what fits 11 and 16": (11, 16, {}),
    "what fits 5 and 64": (5, 64, {}),
    "what fits without less": (1, 64, {"model": nn.LayerNorm(64)}),  # vectors' moments are float32
}
# fmt: on


@pytest.mark.parametrize("name", FITS)
def test_what_fits_changes_as_little_as_possible(name: str) -> None:
    card, host, more = FITS[name]
    given = {"model": 3e9, "optimizer": "FusedAdam", **more}
    model, optimizer = given.pop("model"), given.pop("optimizer")
    level = "O5" if model == 3e9 else "O0"
    found = fitting(model, optimizer, [level], card=card * GIB, host=host * GIB, **given)
    said = "; ".join(f"{memory.place}: {memory.storage}" for memory in found)
    assert_approved("memory_sizes", name, said or "nothing")


# -- factories named in text: read as literals, never run -------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("AdamW", Call(module="", name="AdamW")),
        (" torch.nn:Linear ", Call(module="torch.nn", name="Linear")),
        ("a.b:C.make", Call(module="a.b", name="C.make")),
        ("m:f()", Call(module="m", name="f")),
        (
            "m:f(1, -2.5, 'x:y(', lr=1e-3, betas=(0.9, 0.99), flag=None)",
            Call(
                module="m",
                name="f",
                args=(1, -2.5, "x:y("),
                kwargs={"lr": 1e-3, "betas": (0.9, 0.99), "flag": None},
            ),
        ),
    ],
)
def test_it_is_read(text: str, expected: Call) -> None:
    assert parse_call(text) == expected


def test_it_is_imported() -> None:
    assert parse_call("torch.nn:Linear(2, 3)").import_function() is nn.Linear


# -- what cannot be estimated or counted -----------------------------------------------------------


RELEASING = preamp.Storage(place="host", release_gradients=True)
ON_HOST = preamp.Storage(place="host")


class Odd(torch.optim.SGD):
    """Its state has one element more than the parameter."""

    def step(self, closure: Any = None) -> None:
        del closure
        for param in self.param_groups[0]["params"]:
            self.state[param]["odd"] = torch.zeros(param.numel() + 1)


def mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def of_values(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = mean(model, batch)
    return loss if loss.item() > 0 else -loss


KNOWN, LOCKED = nn.Linear(8, 16), nn.Linear(8, 16)
vars(LOCKED)["lock"] = threading.Lock()  # which cannot be copied


def of(model: Any = 10, opt_level: Any = "O5", **arguments: Any) -> Callable[[], object]:
    """An estimate; its level has the ``storage`` that is given."""
    if storage := arguments.pop("storage", None):
        opt_level = preamp.OPT_LEVELS[opt_level].replace(storage=storage)
    return partial(preamp.estimate, model, opt_level, **arguments)


def peak(**arguments: Any) -> Callable[[], object]:
    """An estimate with activations."""
    return of(nn.Linear(8, 16), **{"loss_fn": mean, "batch": torch.ones(4, 8), **arguments})


REFUSED: dict[str, Callable[[], object]] = {
    "a text as model": of("GPT"),
    "a function that makes no model": of(lambda: 3),
    "half a parameter": of(0.5),
    "a half model": of(nn.Linear(2, 2).half()),
    "an unknown optimizer": of(optimizer="Adm"),
    "an argument without a name": of(optimizer="Adam(0.1)"),
    "an argument that is no literal": of(optimizer="Adam(lr=x)"),
    "an argument that the optimizer refuses": of(optimizer="Adam(lr=-1)"),
    "LBFGS": of(optimizer="LBFGS"),
    "a number as optimizer": of(optimizer=3),
    "an optimizer of no module": of(optimizer="nowhere:Adam"),
    "no rank": of(world_size=0),
    "unknown sharding": of(sharding="zero3"),
    "an unknown level": of(opt_level="O9"),
    "state of another size": of(nn.Linear(9, 9, bias=False), optimizer=Odd),
    "gradients released on ranks": of(storage=RELEASING, optimizer="FusedAdam", world_size=2),
    "a foreign optimizer on the host": of(storage=ON_HOST, optimizer="AdamW"),
    "a loss of values": peak(loss_fn=of_values),
    "a loss without a batch": peak(batch=None),
    "a peak of a sharded model": peak(world_size=2, sharding="fsdp"),
    "a loss of another model": peak(loss_fn=lambda model, batch: mean(KNOWN, batch)),
    "a model that cannot be copied": of(LOCKED, loss_fn=mean, batch=torch.ones(4, 8)),
    "counting without an engine": lambda: preamp.count_memory(nn.Linear(8, 16)),
    "a factory of no module": lambda: parse_call("nowhere:f").import_function(),
    "a factory that is not there": lambda: parse_call("torch.nn:Linea").import_function(),
    "a factory that cannot be called": lambda: parse_call("math:pi").import_function(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_estimated(name: str) -> None:
    assert_refused("memory", name, REFUSED[name])


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 3), lambda: nn.Linear(4, 3), 15], ids=["model", "function", "number"]
)
def test_an_optimizer_of_another_model(model: Any) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(4, 3).parameters())
    act = partial(preamp.estimate, model, "O5", optimizer)
    assert_refused("memory", "an optimizer of another model", act, optimizer)


FORMS = ("", "m:", "a b:c", "m:f(", "m:f(1", "m:f(1))", "m:f(x)", "m:f(open('x'))", "m:f(**{})")
MORE_FORMS = ("m:f(1)(2)", "m:f(1).g", "m:f;g()", "m:f(1) + f(2)")


@pytest.mark.parametrize("text", FORMS + MORE_FORMS)
def test_other_forms_of_a_factory(text: str) -> None:
    act = partial(parse_call, text)
    assert_refused("memory", "a factory in another form", act, text=repr(text))
