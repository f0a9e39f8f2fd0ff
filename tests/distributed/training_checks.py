# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of training under torch's and preamp's DistributedDataParallel.

Gradients are exact (see ``cases.models``), so runs that round nothing on the way equal one process
with both batches to the bit.
"""

import importlib
import io
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import kit.run
import preamp
from cases.levels import CASTING_FUNCTIONS, HALF_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from cases.models import Damage, Exact, Parts, batch, values
from cases.tolerances import assert_same
from distributed.ranks import RUNS_ON_CPUS, assert_equal_everywhere, by_rank, each
from kit.engines import close_engines
from kit.pair import Pair, adam, sgd
from kit.refusals import refused
from preamp.parallel import DistributedDataParallel, Reducer
from preamp.parallel.LARC import LARC

RANKS = 2
STEPS = 3
WRAPS = (TorchDDP, DistributedDataParallel)


def on_rank_1(value: float) -> float:
    return value if dist.get_rank() == 1 else 1.0


def loss_of(model: Any, index: int, **use: Any) -> torch.Tensor:
    x, coefficients = batch(index)
    return (model(x, **use).float() * coefficients).sum()


class Run(Pair):
    """A `Pair` on two ranks under a wrapper, whose plain side has both batches on each rank alone.

    ``wrap`` of None reduces by hand.
    """

    def __init__(
        self,
        level: str,
        wrap: Any = TorchDDP,
        *,
        model: Callable[[int], nn.Module] = Exact,
        build: Callable[[Any], Any] = sgd,
        num_losses: int = 1,
        scale: float | None = None,
        **wrapping: Any,
    ) -> None:
        options: dict[str, Any] = {"loss_scale": "dynamic", "num_losses": num_losses}
        super().__init__(level, build, lambda: model(dist.get_rank()), **options)
        self.plain.load_state_dict(model(0).state_dict())  # the first rank's weights count
        if scale is not None:
            self.engine.scaler(0).set_scale(scale)
        self.reducer = None if wrap else Reducer(self.model)
        self.ddp = wrap(self.model, **wrapping) if wrap else self.model

    def backward(
        self, index: int, loss_id: int = 0, factor: float = 1.0, delay: bool = False, **use: Any
    ) -> None:
        loss = loss_of(self.ddp, RANKS * index + dist.get_rank(), **use) * factor
        with preamp.scale_loss(loss, self.optimizer, loss_id, delay_unscale=delay) as scaled:
            scaled.backward()
            if self.reducer is not None:
                self.reducer.reduce()
        dtype = next(self.plain.parameters()).dtype
        with preamp.disable_casts():
            for rank in range(RANKS):
                x, coefficients = batch(RANKS * index + rank)
                out = self.plain(x.to(dtype), **use).float()
                ((out * coefficients).sum() / RANKS).backward()

    def step(self, *, plain: bool = True) -> None:
        self.optimizer.step()
        if plain:
            self.plain_step()
        self.zero()

    def train(
        self,
        parts: int = 1,
        delay: bool = False,
        no_sync: bool = False,
        uses: str = "",
        tolerance: float = 0.0,
    ) -> None:
        """Steps of so many backwards each; ``uses`` are the parts of the model in turn."""
        for step in range(STEPS):
            use = {"parts": uses[step % len(uses)]} if uses else {}
            for part in range(parts):
                is_last = part == parts - 1
                with self.ddp.no_sync() if no_sync and not is_last else nullcontext():
                    self.backward(step * parts + part, delay=delay and not is_last, **use)
            self.step()
        if uses:  # what one rank leaves out is not what torch's own reducer has
            self.check_ranks()
        else:
            self.check(tolerance=tolerance)

    def check(self, *, tolerance: float = 0.0, steps: int = STEPS) -> None:
        assert self.engine.steps_applied == steps
        for param, wanted in zip(
            preamp.master_params(self.optimizer), values(self.plain_optimizer), strict=True
        ):
            if tolerance:
                torch.testing.assert_close(param.detach(), wanted, atol=tolerance, rtol=tolerance)
            else:
                assert_same(param.detach(), wanted)
        self.check_ranks()

    def check_ranks(self) -> None:
        """Masters, weights, gradients' outcome and scales are the same to the bit everywhere."""
        counts = [self.engine.steps_applied, self.engine.steps_skipped]
        scales = [scaler.value() for scaler in self.engine.scalers]
        own = [*preamp.master_params(self.optimizer), *self.model.parameters()]
        assert_equal_everywhere(*own, torch.tensor([*scales, *map(float, counts)]))


