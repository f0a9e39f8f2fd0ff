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
from cases.plain import TOKENS, Mixed, counted
from kit.refusals import assert_refused
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


class Blocks(nn.Module):
    """Weights with rows of one and of several blocks, and tensors that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 60, 3)
        self.inner = nn.Linear(60, 300)
        self.norm = nn.LayerNorm(300)
        self.head = nn.Linear(300, 20)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inner(self.conv(x).mean((2, 3)))))


STORAGES = ("split", "compact", preamp.Storage(moments="8bit"), preamp.Storage(moments="bfloat16"))
STORING = ("FusedAdam", "FusedSGD(lr=0.1, momentum=0.9)", "FusedNovoGrad", "FusedAdagrad")


# A level says in what dtype state is and whether masters take bytes of their own, an optimizer
# which state there is, a storage what becomes of each moment. Any two of these meet.
@pytest.mark.pairs
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("text", [*STORING, "FusedLAMB", "FusedAdam(max_grad_norm=1.0)", "AdamW"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
def test_storages_count(storage: Any, text: str, level: str) -> None:
    model, policy = Blocks(), preamp.OPT_LEVELS[level]
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


@pytest.mark.parametrize(
    ("storage", "bytes_each"), [("full", 16), ("split", 14), ("compact", 8.0625)]
)
def test_bytes_of_a_parameter(storage: str, bytes_each: float) -> None:
    """With Adam's moments and the gradient; a block of 128 elements has two scales of 4 bytes."""

    def make() -> nn.Module:
        return nn.Linear(1 << 14, 1 << 14, bias=False)

    for model in (make, 2**28):
        policy = preamp.OPT_LEVELS["O5"].replace(storage=storage)
        estimate = preamp.estimate(model, policy, "FusedAdam")
        assert estimate.total - estimate.scaler == bytes_each * 2**28
        assert estimate.storage == storage


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


def test_larc_adds_no_state() -> None:
    model = nn.Linear(3, 5)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrapped = preamp.estimate(model, "O2", LARC(inner))  # pyright: ignore[reportArgumentType]
    assert wrapped == preamp.estimate(model, "O2", inner)


@pytest.mark.parametrize("keep", [False, True])
def test_overrides_come_as_a_policy(keep: bool) -> None:
    policy = preamp.OPT_LEVELS["O2"].replace(keep_batchnorm_fp32=keep)
    model = Mixed()
    estimate = preamp.estimate(model, policy, "Adam")
    optimizer = torch.optim.Adam(model.parameters())
    expected = counted(model, optimizer, "O2", TOKENS, keep_batchnorm_fp32=keep)
    assert estimate.categories == expected


@pytest.mark.parametrize("level", LEVELS)
def test_without_an_optimizer(level: str) -> None:
    estimate = preamp.estimate(Mixed(), level, None)
    assert estimate.optimizer == "none"
    assert (estimate.masters, estimate.optimizer_state, estimate.master_gradients) == (0, 0, 0)


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


HAND_COUNT = {  # weights, masters, gradients, Adam's two averages, in bytes per parameter
    "O0": (4, 0, 4, 8),
    "O1": (4, 0, 4, 8),
    "O2": (2, 4, 2, 8),
    "O3": (2, 0, 2, 8),  # FusedAdam's averages are float32 for half weights too
    "O4": (4, 0, 4, 8),
    "O5": (2, 4, 2, 8),
}


@pytest.mark.parametrize("level", LEVELS)
def test_a_number_of_parameters(level: str) -> None:
    found = preamp.estimate(7e9, level, "FusedAdam")
    count = 7 * 10**9
    assert found.parameters == count
    per_parameter = (found.weights, found.masters, found.gradients, found.optimizer_state)
    assert per_parameter == tuple(count * size for size in HAND_COUNT[level])
    assert (found.buffers, found.scaler) == (0, 12)


def test_masters_gradients_are_made_for_optimizers_that_read_them() -> None:
    assert preamp.estimate(1000, "O2", "AdamW").master_gradients == 4000
    assert preamp.estimate(1000, "O2", "FusedAdam").master_gradients == 0
    assert preamp.estimate(1000, "O1", "AdamW").master_gradients == 0


