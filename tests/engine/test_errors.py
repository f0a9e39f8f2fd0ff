# SPDX-License-Identifier: BSD-3-Clause
"""Every error a user can cause: its words, and that nothing has changed after it."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.host_reads import far_from_the_host
from cases.levels import CASTING_FUNCTIONS, HALF_WEIGHTS
from kit.compare import halves_match, same
from kit.refusals import BOTH, assert_run_refused, each, reached, refusal, refused
from kit.run import ALL, MASTERS, Net, Run, act
from preamp import amp
from preamp.core.errors import LossScaleError, PreampPolicyError, PreampStateError

BOOK = "engine"
DOORS = pytest.mark.parametrize("door", [preamp, amp], ids=["preamp", "amp"])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.out = nn.Linear(3, 1)


# -- what rows do ---------------------------------------------------------------------------------


@act
def used(run: Run) -> None:
    """Give a run that has not started state and gradients: there is something to disturb."""
    for index in range(2):
        run.loss(index).backward()
        if index == 0:
            run.play("step; zero")


@act
def ready(run: Any) -> None:
    """Have a loss: to make one changes the statistics of a batch norm."""
    run.made = run.loss()


@act
def beside(run: Run) -> None:
    """Another engine, whose model and optimizer are the last ones of the run."""
    other = Run(seed=1, door=run.door)
    run.models += other.models
    run.optimizers += other.optimizers


@act
def stranger(run: Run) -> None:
    run.optimizers.append(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))


@act
def another(run: Run) -> None:
    run.models.append(Net())


def enter(run: Any, loss: Any = None, optimizers: Any = None, **options: Any) -> None:
    """A block for that loss, or the one that is ready, and the optimizer or others."""
    loss = run.made if loss is None else loss
    optimizers = run.optimizer if optimizers is None else optimizers
    with run.door.scale_loss(loss, optimizers, **options) as scaled:
        scaled.backward()


def sparse(run: Run) -> None:
    enter(run, run.model.out(run.model.table(torch.tensor([1, 1, 2]))).float().sum())


@act
def rewrite(run: Run) -> None:
    run.model.first.weight.grad.mul_(0.5)


@act
def floats(run: Run) -> None:
    run.model.float()


@act
def half_buffer(run: Run) -> None:
    run.model.bn.running_mean = run.model.bn.running_mean.half()
    run.models.insert(0, nn.Linear(2, 2))


@act
def damage(run: Run, in_loss: int = 0) -> None:
    """An overflow at any scale, of the loss itself or behind it."""
    run.zero()
    loss = run.model.last.weight.float().sum() * (float("inf") if in_loss else 1.0)
    with preamp.scale_loss(loss, run.optimizer) as scaled:
        (scaled * float("inf")).backward()
    run.step()


@act
def lower(run: Run) -> None:
    run.engine.scaler(0).set_scale(2.0**-23)


@act
def spoil(run: Run) -> None:
    with torch.no_grad():
        run.model.last.weight.fill_(float("inf"))


# -- rows -----------------------------------------------------------------------------------------

LATE: dict[str, Any] = {"starts": False, "optimizer": "Adam"}
ROWS = {
    # initialize
    "optimizer of another engine": refusal(
        lambda run: preamp.initialize(run.models[1], run.optimizer, opt_level="O2", verbosity=0),
        "another",
        ALL,
        optimizer="Adam",
    ),
    "half buffer": refusal("initialize", "half_buffer", starts=False),
    "model of another engine": refusal(
        lambda run: preamp.initialize(run.model, opt_level="O1", verbosity=0), levels=MASTERS
    ),
    # scale_loss
    "before initialize": refusal(enter, "used; ready", **LATE),
    "before amp.initialize": refusal(enter, "used; ready", doors="amp", **LATE),
    "a foreign optimizer": refusal(
        lambda run: enter(run, None, run.optimizers), "ready; stranger", doors=BOTH
    ),
    "two engines": refusal(
        lambda run: enter(run, None, run.optimizers), "beside; ready", doors=BOTH
    ),
    "no optimizers": refusal(lambda run: enter(run, None, []), "ready"),
    "loss_scale(5)": refusal(lambda run: run.engine.loss_scale(5)),
    # step, clip, groups, loading
    "assigning load": refusal(
        lambda run: run.model.load_state_dict(run.models[1].state_dict(), assign=True),
        "another",
        MASTERS,
    ),
    "amp state before": refusal(lambda _: amp.load_state_dict({"loss_scaler0": ENTRY}), **LATE),
    "unknown option": refusal(lambda _: amp._amp_state.opt_properties.colour, **LATE),
}


@each(ROWS)
def test_refused(name: str, level: str, door: str) -> None:
    assert_run_refused(BOOK, name, ROWS[name], reached(ROWS[name], level, door))


ARGUMENTS: list[tuple[str, str, Callable[[Run], Any]]] = [
    ("models", "a tuple of Net", lambda run: (run.model,)),
    ("models", "a list of Net, int", lambda run: [run.model, 3]),
    ("models", "a NoneType", lambda run: None),
    ("models", "a str", lambda run: "model"),
    ("models", "a tuple of nothing", lambda run: ()),
    ("models", "a generator", lambda run: run.model.parameters()),
    ("optimizers", "a tuple of Adam", lambda run: (run.optimizer,)),
    ("optimizers", "a list_iterator", lambda run: iter([run.optimizer])),
    ("optimizers", "a list of Adam, NoneType", lambda run: [run.optimizer, None]),
    ("optimizers", "a dict", lambda run: {"a": run.optimizer}),
    ("optimizers", "an int", lambda run: 3),
    ("optimizers twice", "Adam", lambda run: [run.optimizer] * 2),
    *(("verbosity", repr(given), lambda _, given=given: given) for given in (None, "loud", [1])),
    *(
        ("num_losses", repr(given), lambda _, given=given: given)
        for given in (-1, 1.0, "2", None, True)
    ),
]


@DOORS
@pytest.mark.parametrize(("name", "given", "make"), ARGUMENTS)
def test_wrong_arguments(door: Any, name: str, given: str, make: Callable[[Run], Any]) -> None:
    run = Run("O2", "Adam", door=door, starts=False).play("used")
    with refused(BOOK, name, run.model, run.optimizer, given=given):
        run.initialize(**{name.removesuffix(" twice"): make(run)})


@DOORS
@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_model_that_is_half(door: Any, level: str, half: str) -> None:
    run = Run(level, door=door, starts=False)
    run.model.to(getattr(torch, half))
    with refused(BOOK, "half model", run.model, run.optimizer, half=half):
        run.initialize()


@DOORS
@pytest.mark.parametrize("kind", [nn.DataParallel, nn.parallel.DistributedDataParallel])
def test_model_in_a_wrapper_of_ranks(door: Any, kind: Any) -> None:
    run = Run("O2", "Adam", door=door, starts=False).play("used")
    wrapped = kind.__new__(kind)
    nn.Module.__init__(wrapped)
    wrapped.module = run.model
    with refused(BOOK, "wrapped", run.model, run.optimizer, kind=kind.__name__):
        run.initialize(models=[Net(), wrapped])


@pytest.mark.parametrize(
    ("given", "kind"), [("optimizer", "a str"), (None, "a NoneType"), (3, "an int")]
)
def test_scale_loss_with_something_else(given: Any, kind: str) -> None:
    with refused(BOOK, "scale_loss", kind=kind), preamp.scale_loss(torch.ones(()), given):
        pass


# The loss is refused before the engine looks at its level, so that these two do not interact.
@pytest.mark.pairs
@DOORS
@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (1.5, "a float"),
        (None, "a NoneType"),
        ((torch.ones(()),), "a tuple"),
        (torch.ones((), dtype=torch.int64), "a torch.int64 tensor"),
        (torch.ones((), dtype=torch.complex64), "a torch.complex64 tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_that_is_none(door: Any, level: str, loss: Any, kind: str) -> None:
    run = Run(level, "Adam", door=door, starts=False).play("used")
    run.initialize()
    subjects = run.model, run.optimizer
    with refused(BOOK, "loss", *subjects, kind=kind), door.scale_loss(loss, run.optimizer):
        pass


@DOORS
@pytest.mark.parametrize(
    ("count", "number", "allowed"),
    [
        (1, 1, "Allowed are 0 to 0"),
        (3, 3, "Allowed are 0 to 2"),
        (2, -1, "Allowed are 0 to 1"),
        (0, 0, "There is none"),
    ],
)
def test_wrong_loss_id(door: Any, count: int, number: int, allowed: str) -> None:
    run = Run(num_losses=count, door=door).play("outside; ready")
    given = {"number": number, "count": count, "allowed": allowed}
    with refused(BOOK, "loss_id", run.model, run.optimizer, **given):
        enter(run, loss_id=number)


@pytest.mark.parametrize("level", MASTERS)
@pytest.mark.parametrize("form", [lambda p: [p], lambda p: p, lambda p: iter([p])])
def test_group_with_a_known_parameter(level: str, form: Callable[[Any], Any]) -> None:
    run = Run(level)
    with refused(BOOK, "known parameter", run.model, run.optimizer):
        run.optimizer.add_param_group({"params": form(run.model.first.weight)})


ENGINES: list[Callable[[Any], object]] = [
    preamp.engine_of,
    lambda model: preamp.clip_grad_norm_(model, 1.0),
]


@pytest.mark.parametrize("ask", ENGINES)
def test_engine_of_a_stranger(ask: Callable[[Any], object]) -> None:
    stranger = Net()
    with refused(BOOK, "no engine", stranger):
        ask(stranger)


# -- state ----------------------------------------------------------------------------------------

ENTRY = {"loss_scale": 4.0, "unskipped": 1}
TWO: dict[str, Any] = {"loss_scaler0": ENTRY, "loss_scaler1": ENTRY}
SHORT, WORD = {"loss_scale": 2.0}, {**ENTRY, "unskipped": "many"}
STATES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("state", {}, {"count": 0, "lacks": [*TWO], "more": "nothing"}),
    ("state", {"loss_scaler0": ENTRY}, {"count": 1, "lacks": ["loss_scaler1"], "more": "nothing"}),
    *(
        ("state", {**TWO, key: ENTRY}, {"count": 3, "lacks": "nothing", "more": [key]})
        for key in ("loss_scaler2", "extra")
    ),
    *(("scaler", {**TWO, "loss_scaler1": scaler}, {"given": scaler}) for scaler in (SHORT, WORD)),
    *(
        ("steps", {**TWO, "steps": steps}, {"given": steps})
        for steps in ([{"applied": 1}], [3], 5, [{"applied": "x", "skipped": 0, "skips_in_row": 0}])
    ),
]


@pytest.mark.parametrize(("name", "state", "words"), STATES)
def test_engine_state_that_does_not_fit(
    name: str, state: dict[str, Any], words: dict[str, Any]
) -> None:
    run = Run(num_losses=2)
    run.engine.scaler(1).set_scale(32.0)
    before = run.engine.state_dict()
    with refused(BOOK, name, run.model, run.optimizer, **words):
        preamp.engine_of(run.optimizer).load_state_dict(state)
    assert run.engine.state_dict() == before


@pytest.mark.parametrize("key", ["scaler0", "loss_scaler", "loss_scalerx", "model", 0])
def test_amp_state_with_unknown_keys(key: Any) -> None:
    run = Run(door=amp)
    before = amp.state_dict()
    with refused(BOOK, "amp state", run.model, run.optimizer, key=repr(key)):
        amp.load_state_dict({"loss_scaler0": ENTRY, key: ENTRY})
    assert amp.state_dict() == before


# -- what may change, or what comes after ---------------------------------------------------------

AFTER = {
    "gradient rewritten": refusal(
        "step", "backward; rewrite", MASTERS, loss_scale=128.0, changes=True
    ),
    "made float": refusal("step", "floats", MASTERS, changes=True),
    "skips of the loss": refusal("damage 1", changes=True, max_consecutive_skips=1),
    "skips that were watched": refusal(
        "step", "spoil; backward", changes=True, max_consecutive_skips=1, overflow="trace"
    ),
    "skips": refusal("damage", changes=True, max_consecutive_skips=1),
    "three skips in a row": refusal(
        "damage", "damage; damage; iterate; damage; damage", changes=True, max_consecutive_skips=3
    ),
    "the lowest scale": refusal("damage", "lower", changes=True, max_consecutive_skips=None),
}


@each(AFTER)
def test_refused_and_weights_stay(name: str, level: str, door: str) -> None:
    run = reached(AFTER[name], level, door)
    before = run.numbers()["stored"]
    assert_run_refused(BOOK, name, AFTER[name], run)
    assert same(run.numbers()["stored"], before)
    if name == "gradient rewritten":
        run.close()
        assert run.model.first.weight.grad is None
    if name == "skips":  # training can go on
        run.play("iterate")
        assert not run.engine.last_step_skipped
        assert not same(run.numbers()["stored"], before)


@pytest.mark.parametrize("level", MASTERS)
def test_earlier_gradients_outlive_a_sparse_one(level: str) -> None:
    run = Run(level, model=Words, loss_scale="dynamic")
    with refused(BOOK, "sparse", run.model, run.optimizer):
        sparse(run)
    enter(run, run.model.out.weight.float().sum() * 2.0**-8)
    with pytest.raises(PreampStateError, match="is sparse"):
        sparse(run)
    grads = [param.grad for param in run.params() if param.grad is not None]
    assert same(grads, [torch.full((1, 3), 2.0**-8)])
    assert run.engine.loss_scale() == 2.0**16


@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("door", ["scale_loss", "GradScaler"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "SGD"])
def test_the_stack_of_too_many_skips_ends_at_the_line_that_stepped(
    optimizer: str, door: str, in_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host learns of the skip in the step after it."""
    if optimizer == "FusedAdam":
        far_from_the_host(monkeypatch)
    run = Run("O2", optimizer, "Linear", max_consecutive_skips=1, loss_scale="dynamic")
    scaler = preamp.GradScaler(run.optimizer)

    def train() -> None:
        for _ in range(2):
            loss = run.loss() * (float("inf") if in_loss else 1.0)
            by = 1.0 if in_loss else float("inf")
            if door == "GradScaler":
                (scaler.scale(loss) * by).backward()
                scaler.step(run.optimizer)
                scaler.update()
            else:
                with preamp.scale_loss(loss, run.optimizer) as scaled:
                    (scaled * by).backward()
                run.optimizer.step()

    with pytest.raises(LossScaleError) as caught:
        train()
    frames = traceback.extract_tb(caught.value.__traceback__)
    inside = (preamp.__file__ or "").removesuffix("__init__.py")
    inner = [frame for frame in frames if frame.filename.startswith(inside)]
    assert frames[-1 - len(inner)].name == "train"
    assert ".step(" in (frames[-1 - len(inner)].line or "")
    assert [frame.name for frame in inner] == ["step"]  # the method that was called
    assert "pass overflow='trace' to preamp.initialize" in str(caught.value)