def _bf16(state: Any, bucket: Any) -> Any:
    """Torch's hook, which it refuses by its name where there is no NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


_bf16.__annotations__.clear()  # torch reads them, and wants its own


def compressed(hook: Any) -> Any:
    def wrap(model: nn.Module) -> TorchDDP:
        ddp = TorchDDP(model)
        ddp.register_comm_hook(None, hook)
        return ddp

    return wrap


OURS = {"wrap": DistributedDataParallel}
ROWS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # how it is wrapped, and how it trains
    ({}, {}),
    ({"gradient_as_bucket_view": True}, {}),
    ({}, {"parts": 3, "no_sync": True}),
    ({"gradient_as_bucket_view": True}, {"parts": 3, "no_sync": True}),
    ({"static_graph": True}, {}),
    ({"model": Parts, "find_unused_parameters": True}, {"uses": "ab"}),
    # float32 gradients fit float16 on the way
    ({"wrap": compressed(_bf16), "scale": 8.0}, {"tolerance": 0.01}),
    ({"wrap": compressed(default_hooks.fp16_compress_hook), "scale": 8.0}, {"tolerance": 0.01}),
    (OURS, {}),
    ({**OURS, "build": adam}, {}),
    ({**OURS, "build": lambda params: LARC(sgd(params))}, {}),
    (OURS, {"parts": 2}),
    (OURS, {"parts": 2, "delay": True}),
    ({"wrap": None}, {"parts": 2}),
]


def check_trainings_equal_one_process_with_both_batches() -> None:
    for wrapping, how in ROWS:
        for level in each(LEVEL_NAMES):
            Run(level, **wrapping).train(**how)


def check_a_step_adds_no_communication() -> None:
    """Ranks agree by the gradients that the wrapper has reduced; it does so without Python."""
    names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "send"))]
    for level, wrap in each(LEVEL_NAMES, WRAPS):
        run = Run(level, wrap)
        run.backward(0)
        run.step()
        with pytest.MonkeyPatch.context() as patch:
            for name in names:
                patch.setattr(dist, name, None)  # whoever calls it fails
            run.backward(1)
            norm = preamp.clip_grad_norm_(run.optimizer, 1.0)
            run.step()
        assert_equal_everywhere(norm)


# -- overflows -----------------------------------------------------------------------------------


def _in_gradient(run: Run) -> None:
    if dist.get_rank() == 1:
        for name in ("norm.bias", "linear.weight"):
            Damage(run.model.get_parameter(name), math.inf).armed = True
    run.backward(1)


def _in_activation(run: Run) -> None:
    linear = run.model.get_submodule("linear")
    handle = linear.register_forward_hook(
        lambda module, args, output: output * on_rank_1(math.nan), prepend=True
    )
    run.backward(1)
    handle.remove()


def check_an_overflow_that_one_rank_alone_sees() -> None:
    in_loss = lambda run: run.backward(1, factor=on_rank_1(math.inf))  # noqa: E731
    places = (in_loss, _in_gradient, _in_activation)
    for level, place, wrap in each(LEVEL_NAMES, places, WRAPS, size=2):
        run = Run(level, wrap)
        run.backward(0)
        run.step()
        before = values(run.optimizer)
        place(run)
        run.step(plain=False)
        assert run.engine.steps_skipped == 1, (level, place)
        assert run.engine.loss_scale() == 2.0**15
        for now, wanted in zip(values(run.optimizer), before, strict=True):
            assert_same(now, wanted, f"{level}, {place}")
        if place is _in_gradient:  # named on both
            (cause,) = run.engine.overflow_causes
            assert set(cause.parameters) == {"norm.bias", "linear.weight"}, (level, wrap, cause)
            assert cause.loss_was_finite
        run.backward(2)
        run.step()
        run.check(steps=2)


# -- wrappers that are made, used or left at other times than usual --------------------------------


class Wrapped(kit.run.Run):
    """Rows of its own on each rank; the wrapper is made ``before`` `initialize`, after or never."""

    def __init__(
        self,
        level: str,
        *,
        wraps: str = "after",
        wrap: Any = TorchDDP,
        model: Any = None,
        **more: Any,
    ) -> None:
        layers = lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))  # noqa: E731
        more = {"loss_scale": "dynamic", **more}
        super().__init__(level, model=model or layers, starts=False, **more)
        self.wrapped: Any = wrap(self.model) if wraps == "before" else self.model
        self.initialize()
        if wraps == "after":
            self.wrapped = wrap(self.model)

    def loss(self, index: int = 0) -> torch.Tensor:
        del index
        return self.wrapped(torch.randn(4, 8) + dist.get_rank()).float().square().mean()

    def overflow(self, **scaling: Any) -> None:
        """On the second rank, unreduced."""
        with self.wrapped.no_sync():
            self.backward(0, *(["inf"] if dist.get_rank() else []), **scaling)  # type: ignore[list-item]

    def agree(self, program: str = "iterate 0 1 2") -> None:
        """After this training ranks are equal."""
        self.play(program)
        states = [scaler.state_dict() for scaler in self.engine.scalers]
        scales = torch.tensor([float(state[key]) for state in states for key in state])
        own = [*preamp.master_params(self.optimizer), *self.model.parameters()]
        assert_equal_everywhere(scales, *own)


def check_reducing_by_hand_belongs_into_the_block() -> None:
    """Looked for is what the block ends with: after it, the other rank does not know."""
    for level, inside in each(CASTING_FUNCTIONS, (True, False)):
        run = Wrapped(level, wraps="never")
        with preamp.scale_loss(run.loss() * on_rank_1(math.inf), run.optimizer) as scaled:
            scaled.backward()
            if inside:
                Reducer(run.model).reduce()
        if not inside:
            Reducer(run.model).reduce()
        run.step()
        knows = inside or dist.get_rank() == 1
        assert run.engine.steps_skipped == knows
        assert all(bool(param.isfinite().all()) for param in run.model.parameters()) is knows


def check_a_forward_on_one_rank_is_traced_there() -> None:
    """The other rank gets the values by the reduction; each of both prints what it has seen."""
    for level, wrap in each(("O1", "O2", "O4", "O5"), WRAPS):
        run = Wrapped(level, wrap=wrap, overflow="trace")
        run.engine.scaler(0).set_scale(16.0)
        run.iterate()
        if dist.get_rank() == 1:
            run.model[0].register_forward_hook(
                lambda module, args, output: output * math.inf, prepend=True
            )
        told = list[str]()
        for _ in range(2):
            with redirect_stdout(io.StringIO()) as out:
                run.iterate()
            told.append(out.getvalue())
        cause, _ = run.engine.overflow_causes
        weights = [name for name in cause.parameters if "weight" in name]
        assert weights == ["1.weight", "0.weight"], cause  # in the order of a backward
        assert cause.was_watched
        if dist.get_rank() == 1:
            assert cause.trace is not None
            assert (cause.trace.module, cause.trace.phase) == ("0", "forward")
            assert told[0].startswith("Rank 1: Gradient overflow.")
            assert "the forward of '0' (Linear)" in told[0]
            assert told[1] == ""  # once is enough from each rank
        else:
            assert cause.trace is None
            assert "a rank that has seen where it was made prints it" in told[0]
            assert "Gradient overflow." in told[1]


def check_wrapping_comes_after_a_cast() -> None:
    """Casting a parameter takes the reducer's hooks off it: ranks would train alone."""
    for level in each(LEVEL_NAMES):
        run = Wrapped(level, wraps="before")
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper before a cast", changes=True):
                run.wrapped(torch.ones(1, 8))
        else:
            run.agree()


