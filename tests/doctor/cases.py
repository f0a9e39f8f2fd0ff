# SPDX-License-Identifier: BSD-3-Clause
"""Healthy training scripts, and the edits that plant one bug each.

The line to be named is marked; everything else about a script with a bug is as in the healthy one.
"""

import textwrap
from typing import NamedTuple

START = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
x, y = torch.randn(8, 16), torch.randint(4, (8,))
"""

GRAD_SCALER = (
    START
    + """
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for step in range(4):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        output = model(x)
        loss = F.cross_entropy(output, y)
    if step == 2:
        loss = loss * float("inf")
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    if scaler.get_scale() >= before:
        scheduler.step()
"""
)

GRAD_SCALER_O2 = GRAD_SCALER.replace(
    'scaler = torch.amp.GradScaler("cpu", ',
    """import preamp
preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
scaler = preamp.GradScaler(optimizer, """,
).replace(
    """    with torch.autocast("cpu", torch.float16):
        output = model(x)
        loss = F.cross_entropy(output, y)
""",
    """    output = model(x)
    loss = F.cross_entropy(output, y)
""",
)

SCALE_LOSS = (
    "from apex import amp\n"
    + START
    + """
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
model, optimizer = amp.initialize(
    model, optimizer, opt_level="{level}", verbosity=0, loss_scale="dynamic"
)
amp._amp_state.loss_scalers[0]._loss_scale = 1024.0
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
for step in range(4):
    optimizer.zero_grad()
    output = model(x)
    loss = F.cross_entropy(output.float(), y)
    if step == 2:
        loss = loss * float("inf")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    params = amp.master_params(optimizer)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()
    if step != 2:
        scheduler.step()
"""
)

O1 = SCALE_LOSS.replace("{level}", "O1")
O2 = SCALE_LOSS.replace("{level}", "O2")
O3 = SCALE_LOSS.replace("{level}", "O3")

BF16 = (
    START
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

FLOAT32 = (
    START
    + """
model = model.to("cpu")
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(4):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
)

# Half by hand: weights in float16, no masters, gradients scaled by hand.
BY_HAND = (
    START
    + """
model.half()
model[1].float()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(4):
    optimizer.zero_grad()
    hidden = model[1](model[0](x.half()).float())
    loss = F.cross_entropy(model[3](model[2](hidden).half()).float(), y)
    (loss * 128.0).backward()
    for p in model.parameters():
        p.grad.div_(128.0)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
"""
)

# Float32 masters by hand, as in the years before amp.
MASTERS = (
    START
    + """
model = nn.Sequential(model[0], model[2], model[3]).half()
masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=1e-3)
for step in range(4):
    model.zero_grad()
    loss = F.cross_entropy(model(x.half()).float(), y)
    (loss * 128.0).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.float() / 128.0
    nn.utils.clip_grad_norm_(masters, 1.0)
    optimizer.step()
    for master, p in zip(masters, model.parameters()):
        p.data.copy_(master.data)
"""
)

LOOP = BF16[BF16.index("for step") :]
AROUND = 'with torch.autocast("cpu", torch.bfloat16):\n' + textwrap.indent(
    LOOP.replace("    loss.backward()\n", "    loss.backward()  # <-\n"), "    "
)

TWO_LOSSES = GRAD_SCALER.replace(
    "scaler.scale(loss)", "(scaler.scale(loss) + scaler.scale(output.float().square().mean()))"
)

BF16_NO_SCALER = (
    GRAD_SCALER.replace("torch.float16", "torch.bfloat16")
    .replace("init_scale=1024.0", "enabled=False")
    .replace("step == 2", "step > 3")
)

SAVED = (
    GRAD_SCALER
    + """
import io
state = {**optimizer.state_dict(), "preamp": scaler.state_dict()}
torch.save({"state_dict": model.state_dict(), "optimizer": state}, io.BytesIO())
"""
)

AVERAGED = FLOAT32.replace("range(4)", "range(20)").replace(
    "for step", "average = [p.detach().float() for p in model.parameters()]\nfor step"
) + (
    "    for mean, p in zip(average, model.parameters()):\n"
    "        mean.lerp_(p.detach().to(mean.dtype), 1e-3)\n"
)

ACCUMULATED = (
    FLOAT32.replace("range(4)", "range(12)")
    .replace(
        "    optimizer.zero_grad()\n", "    if step % 2 == 0:\n        optimizer.zero_grad()\n"
    )
    .replace("F.cross_entropy(model(x), y).b", "(F.cross_entropy(model(x), y) / 2).b")
    .replace("    optimizer.step()\n", "    if step % 2:\n        optimizer.step()\n")
)

