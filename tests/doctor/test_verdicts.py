# SPDX-License-Identifier: BSD-3-Clause
"""Pairs of scripts that look alike, of which one has a bug, and right scripts that look wrong."""

import textwrap
from pathlib import Path

import pytest

from doctor.cases import BUGS, BY_HAND, CLIP, FLOAT32, GRAD_SCALER, GRAD_SCALER_O2, START
from doctor.harness import HERE, examine, marked_line, where
from preamp.doctor import Severity

LOOP = """
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
other = nn.Linear(16, 4)
others = torch.optim.SGD(other.parameters(), lr=0.1)
for step in range(4):
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x), y)
        {inside}
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    {unscale}
    scaler.step(optimizer)
    scaler.update()
    {after}
"""


def loop(*, inside: str = "pass", unscale: str = "", after: str = "") -> str:
    return START + LOOP.format(inside=inside, unscale=unscale, after=after)


PLAIN = "others.zero_grad(); F.cross_entropy(other(x), y).backward(); others.step()"
FINITE = """
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if torch.isfinite(norm):
        optimizer.step()
"""
OWN_STEP = """
class Compensated(torch.optim.{kind}):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                rest = state.setdefault("rest", torch.zeros_like(p)) - group["lr"] * p.grad
                new = p + rest
                state["rest"] = rest - (new - p)
                p.copy_(new)
"""
SGD = "torch.optim.SGD(model.parameters(), lr=0.5)"


def own_step(kind: str, healthy: str) -> str:
    start, loop = healthy.split("optimizer = ")
    own = loop.replace(SGD, "Compensated(model.parameters(), lr=1e-5)")
    return f"{start}{OWN_STEP.format(kind=kind)}optimizer = {own}"


BY_HAND = BY_HAND.replace("from torch import nn", "from torch import nn, optim")
ADAGRAD = BY_HAND.replace(SGD, "optim.Adagrad(model.parameters(), initial_accumulator_value=0.1)")

SPARSE = (
    START
    + """
table = nn.Embedding(8, 16, sparse=True)
x, y = torch.arange(8), torch.randint(4, (8,))
model = nn.Sequential(table, model)
params = list(model.parameters())
optimizer = torch.optim.SGD(params, lr=0.1)
"""
)
USUAL = """
for step in range(10):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""

TRACED = START + "\ntorch.jit.trace(nn.Sequential(model[0], model[2]), x)\n"

CHECKPOINTS = (
    START
    + """
import preamp
from torch.utils.checkpoint import checkpoint
blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(9))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = blocks, nn.Linear(16, 4)
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = preamp.initialize(model, optimizer, opt_level="{level}", verbosity=0)
scaler = preamp.GradScaler(optimizer)
for step in range(9):
    loss = F.cross_entropy(model(x).float(), y) / 4
    if step == 8:
        loss = loss * 1e6
    scaler.scale(loss).backward()
    if step % 4 == 3:
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
)
ERRORS = (
    GRAD_SCALER_O2.replace("range(4)", "range(13)")
    .replace("step == 2", "step == 8")
    .replace(
        "    scaler.scale(loss).backward()\n",
        "    try:\n"
        "        scaler.scale(loss if step in (0, 1, 2, 3, 8) else loss.detach()).backward()\n"
        "    except RuntimeError:\n"
        "        continue\n",
    )
)
TRIED = """
for width in range(1, 40):
    try:
        model(torch.randn(8, width))
    except RuntimeError:
        pass
"""

