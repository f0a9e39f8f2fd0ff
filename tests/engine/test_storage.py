# SPDX-License-Identifier: BSD-3-Clause
"""Storage: split masters, moments in fewer bits, `place="host"`, and what goes wrong with them.

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
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import preamp
import preamp.parallel
from cases.ranks import one_rank
from kit.compare import same
from kit.loops import begin, scaled_backward
from kit.refusals import assert_refused, refused
from kit.run import MASTERS, Run, act, assert_alike, assert_same_program, where
from preamp.kernels.stored import join, split
from preamp.optim import LARC
from preamp.optim.fused.kinds import KEEP_FEWER_BITS as SPLITS
from preamp.optimizers import FusedAdam, FusedSGD

BOOK = "engine"
levels = pytest.mark.parametrize("level", MASTERS)
TORCHS = ["AdamW", "AdamW fused", "AdamW foreach", "SGD", "Adagrad", "RMSprop"]
OTHERS = [*TORCHS, "LBFGS"]


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


# -- the same numbers -----------------------------------------------------------------------------


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


# -- what steps and scripts do to split masters ---------------------------------------------------


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


# -- refusals, and what is said -------------------------------------------------------------------


HOST = preamp.Storage(place="host")
EIGHT = preamp.Storage(moments="8bit")
UNMADE = where(has_masters=False)


def of(name: str) -> dict[str, Any]:
    return {"kind": name.partition(" ")[0], "kinds": ", ".join(SPLITS)}


REFUSED: list[tuple[str, str, Any, str, dict[str, Any]]] = [  # level, storage, optimizer, words
    *(
        ("nothing to split", level, kept, "FusedAdam", {"storage": kept, "instead": instead})
        for level in UNMADE
        for kept, instead in (("split", '"full"'), ("compact", "preamp.Storage(moments='8bit')"))
    ),
    ("unknown storage", "O5", "splt", "FusedAdam", {}),
    ("misspelt storage", "O5", "Compact", "FusedAdam", {}),
    ("storage that is none", "O5", 16, "FusedAdam", {}),
    *(("moments", level, EIGHT, name, of(name)) for level in ("O0", "O5") for name in OTHERS),
    *(
        ("masters of others", level, "split", name, of(name))
        for level in MASTERS
        for name in OTHERS
    ),
    *(("masters of LARC", level, "split", "LARC FusedSGD", {}) for level in MASTERS),
    ("AdamW of torch", "O5", HOST, "AdamW", {}),
    ("LARC", "O5", HOST, "LARC FusedSGD", {}),
    ("copies", "O5", HOST, "FusedMixedPrecisionLamb", {}),
    ("own masters", "O5", HOST, "FusedAdam", {}),
    ("triton", "O5", HOST, "FusedAdam", {"backend": "triton"}),
]


@pytest.mark.parametrize(("name", "level", "storage", "optimizer", "words"), REFUSED)
def test_what_cannot_be_stored_so_is_refused(
    name: str, level: str, storage: Any, optimizer: str, words: dict[str, Any]
) -> None:
    more = {key: words[key] for key in words.keys() & {"backend"}}
    run = Run(level, optimizer, starts=False, storage=storage, **more)
    if name == "own masters":
        run.optimizer = FusedAdam(run.model.parameters(), capturable=True, master_weights=True)
        run.optimizers = [run.optimizer]
    book = "host_storage" if storage is HOST else BOOK
    with refused(book, name, run.model, run.optimizer, level=repr(level), **words):
        run.initialize()


@levels
def test_moments_that_would_be_rounded_are_refused_before_anything(level: str) -> None:
    run = Run(level, "FusedAdam", starts=False, storage=preamp.Storage(moments="bfloat16"))
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    run.optimizer.step()
    run.optimizer.zero_grad()
    vars(run.optimizer).pop("_kept_lists")  # what it knows of its lists, found anew at any time
    words = {"source": "float32", "target": "bfloat16"}
    with refused("optim", "moments of another storage", run.model, run.optimizer, **words):
        run.initialize()


@pytest.mark.parametrize(
    ("level", "storage", "book", "name"),
    [
        *((level, "split", BOOK, "masters of LARC") for level in MASTERS),
        ("O5", HOST, "host_storage", "LARC later"),
    ],
)
def test_larc_around_it_later_is_refused(level: str, storage: Any, book: str, name: str) -> None:
    run = start(level, storage, "FusedSGD").play("backward")
    with refused(book, name, run.model, run.optimizer):
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
    run.model.last.weight.data[0, 0] = 65520.0
    with refused(BOOK, "beyond float16", run.model, run.optimizer):
        run.initialize()
    # One that float16 rounds to 65504, and infinity, which it has
    run.model.last.weight.data[0, :2] = torch.tensor([65519.0, torch.inf])
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
    assert run.optimizer.storage == preamp.Storage(masters="split")


def test_codes_are_refused_by_optimizers_that_would_take_them_for_values() -> None:
    model = nn.Linear(64, 128)
    optimizer = FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
    preamp.initialize(model, optimizer, opt_level="O5", storage="compact", verbosity=0)
    scaled_backward(model(torch.ones(2, 64)).square().mean(), optimizer)
    optimizer.step()
    state = optimizer.state_dict()
    assert state["state"][0]["momentum_buffer"].dtype is torch.int8
    preamp.engine_of(model).close()

    other = nn.Linear(64, 128)
    sgd = begin("O5", other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    assert_refused(BOOK, "codes for another", lambda: sgd.load_state_dict(state), other, sgd)
    wide = FusedSGD(nn.Linear(64, 128).parameters(), lr=0.1, momentum=0.9)
    wide.load_state_dict(state)
    sgd.load_state_dict(wide.state_dict())
    assert same(list(sgd.state.values()), list(wide.state.values()))
    preamp.engine_of(other).close()
    assert not sgd._optimizer_load_state_dict_pre_hooks  # pyright: ignore


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("an unknown place", {"place": "cpu"}),
        ("misspelt masters", {"masters": "Split"}),
        ("masters of None", {"masters": None}),
        ("moments of a number", {"moments": 8}),
        ("unknown moments", {"moments": "int4"}),
        ("a seed in words", {"seed": "0"}),
        ("a seed out of range", {"seed": -1}),
        ("a seed out of range", {"seed": 2**32}),
    ],
)
def test_wrong_storages(name: str, given: dict[str, Any]) -> None:
    with refused("host_storage" if "place" in given else BOOK, name, **given):
        preamp.Storage(**given)


def test_one_line_says_that_nothing_was_moved(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run("O5", "FusedAdam", storage=HOST, verbosity=1)
    said = 'place="host" moved nothing, all is on the CPU'
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if said in line] == [printed.rstrip("\n")]
    text = run.engine.explain()
    assert f"storage: {said}" in text
    assert "no synchronisation" in text


def test_what_ranks_share_out_is_taken() -> None:
    """By one rank; more are in ``tests/distributed`` and ``tests/devices``."""
    with one_rank():
        run = Run("O5", "FusedAdam", lambda: fully_shard(nn.Linear(4, 4)), storage=HOST)
        assert run.engine.policy.storage == HOST


@pytest.mark.parametrize("named", [False, True])
def test_released_gradients_are_not_shared_out(named: bool) -> None:
    storage = preamp.Storage(place="host", release_gradients=True)
    words = {"beside": "process_groups" if named else "a process group"}
    with one_rank():
        more: dict[str, Any] = {"process_groups": [dist.group.WORLD]} if named else {}
        run = Run("O5", "FusedAdam", starts=False, storage=storage, **more)
        act, things = run.initialize, (run.model, run.optimizer)
        assert_refused("host_storage", "released gradients on ranks", act, *things, **words)
