# SPDX-License-Identifier: BSD-3-Clause
"""Records as curves and histograms in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, cast

from preamp.core.errors import bad_type, unavailable, with_article
from preamp.core.extras import how_to_install
from preamp.numerics.records import (
    NumericsRecord,
    OverflowRecord,
    Record,
    StepRecord,
    TensorStatistics,
)


class TensorBoardWriter:
    """A listener of a `History` that writes what it hears with a ``SummaryWriter``.

    ``engine.history.listen(TensorBoardWriter("runs/1"))`` is all it takes. The page on records
    lists the tags.
    """

    def __init__(self, target: str | os.PathLike[str] | Any) -> None:
        """Open a writer, or take one that is there.

        Args:
            target: A folder for event files, or a ``torch.utils.tensorboard.SummaryWriter``, which
                stays the caller's to close.

        Raises:
            PreampUnavailableError: The package tensorboard is not installed.
            TypeError: ``target`` is neither.
        """
        self._writer: Any = target
        self._owns_writer = isinstance(target, (str, os.PathLike))
        if self._owns_writer:
            self._writer = _summary_writer(os.fspath(cast("str", target)))
        elif not all(hasattr(target, name) for name in ("add_scalar", "add_histogram_raw")):
            raise bad_type(
                f"TensorBoardWriter was given {with_article(type(target).__name__)}",
                "Allowed are the path of a folder and a torch.utils.tensorboard.SummaryWriter",
                "Pass for example TensorBoardWriter('runs/1')",
            )

    def __call__(self, record: Record) -> None:
        """Write ``record``."""
        if isinstance(record, StepRecord):
            self._write_step(record)
        elif isinstance(record, NumericsRecord):
            for tensor in record.tensors:
                self._write_tensor(tensor, record)
        elif isinstance(record, OverflowRecord):
            first = record.parameters[0] if record.parameters else "no gradient"
            self._writer.add_text(_tag("overflow", record.optimizer), first, record.step)

    def close(self) -> None:
        """Write what is left; close the writer if it was opened here."""
        if self._owns_writer:
            self._writer.close()
        else:
            self._writer.flush()

    def _write_step(self, record: StepRecord) -> None:
        values: dict[str, float | None] = {
            **_by_loss("loss", record.losses),
            **_by_loss("loss_scale", record.scales),
            "skipped": float(record.skipped),
            "gradient_norm": record.norm,
            "learning_rate": record.lr,
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(_tag(name, record.optimizer), value, record.step)

    def _write_tensor(self, tensor: TensorStatistics, record: NumericsRecord) -> None:
        name = tensor.name
        if tensor.what != "gradient":
            name = f"{name}.{tensor.what}"
        # Weights are no loss's, though they come in the record of one.
        if record.loss_id and tensor.what == "gradient":
            name = f"loss{record.loss_id}.{name}"
        counts = {
            "zeros": tensor.zeros,
            "below_subnormal": tensor.below_subnormal,
            "below_normal": tensor.below_normal,
            "stalled": tensor.stalled,
        }
        values = {
            tag: count / max(1, tensor.elements)
            for tag, count in counts.items()
            if count is not None
        }
        if tensor.headroom is not None:
            values["headroom"] = tensor.headroom
        for tag, value in values.items():
            tag = f"{_tag(tag, record.optimizer)}/{name}"
            self._writer.add_scalar(tag, value, record.step)
        if tensor.histogram:
            self._write_exponents(
                f"{_tag('exponents', record.optimizer)}/{name}", tensor.histogram, record.step
            )

    def _write_exponents(self, tag: str, histogram: Mapping[int, int], step: int) -> None:
        exponents = range(min(histogram), max(histogram) + 1)
        counts = [histogram.get(exponent, 0) for exponent in exponents]
        pairs = list(zip(exponents, counts, strict=True))
        self._writer.add_histogram_raw(
            tag,
            min=exponents[0],
            max=exponents[-1],
            num=sum(counts),
            sum=sum(exponent * count for exponent, count in pairs),
            sum_squares=sum(exponent**2 * count for exponent, count in pairs),
            bucket_limits=[exponent + 0.5 for exponent in exponents],
            bucket_counts=counts,
            global_step=step,
        )


def _tag(name: str, optimizer: int) -> str:
    return f"{name}/optimizer{optimizer}" if optimizer else name


def _by_loss(name: str, values: Mapping[int, float]) -> dict[str, float | None]:
    return {f"{name}/{loss_id}" if loss_id else name: value for loss_id, value in values.items()}


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise unavailable(
            f"TensorBoardWriter cannot write, since tensorboard is missing ({error})",
            "It needs the package tensorboard",
            how_to_install("tensorboard"),
        ) from error
    return SummaryWriter(folder)
