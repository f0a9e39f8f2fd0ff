# SPDX-License-Identifier: BSD-3-Clause
"""Split masters: what training makes of weights is what it makes of them in full storage.

What they are compared with is an engine in full storage whose masters and half weights are brought
to what split ones can hold after each step (`settle`): at O5 half weights that lie half way, at O2
also masters below float16's normal range.
"""

import copy
import functools
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from kit.compare import same
from kit.refusals import refused
from kit.run import MASTERS, PLAIN, Run, act, assert_alike, assert_same_program, where
from preamp.kernels.stored import join, split
from preamp.optim.fused.kinds import KEEP_FEWER_BITS as PACKED
from preamp.optim.fused.kinds import KINDS
from preamp.optim.master_parameter import PackedMaster

BOOK = "engine"
levels = pytest.mark.parametrize("level", MASTERS)
TORCHS = ["AdamW", "AdamW fused", "AdamW foreach", "SGD", "Adagrad", "RMSprop"]
NAMES = [*(kind.__name__ for kind in KINDS), *TORCHS, "LARC FusedSGD"]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the matrices of small models have 8 bits."""
    monkeypatch.setattr("preamp.optim.fused.moments.can_be_blocks", lambda shape: len(shape) > 1)


def start(level: str, storage: Any, optimizer: str = "FusedAdam", **more: Any) -> Run:
    return Run(level, optimizer, storage=storage, **{"backend": "reference", **more})


def pair(level: str, optimizer: str = "FusedAdam", moments: Any = "float32", **more: Any) -> Any:
    """In full storage, and split."""
    kept = [preamp.Storage(masters=kind, moments=moments, seed=3) for kind in ("float32", "split")]
    return [start(level, storage, optimizer, **more) for storage in kept]


def packed(run: Run) -> list[bool]:
    return [isinstance(twin.master, PackedMaster) for twin in run.twins()]


@act
def settle(run: Run) -> None:
    """Let an engine in full storage have what a split one can hold; torch counts no write."""
    if run.engine.policy.storage.masters == "split":
        return
    for twin in run.twins():
        half, low = split(twin.master.detach(), twin.half.dtype)
        twin.half.data.copy_(half)
        twin.master.data.copy_(join(half, low))


@act
def train(run: Run, index: int) -> None:
    """Two backwards, the third time one infinite at O2, a clip, a step."""
    inf = " inf" if index == 2 and run.options["opt_level"] == "O2" else ""
    run.play(
        f"backward {index} delay; backward {index + 100}{inf}; clip .5; step; zero own; settle"
    )


@act
def penalty(run: Run) -> None:
    torch.stack([twin.master.square().sum() for twin in run.twins()]).sum().backward()


@act
def halve(run: Run) -> None:
    with torch.no_grad():
        for param in run.params():
            param.mul_(0.5)


@act
def infer(run: Run) -> None:
    with torch.inference_mode():
        run.read()


@act
def move(run: Run) -> None:
    """As a move to another device does."""
    run.model._apply(lambda tensor: tensor.clone())


@act
def compiled(run: Run) -> None:
    run.models[0] = torch.compile(run.model, backend="eager")


# -- the same numbers -----------------------------------------------------------------------------

PROGRAMS = {
    "a penalty on masters": "train 0; backward 1; penalty; step; settle",
    "written without a trace after loading": "train 0; save; load; fill; train 1",
    "read in inference mode": "train 0; infer; halve; train 1 | train 2",
    "moved": "train 0; move | train 1",
    "compiled": "compiled; train 0; train 1; train 2",
}
"""Each gives the same bits in full and in split storage."""


@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize(
    ("name", "moments"),
    [*itertools.product(NAMES, ["float32"]), *itertools.product(PACKED, ["bfloat16", "8bit"])],
)
def test_training_is_that_of_full_storage(level: str, name: str, moments: Any) -> None:
    """With an overflow and clips; moments in fewer bits and their scales have the same bits too."""
    runs = pair(level, name, moments)
    assert_same_program("train 0 | train 1 | train 2 | train 3 | train 4", *runs)
    assert all(packed(runs[1]))
    kept = {value.dtype for value in runs[1].optimizer.state[runs[1].twins()[0].master].values()}
    fewer = {"bfloat16": {torch.bfloat16}, "8bit": {torch.int8, torch.uint8}}
    assert moments == "float32" or kept & fewer[moments]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@levels
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(level: str, name: str) -> None:
    scale = {"loss_scale": 1.0} if "penalty" in name else {}
    runs = pair(level, **scale)
    assert_same_program(PROGRAMS[name], *runs)
    assert all(packed(runs[1])) or "fill" in PROGRAMS[name]  # whose step is skipped at O2


@levels
@pytest.mark.parametrize("name", ["FusedAdam", "SGD", "LBFGS"])
def test_closures(level: str, name: str) -> None:
    program = "closure 0 | closure 1 | closure 2 | closure 3"
    assert_same_program(program, *pair(level, name, loss_scale=128.0), after="settle")


# Random programs combine levels and moments freely; here each optimizer needs each of them once.
@pytest.mark.pairs
@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_numbers_do_not_depend_on_when_masters_are_float32(
    level: str, name: str, backend: str, moments: Any
) -> None:
    """Reading them between steps, releasing gradients and resuming change no bit."""

    def started(releases: bool) -> Run:
        kept: Any = {"masters": "split", "moments": moments, "seed": 3}
        storage = preamp.Storage(**kept, release_gradients=releases)
        return start(level, storage, name, backend=backend, loss_scale=128.0)

    def trained(then: str = "", releases: bool = False, resumes: bool = False) -> Run:
        parts = [f"backward {n}; step; zero own; {then}" for n in range(5)]
        run = started(releases).play(*parts[:3], "save")
        if resumes:
            saved, run = run.saved, started(releases)
            run.saved = saved
            run.play("load")
        return run.play(*parts[3:], "zero")  # zeros are kept, or released

    runs = [trained(), trained("read"), trained(resumes=True)]
    if name != "FusedLAMB":  # whose update needs all gradients of a step
        runs += [trained(then, releases=True) for then in ("", "read")]
        runs.append(trained(releases=True, resumes=True))
    assert_alike(*runs)


def test_ties_resume_bitwise() -> None:
    """A half weight is rounded in one way, whenever it is."""
    run, again = (start("O5", "split", "FusedSGD") for _ in range(2))
    run.model.load_state_dict(
        {k: torch.full_like(v, 1 + 2.0**-8) for k, v in run.model.state_dict().items()}
    )
    assert {float(twin.half.detach().flatten()[0]) for twin in run.twins()} == {1 + 2.0**-7}
    again.model.load_state_dict(run.model.state_dict())
    assert_same_program("train 0", run, again)
    third = start("O5", "split")
    third.model.load_state_dict(run.model.state_dict())
    assert_alike(run, third, of=["stored"])
    third.play("train 1")
    assert all(torch.equal(t.half, split(t.value(), t.dtype)[0]) for t in third.twins())


@levels
@pytest.mark.parametrize("to", ["full", "split"])
def test_checkpoints_load_into_another_storage(level: str, to: str, tmp_path: Any) -> None:
    run = start(level, "split").play("train 0; train 1; train 2")
    again = start(level, to).play("train 7")
    run.save(tmp_path / "run.safetensors")
    assert all(packed(run))
    again.load(tmp_path / "run.safetensors")
    assert_same_program("train 3; settle; train 4", run, again)
    again.save(tmp_path / "run.safetensors")
    run.load(tmp_path / "run.safetensors")
    assert_alike(run, again)


class Scale(nn.Module):
    """Multiplies: the forward saves the half weight itself for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@levels