MASK = """
model.mask = nn.Parameter(torch.tensor([0.0, 0.0, 0.0, 0.0]), requires_grad=False)
y = y.clamp(max=2)
model.mask[3] = -torch.inf
optimizer ="""
POISONED = BUGS["averages that a skipped step has destroyed"].text
AROUND_LOOP = BUGS["a region around the loop"].text.replace(HERE, "")
AROUND_STEP = (
    START
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(6):
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(4):
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
"""
)
RIGHT = {
    "a float32 model beside one under float16 autocast": loop(after=PLAIN),
    # It is in the float16 graph of the first, and its own step has a float32 graph.
    "a critic with a float32 step": loop(
        inside="loss = loss + other(x).float().mean()", after=PLAIN
    ).replace("lr=0.1)\nfor", "lr=0.1)\nother.requires_grad_()\nfor"),
    "an optimizer that keeps what is rounded away": own_step("SGD", BY_HAND),
    "an optimizer with a denominator of its own": own_step("Adam", BY_HAND),
    "Adagrad with something accumulated": ADAGRAD,
    "an eps that rounds to the smallest float16": BY_HAND.replace(
        SGD, "optim.Adam(model.parameters(), lr=0.1, eps=5e-8)"
    ),
    "the norm of scaled gradients": loop(
        unscale="nn.utils.clip_grad_norm_(model.parameters(), float('inf'))"
    ),
    "the norm of scaled gradients by name": loop(
        unscale="nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=torch.inf)"
    ),
    "a clipped norm after the norm": loop(
        unscale="nn.utils.clip_grad_norm_(model.parameters(), torch.inf)\n"
        f"    scaler.unscale_(optimizer)\n    {CLIP}"
    ),
    "gradients unscaled through their data": FLOAT32.replace("range(4)", "range(20)").replace(
        "    F.cross_entropy(model(x), y).backward()\n",
        "    with torch.autocast('cpu', torch.float16):\n"
        "        loss = F.cross_entropy(model(x), y)\n"
        "    (loss * 1024.0).backward()\n"
        "    for p in model.parameters():\n        p.grad.data.div_(1024.0)\n",
    ),
    "parameters added late, in a function": FLOAT32.replace(
        "model.parameters()", "model[:3].parameters()"
    )
    .replace("range(4)", "range(7)")
    .replace(
        "    optimizer.zero_grad()\n",
        "    optimizer.zero_grad()\n    if step == 5:\n"
        "        optimizer.add_param_group({'params': list(model[3].parameters())})\n",
    )
    + "del model, optimizer\n",
    "sparse gradients of an embedding": SPARSE + USUAL,
    "sparse gradients read by the script, and not stepped": SPARSE
    + USUAL.replace("optimizer.step()", "norms = [p.grad.norm() for p in params]"),
    "a sparse matrix in the model": FLOAT32.replace(
        "F.cross_entropy(model(x), y)",
        "F.cross_entropy(torch.sparse.mm(torch.eye(8).to_sparse(), model(x)), y)",
    ),
    "traced before and after it is trained": TRACED
    + FLOAT32.partition(START)[2]
    + "model.train()"
    + TRACED.partition(START)[2],
    "sized with fake tensors": FLOAT32
    + "from torch._subclasses import FakeTensorMode\n"
    + "with FakeTensorMode():\n"
    + "    model = nn.Linear(16, 4)\n"
    + "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
    + "    for step in range(10):\n"
    + "        model(torch.randn(8, 16)).mean().backward()\n",
    "counted without memory": FLOAT32 + "model.to('meta')(x.to('meta')).mean().backward()\n",
    "checkpoints recomputed after the last step": CHECKPOINTS.format(level="O0"),
    "checkpoints recomputed for a step that an engine skips": CHECKPOINTS.format(
        level="O2"
    ).replace("3:", "3 or step > 6:"),
    "errors before and after a step that an engine skips": ERRORS,
    "inputs that the model may take are tried": FLOAT32 + TRIED,
    "inputs tried in every step": FLOAT32 + textwrap.indent(TRIED, "    "),
    "a mask that is infinite and never trained": FLOAT32.replace("optimizer =", MASK).replace(
        "model(x)", "model(x) + model.mask"
    ),
    "a minimum that begins infinite": FLOAT32.replace(
        "optimizer =",
        "model[0].register_buffer('running_min', torch.full((16,), torch.inf))\noptimizer =",
    ),
    "a copy, partly frozen, in place of what diverged": "import copy\n"
    + FLOAT32.replace("optimizer =", "model[0].requires_grad_(False)\noptimizer =")
    .replace("Adam(", "SGD(")
    .replace("lr=1e-3)", "lr=1e30)\nbest = copy.deepcopy(model)")
    + "with torch.no_grad():\n    best(x)\n",
    "a region around the loop that keeps no casts": AROUND_LOOP.replace(
        "torch.bfloat16)", "torch.bfloat16, cache_enabled=False)"
    ),
    "a region around each step and its accumulation": AROUND_STEP,
    "a region around each step, and a graph that is never detached": AROUND_STEP.replace(
        "/ 4).backward()", "/ 4 + last).backward(retain_graph=True)"
    )
    .replace("optimizer.step()", "last = last + model(x).sum() / 9\n        optimizer.step()")
    .replace("for step", "model = nn.Sequential(model[0], model[3])\nlast = 0\nfor step"),
    "an evaluation in a region around it": FLOAT32
    + "with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):\n"
    "    [F.cross_entropy(model(x), y).item() for _ in range(4)]\n",
    "averages that are reset": POISONED.replace(HERE, "") + "model[1].reset_running_stats()\n",
    "complex parameters": FLOAT32.replace(
        "F.cross_entropy(model(x), y)", "F.cross_entropy((model(x) * turn).real, y)"
    ).replace(
        "optimizer = torch.optim.Adam(model.parameters(),",
        "turn = nn.Parameter(torch.ones(4, dtype=torch.cfloat))\n"
        "optimizer = torch.optim.Adam([*model.parameters(), turn],",
    ),
}


CAUSES = ("PA1", "PA2", "PA3", "PA4")
"""All rules but those of runs that have come to nothing, which some of these bugs lead to."""


@pytest.mark.parametrize("text", RIGHT.values(), ids=RIGHT)
def test_a_right_script_is_clean(text: str, tmp_path: Path) -> None:
    # At its eps float16's smallest number is enough for PA201, and too little for the weights.
    examination, _ = examine(text, tmp_path, select=CAUSES if "eps=5e-8" in text else ())
    assert examination.findings == []
    assert examination.notes == []


NO_SCALER = loop().replace("scaler.scale(loss)", "loss").replace("scaler.update()", "pass")
DECORATED = (
    FLOAT32.replace("for step", "@torch.autocast('cpu', torch.bfloat16)\ndef train():\n  for step")
    .replace("    ", "      ")
    .replace(".backward()", f".backward()  {HERE}")
)

WRONG = {
    "a region around a function with the loop": ("PA304", f"{DECORATED}train()\n"),
    "a clipped step without a scaler": (
        "PA102",
        NO_SCALER.replace("scaler.step(optimizer)", f"{CLIP}\n    optimizer.step()  {HERE}"),
    ),
    "without a scaler, the other one of two": (
        "PA102",
        loop(
            inside="lost = F.cross_entropy(other(x), y)",
            after=f"others.zero_grad(); lost.backward(); others.step()  {HERE}",
        ),
    ),
    "a scaled step after a norm": (
        "PA103",
        loop(
            unscale="nn.utils.clip_grad_norm_(model.parameters(), torch.inf)\n"
            f"    optimizer.step(); continue  {HERE}"
        ),
    ),
    "clipping after a norm": (
        "PA101",
        loop(
            unscale=f"nn.utils.clip_grad_norm_(model.parameters(), torch.inf)\n    {CLIP}  {HERE}"
        ),
    ),
    "Adagrad with nothing accumulated": (
        "PA201",
        ADAGRAD.replace("value=0.1", "value=1e-9").replace(
            "    optimizer.step()\n", f"    optimizer.step()  {HERE}\n"
        ),
    ),
    "a missing layer of a model that is gone": (
        "PA401",
        BUGS["a missing layer"].text + "del model, optimizer\n",
    ),
    "a stalled model that is gone": (
        "PA202",
        BUGS["a small learning rate"].text + "del model, optimizer, p\n",
    ),
}


@pytest.mark.parametrize(("rule", "text"), WRONG.values(), ids=WRONG)
def test_its_wrong_twin_is_not(rule: str, text: str, tmp_path: Path) -> None:
    examination, _ = examine(text, tmp_path, select=CAUSES)
    assert [finding.rule.id for finding in examination.findings] == [rule]
    assert where(examination.findings[0]) == ("script.py", marked_line(text))


@pytest.mark.parametrize(("scale", "severity"), [(1.0, Severity.INFO), (1e38, Severity.ERROR)])
def test_a_step_after_unscale(scale: float, severity: Severity, tmp_path: Path) -> None:
    """Whether a script looks for overflow itself shows only when there is one."""
    text = loop(unscale="scaler.unscale_(optimizer)").replace(
        "scaler.step(", "torch.optim.SGD.step("
    )
    text = text.replace("init_scale=1024.0", f"init_scale={scale}")
    [finding] = examine(text, tmp_path, select=CAUSES)[0].findings
    assert (finding.rule.id, finding.severity) == ("PA103", severity)
    assert finding.numbers["steps"] == 4
    looks = text.replace("torch.optim.SGD.step(optimizer)", FINITE.strip())
    found = examine(looks, tmp_path)[0].findings
    assert [one.severity for one in found] == ([Severity.INFO] if scale == 1.0 else [])


def test_a_replaced_model_that_a_scaler_refuses_to_train(tmp_path: Path) -> None:
    text = GRAD_SCALER.replace("for step", "import copy\nmodel = copy.deepcopy(model)\nfor step")
    text = text.replace("    nn.utils.clip_grad", "    pass  # nn.utils.clip_grad").replace(
        "    scaler.step(optimizer)\n",
        "    try:\n        scaler.step(optimizer)\n    except AssertionError:\n        break\n",
    )
    examination, _ = examine(text, tmp_path)
    assert [finding.rule.id for finding in examination.findings] == ["PA402"]
    assert examination.seen.steps == 0


@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step")
def test_compiled_steps_are_not_taken_for_skipped(tmp_path: Path) -> None:
    text = loop(after="scheduler.step()").replace(
        "for step",
        "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)\n"
        "torch.compile(nn.Identity(), backend='eager')\n"
        "optimizer.step = lambda: None  # no hook of the doctor runs in a compiled one\nfor step",
    )
    examination, _ = examine(text, tmp_path)
    assert examination.findings == []
    assert examination.seen.steps == 4


def test_a_step_that_raised_is_no_end_of_the_looking(tmp_path: Path) -> None:
    text = FLOAT32.replace(
        "    optimizer.step()\n",
        "    try:\n        optimizer.step(lambda: 1 / 0 if step == 1 else 0)\n"
        "    except ZeroDivisionError:\n        pass\n",
    )
    examination, _ = examine(text, tmp_path)
    assert examination.seen.steps == 3
    assert examination.findings == []
