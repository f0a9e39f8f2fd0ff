# SPDX-License-Identifier: BSD-3-Clause
"""Before training: what a level will take, and which one to take."""

from preamp.planning.count import CATEGORIES as CATEGORIES
from preamp.planning.count import count_memory as count_memory
from preamp.planning.forecast import TensorForecast as TensorForecast
from preamp.planning.memory import MemoryEstimate as MemoryEstimate
from preamp.planning.memory import estimate as estimate
from preamp.planning.plan import PURE_BFLOAT16 as PURE_BFLOAT16
from preamp.planning.plan import plan as plan
from preamp.planning.report import LevelPlan as LevelPlan
from preamp.planning.report import PlanProblem as PlanProblem
from preamp.planning.report import PlanReport as PlanReport
from preamp.planning.verify import Verification as Verification