def check_wrappers_inside_a_model_come_after_a_cast() -> None:
    for level in each(("O1", "O2")):
        model: Any = nn.Sequential(TorchDDP(nn.Linear(8, 8)), TorchDDP(nn.Linear(8, 4)))
        if level == "O2":
            with refused("distributed", "wrappers inside a model", model):
                Wrapped(level, model=lambda model=model: model, wraps="never")
            assert model[0].module.weight.dtype is torch.float32
        else:
            run = Wrapped(level, model=lambda model=model: model, wraps="never")
            run.agree()


def check_a_delayed_reduction_may_be_made_before_a_cast() -> None:
    run = Wrapped(
        "O2", wraps="before", wrap=lambda m: DistributedDataParallel(m, delay_allreduce=True)
    )
    run.agree()
    run.engine.close()
    run.wrapped(torch.ones(1, 8))


def check_a_wrapper_ends_with_the_casts_it_was_made_for() -> None:
    for level in each(LEVEL_NAMES):
        run = Wrapped(level)
        run.iterate()
        run.engine.close()
        run.wrapped.eval()(torch.ones(1, 8))
        run.wrapped.train()
        wrapped = run.wrapped
        if level in HALF_WEIGHTS:
            with refused("distributed", "a wrapper after close", changes=True):
                wrapped(torch.ones(1, 8))
            wrapped = TorchDDP(run.model)
        wrapped(torch.ones(1, 8) + dist.get_rank()).sum().backward()
        assert_equal_everywhere(run.model[1].weight.grad)


