"""Plans that an earlier process kept: taken for the same step alone, with the same bits."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import run_script

MODEL = """
import torch
from torch import nn
import helper

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.scale = 2.0
        self.table = torch.linspace(0, 1, 8)  # no buffer: a constant of the graph
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])  # a literal of the graph
        x = nn.functional.relu(self.inner(x)) * self.scale + self.table
        return helper.shift(x) * weights.sum()

class Scaled(nn.Sequential):
    def forward(self, x, scale=1.0):
        scaled = super().forward(x) * scale
        return scaled if scale < 0.12 else scaled + 1
"""

HELPER = """
AMOUNT = 0.5

def shift(x):
    return x + AMOUNT
"""

SCRIPT = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import fsdp_mlir, torch
from fsdp_mlir.frontdoor import planning
from torch import nn
from model import Block, Scaled

captures = []
capture = planning.capture
planning.capture = lambda *args, **kwargs: captures.append(1) or capture(*args, **kwargs)

folder = os.path.dirname(__file__)
rank = int(os.environ["RANK"])
policy, rate = {}, 0.01
torch.manual_seed(0)
model = Scaled(Block(), Block(), nn.Linear(8, 1))
called = lambda call: {}
exec(open(folder + "/before.txt").read())  # no file of a module
for block in model[:2]:
    fsdp_mlir.fully_shard(block, **policy)
fsdp_mlir.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
step = fsdp_mlir.compile(
    model,
    loss=lambda y: (y.square().mean(), {"mean": y.mean()}),
    optimizer=optimizer,
    cache=folder + "/cache",
    fallback="error",
)
torch.manual_seed(rank)
losses = []
for call in range(3):
    loss, metrics = step(x=torch.randn(4, 8), **called(call))
    losses += [loss.item(), metrics["mean"].item()]
calls = [block.calls.item() for block in model[:2]]
print(len(captures), *losses, *calls, file=sys.stderr)
os._exit(0)
"""


