# SPDX-License-Identifier: BSD-3-Clause
"""Importing preamp loads preamp, nothing else, and changes nothing in torch."""

import json
import subprocess
import sys

FORKS = """
import os, sys
import torch
for text in sys.argv[1:]:
    sys.stdout.flush()
    if os.fork() == 0:
        exec(text)
        sys.exit()
    assert os.wait()[1] == 0, text
"""

LOOK = """
import json
before = set(sys.modules)
environment = dict(os.environ)
names = {owner: {k: id(v) for k, v in vars(owner).items()}
         for owner in (torch, torch.Tensor, torch.nn.functional, torch.nn.Module)}
autocast = torch.is_autocast_enabled("cpu")
import %s
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps({
    "foreign": sorted(new - {"preamp"} - set(sys.stdlib_module_names)),
    "changed": [owner.__name__ for owner, old in names.items()
                if {k: id(v) for k, v in vars(owner).items() if k in old} != old],
    "autocast": torch.is_autocast_enabled("cpu") != autocast,
    "environment": dict(os.environ) != environment,
}))
"""

LIGHT = {"foreign": [], "changed": [], "autocast": False, "environment": False}
FACADES = "fp16_utils optimizers multi_tensor_apply normalization parallel"

APEX_NAMES = """
import preamp
assert "preamp.compat.frontend" not in sys.modules and not hasattr(preamp, "nothing")
amp = preamp.amp
from preamp import amp as again
assert again is amp is sys.modules["preamp.amp"] is vars(preamp)["amp"]
try:
    preamp.nothing
except AttributeError as error:
    assert error.name == "nothing" and "'preamp' has no attribute 'nothing'" in str(error)
"""

PUBLIC = """
import preamp
shown = {name for name in dir(preamp) if not name.startswith("__")}
modules = {"amp", "checkpoint", "fp16_utils", "integrations", "multi_tensor_apply",
           "memory", "normalization", "numerics", "optimizers", "parallel", "report"}
assert shown == {*preamp.__all__, *modules} - {"__version__"}, shown
assert not any("preamp." + name in sys.modules for name in modules)
assert not any("preamp.watch." + name in sys.modules for name in ("trace", "recorder"))
for package in (preamp, preamp.checkpoint, preamp.memory):
    names = [name for name in dir(package) if not name.startswith("__")]
    assert {*package.__all__} - {"__version__"} <= {*names}
    assert all(getattr(package, name) is not None for name in names)
assert preamp.optimizers.FusedAdam and preamp.parallel.LARC.LARC
assert preamp.normalization.fused_layer_norm.FusedLayerNorm
assert "__doc__" in dir(preamp) and "TYPE_CHECKING" not in dir(preamp.checkpoint)
"""

LATE = """
import preamp.checkpoint
assert "preamp.checkpoint.saving" not in sys.modules
assert not hasattr(preamp.checkpoint, "nothing")
assert "read_checkpoint" not in vars(preamp.checkpoint)
from preamp.checkpoint import *
assert read_checkpoint is sys.modules["preamp.checkpoint.saving"].read_checkpoint
assert vars(preamp.checkpoint)["read_checkpoint"] is read_checkpoint
assert all(name in globals() for name in preamp.checkpoint.__all__)
"""


def run_each(*texts: str) -> list[dict[str, object]]:
    """Run programs in forks of one process that has imported torch; what they print."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *texts], capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_import_is_light_and_the_rest_loads_when_it_is_asked_for() -> None:
    facades = ", ".join(f"preamp.{name}" for name in FACADES.split())
    looks = [LOOK % "preamp, preamp.amp", LOOK % facades]
    looks.append(LOOK % "preamp; preamp.install_apex_alias(); import apex")
    told = {**LIGHT, "foreign": ["apex"], "environment": True}  # for processes that it starts
    programs = (APEX_NAMES, PUBLIC, LATE)
    assert run_each(*looks, *programs) == [LIGHT, LIGHT, told]
