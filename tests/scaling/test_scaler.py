# SPDX-License-Identifier: BSD-3-Clause
"""The loss scaler against a model of it in plain Python numbers; everything is exact."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from cases.selection import examples
from kit.refusals import refused
from preamp.amp import LossScaler as ApexScaler
from preamp.scaling import SMALLEST_SCALE, DynamicScale, LossScaler, ScaleState, StaticScale

INF, NAN = float("inf"), float("nan")
POWERS = st.integers(-20, 20).map(lambda n: 2.0**n)
WINDOWS = st.integers(1, 5)


@dataclasses.dataclass
class Model:
    """What a loss scaler is, in Python numbers."""

    dynamic: bool
    scale: float
    window: int = 2000
    floor: float | None = None
    ceiling: float = 2.0**24
    clean: int = 0
    overflow: bool = False

    @property
    def lowest(self) -> float:
        return SMALLEST_SCALE if self.floor is None else self.floor

    def countable(self, clean: int) -> int:
        """As many clean updates, but the next one that grows the scale is still to come."""
        return min(clean, self.window - 1) if self.dynamic else clean

    def update(self) -> bool:
        skip = self.overflow and self.dynamic
        if skip:
            self.scale /= 2
            self.clean = 0
        else:
            self.clean += 1
        if self.dynamic and self.clean >= self.window:
            self.scale *= 2
            self.clean = 0
        if self.dynamic:
            self.scale = min(max(self.scale, self.lowest), self.ceiling)
        self.overflow = False
        return skip


class Machine(RuleBasedStateMachine):
    """Rules that the core scaler and Apex's face of it share."""

    model: Model
    build: Any
    found: Any
    do_update: Any
    set_scale: Any
    state: Any

    @initialize(start=POWERS, window=WINDOWS, floor=st.none() | POWERS, ceiling=st.integers(0, 24))
    def start_dynamic(self, start: float, window: int, floor: float | None, ceiling: int) -> None:
        """It starts within its range, wherever it was to start."""
        top = max(2.0**ceiling, floor or 0.0)
        self.model = Model(True, start, window, floor, top)
        self.build(self.model)
        self.model.scale = max(min(start, top), floor or 0.0)

    @rule(value=POWERS)
    def turn_static(self, value: float) -> None:
        self.model = Model(False, value)
        self.build(self.model)

    @rule(times=st.integers(1, 12))
    def clean_updates(self, times: int) -> None:
        for _ in range(times):
            assert self.do_update() == self.model.update()

    @rule(times=st.integers(1, 60))
    def overflows(self, times: int) -> None:
        for _ in range(times):
            self.found()
            self.model.overflow = True
            assert self.do_update() == self.model.update()

    @rule()
    def delayed_overflow(self) -> None:
        self.found()
        self.model.overflow = True

    @rule(value=POWERS)
    def assign_scale(self, value: float) -> None:
        self.set_scale(value)
        self.model.scale = value

    @invariant()
    def equal(self) -> None:
        if hasattr(self, "model"):
            assert self.state() == (self.model.scale, self.model.clean, self.model.overflow)


class CoreMachine(Machine):
    """`preamp.scaling.LossScaler`."""

    def build(self, model: Model) -> None:
        if model.dynamic:
            rule_ = DynamicScale(
                init_scale=model.scale,
                growth_interval=model.window,
                min_scale=model.floor,
                max_scale=model.ceiling,
            )
            self.scaler = LossScaler(rule_)
        else:
            self.scaler = LossScaler(StaticScale(init_scale=model.scale))

    def found(self) -> None:
        self.scaler.record(torch.tensor(1.0))

    def do_update(self) -> bool:
        return bool(self.scaler.update())

    def set_scale(self, value: float) -> None:
        self.scaler.set_scale(value)

    def state(self) -> tuple[float, int, bool]:
        scaler = self.scaler
        assert scaler.state_dict() == {
            "loss_scale": scaler.value(),
            "unskipped": scaler.growth_tracker.item(),
        }
        return scaler.value(), int(scaler.growth_tracker.item()), bool(scaler.found_inf)

    @rule()
    def nothing_found(self) -> None:
        self.scaler.record(torch.tensor(0.0))

    @rule()
    def save_and_load(self) -> None:
        """A file carries the numbers; the rule comes from the arguments, the flag is dropped."""
        saved = self.scaler.state_dict()
        self.build(dataclasses.replace(self.model, scale=self.model.scale))
        self.scaler.load_state_dict(saved)
        self.model.overflow = False

    @rule(scale=POWERS, clean=st.integers(0, 4))
    def load(self, scale: float, clean: int) -> None:
        self.scaler.load_state_dict({"loss_scale": scale, "unskipped": clean})
        if self.model.dynamic:
            self.model.scale = scale
        self.model.clean, self.model.overflow = self.model.countable(clean), False

    @rule(loss=st.integers(-64, 64).map(float))
    def scaled_loss(self, loss: float) -> None:
        leaf = torch.tensor(loss, requires_grad=True)
        scaled = self.scaler.scale_loss(leaf)
        scaled.backward()
        assert scaled.item() == loss * self.model.scale
        assert leaf.grad is not None
        assert leaf.grad.item() == self.model.scale