class Job:
    """The files of a training script, and the folder of its plans."""

    def __init__(self, folder: Path, world: int) -> None:
        self.folder = folder
        self.world = world
        self.cache = folder / "cache"
        self.write("model.py", MODEL)
        self.write("helper.py", HELPER)
        self.write("train.py", SCRIPT)
        self.before("")

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        # What is the same keeps its time of modification.
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    def before(self, text: str) -> None:
        """What the script does before it shards its model."""
        self.write("before.txt", text)

    def run(self) -> tuple[int, list[list[float]], list[str]]:
        """How often a rank captured, each rank's numbers, and what else was written."""
        statuses, errors = run_script(self.folder / "train.py", self.world)
        assert statuses == [0] * self.world, errors
        lines = [text.strip().splitlines() for text in errors]
        numbers = [[float(word) for word in each[-1].split()] for each in lines]
        assert len({each[0] for each in numbers}) == 1
        return int(numbers[0][0]), [each[1:] for each in numbers], lines[0][:-1]

    def entries(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """A job that ran once, with what its ranks printed."""
    job = Job(tmp_path_factory.mktemp("kept"), 2)
    captured, numbers, _ = job.run()
    assert captured == 1 and len(job.entries()) == 1
    return job.folder, numbers


@pytest.fixture
def job(kept: tuple[Path, list[list[float]]]) -> Iterator[Job]:
    """The same job: in the same folder, since a path is part of what is the same."""
    folder, _ = kept
    job = Job(folder, 2)
    entries = job.entries()
    yield job
    for made in set(job.entries()) - set(entries):
        shutil.rmtree(made)


SAME = {
    "nothing": "",
    "hooks_of_others": "for _ in range(9): nn.Linear(1, 1).register_forward_hook(print)",
    "values": (
        "rate = 0.02\nmodel[0].inner.weight.data.mul_(2)\nmodel[0].table = torch.linspace(1, 2, 8)"
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_step_is_taken(job: Job, kept: tuple[Path, list[list[float]]], name: str) -> None:
    job.before(SAME[name])
    captured, numbers, _ = job.run()
    assert (captured, len(job.entries())) == (0, 1)
    assert (numbers == kept[1]) == (name != "values")
    shutil.move(job.cache, job.folder / "aside")
    try:
        captured, again, _ = job.run()
        assert captured == 1 and again == numbers
    finally:
        shutil.rmtree(job.cache)
        shutil.move(job.folder / "aside", job.cache)


def test_a_number_of_each_call(job: Job) -> None:
    """A number that changed has plans for each outcome of its comparisons, and all are kept."""
    job.before("called = lambda call: {'scale': (call + 1) / 20}")
    captured, numbers, _ = job.run()
    assert (captured, len(job.entries())) == (3, 4)
    job.before("called = lambda call: {'scale': (call + 1) / 20} ")
    assert job.run()[:2] == (0, numbers)
    job.before("called = lambda call: {'scale': 0.05 + call / 50}")
    captured, others, _ = job.run()
    assert captured == 0 and others[0][:2] == numbers[0][:2] and others != numbers
    job.before("called = lambda call: {'scale': 0.05 + call}")  # the second is for another outcome
    assert job.run()[0] == 1


def test_a_number_of_each_call_that_code_reads(job: Job) -> None:
    given = "called = lambda call: [setattr(block, 'scale', VALUE) for block in model[:2]] and {}"
    job.before(given.replace("VALUE", "1 + call / 10"))
    captured, numbers, _ = job.run()
    assert (captured, len(job.entries())) == (2, 3)
    assert job.run()[:2] == (0, numbers)
    job.before(given.replace("VALUE", "1 + call / 7"))
    captured, others, _ = job.run()
    assert captured == 0 and others[0][:2] == numbers[0][:2] and others != numbers


def test_variables_of_the_process_that_no_step_reads(job: Job) -> None:
    """As those that from_pretrained reads, of every model of transformers."""
    job.before("Block.note = lambda self: (os.environ['RANK'], os.getenv('MASTER_PORT'))")
    captured, numbers, _ = job.run()
    assert (captured, len(job.entries())) == (1, 2)
    assert job.run()[:2] == (0, numbers)


PRETRAINED = """
import os, sys
import fsdp_mlir, torch
from fsdp_mlir.frontdoor import planning
from transformers import GPT2Config, GPT2LMHeadModel

captures = []
capture = planning.capture
planning.capture = lambda *args, **kwargs: captures.append(1) or capture(*args, **kwargs)
torch.manual_seed(0)
sizes = dict(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
for block in model.transformer.h:
    fsdp_mlir.fully_shard(block)
fsdp_mlir.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
cache = os.path.join(os.path.dirname(__file__), "cache")
step = fsdp_mlir.compile(model, optimizer=optimizer, cache=cache, fallback="error")
tokens = torch.arange(16).view(2, 8)
loss = step(input_ids=tokens, labels=tokens).item()
print(len(captures), loss, file=sys.stderr)
os._exit(0)
"""


def test_a_model_of_transformers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PRETRAINED)
    lines = []
    for _ in range(2):
        statuses, errors = run_script(script, 2)
        assert statuses == [0, 0], errors
        lines.append([text.splitlines()[-1].split() for text in errors])
    first, second = lines
    assert [captures for captures, _ in first] == ["1", "1"]
    assert [captures for captures, _ in second] == ["0", "0"]
    assert [loss for _, loss in first] == [loss for _, loss in second]


# After rank 0 has found the entry, another process removes it. How often the ranks capture then.
GONE = {
    "before_all_ranks_have_read_it": ("PlanCache.captured", 1),
    "after_all_ranks_have_read_it": ("Plans._sent", 0),
}


@pytest.mark.parametrize("name", GONE)
def test_an_entry_that_goes_meanwhile(
    job: Job, kept: tuple[Path, list[list[float]]], name: str
) -> None:
    method, captures = GONE[name]
    job.before(
        "import shutil\n"
        "from fsdp_mlir.frontdoor.plan_cache import PlanCache\n"
        "from fsdp_mlir.frontdoor.plans import Plans\n"
        f"before = {method}\n"
        "def then(*args):\n"
        "    shutil.rmtree(folder + '/cache', ignore_errors=True)\n"
        "    return before(*args)\n"
        f"{method} = then"
    )
    shutil.copytree(job.cache, job.folder / "aside")
    try:
        captured, numbers, _ = job.run()
        assert captured == captures and numbers == kept[1]
    finally:
        shutil.rmtree(job.cache, ignore_errors=True)
        shutil.move(job.folder / "aside", job.cache)


OTHER = {
    "attribute": "model[1].scale = 3.0",
    "hook": "model[0].register_forward_hook(lambda m, x, y: y * 2)",
    "class": "Block.forward = lambda self, x: self.inner(x)",
    "library": "nn.functional.relu = torch.tanh",
    "global": "import helper; helper.AMOUNT = 0.25",
    "class_of_torch": "torch.Tensor.__mul__ = lambda x, y: torch.mul(x, y)",
    "mode": "torch.use_deterministic_algorithms(True)",
    "frozen": "model[0].inner.bias.requires_grad_(False)",
    "training": "model.eval()",
    "variable": "os.environ['MODEL_FLAG'] = '1'",
    "policy": "policy = {'reshard_after_forward': False}",
    "replaced": "model[0] = nn.Linear(8, 8)\nmodel[0].calls = torch.zeros(1)",
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", OTHER)
def test_another_step_is_captured(job: Job, name: str) -> None:
    job.before(OTHER[name])
    assert job.run()[0] == 1


# What differs lies behind something whose name, code and text are the same.
HIDDEN = {
    "item_of_a_dict_with_attributes": (
        "class Node(dict):\n    __getattr__ = dict.__getitem__\nmodel[0].config = Node(by=VALUE)"
    ),
    "order_of_a_dict": (
        "names = sorted(('by', 'to'), reverse=VALUE > 2)\n"
        "model[0].config = dict.fromkeys(names, 1.0)"
    ),
    "owner_of_a_method": (
        "class Held:\n"
        "    def __init__(self, by): self.by = by\n"
        "    def hook(self, module, x, y): return y * self.by\n"
        "model[0].register_forward_hook(Held(VALUE).hook)"
    ),
    "object_that_shows_nothing": (
        "class Held:\n"
        "    __slots__ = ('by',)\n"
        "    def __init__(self, by): self.by = by\n"
        "    def __call__(self, module, x, y): return y * self.by\n"
        "    def __repr__(self): return 'Held()'\n"
        "model[0].register_forward_hook(Held(VALUE))"
    ),
    "behind_a_library": (
        "scaled = lambda by: lambda module, x, y: y * by\n"
        "model[0].register_forward_hook(torch.autocast('cpu', enabled=False)(scaled(VALUE)))"
    ),
    "hook_of_all_modules": (
        "scaled = lambda by: lambda module, x, y: y * by if type(module) is Block else None\n"
        "nn.modules.module.register_module_forward_hook(scaled(VALUE))"
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", HIDDEN)
def test_what_lies_deeper_is_told(job: Job, name: str) -> None:
    for value, captures in (("2.0", 1), ("3.0", 1), ("2.0", 0)):
        job.before(HIDDEN[name].replace("VALUE", value))
        assert job.run()[0] == captures, value


TAKING = """
given = []

def called(call):
    assert all("y" not in each for each in given)
    given.append({"y": torch.ones(1), "z": torch.ones(1)})
    return {"extra": given[-1]}

def take(module, args, kwargs):
    kwargs.pop("extra").pop("y")
    return args, kwargs

model.register_forward_pre_hook(take, with_kwargs=True)
"""


def test_keys_that_a_step_takes_are_kept(job: Job) -> None:
    job.before(TAKING)
    assert [job.run()[0] for _ in range(2)] == [1, 0]


def test_other_code_is_captured(job: Job) -> None:
    helper = job.folder / "helper.py"
    before = helper.stat()
    job.write("helper.py", HELPER.replace("x + AMOUNT", "x - AMOUNT"))
    assert job.run()[0] == 1
    job.write("helper.py", HELPER)
    os.utime(helper, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_damaged_entry_is_replaced(job: Job, kept: tuple[Path, list[list[float]]]) -> None:
    job.run()
    for name in ("plan.json", "model.safetensors", "entry.json"):
        (entry,) = job.entries()
        whole = (entry / name).read_bytes()
        (entry / name).write_bytes(whole[: len(whole) // 2])
        captured, numbers, _ = job.run()
        assert captured == 1 and numbers == kept[1]
    captured, numbers, _ = job.run()
    assert captured == 0 and numbers == kept[1]


UNKEPT = {
    "values": (
        "import helper\n"
        "helper.shift = lambda x: x[:, model[0].table > 0.5].sum(1, keepdim=True) + x",
        "the values of an input, a buffer or a constant decide",
    ),
    "object": (
        "model[0].kept = (each for each in range(3))",
        "'0.kept' holds a builtins.generator",
    ),
    "any_name": (
        "import helper\n"
        "helper.shift = lambda x: x + vars(helper)['AMOUNT'] + eval('helper.AMOUNT')",
        "'<lambda>' may read any name by 'eval'",
    ),
    "file": (
        "import helper, pathlib\n"
        "path = pathlib.Path(folder, 'before.txt')\n"
        "helper.shift = lambda x: x + len(path.read_text())",
        "before.txt', which may change",
    ),
    "variable_of_the_process": (
        "import helper\nhelper.shift = lambda x: x + len(os.environ['MASTER_PORT'])",
        "reads '$MASTER_PORT', which may change",
    ),
    "late_import": (
        "import helper\n"
        "import pathlib\n"
        "pathlib.Path(folder, 'late.py').write_text('def half(x): return x / 2')\n"
        "def shift(x):\n"
        "    import late\n"
        "    return late.half(x)\n"
        "helper.shift = shift",
        "the step is the first to import 'late'",
    ),
}


@pytest.mark.parametrize("name", UNKEPT)
def test_what_cannot_be_told_is_not_kept(job: Job, name: str) -> None:
    job.before(UNKEPT[name][0])
    captured, _, lines = job.run()
    assert captured == 1
    (line,) = [line for line in lines if "is not kept" in line]
    assert UNKEPT[name][1] in line
    assert len(job.entries()) == 1


def test_ranks_that_differ_capture(job: Job) -> None:
    job.before("model.rank = rank")
    captured, _, lines = job.run()
    assert captured == 1
    (line,) = [line for line in lines if "is not kept" in line]
    assert "what decides the step is not the same on rank 1 as on rank 0" in line
    assert len(job.entries()) == 1


def test_no_two_runs_share_what_they_must_not(job: Job) -> None:
    """An entry names files of its own folder alone."""
    (entry,) = job.entries()
    record = json.loads((entry / "entry.json").read_text().partition("\n")[2])
    assert set(record["files"]) == {path.name for path in entry.iterdir()} - {"entry.json"}
    kinds = ["literal", "attribute", "attribute", "output"]
    assert list(record["constants"].values()) == kinds


DRAWING = """
import random
import numpy as np

def shift(x):
    return x * np.random.beta(0.5, 0.5) if random.random() < 0.5 else x + 1
"""


def test_drawn_numbers(job: Job) -> None:
    """A plan for each way that the draws go."""
    job.write("helper.py", DRAWING)
    captures, found = [], []
    for seed in (0, 1, 2, 0, 1, 2):
        # One call of two blocks: the second one's numbers follow the first one's.
        job.before(f"import random, numpy as np; random.seed({seed}); np.random.seed({seed})")
        captured, numbers, told = job.run()
        captures.append(captured)
        found.append(numbers)
        assert told == []
    assert found[:3] == found[3:] and found[0] != found[1]
    assert min(captures[:2]) > 0 and captures[3:] == [0, 0, 0]
    assert len(job.entries()) == 1 + sum(captures)