def test_sharding() -> None:
    def at(sharding: str) -> tuple[int, ...]:
        found = preamp.estimate(
            1001,
            "O2",
            "Adam",
            world_size=4,
            sharding=sharding,  # type: ignore[arg-type]
        )
        state = found.optimizer_state - 4  # the step counter is not shared out
        return found.weights, found.masters, found.gradients, state, found.master_gradients

    part = -(-1001 // 4)
    assert at("none") == (2002, 4004, 2002, 8008, 4004)
    assert at("fsdp") == (2 * part, 4 * part, 2 * part, 8 * part, 4 * part)


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


def test_storages_that_take_less_are_named() -> None:
    found = preamp.estimate(3e9, "O5", "FusedAdam")
    host = "preamp.Storage(masters='split', place='host')"
    both = "preamp.Storage(masters='split', release_gradients=True, place='host')"
    assert list(found.smaller) == ['"split"', '"compact"', host, both]
    sizes = [round(size / 2**30, 1) for size in found.smaller.values()]
    assert sizes == [39.1, 22.5, 11.2, 5.6]
    policy = preamp.OPT_LEVELS["O5"].replace(storage="compact")
    assert preamp.estimate(3e9, policy, "FusedAdam").total == found.smaller['"compact"']
    # What level, optimizer or ranks cannot have is not named.
    assert [*preamp.estimate(3e9, "O2", "FusedAdam").smaller] == [
        '"split"',
        '"compact"',
        host,
        both,
    ]
    assert not preamp.estimate(3e9, "O5", "AdamW").smaller
    assert both not in preamp.estimate(3e9, "O5", "FusedAdam", world_size=2).smaller


def on_host(**storage: Any) -> preamp.Policy:
    return preamp.OPT_LEVELS["O5"].replace(storage=preamp.Storage(place="host", **storage))


@pytest.mark.parametrize(
    ("storage", "masters", "moments"),
    [
        ({}, 4, 8),
        ({"masters": "split"}, 2, 8),
        ({"masters": "split", "moments": "8bit"}, 2, 2.0625),
    ],
    ids=["full", "split", "compact"],
)
def test_the_host_has_masters_and_moments(
    storage: dict[str, Any], masters: float, moments: float
) -> None:
    found = preamp.estimate(2**28, on_host(**storage), "FusedAdam")
    sizes = {name: size / 2**28 for name, size in found.categories.items() if size >= 2**28}
    assert sizes == {
        "weights": 2,
        "gradients": 2,
        "masters on the host": masters,
        "optimizer state on the host": moments,
    }
    assert found.on_device == 4 * 2**28 + 12
    assert found.staging == 3 * 2**25
    assert found.on_host == (masters + moments) * 2**28 + found.staging
    assert found.total == found.on_device + found.on_host - found.staging


def test_weights_that_stay_float32_have_their_moments_on_the_host_too() -> None:
    policy = on_host().replace(keep_fp32=["1.*"])
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    found = preamp.estimate(model, policy, "FusedAdam")
    assert (found.weights, found.gradients) == (6 * 64, 6 * 64)
    assert found.categories["masters on the host"] == 4 * 64
    assert found.categories["optimizer state on the host"] == 2 * 8 * 64


def test_what_is_on_the_way_takes_powers_of_two() -> None:
    """And runs of the size of the largest tensor, at most; nothing is on its way of frozen weights.

    Two gradients at once where these go to wait; of one size, buffers serve both.
    """
    frozen = make_layers((64,)).requires_grad_(requires_grad=False)
    assert preamp.estimate(frozen, on_host(), "FusedAdam").staging == 0
    wide = partial(nn.Linear, 2**10, 2**15, bias=False)
    assert preamp.estimate(wide, on_host(), "FusedAdam").staging == 4 * 2**25
    for rows, update, waiting in ((2**10, 2**22, 2 * 2**21), (1100, 2**23, 2 * 2**22)):
        make = partial(nn.Linear, 2**10, rows, bias=False)
        assert preamp.estimate(make, on_host(), "FusedAdam").staging == update
        released = on_host(release_gradients=True)
        assert preamp.estimate(make, released, "FusedAdam").staging == update + waiting
    layers = partial(make_layers, (2**23, 2**22, 2**22))
    released = on_host(release_gradients=True)
    assert preamp.estimate(layers, on_host(), "FusedAdam").staging == 2 * 2**25
    assert preamp.estimate(layers, released, "FusedAdam").staging == 2 * 2**25 + 2 * 2**24


def make_layers(sizes: tuple[int, ...]) -> nn.Module:
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(str(number), nn.Parameter(torch.empty(size)))
    return model


def test_the_peak_on_a_device_has_nothing_of_the_host() -> None:
    model, batch = nn.Linear(64, 64), torch.ones(1, 64)
    options: dict[str, Any] = {"loss_fn": lambda m, x: m(x).mean(), "batch": batch}
    here, host = (preamp.estimate(model, p, "FusedAdam", **options) for p in ("O5", on_host()))
    assert here.activations == host.activations
    assert here.peak is not None
    assert host.peak == here.peak - 12 * (64 * 64 + 64)


def test_ranks_have_their_parts_on_their_hosts() -> None:
    whole = preamp.estimate(2**20, on_host(), "FusedAdam")
    part = preamp.estimate(2**20, on_host(), "FusedAdam", world_size=2, sharding="fsdp")
    assert part.on_host - part.staging == (whole.on_host - whole.staging) / 2
    assert part.on_device - part.scaler == 2 * 2**20
    found = preamp.estimate(1e6, "O5", "FusedAdam", world_size=2, sharding="fsdp")
    on_the_host = "preamp.Storage(masters='split', place='host')"
    assert list(found.smaller) == ['"split"', '"compact"', on_the_host]


def test_what_fits_changes_as_little_as_possible() -> None:
    def fits(card: float, host: float = 0.0, **more: Any) -> list[tuple[str, str]]:
        sizes = {"card": card * 2**30, "host": host * 2**30}
        found = fitting(3e9, more.pop("optimizer", "FusedAdam"), ["O5"], **sizes, **more)
        return [(memory.place, memory.storage) for memory in found]

    split = "Storage(masters='split', place='host')"
    eight = split.replace("'split'", "'split', moments='8bit'")
    both = "Storage(masters='split', release_gradients=True, place='host')"
    compact = both.replace("'split'", "'split', moments='8bit'")
    wide = both.replace("masters='split', ", "")
    on_device = [("device", name) for name in ("full", "split", "compact")]
    on_host = [("host", n) for n in ("Storage(place='host')", split, eight, wide, both, compact)]
    assert fits(48) == on_device
    assert fits(40) == on_device[1:]
    assert fits(24) == on_device[2:]
    assert fits(48, 64) == on_device + on_host
    assert fits(20, 32) == [("host", split), ("host", eight), on_host[-1]]
    assert fits(12, 12) == [("host", eight)]
    assert fits(12, 64) == on_host
    # Ranks release no gradients.
    assert fits(20, 32, world_size=2) == [("host", split), ("host", eight)]
    assert not fits(40, 64, optimizer="AdamW")
    assert fits(11, 64) == on_host[3:]
    assert fits(11, 34) == on_host[4:]
    assert fits(11, 18) == on_host[5:]
    assert fits(11, 16) == []
    assert fits(5, 64) == []


def test_what_fits_leaves_out_what_takes_no_less() -> None:
    vectors = nn.LayerNorm(64)  # moments of vectors stay float32
    found = fitting(vectors, "FusedAdam", ["O0"], card=2**30)
    full, *on_host = [memory.storage for memory in found]
    assert full == "full"
    assert on_host == ["Storage(place='host')", "Storage(release_gradients=True, place='host')"]


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


KNOWN = nn.Linear(8, 16)


class Locked(nn.Linear):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__(8, 16)
        self.lock = threading.Lock()


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
    "a model that cannot be copied": of(Locked(), loss_fn=mean, batch=torch.ones(4, 8)),
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
