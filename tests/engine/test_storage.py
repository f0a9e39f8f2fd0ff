# SPDX-License-Identifier: BSD-3-Clause
"""Split masters: what training makes of weights is what it makes of them in full storage.

What they are compared with is an engine in full storage whose masters and half weights are brought
to what split ones can hold after each step (`settle`): at O5 half weights that lie half way, at O2
also masters below float16's normal range.
"""

import copy
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
from preamp.optim import LARC
from preamp.optim.fused.kinds import KEEP_FEWER_BITS as SPLITS

BOOK = "engine"
levels = pytest.mark.parametrize("level", MASTERS)
TORCHS = ["AdamW", "AdamW fused", "AdamW foreach", "SGD", "Adagrad", "RMSprop"]
OTHERS = [*TORCHS, "LBFGS", "LARC FusedSGD"]


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
def halve(run: Run) -> None:
    """Weights, to all of their digits."""
    with torch.no_grad(), run.engine.exact_weights():
        for param in run.model.parameters():
            param.mul_(0.5)


@act
def infer(run: Run) -> None:
    with torch.inference_mode():
        run.model.state_dict()


@act
def move(run: Run) -> None:
    """As a move to another device does."""
    run.model._apply(lambda tensor: tensor.clone())


@act
def compiled(run: Run) -> None:
    run.models[0] = torch.compile(run.model, backend="eager")


# -- the same numbers -----------------------------------------------------------------------------

PROGRAMS = {
    "read in inference mode": "train 0; infer; halve; settle; train 1 | train 2",
    "moved": "train 0; move | train 1",
    "compiled": "compiled; train 0; train 1; train 2",
}
"""Each gives the same bits in full and in split storage."""


@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize(
    ("name", "moments"), [*itertools.product(SPLITS, ["float32", "bfloat16", "8bit"])]
)
def test_training_is_that_of_full_storage(level: str, name: str, moments: Any) -> None:
    """With an overflow and clips; moments in fewer bits and their scales have the same bits too."""
    runs = pair(level, name, moments)
    assert_same_program("train 0 | train 1 | train 2 | train 3 | train 4", *runs)
    kept = {value.dtype for value in runs[1].optimizer.state[runs[1].twins()[0].master].values()}
    fewer = {"bfloat16": {torch.bfloat16}, "8bit": {torch.int8, torch.uint8}}
    assert moments == "float32" or kept & fewer[moments]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@levels
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(level: str, name: str) -> None:
    assert_same_program(PROGRAMS[name], *pair(level))


@levels
def test_closures(level: str) -> None:
    program = "closure 0 | closure 1 | closure 2 | closure 3"
    assert_same_program(program, *pair(level, loss_scale=128.0), after="settle")


# Random programs combine levels and moments freely; here each optimizer needs each of them once.
@pytest.mark.pairs
@pytest.mark.usefixtures("small_blocks")
@levels
@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("backend", ["reference", "blocks", "auto"])
@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_numbers_do_not_depend_on_who_reads_and_resumes(
    level: str, name: str, backend: str, moments: Any
) -> None:
    """Reading gradients of masters, releasing gradients and resuming change no bit."""

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


# -- what steps and scripts do to split masters ---------------------------------------------------


@levels
@pytest.mark.parametrize("name", SPLITS)
def test_no_step_makes_float32_masters(
    level: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(level, "split", name).play("train 0")
    table = run.engine.sessions[id(run.optimizer)].table
    with monkeypatch.context() as patch:
        for op in ("join_", "split_", "cast_copy_", "take_over_"):
            patch.setattr(table.ops, op, lambda *lists: pytest.fail("masters were touched"))
        run.play("train 1; train 2; train 3")


@levels
def test_bytes_between_steps(level: str) -> None:
    run = start(level, "split").play("train 0; train 1; backward 2")
    kept = preamp.count_memory(run.engine)
    halves = sum(twin.half.numel() for twin in run.twins())
    wide = sum(p.numel() for p in run.model.parameters() if p.dtype is torch.float32)
    assert kept["weights"] == kept["gradients"] == 2 * halves + 4 * wide
    assert (kept["masters"], kept["optimizer state"]) == (2 * halves, 8 * (halves + wide))


READS: dict[str, Any] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "foreach": lambda p: torch._foreach_mul([p], 1.0),
    "a sum": lambda p: (p * 2).sum(),
    "compared": lambda p: p == 0,
    "written": lambda p: p.add_(1),
    "assigned": lambda p: setattr(p, "data", torch.zeros(p.shape)),
}