def check_masters_are_made_equal_also_where_training_is_in_evaluation_mode() -> None:
    """As with batch norms and dropout that a fine-tuning leaves frozen; without blocks, too."""
    for level in each(WITH_MASTERS):
        run = Wrapped(level, seed=dist.get_rank())
        run.wrapped.eval()
        if dist.get_rank() == 0:
            run.loss()
        torch.manual_seed(0)
        run.agree()
    run = Wrapped("O5", seed=dist.get_rank(), loss_scale=1.0)
    run.wrapped.eval()
    torch.manual_seed(0)
    run.agree(3 * "outside; step; zero; ")


def check_an_overflow_that_is_dropped_before_the_reduction_leaves_no_trace() -> None:
    """Other ranks never hear of it, and keep the scale."""
    for level in each(LEVEL_NAMES):
        run = Wrapped(level)
        run.iterate()
        scale = run.engine.loss_scale()
        for overflows in (False, True):
            if overflows:
                run.overflow()
            run.optimizer.zero_grad()
            run.agree()
            assert run.engine.loss_scale() == scale


def check_an_overflow_of_one_loss_that_another_loss_reduces() -> None:
    """All losses that the reduction is of react, on every rank."""
    for level, delays in each(("O1", "O2"), (False, True), size=2):
        run = Wrapped(level, num_losses=3)
        run.iterate()
        run.overflow(delay_unscale=delays)
        run.backward(loss_id=1)
        run.play("step; zero")
        assert run.engine.steps_skipped == 1
        run.agree("iterate 0 1")
        scales = [run.engine.loss_scale(index) for index in range(3)]
        assert scales == [2.0**15, 2.0**15, 2.0**16]


def check_ranks_that_step_alone_react_alone() -> None:
    for level, delays in each(("O1", "O2"), ((), (True,)), size=2):
        run = Wrapped(level)
        run.iterate()
        for is_late in (False, *delays):  # one that only unscales leaves a reaction due
            run.overflow(delay_overflow_check=is_late)
        run.optimizer.step()
        rank = dist.get_rank()
        assert (run.engine.steps_skipped, run.engine.loss_scale()) == (rank, 2.0 ** (16 - rank))


def check_torchs_own_sharding() -> None:
    """It has an optimizer inside, which does not see masters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit.script, which torch's own import calls
        kind: Any = importlib.import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    for level in WITH_MASTERS:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), optim.SGD, lr=0.1)
        with refused("distributed", "ZeroRedundancyOptimizer", model):
            preamp.initialize(model, optimizer, opt_level=level)


# -- ranks that do not train the same: both are told, and what differs -----------------------------


class Named(nn.Module):
    """Linear layers in an order of their own."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.children()]).sum()


def start(model: nn.Module, optimizer: Any = torch.optim.SGD, **options: Any) -> Any:
    updated = optimizer(model.parameters(), lr=0.1)
    options = {"opt_level": "O1", "loss_scale": 8.0, "verbosity": 0, **options}
    preamp.initialize(model, updated, **options)
    return preamp.engine_of(updated)


MODELS = {"ab": {"a": 2, "b": 2}, "ac": {"a": 2, "c": 2}, "ba": {"b": 2, "a": 2}}
MODELS |= {"2": {"a": 2}, "3": {"a": 3}}
ALONE = (DistributedDataParallel,)
DIFFERENT: dict[str, tuple[Sequence[Any], dict[str, Any]]] = {
    # what both ranks are told, whose wrapper, and what the ranks train
    "levels O1 and O4": (WRAPS, {"opt_level": ("O1", "O4")}),
    "levels O2 and O1": (ALONE, {"opt_level": ("O2", "O1")}),
    "levels O2 and O5": (WRAPS, {"opt_level": ("O2", "O5")}),
    "floors of the scale": (WRAPS, {"loss_scale": ("dynamic",) * 2, "min_loss_scale": (None, 2.0)}),
    "static scales": (WRAPS, {"loss_scale": (8.0, 4.0)}),
    "parameters of other names": (WRAPS, {"model": ("ab", "ac")}),
    "parameters in another order": (WRAPS, {"model": ("ab", "ba")}),
    "optimizers of other kinds": (WRAPS, {"optimizer": (torch.optim.SGD, torch.optim.Adam)}),
    "parameters of other shapes": (ALONE, {"model": ("2", "3")}),
}


