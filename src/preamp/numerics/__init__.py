# SPDX-License-Identifier: BSD-3-Clause
"""What happened to the numbers: statistics of tensors, records of a run, and their history.

Nothing here knows an engine. Records are plain values; what makes them is handed tensors.
"""

from preamp.kernels.plain.tally import EXPONENTS as EXPONENTS
from preamp.numerics.formats import FORMATS as FORMATS
from preamp.numerics.formats import NumberFormat as NumberFormat
from preamp.numerics.history import History as History
from preamp.numerics.history import Listener as Listener
from preamp.numerics.history import read_history as read_history
from preamp.numerics.records import CastRecord as CastRecord
from preamp.numerics.records import Float32Record as Float32Record
from preamp.numerics.records import FrameRecord as FrameRecord
from preamp.numerics.records import NumericsRecord as NumericsRecord
from preamp.numerics.records import OverflowRecord as OverflowRecord
from preamp.numerics.records import Record as Record
from preamp.numerics.records import ResumeRecord as ResumeRecord
from preamp.numerics.records import RunRecord as RunRecord
from preamp.numerics.records import StepRecord as StepRecord
from preamp.numerics.records import TensorStatistics as TensorStatistics
from preamp.numerics.records import TraceRecord as TraceRecord
from preamp.numerics.records import from_json as from_json
from preamp.numerics.records import to_json as to_json
from preamp.numerics.statistics import Measured as Measured
from preamp.numerics.statistics import measure as measure
from preamp.numerics.tensorboard import TensorBoardWriter as TensorBoardWriter