@levels
@pytest.mark.parametrize("read", READS)
def test_split_masters_have_a_form_and_a_gradient_and_no_values(level: str, read: str) -> None:
    run = start(level, "split").play("train 0; backward 1")
    p, value = run.twins()[0].master, run.twins()[0].value()
    form = (p.shape, p.dtype, p.device, p.numel(), p.requires_grad, p.dim())
    assert form == (value.shape, torch.float32, value.device, value.numel(), True, value.dim())
    assert p.grad.dtype is torch.float32
    assert "SplitMaster(shape=(8, 4))" in repr(p)
    with refused(BOOK, "a split master is read", run.model, run.optimizer), torch.no_grad():
        READS[read](p)
    for copied in (copy.deepcopy(p), pickle.loads(pickle.dumps(p))):  # as of any master
        assert type(copied) is nn.Parameter
        assert torch.equal(copied, value)


@levels
def test_clips_of_masters_by_torch_count(level: str) -> None:
    """They ask gradients alone."""
    runs = pair(level)
    for index in range(3):
        for run in runs:
            run.play(f"backward {index}")
            nn.utils.clip_grad_norm_(preamp.master_params(run.optimizer), 0.25)
            run.play("step; zero; settle")
    assert_alike(*runs)


@levels
def test_a_write_to_a_half_weight_counts(level: str) -> None:
    """However it is made; no element is further than half a unit from its half weight."""
    run = start(level, "split").play("train 0")
    for write in (lambda p: p.data.clamp_(-0.01, 0.01), lambda p: p.data.fill_(0.0)):
        for index in range(2):
            for param in run.model.parameters():
                write(param)
            halves = {n: p.detach().clone() for n, p in run.model.named_parameters()}
            for name, value in run.model.state_dict().items():
                if name in halves and halves[name].dtype is not torch.float32:
                    assert torch.equal(split(value, halves[name].dtype)[0], halves[name])
            run.play(f"train {index}")
            for name, param in run.model.named_parameters():
                assert (param - halves[name]).abs().max() < 0.05


@levels
def test_who_reads_weights_makes_no_master(level: str) -> None:
    """Forwards, statistics, states and copies."""
    run = start(level, "split", numerics="full", numerics_every=1)
    for _ in range(2):
        run.play("iterate; forward")
        want = {t.name: t.value() for t in run.twins()}
        for weights in (dict(copy.deepcopy(run.model).named_parameters()), run.model.state_dict()):
            assert all(torch.equal(weights[name], value) for name, value in want.items())
    assert len(run.engine.history)


# -- the end, and copies --------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("floats", [False, True])
def test_close_gives_exact_weights_back(level: str, floats: bool) -> None:
    run = start(level, "split").play("train 0")
    want = dict(run.model.state_dict())
    if floats:
        run.model.float()
    run.close()
    assert same(want, dict(run.model.state_dict()))
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    assert run.optimizer.storage.masters == "float32"


def test_copies_have_plain_parameters_and_may_be_moved() -> None:
    run = start("O5", "split").play("iterate")
    copied = copy.deepcopy(run.optimizer)
    pairs = zip(copied.param_groups[0]["params"], copy.deepcopy(run.params()), strict=True)
    assert all(type(a) is nn.Parameter and torch.equal(a, b) for a, b in pairs)
    run.play("train 0")
    want = dict(run.model.state_dict())
    run.play("move")
    assert same(want, dict(run.model.state_dict()))
    read: Any = pickle.loads(pickle.dumps(run.model))
    assert read.double().first.weight.dtype is torch.float64


# -- refusals, and what is said -------------------------------------------------------------------


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


@pytest.mark.parametrize("name", OTHERS[:-1])
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_moments_of_other_optimizers_are_refused(level: str, name: str) -> None:
    words = {"kind": name.partition(" ")[0], "kinds": ", ".join(SPLITS)}
    refuse("moments", level, preamp.Storage(moments="8bit"), name, **words)


@levels
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_refuse_to_split_masters(level: str, name: str) -> None:
    words = {"kind": name.partition(" ")[0], "kinds": ", ".join(SPLITS)}
    refuse("masters of others", level, "split", name, **words)


def test_larc_around_an_initialized_optimizer_is_refused() -> None:
    run = start("O5", "split").play("backward")
    words: Any = {"kind": "LARC", "kinds": ", ".join(SPLITS)}
    with refused(BOOK, "masters of others", run.model, run.optimizer, **words):
        LARC(run.optimizer).step()


@pytest.mark.parametrize(("level", "convert"), [("O2", "bfloat16"), ("O5", "half")])
def test_half_weights_of_another_half_dtype_are_refused(level: str, convert: str) -> None:
    run = start(level, "split")
    getattr(run.model, convert)()
    half = str(run.model.first.weight.dtype).removeprefix("torch.")
    with refused(BOOK, "another half dtype", run.model, changes=True, half=half):
        run.play("backward; step")


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
    state = run.model.state_dict()
    state["last.weight"][0, 0] = 65520.0
    with refused(BOOK, "loaded beyond float16", run.optimizer):
        run.model.load_state_dict(state)


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
    assert "storage: 6 masters are split" in run.engine.explain()
    assert run.optimizer.storage == preamp.Storage(masters="split")