def check_first_forwards() -> None:
    for name, (wraps, ranks) in DIFFERENT.items():
        for wrap in wraps:
            mine = {key: by_rank(*values) for key, values in ranks.items()}
            model = Named(**MODELS[mine.pop("model", "ab")])
            start(model, **mine)
            with refused("distributed", name):
                wrap(model)(torch.ones(1, 2))
            close_engines()


def check_counts_towards_a_higher_scale() -> None:
    """A file that one rank alone has loaded would let its scale grow before the others'."""
    for wrap in each(WRAPS):
        engine = start(model := Named(a=2), opt_level="O2", loss_scale="dynamic")
        if dist.get_rank() == 1:
            engine.scalers[0].load_state_dict({"loss_scale": 65536.0, "unskipped": 7})
        with refused("distributed", "counts towards a higher scale"):
            wrap(model)(torch.ones(1, 2))


def check_states_that_are_loaded_later() -> None:
    for wrap in each(WRAPS):
        engine = start(model := Named(a=2), opt_level="O2", loss_scale="dynamic")
        wrapped = wrap(model)
        wrapped(torch.ones(1, 2)).backward()
        model.zero_grad()
        engine.load_state_dict({"loss_scaler0": {"loss_scale": by_rank(8.0, 4.0), "unskipped": 0}})
        with refused("distributed", "scales loaded later"):
            wrapped(torch.ones(1, 2))


def check_a_rank_without_preamp() -> None:
    model = Named(a=2)
    if dist.get_rank() == 0:
        start(model)
    with refused("distributed", "a rank without preamp"):
        DistributedDataParallel(model)(torch.ones(1, 2))


def check_initialize_itself_asks_nobody() -> None:
    """Ranks of a pipeline have different models, and some may have none."""
    if dist.get_rank() == 0:
        engine = start(model := Named(a=2), opt_level="O2")
        (optimizer,) = engine.optimizers
        with preamp.scale_loss(model(torch.ones(1, 2)), optimizer) as scaled:
            scaled.backward()
        optimizer.step()


def check_evaluating_on_one_rank_asks_nobody() -> None:
    model = Named(a=2)
    preamp.initialize(model, opt_level="O2", verbosity=0)
    wrapped = TorchDDP(model)
    if dist.get_rank() == 0:
        wrapped.eval()(torch.ones(1, 2))
        with torch.no_grad():
            wrapped.train()(torch.ones(1, 2))
    wrapped.train()(torch.ones(1, 2)).backward()


SHARDED: dict[str, dict[str, Any]] = {
    "sharded levels": {"opt_level": ("O2", "O5")},
    "sharded scales": {"loss_scale": (8.0, 16.0)},
    "sharded widths": {"width": (1, 4)},
    "sharded optimizers": {"optimizer": (torch.optim.SGD, torch.optim.Adam)},
    "sharded parts": {"parts": (1, 2)},
}


def sharded(evaluates_first: bool = False, **ranks: tuple[Any, Any]) -> Any:
    """The first forward of a sharded model."""
    mine = {key: by_rank(*values) for key, values in ranks.items()}
    width, parts = mine.pop("width", 1), mine.pop("parts", 2)
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, width, bias=False))
    for part in [*model.children()][:parts]:
        fully_shard(part)
    fully_shard(model)
    engine = start(model, **{"opt_level": "O2", **mine})
    if evaluates_first:
        with torch.no_grad():
            model(torch.ones(2, 4))
    model(torch.ones(2, 4)).sum().backward()
    return engine


def check_first_sharded_forwards() -> None:
    """Told before anything is gathered, also after an evaluation has left weights gathered."""
    if not RUNS_ON_CPUS:
        return
    for name, ranks in SHARDED.items():
        with refused("distributed", name, changes=True):
            sharded(**ranks)
        close_engines()
    sharded()
    sharded(evaluates_first=True)
