# SPDX-License-Identifier: BSD-3-Clause
"""What two ranks check of training under torch's and preamp's DistributedDataParallel.

Gradients are exact (see ``cases.models``), so runs that round nothing on the way equal one process
with both batches to the bit.
"""

import io
import math
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import preamp
from cases.levels import BY_NAME, CASTING_FUNCTIONS, LEVEL_NAMES, WITH_MASTERS
from cases.models import Damage, Exact, Parts, batch, values
from cases.tolerances import assert_same
from distributed.ranks import assert_equal_everywhere, each
from preamp.parallel import DistributedDataParallel, Reducer
from preamp.parallel.LARC import LARC

RANKS = 2
STEPS = 3
WRAPS = (TorchDDP, DistributedDataParallel)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05, eps=1e-4)


def on_rank_1(value: float) -> float:
    return value if dist.get_rank() == 1 else 1.0


def loss_of(model: Any, index: int, **use: Any) -> torch.Tensor:
    x, coefficients = batch(index)
    return (model(x, **use).float() * coefficients).sum()


class Run:
    """A model on two ranks under a wrapper, and beside it on each rank alone with both batches.

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
        row = BY_NAME[level]
        self.model = model(dist.get_rank())  # the first rank's weights are those that count
        self.plain = model(0).to(torch.float32 if row.has_masters else row.weight)
        self.optimizer = build(self.model.parameters())
        self.plain_optimizer = build(self.plain.parameters())
        options: dict[str, Any] = {"loss_scale": "dynamic", "num_losses": num_losses}
        preamp.initialize(self.model, self.optimizer, opt_level=level, verbosity=0, **options)
        self.engine = preamp.engine_of(self.model)
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
            with preamp.disable_casts():
                self.plain_optimizer.step()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

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
EXACT_ROWS = [  # not in bfloat16
    ({**OURS, **way}, {})
    for way in (
        {"delay_allreduce": True},
        {"message_size": 1},
        {"allreduce_always_fp32": True},
        {"gradient_predivide_factor": 2.0},
    )
]


def check_trainings_equal_one_process_with_both_batches() -> None:
    for (wrapping, how), levels in [(row, LEVEL_NAMES) for row in ROWS] + [
        (row, ("O1", "O2", "O3")) for row in EXACT_ROWS
    ]:
        for level in each(levels):
            Run(level, **wrapping).train(**how)


def check_masters_are_those_of_the_first_rank_from_the_first_forward_on() -> None:
    """Torch broadcasts the half weights alone; each rank drew masters of its own."""
    for level, wrap in each(WITH_MASTERS, WRAPS):
        run = Run(level, wrap)
        loss_of(run.ddp, 0)
        for param, wanted in zip(
            preamp.master_params(run.optimizer), Exact(0).parameters(), strict=True
        ):
            assert_same(param.detach(), wanted.detach())


def check_losses_with_scalers_of_their_own() -> None:
    for level in each(LEVEL_NAMES):
        run = Run(level, num_losses=2)
        run.engine.scaler(1).set_scale(2.0)
        for step in range(STEPS):
            run.backward(2 * step, 0)
            run.backward(2 * step + 1, 1, factor=on_rank_1(math.inf) if step == 1 else 1.0)
            run.step()
        assert run.engine.steps_skipped == 1
        assert [run.engine.loss_scale(index) for index in range(2)] == [2.0**16, 1.0]
        run.check_ranks()


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


# -- overflows ------------------------------------------------------------------------------------


def _in_loss(run: Run) -> None:
    run.backward(1, factor=on_rank_1(math.inf))


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
    places = (_in_loss, _in_gradient, _in_activation)
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


def _by_hand(level: str, *, inside: bool) -> tuple[int, bool]:
    """A step whose gradients overflow on the second rank; reduced without a wrapper."""
    model = Exact(0)
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    loss = loss_of(model, dist.get_rank()) * on_rank_1(math.inf)

    def reduce() -> None:
        for param in model.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= RANKS

    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
        if inside:
            reduce()
    if not inside:
        reduce()
    optimizer.step()
    finite = all(bool(torch.isfinite(param).all()) for param in model.parameters())
    engine = preamp.engine_of(model)
    engine.close()
    return engine.steps_skipped, finite


def check_reducing_by_hand_belongs_into_the_block() -> None:
    """Looked for is what the block ends with: after it, the other rank does not know."""
    for level in CASTING_FUNCTIONS:
        assert _by_hand(level, inside=True) == (1, True)
        knows = dist.get_rank() == 1
        assert _by_hand(level, inside=False) == ((1, True) if knows else (0, False))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=False)
        self.middle = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


NAMES = ("last.weight", "middle.weight", "first.weight")
"""In the order of a backward."""


def check_a_forward_on_one_rank_is_traced_there() -> None:
    """The other rank gets the values by the reduction; each of both prints what it has seen."""
    for level, wrap in each(("O1", "O2", "O4", "O5"), WRAPS):
        model = Deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        options: dict[str, Any] = {"loss_scale": "dynamic", "overflow": "trace", "verbosity": 0}
        preamp.initialize(model, optimizer, opt_level=level, **options)
        engine, ddp = preamp.engine_of(model), wrap(model)
        engine.scaler(0).set_scale(16.0)

        def step(ddp: Any = ddp, optimizer: Any = optimizer) -> str:
            out = io.StringIO()
            with redirect_stdout(out):
                loss = ddp(torch.ones(2, 4)).float().sum()
                with preamp.scale_loss(loss, optimizer) as scaled:
                    scaled.backward()
                optimizer.step()
            optimizer.zero_grad()
            return out.getvalue()

        step()
        if dist.get_rank() == 1:
            model.middle.register_forward_hook(
                lambda module, args, output: output * math.inf, prepend=True
            )
        lines, again = step(), step()
        cause, _ = engine.overflow_causes
        assert cause.parameters == NAMES, (level, wrap, cause)
        assert cause.was_watched
        if dist.get_rank() == 1:
            assert cause.trace is not None
            assert (cause.trace.module, cause.trace.phase) == ("middle", "forward")
            assert lines.startswith("Rank 1: Gradient overflow.")
            assert "the forward of 'middle' (Linear)" in lines
            assert again == ""  # once is enough from each rank
        else:
            assert cause.trace is None
            assert "a rank that has seen where it was made prints it" in lines
            assert "Gradient overflow." in again