# It diverges in the end, and the best weights are put back.
RESTORED = (
    "import copy\n"
    + FLOAT32.replace("Adam(model.parameters(), lr=1e-3)", "SGD(model.parameters(), lr=0.1)")
    .replace("range(4)", "range(12)")
    .replace(
        "    optimizer.zero_grad()\n",
        """\
    if step == 6:
        best = copy.deepcopy(model.state_dict())
        optimizer.param_groups[0]["lr"] = 1e30
    optimizer.zero_grad()
""",
    )
    + "model.load_state_dict(best)\n"
)

GUARDED = FLOAT32.replace("range(4)", "range(12)").replace(
    "    F.cross_entropy(model(x), y).backward()\n",
    """\
    loss = F.cross_entropy(model(x), y) * (float("nan") if step == 5 else 1.0)
    if not torch.isfinite(loss):
        continue
    loss.backward()
""",
)

HEALTHY = {
    "GradScaler": GRAD_SCALER,
    "preamp.GradScaler": GRAD_SCALER_O2,
    "O1": O1,
    "O2": O2,
    "bfloat16": BF16,
    "float32": FLOAT32,
    "by hand": BY_HAND,
    "masters by hand": MASTERS,
    "no training": "print('hello')",
}


class Bug(NamedTuple):
    """A healthy script with one bug planted, by what is replaced by what."""

    rule: str
    healthy: str
    edits: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        text = self.healthy
        for old, new in self.edits:
            assert old in text, old
            text = text.replace(old, new)
        return text


def bug(rule: str, healthy: str, *edits: tuple[str, str]) -> Bug:
    return Bug(rule, healthy, edits)


CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
UNCLIPPED = (f"    {CLIP}\n", "")
SCALED = ("    scaler.unscale_(optimizer)\n", "")
FINITE = ('    if step == 2:\n        loss = loss * float("inf")\n', "")
STEP = ("    optimizer.step()\n", "    optimizer.step()  # <-\n")
DIRECT = ("    scaler.step(optimizer)\n", "    optimizer.step()  # <-\n")
SCHEDULED = (
    "    if scaler.get_scale() >= before:\n        scheduler.step()\n",
    "    scheduler.step()  # <-\n",
)
LACKING = ("Adam(model.parameters(), lr=1e-3)", "Adam(model[:3].parameters())  # <-")
IN_BLOCK = (
    "        scaled_loss.backward()\n",
    "        scaled_loss.backward()\n"
    "        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)  # <-\n",
)
NO_SCALER = (
    (
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n",
        "    loss.backward()\n",
    ),
    DIRECT,
    ("    before = scaler.get_scale()\n    scaler.update()\n", ""),
    ("    if scaler.get_scale() >= before:\n        scheduler.step()\n", ""),
    FINITE,
    UNCLIPPED,
)
PLAIN_BACKWARD = (
    (
        "    with amp.scale_loss(loss, optimizer) as scaled_loss:\n"
        "        scaled_loss.backward()\n",
        "    loss.backward()\n",
    ),
    FINITE,
    ("    torch.nn.utils.clip_grad_norm_(params, 1.0)\n", ""),
    STEP,
)

BOOK = "doctor"
"""What is found of each is in this book."""

