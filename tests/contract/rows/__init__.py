# SPDX-License-Identifier: BSD-3-Clause
"""The contract with NVIDIA Apex: what works, differs or is refused, and the tests that show it."""

from contract.rows import (
    bugs,
    casts,
    forms,
    half_by_hand,
    idioms,
    initialize,
    levels,
    multi_tensor,
    names,
    optimizers,
    parallel,
    scale_loss,
    state,
)
from contract.rows.row import Row

SECTIONS: dict[str, str] = {
    "0": "What can be imported; how it behaves is told below",
    "1.1": "`amp.initialize`: the call",
    "1.2": "`amp.initialize`: what goes in and comes out",
    "1.4": "`amp.initialize`: what the levels set",
    "1.5": "`amp.initialize`: overrides",
    "1.7": "`amp.initialize`: models and their state",
    "1.8": "`amp.initialize`: arguments and results of `forward`",
    "2.1": "`amp.scale_loss`: the block",
    "2.2": "`amp.scale_loss`: by level",
    "2.6": "Optimizers after `initialize`",
    "2.7": "Accumulation, several losses",
    "3": "`amp.state_dict` and the loss scaler",
    "4.1": "Function casts, `amp.init` and the handle",
    "4.2": "Function casts: Apex's lists",
    "5.1": "`apex.fp16_utils`: functions",
    "5.2": "`apex.fp16_utils`: scalers",
    "5.3": "`apex.fp16_utils.FP16_Optimizer`",
    "6": "The flat `FP16_Optimizer` of early 2019",
    "7": "`apex.optimizers`: the optimizers",
    "7.0": "`apex.optimizers`: what they share",
    "8": "`multi_tensor_apply`, `amp_C`, `apex_C`",
    "9.1": "`apex.parallel`: data parallelism",
    "9.3": "`apex.parallel`: SyncBatchNorm",
    "9.4": "`apex.parallel.LARC`",
    "9.5": "`apex.parallel.multiproc`",
    "9.6": "`apex.normalization`",
    "9.7": "Other modules",
    "10": "Known bugs of Apex",
    "A": "Idioms",
    "forms": "How people's scripts use it, form by form",
}
"""Section → heading, in the order of the page."""

ROWS: tuple[Row, ...] = (
    *names.ROWS,
    *initialize.ROWS,
    *levels.ROWS,
    *scale_loss.ROWS,
    *state.ROWS,
    *casts.ROWS,
    *half_by_hand.ROWS,
    *optimizers.ROWS,
    *multi_tensor.ROWS,
    *parallel.ROWS,
    *bugs.ROWS,
    *idioms.ROWS,
    *forms.ROWS,
)
