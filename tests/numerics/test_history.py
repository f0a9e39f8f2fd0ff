# SPDX-License-Identifier: BSD-3-Clause
"""A history keeps a bounded number of records, writes all of them, and gets over damage.

And its writer for TensorBoard, read back from the files that TensorBoard itself would read.
"""

import gc
import json
import math
import os
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases.records import look, overflow, step, tensor
from kit.refusals import assert_approved, refused
from preamp.core.errors import with_article
from preamp.numerics import (
    History,
    NumericsRecord,
    OverflowRecord,
    Record,
    ResumeRecord,
    StepRecord,
    TensorBoardWriter,
    from_json,
    read_history,
    to_json,
)


def steps_of(kept: History) -> list[int]:
    return [record.step for record in kept.of(StepRecord)]


def written(path: Path, *records: Record) -> History:
    """A history that has written these to its file."""
    kept = History(path)
    for record in records:
        kept.add(record)
    kept.close()
    return kept


def open_files() -> set[str]:
    return {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.exists()}


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")


# -- in memory -------------------------------------------------------------------------------


@pytest.mark.parametrize(("histogram", "lasting"), [(False, 5), (True, 1)])
def test_statistics_are_bounded_by_their_size(histogram: bool, lasting: int) -> None:
    kept = History(kept=100)
    one = tensor(histogram={0: 1} if histogram else None)
    for number in range(1, 20):
        kept.add(look(number, *[one] * 10))
    assert [record.step for record in kept.of(NumericsRecord)] == list(range(20 - lasting, 20))
    kept.add(look(20, *[tensor()] * 1000))  # the latest stays, however large
    assert len(kept.of(NumericsRecord)) == 1
    kept.add(ResumeRecord(step=19))
    kept.add(look(20, *[tensor()] * 50))
    assert [len(record.tensors) for record in kept.of(NumericsRecord)] == [50]