class ApexMachine(Machine):
    """`preamp.amp.LossScaler`, with the names that scripts read and write."""

    def build(self, model: Model) -> None:
        self.scaler = ApexScaler(
            "dynamic" if model.dynamic else model.scale,
            init_scale=model.scale,
            scale_window=model.window,
            min_loss_scale=model.floor,
            max_loss_scale=model.ceiling,
        )

    def found(self) -> None:
        if self.model.dynamic:
            bad = torch.tensor([1.0, INF])
            self.scaler.unscale([bad], [bad.clone()], 1.0)
        else:
            self.scaler._has_overflow = True

    def do_update(self) -> bool:
        return self.scaler.update_scale()

    def set_scale(self, value: float) -> None:
        self.scaler._loss_scale = value

    def state(self) -> tuple[float, int, bool]:
        scaler = self.scaler
        assert scaler.dynamic is self.model.dynamic
        assert scaler._loss_scale == scaler.loss_scale()
        assert scaler._scale_seq_len == self.model.window
        assert scaler._min_loss_scale == self.model.floor
        assert scaler._max_loss_scale == self.model.ceiling
        return scaler.loss_scale(), scaler._unskipped, scaler._has_overflow

    @rule(window=WINDOWS)
    @precondition(lambda self: self.model.dynamic)
    def assign_window(self, window: int) -> None:
        self.scaler._unskipped = 0
        self.scaler._scale_seq_len = window
        self.model.clean, self.model.window = 0, window

    @rule(clean=st.integers(0, 4))
    def assign_clean(self, clean: int) -> None:
        self.scaler._unskipped = clean
        self.model.clean = self.model.countable(clean)

    @rule(flag=st.booleans())
    def assign_flag(self, flag: bool) -> None:
        self.scaler._has_overflow = flag
        self.model.overflow = flag

    @rule(assigns=st.booleans())
    def overflow_in_the_buffer(self, assigns: bool) -> None:
        if assigns:
            self.scaler._overflow_buf = torch.ones(1, dtype=torch.int32)
        else:
            self.scaler._overflow_buf.fill_(1)
        self.model.overflow = True
        assert self.do_update() == self.model.update()
        assert self.scaler._overflow_buf.tolist() == [0]

    @rule()
    def clear(self) -> None:
        self.scaler.clear_overflow_state()
        self.model.overflow = False

    @rule(value=st.integers(-64, 64).map(float), stashed=st.integers(-64, 64).map(float))
    def unscale(self, value: float, stashed: float) -> None:
        grads = [torch.full((3,), value, dtype=torch.float16)]
        out = [torch.full((3,), NAN)]
        self.scaler.unscale(grads, out, 1.0)
        assert out[0].tolist() == [value / self.model.scale] * 3
        self.scaler.unscale_with_stashed(grads, [torch.full((3,), stashed)], out)
        wide = torch.tensor(value / self.model.scale) + stashed
        assert out[0].tolist() == [wide.item()] * 3
        assert grads[0].tolist() == [value] * 3