@pytest.mark.parametrize("storage", ["full", "split", "compact"])
@pytest.mark.parametrize("frozen", [[0], [1], [2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("thaws", ["before the forward", "before the step"])
def test_a_weight_that_was_frozen_at_first_trains_later(
    level: str, storage: str, frozen: list[int], thaws: str
) -> None:
    """Its master is made after a forward that saved it; small numbers are exact throughout."""
    options: Any = {"storage": storage, "loss_scale": 128.0, "starts": False}
    ours, plain = runs = [
        Run(kind, name, lambda: nn.Sequential(*(Scale() for _ in range(4))), **options)
        for kind, name in ((level, "FusedSGD"), (PLAIN, "SGD"))
    ]
    for run in runs:
        run.optimizer.param_groups[0].update(lr=2.0**-5, momentum=0.0)
        for place in frozen:
            run.model[place].requires_grad_(False)
    ours.initialize()
    for number in range(3):
        for run in runs:
            if number == 1 and thaws == "before the forward":
                run.model.requires_grad_(True)
            run.back(run.model(torch.ones(8)).float().sum())
            if number == 1:
                run.model.requires_grad_(True)
            run.play("step; zero own")
        for mine, wanted in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
            exact = ours.engine.exact_value(mine)
            value = mine.detach().float() if exact is None else exact.detach()
            torch.testing.assert_close(value, wanted.detach(), rtol=2.0**-6, atol=0)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_state_of_ones_own_may_have_any_keys(level: str) -> None:
    run = Run(level).play("iterate")
    for param in run.params():
        run.optimizer.state[param][0] = param.detach().float() + 1
    state = copy.deepcopy(run.optimizer.state_dict())
    run.optimizer.load_state_dict(state)
    assert same(run.optimizer.state_dict(), state)


# -- when masters are made ------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("name", [*PACKED, "FusedLARS", "AdamW"])
def test_masters_are_made_by_no_fused_step_and_once_by_another(
    level: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(level, "split", name).play("train 0")
    (table,) = run.engine.sessions[id(run.optimizer)].tables
    counts = {"join_": 0, "split_": 0, "cast_copy_": 0}

    def counted(op: str, call: Any, first: list[Any], *rest: Any) -> None:
        counts[op] += len(first)
        call(first, *rest)

    with monkeypatch.context() as patch:
        for op in counts:
            patch.setattr(table.ops, op, functools.partial(counted, op, getattr(table.ops, op)))
        if name in PACKED:
            patch.setattr(table, "make", lambda: pytest.fail("masters were made"))
            run.play("train 1; train 2")
        run.play("train 3")
    every = 0 if name in PACKED else len(table)
    assert counts == {"join_": every, "split_": every, "cast_copy_": 0}


@levels
def test_bytes_between_steps(level: str) -> None:
    run = start(level, "split").play("train 0; train 1; backward 2")
    kept = preamp.count_memory(run.engine)
    halves = sum(twin.half.numel() for twin in run.twins())
    wide = sum(p.numel() for p in run.model.parameters() if p.dtype is torch.float32)
    assert all(packed(run))
    assert kept["weights"] == kept["gradients"] == 2 * halves + 4 * wide
    assert (kept["masters"], kept["optimizer state"]) == (2 * halves, 8 * (halves + wide))


READS: dict[str, Any] = {
    "compared": lambda p: p,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "detach": lambda p: p.detach().clone(),
    "data": lambda p: p.data,
    "foreach": lambda p: torch._foreach_mul([p], 1.0)[0],
    "stack": lambda p: torch.stack([p])[0],
}


@levels
@pytest.mark.parametrize("read", READS)
def test_whoever_reads_a_master_gets_its_value(level: str, read: str) -> None:
    """Made float32 then, with its whole table, and packed at the next step; its form is known."""
    run = start(level, "split")
    assert not any(packed(run))  # the values from before the cast
    run.play("train 0")
    want = [twin.value() for twin in run.twins()]
    p, value = run.twins()[0].master, want[0]
    form = (p.shape, p.dtype, p.device, p.numel(), p.requires_grad, p.dim())
    assert form == (value.shape, torch.float32, value.device, value.numel(), True, value.dim())
    assert all(packed(run))
    assert torch.equal(READS[read](p), value)
    assert not any(packed(run)) or read != "compared"
    assert all(
        torch.equal(READS[read](t.master), v) for t, v in zip(run.twins(), want, strict=True)
    )
    assert all("nan" not in repr(twin.master) for twin in run.twins())
    run.play("train 1")
    assert all(packed(run)) or read == "data"  # memory that a script holds stays


@levels
def test_a_write_to_a_packed_half_weight_drops_what_is_beside_it_once(level: str) -> None:
    run = start(level, "split").play("train 0")
    written = next(t for t in run.twins() if t.name == "first.weight")
    kept = [t is not written for t in run.twins()]
    with torch.no_grad():
        written.half.clamp_(-0.25, 0.25)
    seen = written.half.detach().float()
    with pytest.warns(UserWarning, match="'first.weight' was written to between two steps"):
        assert torch.equal(run.model.state_dict()["first.weight"], seen)
    assert packed(run) == kept
    run.play("train 1")
    assert packed(run) == kept
    other = written.master.detach().clone()
    with torch.no_grad():
        written.half[0, 0] = other[0, 0] = 0.125
    assert torch.equal(run.model.state_dict()["first.weight"], other)  # others keep what is beside
    with torch.no_grad():
        written.master.fill_(0.25)
    run.play("forward")
    assert (written.half == 0.25).all()
    assert "1 stay float32" in run.engine.explain()


@levels
def test_memory_that_a_script_holds_stays_the_masters(level: str) -> None:
    run = start(level, "split")
    views = [twin.master.data for twin in run.twins()]
    run.play("train 0")
    assert not any(packed(run))
    at = [twin.master.data_ptr() for twin in run.twins()]
    assert [view.data_ptr() for view in views] == at
    views.clear()
    assert all(packed(run.play("train 1")))


@levels
def test_a_backward_through_packed_masters_is_refused(level: str) -> None:
    run = start(level, "split")
    loss = torch.stack([twin.master.square().sum() for twin in run.twins()]).sum()
    run.play("train 0")
    with refused(BOOK, "backward through packed masters", run.model, run.optimizer):
        loss.backward()


@levels
def test_who_reads_weights_makes_no_master(level: str) -> None:
    """Forwards, statistics, states and copies."""
    run = start(level, "split", numerics="full", numerics_every=1)
    for _ in range(2):
        run.play("iterate; forward")
        want = {t.name: t.value() for t in run.twins()}
        for weights in (dict(copy.deepcopy(run.model).named_parameters()), run.model.state_dict()):
            assert all(torch.equal(weights[name], value) for name, value in want.items())
        assert all(packed(run))
    assert len(run.engine.history)


# -- the end, and copies --------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("floats", [False, True])
def test_close_gives_exact_weights_back(level: str, floats: bool) -> None:
    run = start(level, "split").play("train 0")
    want, (first, *_) = dict(run.model.state_dict()), run.twins()
    held, value = first.master, first.value()
    if floats:
        run.model.float()
    run.close()
    assert same(want, dict(run.model.state_dict()))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert torch.equal(held, value)
    assert run.optimizer.storage.masters == "float32"


def test_copies_have_plain_parameters_and_may_be_moved() -> None:
    run = start("O5", "split").play("iterate")
    copied = copy.deepcopy(run.optimizer)
    pairs = zip(copied.param_groups[0]["params"], run.params(), strict=True)
    assert all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)
    run.play("train 0")
    want = dict(run.model.state_dict())
    run.play("move")
    assert same(want, dict(run.model.state_dict()))
    read: Any = pickle.loads(pickle.dumps(run.model))
    assert read.double().first.weight.dtype is torch.float64
    assert "_apply" not in vars(copy.deepcopy(run.model))
    run.close()
    assert "_apply" not in vars(run.model)


# -- refusals, and what is said -------------------------------------------------------------------


def test_steps_are_not_captured_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start("O5", "split").play("backward")
    monkeypatch.setattr("preamp.engine.session.is_capturing", lambda device: True)
    with refused(BOOK, "captured", run.model, run.optimizer):
        run.play("step")


def refuse(name: str, level: str, given: Any, optimizer: str = "FusedAdam", **words: Any) -> None:
    run = Run(level, optimizer, starts=False, storage=given)
    with refused(BOOK, name, run.model, run.optimizer, level=repr(level), **words):
        run.initialize()


@pytest.mark.parametrize("level", where(has_masters=False))
@pytest.mark.parametrize(
    ("storage", "instead"), [("split", '"full"'), ("compact", "preamp.Storage(moments='8bit')")]
)
def test_levels_without_masters_refuse_to_split_them(
    level: str, storage: str, instead: str
) -> None:
    refuse("nothing to split", level, storage, storage=storage, instead=instead)


@pytest.mark.parametrize(
    ("name", "storage"),
    [("unknown storage", "splt"), ("misspelt storage", "Compact"), ("storage that is none", 16)],
)
def test_unknown_storages(name: str, storage: Any) -> None:
    refuse(name, "O5", storage)


@pytest.mark.parametrize("name", sorted({*NAMES, "LBFGS"} - {*PACKED, "LARC FusedSGD"}))
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_moments_of_other_optimizers_are_refused(level: str, name: str) -> None:
    words = {"kind": name.partition(" ")[0], "kinds": ", ".join(PACKED)}
    refuse("moments", level, preamp.Storage(moments="8bit"), name, **words)


def test_masters_of_another_level_may_be_split() -> None:
    assert start("O3", "split", master_weights=True).engine.policy.storage.masters == "split"


def test_float16_weights_beyond_its_range_are_named() -> None:
    run = Run("O2", "FusedAdam", starts=False, storage="split")
    with torch.no_grad():
        run.model.last.weight[0, 0] = 65520.0
    with refused(BOOK, "beyond float16", run.model, run.optimizer):
        run.initialize()
    with torch.no_grad():
        run.model.last.weight[0, 0] = 65519.0  # which float16 rounds to 65504
    run.initialize()


def test_weights_that_have_no_split_master_may_be_of_any_size() -> None:
    """Those that stay float32, and those that no optimizer has."""
    run = Run("O2", "FusedAdam", starts=False, storage="split", keep_fp32=["last.weight"])
    with torch.no_grad():
        run.model.last.weight[0, 0] = run.model.first.bias[0] = 1e6
    del run.optimizer.param_groups[0]["params"][1]
    run.initialize()
    assert run.model.last.weight[0, 0] == 1e6


@pytest.mark.parametrize("door", [preamp, preamp.amp])
def test_engines_say_their_storage(door: Any) -> None:
    run = Run("O5", "FusedAdam", storage="split", door=door)
    assert "  storage = split (default of O5: full)\n" in run.engine.explain()
    run.play("iterate")
    assert "6 of 6 masters are split now" in run.engine.explain()
    assert run.optimizer.storage == preamp.Storage(masters="split")