STEPS = [step(number) for number in range(1, 6)]
OTHERS = [step(number, optimizer=1) for number in range(1, 6)]
KEPT: dict[str, tuple[int, list[Record], list[Record]]] = {  # how many, what is added, and kept
    "all": (9, [step(1), overflow(2), step(2)], [step(1), step(2), overflow(2)]),
    "the latest": (2, [*STEPS, overflow(1)], [step(4), step(5), overflow(1)]),
    "what a resumed run goes on from": (
        99,
        [*STEPS, overflow(4), ResumeRecord(step=3), step(4)],
        STEPS[:4],
    ),
    "each optimizer at its own step": (
        99,
        [*STEPS, *OTHERS, ResumeRecord(step=4, steps=[4, 2])],
        [*STEPS[:4], *OTHERS[:2]],
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    count, records, wanted = KEPT[name]
    kept = History(kept=count)
    kept.close()  # of one in memory that is no end
    for record in records:
        kept.add(record)
    assert [*kept.of(StepRecord), *kept.of(OverflowRecord)] == wanted
    assert kept.of(NumericsRecord) == []
    assert len(kept) == len(list(kept)) >= len(wanted)


def test_listeners() -> None:
    kept, heard = History(), list[Record]()
    kept.add(step(1))
    end = kept.listen(heard.append)
    kept.listen(lambda record: end() if heard else None)  # one may leave while all are told
    kept.add(step(2))
    kept.add(step(3))
    end()
    assert heard == [step(2)]


# -- on disk ---------------------------------------------------------------------------------


@given(st.integers(0, 400))
def test_a_file_cut_anywhere_can_be_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, length: int
) -> None:
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    written(path, step(1), step(2), step(3))
    content = path.read_bytes()[:length]
    path.write_bytes(content)
    whole = content.count(b"\n")
    assert read_history(path) == [step(number) for number in range(1, whole + 1)]
    assert path.read_bytes() == content  # reading changes nothing
    written(path, step(whole + 1))
    assert read_history(path) == [step(number) for number in range(1, whole + 2)]


STEP = to_json(StepRecord(step=3, losses={0: math.inf}, scales={0: 2.0}, skipped=True))
COMPLAINTS: dict[str, dict[str, Any]] = {
    "could not convert string to float: 'much'": {"losses": {"0": "much"}},
    "invalid literal for int": {"losses": {"first": 1.0}},
    "'list' object has no attribute": {"losses": [1.0]},
    "it has no kind": {"kind": 7},
    "missing 2 required keyword-only arguments: 'loss_id' and 'tensors'": {"kind": "numerics"},
    "'int' object has no attribute": {"kind": "numerics", "loss_id": 0, "tensors": [3]},
}
DAMAGED = dict.fromkeys((b"hello", b"[1]", b'{"kind": "step", "step": 1}', b"\xff\xfe", b"3"), "")
DAMAGED |= {json.dumps(STEP | changes).encode(): why for why, changes in COMPLAINTS.items()}
DAMAGED[b"[" * 9999] = ""


@pytest.mark.parametrize(("damaged", "why"), DAMAGED.items(), ids=range(len(DAMAGED)))
def test_a_damaged_line_is_refused_and_the_file_left_alone(
    damaged: bytes, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    written(path, step(1))
    content = path.read_bytes() + damaged + b"\n" + path.read_bytes() + b"half a li"
    path.write_bytes(content)
    words = {"path": path, "line": 2, "why": f"[…]{why}[…]" if why else "[…]"}
    for read in (read_history, History):
        with refused("numerics", "a line that is no record", **words):
            read(path)
    assert path.read_bytes() == content


def test_other_kinds_and_empty_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "of a newer version"}\n\n', encoding="utf-8")
    written(path, step(1))
    assert read_history(path) == [step(1)]


def test_a_line_that_cannot_be_written_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = History(tmp_path / "run.jsonl")
    kept.add(step(1))
    write = os.write

    def full_disk(file: int, content: bytes) -> int:
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return write(file, content[: len(content) - 10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="No space left"):
            kept.add(step(2))
    assert steps_of(kept) == [1]
    assert read_history(tmp_path / "run.jsonl") == [step(1)]
    kept.add(step(2))
    kept.close()
    assert read_history(tmp_path / "run.jsonl") == [step(1), step(2)]


def test_two_histories_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = History(path)
    first.add(step(1))
    (tmp_path / "link.jsonl").symlink_to(path)
    for other in (path, tmp_path / "." / "run.jsonl", tmp_path / "link.jsonl"):
        with refused("numerics", "a file of another history", path=other):
            History(other).add(step(1))
    first.close()
    second = History(str(path))
    second.add(step(2))
    assert steps_of(second) == [1, 2]
    second.close()


def test_a_history_that_is_not_used_makes_no_file(tmp_path: Path) -> None:
    kept = History(tmp_path / "deep" / "run.jsonl")
    kept.close()
    assert list(tmp_path.iterdir()) == []
    with refused("numerics", "a record after the end", path=tmp_path / "deep" / "run.jsonl"):
        kept.add(step(1))
    assert steps_of(written(tmp_path / "run.jsonl", step(1))) == [1]


def test_a_file_that_is_removed_meanwhile_is_not_written_to_in_vain(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    kept = History(path)
    kept.add(step(1))
    path.rename(tmp_path / "moved.jsonl")
    kept.add(step(2))
    (tmp_path / "moved.jsonl").unlink()
    with refused("numerics", "a file that was removed", path=path):
        kept.add(step(3))
    assert steps_of(kept) == [1, 2]
    other = History(path)  # somebody else's is left alone
    kept.close()
    other.add(step(1))
    other.close()
    assert read_history(path) == [step(1)]


def test_closing_goes_on_where_a_listener_fails_and_is_done_once(tmp_path: Path) -> None:
    kept, closed = History(tmp_path / "run.jsonl"), list[int]()

    class Listener:
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, record: Record) -> None: ...

        def close(self) -> None:
            closed.append(self.number)
            raise RuntimeError(f"listener {self.number}")

    for number in range(2):
        kept.listen(Listener(number))
    with pytest.raises(RuntimeError, match="listener 0"):
        kept.close()
    kept.close()
    assert closed == [0, 1]
    History(tmp_path / "run.jsonl").close()


@needs_proc
def test_no_handle_stays_open(tmp_path: Path) -> None:
    before = open_files()
    kept = History(tmp_path / "run.jsonl")
    kept.add(step(1))
    assert str(tmp_path / "run.jsonl") in open_files()
    kept.close()
    assert open_files() == before
    (tmp_path / "bad.jsonl").write_text("bad\n")
    bad = tmp_path / "bad.jsonl"
    with refused("numerics", "a line that is no record", path=bad, line=1, why="[…]"):
        History(bad)
    assert open_files() == before
    dropped = History(tmp_path / "run.jsonl")
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None
    assert open_files() == before


# -- the way through JSON ---------------------------------------------------------------------


KINDS: tuple[type[Any], ...] = get_args(Record)
records = st.one_of(*(st.from_type(kind) for kind in KINDS))


def same(a: Record, b: Record) -> bool:
    """Equal, nan being itself, and of the same types."""
    return type(a) is type(b) and repr(a) == repr(b)


@given(records)
def test_records_come_back_and_unknown_fields_and_kinds_are_ignored(record: Record) -> None:
    line = json.dumps(to_json(record), allow_nan=False)
    assert "\n" not in line
    line.encode("utf-8")
    newer = {**to_json(record), "of a newer version": [1]}
    for known in (json.loads(line, parse_constant=pytest.fail), newer):
        again = from_json(known)
        assert again is not None
        assert same(record, again)
    assert from_json({**newer, "kind": "of a newer version"}) is None


def test_optional_fields_may_be_missing() -> None:
    line = {key: STEP[key] for key in ("kind", "step", "losses", "scales", "skipped")}
    assert from_json(line) == StepRecord(
        step=3, losses={0: math.inf}, scales={0: 2.0}, skipped=True
    )


# -- TensorBoard -----------------------------------------------------------------------------------


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of protobuf, about itself
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter


def told(number: int, **changes: Any) -> StepRecord:
    return step(number, **{"losses": {0: 0.5}, "scales": {0: 1024.0}, **changes})


def counted(loss_id: int = 0, optimizer: int = 0, *tensors: dict[str, Any]) -> NumericsRecord:
    few = {"elements": 8, "zeros": 2, "below_subnormal": 1, "below_normal": 4}
    made = [tensor("net.w", **{**few, **changes}) for changes in tensors]
    return NumericsRecord(step=3, loss_id=loss_id, tensors=made, optimizer=optimizer)


BOTH = {0: 1.0, 1: 2.0}
EMPTY = {"elements": 0, "zeros": 0, "below_subnormal": 0, "below_normal": 0, "headroom": None}
WRITTEN: dict[str, list[Record]] = {
    "steps": [told(1, norm=2.5, lr=0.25), told(2, skipped=True, losses={0: 0.25}, lr=0.125)],
    "what is not finite": [told(1, losses={0: math.nan}, norm=math.inf)],
    "more losses": [told(1, losses=BOTH, scales=BOTH), told(1, optimizer=1)],
    "gradients": [counted(0, 0, {})],
    "weights": [counted(0, 0, {"what": "weight", "stalled": 6, "headroom": None})],
    "a second loss and an empty tensor": [counted(1, 2, EMPTY, {"what": "weight"})],
    "exponents": [counted(0, 0, {"histogram": {-4: 3, -2: 5}})],
    "an overflow": [overflow(7, "net.w", parameters=["net.w", "net.b"])],
}


def read(folder: Path) -> str:
    """All that TensorBoard would read, each at its step."""
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    tags: Any = events.Tags()
    found = [
        f"{tag} " + ", ".join(f"{e.value:g} at {e.step}" for e in events.Scalars(tag))
        for tag in tags["scalars"]
    ]
    for tag in tags["histograms"]:
        (event,) = events.Histograms(tag)
        value = event.histogram_value
        bars = dict(zip(value.bucket_limit, value.bucket, strict=True))
        sums = (value.min, value.max, value.num, value.sum, value.sum_squares)
        found.append(f"{tag} {sums} {bars} at {event.step}")
    for tag in tags["tensors"]:
        (text,) = events.Tensors(tag)
        found.append(f"{tag} {text.tensor_proto.string_val[0].decode()} at {text.step}")
    return "; ".join(sorted(found))


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written(name: str, tmp_path: Path) -> None:
    history = History()
    history.listen(TensorBoardWriter(tmp_path))
    for record in WRITTEN[name]:
        history.add(record)
    history.close()
    assert_approved("tensorboard", name, read(tmp_path))


def test_a_writer_of_the_caller_stays_open(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        history = History()
        history.listen(TensorBoardWriter(writer))
        history.add(told(1))
        history.close()
        writer.add_scalar("own", 1.0, 1)
    assert "loss 0.5 at 1; " in read(tmp_path)
    assert "; own 1 at 1; " in read(tmp_path)


@pytest.mark.parametrize("target", [3, None, object()])
def test_other_targets_are_refused(target: Any) -> None:
    kind = with_article(type(target).__name__)
    with refused("numerics", "a TensorBoardWriter elsewhere", kind=kind):
        TensorBoardWriter(target)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with refused("numerics", "TensorBoard that is missing"):
        TensorBoardWriter(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