BUGS = {
    "clipping without unscale_": bug("PA101", GRAD_SCALER, SCALED, (CLIP, f"{CLIP}  # <-")),
    "clipping without unscale_, O2": bug("PA101", GRAD_SCALER_O2, SCALED, (CLIP, f"{CLIP}  # <-")),
    "clipping values without unscale_": bug(
        "PA101",
        GRAD_SCALER,
        SCALED,
        (CLIP, "nn.utils.clip_grad_value_(model.parameters(), 1.0)  # <-"),
    ),
    "clipping in the block, O1": bug("PA101", O1, IN_BLOCK),
    "autocast without a scaler": bug("PA102", GRAD_SCALER, *NO_SCALER),
    "backward outside scale_loss, O2": bug("PA102", O2, *PLAIN_BACKWARD),
    "half by hand without a scale": bug(
        "PA102",
        BY_HAND,
        ("    (loss * 128.0).backward()\n", "    loss.backward()\n"),
        ("    for p in model.parameters():\n        p.grad.div_(128.0)\n", ""),
        ("    nn.utils.clip_grad_value_(model.parameters(), 1.0)\n", ""),
        STEP,
    ),
    "a step on scaled gradients": bug(
        "PA103",
        GRAD_SCALER,
        SCALED,
        UNCLIPPED,
        DIRECT,
        ("    before = scaler.get_scale()\n    scaler.update()\n", "    before = 0\n"),
    ),
    "a step past the overflow check": bug("PA103", GRAD_SCALER, DIRECT),
    "a schedule on a skipped step, GradScaler": bug("PA104", GRAD_SCALER, SCHEDULED),
    "a schedule on a skipped step, fused": bug(
        "PA104", GRAD_SCALER.replace("lr=1e-3)", "lr=1e-3, fused=True)"), SCHEDULED
    ),
    "a schedule on a skipped step, O2": bug(
        "PA104",
        O2,
        ("    if step != 2:\n        scheduler.step()\n", "    scheduler.step()  # <-\n"),
    ),
    "eps by hand": bug(
        "PA201",
        BY_HAND,
        ("SGD(model.parameters(), lr=0.5)", "Adam(model.parameters(), lr=0.1)"),
        STEP,
    ),
    "eps at O3": bug(
        "PA201",
        O3.replace('"O3"', '"O3", keep_batchnorm_fp32=True').replace(
            "SGD(model.parameters(), lr=1e-2, momentum=0.9)", "Adam(model.parameters(), eps=1e-4)"
        ),
        ("eps=1e-4", "eps=2**-25"),  # the largest that float16 rounds to zero
        STEP,  # the weights become nan
    ),
    "a small learning rate": bug("PA202", BY_HAND, ("lr=0.5)", "lr=1e-5)  # <-")),
    "batch norm in half by hand": bug(
        "PA301",
        BY_HAND,
        ("model[1].float()\n", ""),
        ("model[1](model[0](x.half()).float())", "model[1](model[0](x.half()))  # <-"),
    ),
    "batch norm in half at O2": bug(
        "PA301",
        O2,
        ('opt_level="O2"', 'opt_level="O2", keep_batchnorm_fp32=False'),
        ("output = model(x)", "output = model(x)  # <-"),
    ),
    "a half loss by hand": bug(
        "PA302",
        BY_HAND,
        ("F.cross_entropy(", "nn.CrossEntropyLoss()("),
        (".half()).float(), y)", ".half()), y)  # <-"),
    ),
    "a half loss under autocast": bug(
        "PA302",
        GRAD_SCALER,
        ("loss = F.cross_entropy(output, y)", "loss = output.sum()"),
        ("    scaler.scale(loss).backward()\n", "    scaler.scale(loss.half()).backward()  # <-\n"),
    ),
    "a half loss that is cast": bug(
        "PA302",
        BY_HAND,
        (".half()).float(), y)\n", ".half()), y).float()\n"),
        ("(loss * 128.0).backward()", "(loss * 128.0).backward()  # <-"),
    ),
    "a half loss that is cast, a part of another": bug(
        "PA302",
        BF16.replace("(model(x), y)", "(model(x), y)\n        output = model(x)"),
        (
            "    loss.backward()\n",
            "    again = F.mse_loss(output, torch.zeros_like(output)).float()\n"
            "    ((again + loss) / 2).backward()  # <-\n",
        ),
    ),
    "a region around the loop": bug(
        "PA304", BF16, (LOOP, AROUND), ("    with", "    if True:  # with")
    ),
    "a half loss in scale_loss": bug(
        "PA302",
        O1,
        ("with amp.scale_loss(loss, ", "with amp.scale_loss(loss.half(), "),
        ("as scaled_loss:\n", "as scaled_loss:  # <-\n"),
    ),
    "a missing layer": bug("PA401", FLOAT32, LACKING),
    "a copy of the model": bug(
        "PA402",
        FLOAT32,
        ("model = model.to", "import copy\nmodel = model.to"),
        ("lr=1e-3)", "lr=1e-3)  # <-\nmodel = copy.deepcopy(model)"),
    ),
    "a weighted loss never scaled": bug(
        "PA105",
        GRAD_SCALER,
        ("    scaler.scale(loss).backward()\n", "    scaler.scale(loss); loss = 0.5 * loss\n"),
        ("scaler.unscale_(optimizer)", "loss.backward()\n    scaler.unscale_(optimizer)  # <-"),
    ),
    "gradients unscaled twice": bug(
        "PA105",
        GRAD_SCALER,
        ("scaler.unscale_(optimizer)", "for p in model.parameters():\n        p.grad /= 1024.0"),
        UNCLIPPED,
        ("    scaler.step(optimizer)\n", "    scaler.step(optimizer)  # <-\n"),
        FINITE,
    ),
    "two steps of one iteration": bug(
        "PA103",
        GRAD_SCALER,
        ("scaler.step(optimizer)", "optimizer.step()\n    scaler.step(optimizer)  # <-"),
        FINITE,
    ),
    "most steps skipped": bug(
        "PA601",
        GRAD_SCALER,
        ("range(4)", "range(60)"),
        ("if step == 2:", "if step % 5:"),
        ('float("inf")', "1e35"),
        ("    scaler.step(optimizer)\n", "    scaler.step(optimizer)  # <-\n"),
        ("init_scale=1024.0", "init_scale=2.0**40"),
    ),
    "a learning rate of zero": bug(
        "PA202", FLOAT32, ("range(4)", "range(9)"), ("lr=1e-3)", "lr=0.0)  # <-")
    ),
    "zeros of one layer only": bug(
        "PA404",
        FLOAT32,
        ("range(4)", "range(9)"),
        ("optimizer.zero_grad()", "model[0].zero_grad()"),
        STEP,
    ),
    "zeros for each batch of an accumulation": bug(
        "PA403",
        ACCUMULATED,
        ("    if step % 2 == 0:\n        optimizer.zero", "    optimizer.zero"),
        ("optimizer.step()", "optimizer.step()  # <-"),
    ),
    "a schedule for each batch of an accumulation": bug(
        "PA104",
        ACCUMULATED,
        ("for", "schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)\nfor"),
        ("optimizer.step()", "optimizer.step()\n    schedule.step()  # <-"),
    ),
    "a checkpoint loaded without the scaler": bug(
        "PA113",
        GRAD_SCALER,
        (
            "for step",
            "import io\nfile = io.BytesIO()\n"
            "torch.save([model.state_dict(), optimizer.state_dict(), "
            "scaler.state_dict() | {'scaler': 1}], file)\n"
            "file.seek(0)\nstates = torch.load(file)  # <-\n"
            "model.load_state_dict(states[0])\noptimizer.load_state_dict(states[1])\nfor step",
        ),
    ),
    "a layer frozen with zeros": bug(
        "PA408",
        FLOAT32,
        ("Adam(model.parameters(), lr=1e-3)", "AdamW(model.parameters(), weight_decay=0.1)"),
        ("optimizer.step()", "model[0].zero_grad(set_to_none=False)\n    optimizer.step()  # <-"),
    ),
    "an unscaled term in a scaled loss": bug(
        "PA106",
        TWO_LOSSES,
        (" + scaler.scale(output.float()", " + (output.float()"),
        ("    scaler.unscale_(optimizer)\n", "    scaler.unscale_(optimizer)  # <-\n"),
    ),
    "an update before the step": bug(
        "PA107",
        GRAD_SCALER,
        (
            "scaler.unscale_(optimizer)",
            "scaler.update(512.0)\n    scaler.unscale_(optimizer)  # <-",
        ),
    ),
    "a scaler for each batch": bug(
        "PA108",
        GRAD_SCALER,
        ("init_scale=1024.0)\n", "init_scale=1024.0)\nmake = torch.amp.GradScaler\n"),
        ("zero_grad()\n", 'zero_grad()\n    scaler = make("cpu", init_scale=1024.0)  # <-\n'),
    ),
    "no scale saved beside the optimizer's state": bug(
        "PA110", SAVED, ("scaler.state_dict()", "{}"), ("BytesIO())", "BytesIO())  # <-")
    ),
    "a scaler for bfloat16": bug(
        "PA111",
        BF16_NO_SCALER,
        ("enabled=False", "init_scale=1024.0"),
        (".backward()\n", ".backward()  # <-\n"),
    ),
    "an average in half": bug(
        "PA204",
        AVERAGED,
        ("p.detach().float()", "p.detach().half()"),
        ("(mean.dtype), 1e-3)\n", "(mean.dtype), 1e-3)  # <-\n"),
    ),
    "masters that are never copied back": bug(
        "PA405", MASTERS, ("        p.data.copy_(master.data)\n", "        pass\n"), STEP
    ),
    "sums of losses": bug(
        "PA406",
        ACCUMULATED,
        ("(F.cross_entropy(model(x), y) / 2)", "F.cross_entropy(model(x), y)"),
        ("optimizer.step()", "optimizer.step()  # <-"),
    ),
    "averages that a skipped step has destroyed": bug(
        "PA602",
        GRAD_SCALER,
        ("output = model(x)", 'output = model(x * (float("inf") if step == 2 else 1.0))'),
        FINITE,
        ("    scaler.step(optimizer)\n", "    scaler.step(optimizer)  # <-\n"),
    ),
    "weights that diverge": bug("PA602", RESTORED, ("model.load_state_dict(best)\n", ""), STEP),
    "nan losses that are left out": bug(
        "PA603", GUARDED, ("step == 5", "step >= 5"), ("isfinite(loss):", "isfinite(loss):  # <-")
    ),
}