def test_no_limit_on_skips() -> None:
    run = Run(max_consecutive_skips=None, min_loss_scale=1.0).play(60 * "damage; ")
    assert run.engine.loss_scale() == 1.0


@pytest.mark.parametrize("through", ["argument", "state"])
def test_half_models_on_request(through: str) -> None:
    amp._amp_state.allow_incoming_model_not_fp32 = through == "state"
    options = {"allow_half_model": True} if through == "argument" else {"door": amp}
    run = Run(model=lambda: Net().half(), starts=False, **options)
    widened = [param.detach().float() for param in run.model.parameters()]
    run.initialize()
    assert same([param.detach() for param in run.params()], widened)
    run.play("iterate")
    assert halves_match(run.model)


def test_failed_amp_initialize_keeps_the_current_engine() -> None:
    run = Run(door=amp)
    with pytest.raises(PreampPolicyError):
        amp.initialize(Net(), opt_level="O8", verbosity=0)
    assert amp._amp_state.engine is run.engine
    assert amp._amp_state.opt_properties.opt_level == "O2"


# -- models without shapes, layers, memory or casts -----------------------------------------------


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@DOORS
@pytest.mark.parametrize("level", ALL)
@pytest.mark.parametrize(
    ("lazy", "param"),
    [
        (lambda: nn.LazyLinear(2), "1.weight"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "1.running_mean"),
    ],
)
def test_lazy_modules(door: Any, level: str, lazy: Any, param: str) -> None:
    run = Run(level, model=lambda: nn.Sequential(nn.Linear(3, 4), lazy()), starts=False, door=door)
    first, x = run.model[0], torch.randn(5, 3)
    with refused(BOOK, "lazy", first, param=param):  # what is not initialized cannot be pictured
        run.initialize()
    assert first.weight.dtype is torch.float32
    with pytest.raises(PreampStateError):
        preamp.engine_of(run.model)
    run.model(x)
    run.initialize()
    run.model(x)