FEW = settings(
    max_examples=examples(40),
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
TestCoreScaler = CoreMachine.TestCase
TestCoreScaler.settings = FEW
TestApexScaler = ApexMachine.TestCase
TestApexScaler.settings = FEW


# -- single facts ----------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Writes down the names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FACTORS = st.floats(0.3, 0.99)


@given(
    overflows=st.lists(st.booleans(), min_size=1, max_size=12),
    growth=FACTORS.map(lambda x: 1 / x),
    backoff=FACTORS,
    interval=WINDOWS,
    floor=st.floats(2.0**-20, 1.0),
    ceiling=st.floats(1.0, 2.0**20),
    within=st.floats(0, 1),
)
def test_one_operation_does_what_the_formula_says(
    overflows: list[bool],
    growth: float,
    backoff: float,
    interval: int,
    floor: float,
    ceiling: float,
    within: float,
) -> None:
    """To the bit, with factors that are no powers of two."""
    rule_ = DynamicScale(
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=interval,
        min_scale=floor,
        max_scale=ceiling,
    )
    scaler = LossScaler(rule_)
    scaler.set_scale(min(floor + within * (ceiling - floor), ceiling))
    expected = ScaleState(scaler.scale.clone(), scaler.growth_tracker.clone())
    for overflow in overflows:
        flag = torch.tensor(float(overflow))
        expected = rule_.adjust(expected, flag)
        scaler.record(flag)
        with Operations() as seen:
            scaler.react()
        assert "_amp_update_scale_" in seen.names
        assert (scaler.scale, scaler.growth_tracker) == expected


def test_a_reaction_is_four_operations() -> None:
    """On a GPU each of them would take the host longer than the device."""
    scaler = LossScaler(DynamicScale())
    flag = torch.tensor(1.0)
    with Operations() as seen:
        scaler.record(flag)
        scaler.react()
    assert seen.names == ["maximum", "_amp_update_scale_", "clamp_", "zero_"]
    with Operations() as seen:
        scaler.react()
    assert seen.names == ["_amp_update_scale_", "clamp_"]  # nothing was recorded since


@pytest.mark.parametrize(
    ("numbers", "is_used"),
    [
        ({"growth_interval": 2**31 - 1, "max_scale": 2.0**126}, True),
        ({"growth_interval": 2**31}, False),
        ({"growth_interval": 0}, False),
        ({"max_scale": 2.0**127}, False),  # it would not grow to infinity, and so not at all
    ],
)
def test_the_operation_is_used_where_it_does_the_same(
    numbers: dict[str, Any], is_used: bool
) -> None:
    scaler = LossScaler(DynamicScale(**numbers))
    scaler.rule = scaler.rule  # replaced, with the same bounds
    with Operations() as seen:
        scaler.react()
    assert ("_amp_update_scale_" in seen.names) is is_used


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_reaction_happens_once(calls: int) -> None:
    """However often an interrupt lets it be called."""
    assert DynamicScale() == DynamicScale(init_scale=2.0**16, growth_interval=2000)
    scaler = LossScaler(DynamicScale(growth_interval=2))
    scaler.update()
    scaler.record(torch.tensor(1.0))
    react = scaler.reaction()
    for _ in range(calls):
        react()
    assert scaler.state_dict() == {"loss_scale": 2.0**15, "unskipped": 0}
    assert scaler.generation == 2
    scaler.set_scale(8.0)
    assert scaler.generation == 3


@pytest.mark.parametrize(
    ("change", "overflow", "after"),
    [
        ({"min_scale": 64.0}, True, 64.0),
        ({"max_scale": 8.0}, False, 8.0),
        ({"max_scale": 8.0, "growth_interval": 1}, False, 8.0),
    ],
)
def test_a_rule_that_is_replaced_brings_the_scale_within_its_bounds(
    change: dict[str, Any], overflow: bool, after: float
) -> None:
    rule_ = DynamicScale(init_scale=32.0)
    scaler = LossScaler(rule_)
    scaler.rule = dataclasses.replace(rule_, **change)
    scaler.record(torch.tensor(float(overflow)))
    scaler.react()
    assert scaler.value() == after


def test_a_static_scale_that_becomes_dynamic_goes_on_from_its_count() -> None:
    scaler = LossScaler(StaticScale(init_scale=128.0))
    for _ in range(50):
        scaler.react()
    scaler.rule = DynamicScale(growth_interval=10)
    scaler.set_scale(1024.0)
    for _ in range(21):
        scaler.react()
    assert scaler.state_dict() == {"loss_scale": 8192.0, "unskipped": 0}


def test_identity_needs_no_arithmetic() -> None:
    loss = torch.tensor(3.0)
    scaler = LossScaler(StaticScale())
    assert scaler.is_identity
    assert not LossScaler(DynamicScale(init_scale=1.0)).is_identity
    assert scaler.scale_loss(loss) is loss
    scaler.set_scale(2.0)
    assert not scaler.is_identity
    assert scaler.scale_loss(loss).item() == 6.0


@pytest.mark.parametrize("given", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_scaled_loss_is_wide(given: torch.dtype) -> None:
    # With a dimension: a half scalar would be widened by the scale itself.
    scaled = LossScaler(DynamicScale()).scale_loss(torch.full((1,), 2.0, dtype=given))
    assert scaled.dtype is torch.promote_types(given, torch.float32)
    assert scaled.item() == 2.0**17


@pytest.mark.parametrize(
    "state",
    [
        *({"loss_scale": scale, "unskipped": 0} for scale in (NAN, INF, 0.0, -2.0)),
        {"loss_scale": 2.0, "unskipped": -1},
        {},
        {"loss_scale": 2.0},
        {"loss_scale": "x", "unskipped": 0},
        {"unskipped": 1},
    ],
)
def test_unreadable_state_changes_nothing(state: dict[str, Any]) -> None:
    scaler = LossScaler(DynamicScale())
    scaler.update()
    with refused("scaling", "a state that cannot be read", state=state):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == {"loss_scale": 2.0**16, "unskipped": 1}
    largest = {"loss_scale": 2.0**127, "unskipped": 2**31 - 1}
    assert scaler.read_state(largest) == tuple(largest.values())


# -- Apex's face -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_apex_unscale_finds_overflow_and_still_writes_all(bad: float, place: int) -> None:
    """Of infinite values, not of those whose sum is; a static one does not look."""
    static, scaler = ApexScaler(2.0), ApexScaler("dynamic", init_scale=2.0)
    static.unscale([torch.tensor([bad])], [torch.zeros(1)], 1.0)
    assert static.update_scale() is False
    scaler.unscale([torch.full((4,), 3e38)], [torch.zeros(4)], 1.0)
    assert not scaler._has_overflow
    assert (scaler._overflow_buf.dtype, scaler._overflow_buf.tolist()) == (torch.int32, [0])
    grads = [torch.full((2,), 6.0, dtype=torch.float16) for _ in range(3)]
    grads[place][1] = bad
    out = [torch.full((2,), -1.0) for _ in range(3)]
    scaler.unscale(grads, out, 1.0)
    assert scaler._has_overflow
    assert [t[0].item() for t in out] == [3.0, 3.0, 3.0]


def test_apex_overrides_of_the_scale() -> None:
    scaler = ApexScaler("dynamic")
    out = [torch.zeros(1)]
    scaler.unscale([torch.tensor([8.0])], out, 1.0, scale_override=4.0)
    assert out[0].item() == 2.0
    scaler.unscale_with_stashed(
        [torch.tensor([8.0])], [torch.tensor([6.0])], out, scale_override=(4.0, 2.0, 1.0)
    )
    assert out[0].item() == 8.0 * (1.0 / 4.0) + 6.0 * (1.0 / 2.0)


def test_apex_fields() -> None:
    """What scripts read; flags of compiled kernels are not among them, as there are none."""
    dynamic = ApexScaler("dynamic", min_loss_scale=4.0, max_loss_scale=2.0**20, scale_window=7)
    assert dynamic.dynamic
    assert (dynamic._loss_scale, dynamic._unskipped, dynamic._has_overflow) == (2.0**16, 0, False)
    assert (dynamic._min_loss_scale, dynamic._max_loss_scale) == (4.0, 2.0**20)
    assert (dynamic._scale_seq_len, ApexScaler("dynamic")._scale_seq_len) == (7, 2000)
    for flag in ("has_fused_kernel", "warned_no_fused_kernel", "warned_unscaling_non_fp32_grad"):
        assert not hasattr(ApexScaler, flag)
