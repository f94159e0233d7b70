"""Random training loops: with the compiled step they have FSDP2's bits after each event.

A case is a small model, its units and precision, an optimizer, options of `compile`, and a sequence
of events: calls of the step, steps by hand, and changes of what these read (any_loop_ranks.py).
Both sides must also raise the same class of error.

`--random-cases N`, `--random-seed S` and `--random-world W` choose the cases, which share a job of
ranks. A case that fails is shrunk, and printed as JSON that `--random-case JSON` runs again.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks

ranks.PRELOAD.append("any_loop_models")

SHRINK_SECONDS = 60
SECONDS_OF_CASE = 60
Spec = dict[str, Any]
Event = list[Any]


# --- cases


def random_optimizer(rng: random.Random) -> Spec:
    others = ["RMSprop", "Adagrad", "NAdam"]  # which have no step in a plan
    name = rng.choice(["SGD", "SGD", "SGD", "Adam", "Adam", "AdamW", "AdamW", rng.choice(others)])
    settings: Spec = {"lr": 0.1 if name == "SGD" else 0.01}
    settings["weight_decay"] = rng.choice([0.0, 0.1])
    if name == "SGD":
        settings["momentum"] = rng.choice([0.0, 0.9])
        settings["nesterov"] = bool(settings["momentum"]) and rng.random() < 0.3
        settings["maximize"] = rng.random() < 0.2
        settings["dampening"] = 0.0 if settings["nesterov"] else rng.choice([0.0, 0.2])
    elif name in ("Adam", "AdamW"):
        settings["amsgrad"] = rng.random() < 0.2
    kind = rng.choice(["", "", "foreach", "fused"])
    if kind == "foreach" or (kind and name in ("Adam", "AdamW")):
        settings[kind] = True
    groups = rng.choice(["one", "one", "one", "two", "two", "held"])
    return {"name": name, "settings": settings, "groups": groups}


def random_model(rng: random.Random) -> Spec:
    tokens = rng.random() < 0.5
    layers = [rng.choice(["mlp", "mlp", "attention", "conv", "counting"]) for _ in range(2)]
    precision = None
    if "conv" not in layers and rng.random() < 0.3:  # BatchNorm's kernel wants float32
        precision = {"param_dtype": "bfloat16"}
        precision |= rng.choice([{}, {"reduce_dtype": "float32"}, {"output_dtype": "float32"}])
    return {
        "seed": rng.randrange(1000),
        "tokens": tokens,
        "layers": layers[: rng.choice([1, 2, 2])],
        "dropout": rng.choice([0.0, 0.2]),
        "tie": tokens and rng.random() < 0.4,
        "unused": rng.random() < 0.15,
        "frozen": rng.choice([0, 0, 0, 1]),
        "returns": "logits",
        "units": rng.choice(["root", "first", "all", "all"]),
        "reshard": rng.choice([None, None, True, False]),
        "precision": precision,
    }


def random_batch(rng: random.Random, plain: float = 0.8) -> Spec:
    """Mostly of one form; each other form is a plan more."""
    made: Spec = {"number": rng.randrange(1000), "size": 4, "length": 3}
    if rng.random() > plain:
        others = [{"size": 2}, {"size": 6}, {"length": 5}, {"dtype": "float64"}, {"more": 1}]
        made |= rng.choice(others)
    if rng.random() < 0.3:
        made["weight"] = rng.choice([0.5, 1.0, 1.5, 2.0])
    return made


def random_calls(rng: random.Random, count: int) -> list[Event]:
    """A call of the step, or several that belong together."""
    kinds = ["step"] * 8 + ["backward"] * 3 + ["accumulate", "evaluate", "evaluate"]
    kinds += ["by_hand", "eager_backward", "eager_forward", "eager_forward", "unsynced", "stopped"]
    kind = rng.choice(kinds)
    if kind == "step" or (kind == "stopped" and count > 1):
        return [["step", random_batch(rng)]]
    if kind == "stopped":
        call = rng.choice(["step", "backward", "evaluate", "eager_backward"])
        return [[kind, {"at": rng.randrange(4), "call": call, **random_batch(rng, 1.0)}]]
    if kind == "backward":
        calls = [["backward", random_batch(rng)] for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.3:
            calls.append(["clip_by_hand", {}])
        return [*calls, [rng.choice(["update", "update", "step_of_optimizer"]), {}]]
    if kind == "accumulate":
        form = random_batch(rng)
        numbers = [form.pop("number"), *(rng.randrange(1000) for _ in range(rng.randint(0, 2)))]
        ends = rng.choice([[], [["update", {}]], [["update", {}]]])
        return [["accumulate", {"numbers": numbers, **form}], *ends]
    if kind == "unsynced":
        setting = rng.choice(["set_requires_gradient_sync", "set_is_last_backward"])
        first = ["unsynced", {"setting": setting, **random_batch(rng)}]
        return [first, [rng.choice(["backward", "step"]), random_batch(rng)]]
    if kind == "by_hand":
        return [[kind, {"clips": rng.random() < 0.5, **random_batch(rng)}]]
    return [[kind, random_batch(rng)]]


def random_setting(rng: random.Random) -> Event:
    name = rng.choice(["lr", "lr", "weight_decay", "momentum", "betas", "eps", "maximize"])
    value = {
        "lr": rng.choice([0.003, 0.05, 0.0]),
        "weight_decay": rng.choice([0.0, 0.2]),
        "momentum": rng.choice([0.5, 0.8]),
        "betas": [rng.choice([0.5, 0.8]), rng.choice([0.9, 0.95])],
        "eps": 1e-4,
        "maximize": rng.random() < 0.5,
    }[name]
    return ["setting", {"name": name, "value": value, "group": rng.randrange(2)}]


def random_change(rng: random.Random) -> list[Event]:
    """A change of what a call reads."""
    layer, index = rng.randrange(4), rng.randrange(8)
    factor = rng.choice([0.5, 2.0])
    hooks = ["forward", "pre", "backward", "param", "accumulated"]
    changes: list[list[Event]] = [
        *([random_setting(rng)] for _ in range(4)),
        *([["schedule", {}], ["schedule", {}]] for _ in range(2)),
        [["mode", {"training": rng.random() < 0.6}]],
        [["mode", {"training": rng.random() < 0.5, "layer": layer}]],
        [["freeze", {"index": index, "grad": rng.random() < 0.5}]],
        [["change_param", {"index": index, "factor": factor}]],
        [["change_buffers", {"assigns": rng.random() < 0.5}]],
        [["scale", {"value": rng.choice([0.5, 1.0, 2.0, 3.0])}]],
        [["dropout", {"p": rng.choice([0.0, 0.1, 0.5])}]],
        [["hook", {"kind": rng.choice(hooks), "layer": layer, "factor": factor}]],
        [["unhook", {}]],
        [["add_group", {}]],
        [["clear_state", {}]],
        [["zero_grad", {"none": rng.random() < 0.3}]],
        [["save", {}]],
        [["load", {"model": rng.random() < 0.7, "optimizer": rng.random() < 0.7}]],
        [["save_whole", {"full": rng.random() < 0.5}]],
        [["load_whole", {}]],
        *([[name, {}]] for name in ("save_step", "load_step")),
        [["state_of_step", {}]],
        [["seed", {"seed": rng.randrange(100)}]],
        [["autocast_on", {"on": rng.random() < 0.5}]],
        [["unshard", {"unit": layer}]],
        [["reshard", {}]],
        [["set_of_units", {"method": "set_reshard_after_backward", "value": rng.random() < 0.5}]],
        [["set_of_units", {"method": "set_reshard_after_forward", "value": rng.random() < 0.5}]],
        [["divide", {"factor": factor}]],
        [
            [
                "new_optimizer",
                {"optimizer": random_optimizer(rng), "max_norm": rng.choice([None, 0.5])},
            ]
        ],
    ]
    return rng.choice(changes)


def random_case(seed: str, world: int) -> Spec:
    rng = random.Random(seed)
    model = random_model(rng)
    form = rng.choice(["loss", "several", "compute", "compute", "model", "nested"])
    # Over more than two ranks the sums have an order, which is Gloo's with FSDP2.
    options: Spec = {"comm": "gloo" if world > 2 or rng.random() < 0.25 else "shm"}
    if rng.random() < 0.4:
        options["max_norm"] = rng.choice([0.1, 1.0])
        if rng.random() < 0.3:
            options["norm_type"] = rng.choice([1.0, float("inf")])
    if form in ("loss", "model") and rng.random() < 0.4:
        options["gradient_accumulation_steps"] = 2
    if rng.random() < 0.4:
        options["evaluation"] = True
    model["returns"] = {"model": "loss", "nested": "nested"}.get(form, "logits")
    case: Spec = {
        "seed": rng.randrange(1000),
        "world": world,
        "model": model,
        "form": form,
        "options": options,
        "optimizer": random_optimizer(rng),
    }
    count = options.get("gradient_accumulation_steps", 1)
    events: list[Event] = []
    for _ in range(rng.randint(5, 8)):
        events += random_calls(rng, count)
        for _ in range(rng.choice([0, 1, 1, 2])):
            events += random_change(rng)
    return case | {"events": [*events, ["step", random_batch(rng, 1.0)]]}


# --- both sides


def compared(cases: list[Spec], directory: Path) -> list[list[Spec]]:
    """What each case gives, by rank; a case that ends its ranks is a problem, and the cases after
    it have ranks of their own. The cases have one world."""
    directory.mkdir(parents=True, exist_ok=True)
    given, out = directory / "cases.json", directory / "found"
    found: list[list[Spec]] = []
    while len(found) < len(cases):
        left, world = cases[len(found) :], cases[0]["world"]
        given.write_text(json.dumps(left))
        ended = ""
        try:
            ranks.run_ranks(
                "any_loop_ranks", [given, out], world, timeout=SECONDS_OF_CASE * len(left)
            )
        except RuntimeError as error:
            ended = str(error)[-3000:]
        files = [Path(f"{out}.{rank}") for rank in range(world)]
        lines = [file.read_text().splitlines() if file.exists() else [] for file in files]
        found += [[json.loads(line) for line in rows] for rows in zip(*lines, strict=False)]
        for file in files:
            file.unlink(missing_ok=True)
        if ended and len(found) < len(cases):
            found.append([{"problem": ended, "planned": 0, "told": []}] * world)
    return found


def problems_of(found: list[Spec]) -> list[str]:
    return [f"rank {rank}: {of['problem']}" for rank, of in enumerate(found) if of["problem"]]


# --- shrinking


def smaller_cases(case: Spec) -> Iterator[Spec]:
    """Each with less, the largest parts first."""
    events = case["events"]
    size = len(events)
    while size := size // 2:
        for begin in range(0, len(events), size):
            yield {**case, "events": events[:begin] + events[begin + size :]}
    plain = {"name": "SGD", "settings": {"lr": 0.1}, "groups": "one"}
    if case["optimizer"] != plain:
        yield {**case, "optimizer": plain}
    for name in case["options"]:
        yield {**case, "options": {k: v for k, v in case["options"].items() if k != name}}
    model = case["model"]
    simple = {"units": "root", "precision": None, "dropout": 0.0, "tie": False, "unused": False}
    for key, value in {**simple, "frozen": 0, "reshard": None}.items():
        if model[key] != value:
            yield {**case, "model": {**model, key: value}}
    if model["layers"] != ["mlp"]:
        yield {**case, "model": {**model, "layers": ["mlp"]}}
    if case["form"] != "loss":
        yield {**case, "form": "loss", "model": {**model, "returns": "logits"}}


def shrink(case: Spec, problems: list[str], directory: Path) -> tuple[Spec, list[str]]:
    """The smallest case found in bounded time that also fails."""
    deadline = time.monotonic() + SHRINK_SECONDS
    smaller = smaller_cases(case)
    while time.monotonic() < deadline and (candidate := next(smaller, None)):
        if found := problems_of(compared([candidate], directory)[0]):
            case, problems, smaller = candidate, found, smaller_cases(candidate)
    return case, problems


# --- the tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" not in metafunc.fixturenames:
        return
    seeds = seeds_of(metafunc.config)
    given = bool(metafunc.config.getoption("--random-case"))
    metafunc.parametrize("seed", seeds, ids=["given"] if given else seeds)


def seeds_of(config: pytest.Config) -> list[str]:
    if given := config.getoption("--random-case"):
        return [given]
    seed, count = config.getoption("--random-seed"), config.getoption("--random-cases")
    return [f"{seed}.{index}" for index in range(count)]


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Spec, list[Spec]]]:
    """Each case, and what its ranks give, by seed."""
    seeds, world = seeds_of(request.config), request.config.getoption("--random-world")
    cases = [
        json.loads(seed) if seed.startswith("{") else random_case(seed, world) for seed in seeds
    ]
    results = compared(cases, tmp_path_factory.mktemp("loops"))
    return dict(zip(seeds, zip(cases, results, strict=True), strict=True))


def test_like_fsdp2(seed: str, found: dict[str, tuple[Spec, list[Spec]]], tmp_path: Path) -> None:
    case, results = found[seed]
    if problems := problems_of(results):
        case, problems = shrink(case, problems, tmp_path)
        again = f"pytest test/parity/test_any_loop.py --random-case '{json.dumps(case)}'"
        pytest.fail("\n".join([f"seed {seed}", *problems, "again: " + again]))


def test_plans_make_most_calls(found: dict[str, tuple[Spec, list[Spec]]]) -> None:
    """Else FSDP2 would be compared with itself."""
    calls = [event for case, _ in found.values() for event in case["events"]]
    steps = [name for name, _ in calls if name in ("step", "backward", "accumulate", "evaluate")]
    planned = sum(results[0]["planned"] for _, results in found.values())
    print(f"{planned} of {len(steps)} calls have a plan")
    assert len(found) == 1 or planned > len(steps) / 2
