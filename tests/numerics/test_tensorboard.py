# SPDX-License-Identifier: BSD-3-Clause
"""The TensorBoard writer, read back from the event files that TensorBoard itself would read."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from kit.refusals import refused
from preamp.core.errors import with_article
from preamp.numerics import (
    History,
    NumericsRecord,
    OverflowRecord,
    Record,
    StepRecord,
    TensorBoardWriter,
    TensorStatistics,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of protobuf, about itself
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter


def step(number: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {"losses": {0: 0.5}, "scales": {0: 1024.0}, "skipped": False}
    return StepRecord(step=number, **{**values, **changes})


def tensor(**changes: Any) -> TensorStatistics:
    counts = {"zeros": 2, "nonfinite": 0, "below_subnormal": 1, "below_normal": 4}
    unscaled = {"unscaled_below_subnormal": 5, "unscaled_below_normal": 6}
    values: dict[str, Any] = {
        **{"name": "net.w", "what": "gradient", "dtype": "float32", "form": "float16"},
        **{"elements": 8, "max_abs": 1.0, "rms": 0.5, "headroom": 16.0, **counts, **unscaled},
    }
    return TensorStatistics(**{**values, **changes})


def written(folder: Path, *records: Record) -> EventAccumulator:
    history = History()
    history.listen(TensorBoardWriter(folder))
    for record in records:
        history.add(record)
    history.close()
    return read(folder)


def read(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_steps(tmp_path: Path) -> None:
    events = written(
        tmp_path, step(1, norm=2.5, lr=0.25), step(2, skipped=True, losses={0: 0.25}, lr=0.125)
    )
    assert scalars(events, "loss") == [(1, 0.5), (2, 0.25)]
    assert scalars(events, "loss_scale") == [(1, 1024.0), (2, 1024.0)]
    assert scalars(events, "skipped") == [(1, 0.0), (2, 1.0)]
    assert scalars(events, "gradient_norm") == [(1, 2.5)]
    assert scalars(events, "learning_rate") == [(1, 0.25), (2, 0.125)]


def test_what_is_not_finite_is_written_as_it_is(tmp_path: Path) -> None:
    events = written(tmp_path, step(1, losses={0: math.nan}, norm=math.inf))
    assert math.isnan(scalars(events, "loss")[0][1])
    assert scalars(events, "gradient_norm") == [(1, math.inf)]


def test_more_losses_and_optimizers_have_tags_of_their_own(tmp_path: Path) -> None:
    both = {0: 1.0, 1: 2.0}
    events = written(tmp_path, step(1, losses=both, scales=both), step(1, optimizer=1))
    assert scalars(events, "loss") == [(1, 1.0)]
    assert scalars(events, "loss/1") == [(1, 2.0)]
    assert scalars(events, "loss_scale/1") == [(1, 2.0)]
    assert scalars(events, "loss/optimizer1") == [(1, 0.5)]
    assert scalars(events, "skipped/optimizer1") == [(1, 0.0)]


def test_shares_and_headroom_of_each_tensor(tmp_path: Path) -> None:
    weight = tensor(what="weight", stalled=6, headroom=None, elements=8)
    record = NumericsRecord(step=3, loss_id=0, tensors=[tensor(), weight])
    events = written(tmp_path, record)
    assert scalars(events, "headroom/net.w") == [(3, 16.0)]
    assert scalars(events, "zeros/net.w") == [(3, 0.25)]
    assert scalars(events, "below_subnormal/net.w") == [(3, 0.125)]
    assert scalars(events, "below_normal/net.w") == [(3, 0.5)]
    assert scalars(events, "stalled/net.w.weight") == [(3, 0.75)]
    tags = events.Tags()["scalars"]
    assert "stalled/net.w" not in tags
    assert "headroom/net.w.weight" not in tags


def test_a_second_loss_and_an_empty_tensor(tmp_path: Path) -> None:
    empty = tensor(elements=0, zeros=0, below_subnormal=0, below_normal=0, headroom=None)
    record = NumericsRecord(step=3, loss_id=1, tensors=[empty, tensor(what="weight")], optimizer=2)
    events = written(tmp_path, record)
    assert scalars(events, "zeros/optimizer2/loss1.net.w") == [(3, 0.0)]
    assert scalars(events, "zeros/optimizer2/net.w.weight") == [(3, 0.25)]


def test_histograms_are_over_exponents(tmp_path: Path) -> None:
    record = NumericsRecord(step=3, loss_id=0, tensors=[tensor(histogram={-4: 3, -2: 5})])
    (event,) = written(tmp_path, record).Histograms("exponents/net.w")
    value = event.histogram_value
    assert event.step == 3
    assert (value.min, value.max, value.num, value.sum) == (-4, -2, 8, -22)
    assert value.sum_squares == 68
    assert dict(zip(value.bucket_limit, value.bucket, strict=True)) == {-3.5: 3, -2.5: 0, -1.5: 5}


def test_overflows_are_told_in_words(tmp_path: Path) -> None:
    overflow = OverflowRecord(
        step=7,
        loss_id=0,
        parameters=["net.w", "net.b"],
        loss_was_finite=True,
        old_scale=4.0,
        new_scale=2.0,
    )
    events = written(tmp_path, overflow)
    (event,) = events.Tensors("overflow/text_summary")
    assert event.step == 7
    assert event.tensor_proto.string_val == [b"net.w"]


def test_a_writer_of_the_caller_stays_open(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        history = History()
        history.listen(TensorBoardWriter(writer))
        history.add(step(1))
        history.close()
        writer.add_scalar("own", 1.0, 1)
    events = read(tmp_path)
    assert scalars(events, "loss") == [(1, 0.5)]
    assert scalars(events, "own") == [(1, 1.0)]


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
