# SPDX-License-Identifier: BSD-3-Clause
"""What `preamp.estimate` and `preamp.plan` return."""

from preamp.planning.forecast import TensorForecast as TensorForecast
from preamp.planning.memory import MemoryEstimate as MemoryEstimate
from preamp.planning.planner import PURE_BFLOAT16 as PURE_BFLOAT16
from preamp.planning.report import LevelPlan as LevelPlan
from preamp.planning.report import PlanProblem as PlanProblem
from preamp.planning.report import PlanReport as PlanReport
from preamp.planning.verify import Verification as Verification
from preamp.watch.inventory import CATEGORIES as CATEGORIES