@DOORS
@pytest.mark.parametrize("level", HALF_WEIGHTS)
@pytest.mark.parametrize(
    "by", [torch.jit.script, lambda net: torch.jit.trace(net, torch.ones(6, 4))]
)
@pytest.mark.parametrize("is_part", [False, True])
def test_scripted_models_are_not_cast(door: Any, level: str, by: Any, is_part: bool) -> None:
    def make() -> Any:
        model = by(nn.Linear(4, 3))
        return nn.Sequential(nn.Linear(4, 4), model) if is_part else model

    run = Run(level, model=make, starts=False, door=door)
    what = "'1' of Sequential" if is_part else "The model"
    with refused(BOOK, "scripted", run.model, run.optimizer, what=what, level=repr(level)):
        run.initialize()


@DOORS
@pytest.mark.parametrize("level", CASTING_FUNCTIONS)
@pytest.mark.parametrize("partly", [False, True])
def test_devices_without_autocast(door: Any, level: str, partly: bool) -> None:
    """Refused before torch is asked for the casts of such a device, by any engine."""
    other = Run(level, door=door)
    model = nn.Sequential(nn.Linear(3, 4, device="cpu" if partly else "meta"))
    model.append(nn.Linear(4, 2, device="meta"))
    run = Run(level, model=lambda: model, starts=False, door=door)
    words = {"param": f"{int(partly)}.weight", "level": repr(level)}
    with refused(BOOK, "meta", changes=True, **words):
        run.initialize()
    with pytest.raises(PreampStateError):
        preamp.engine_of(model)
    other.play("iterate 1")
    model.to_empty(device="cpu")
    run.initialize(optimizers=torch.optim.SGD(model.parameters(), lr=0.1))
    assert model(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("level", sorted({*ALL} - {*CASTING_FUNCTIONS}))
def test_models_without_memory_may_be_cast_and_filled_later(level: str) -> None:
    model = nn.Linear(3, 4, device="meta")
    preamp.initialize(model, opt_level=level, verbosity=0)
    model.to_empty(device="cpu")
    model.load_state_dict({"weight": torch.ones(4, 3), "bias": torch.zeros(4)})
    assert torch.equal(model(torch.ones(1, 3)), torch.full((1, 4), 3.0))
