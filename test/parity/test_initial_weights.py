"""A model captured on `meta` starts from the weights that its factory makes at the same seed.

Every rank runs the captured initialisation and keeps its rows, so all world sizes get the bits of
one device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp_mlir
import pytest
import torch
from fsdp_mlir.models.llama import Llama, LlamaConfig
from fsdp_mlir.models.llama3 import llama3_8b
from fsdp_mlir.support.files import save_tensors
from harness import BIN, execute, read_run
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision.models import resnet18
from transformers import GPT2Config, GPT2LMHeadModel

SEED = 5
SIZES = {"dim": 64, "layers": 2, "heads": 4, "vocab": 256, "seq": 32, "hidden": 171}
TOKENS = torch.arange(64).view(2, 32)


class WithLoss(nn.Module):
    """An image classifier whose output is its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = resnet18(num_classes=7)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).logsumexp(1).mean()


def llama() -> nn.Module:
    return Llama(LlamaConfig(**SIZES))


def gpt2() -> nn.Module:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
    config = GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"
    return model


Factory = Callable[[], nn.Module]
MODELS: dict[str, tuple[Factory, dict[str, Tensor]]] = {
    "llama": (llama, {"tokens": TOKENS, "targets": TOKENS}),
    "gpt2": (gpt2, {"input_ids": TOKENS, "labels": TOKENS}),
    "resnet18": (WithLoss, {"x": torch.zeros(2, 3, 32, 32)}),
}


def initial_state(factory: Factory, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the factory makes at `seed`: as its state dict has it, and with all buffers."""
    torch.manual_seed(seed)
    model = factory()
    return model.state_dict(), model.state_dict() | dict(model.named_buffers())


def compile_plan(archive: Path, world: int) -> Path:
    config = archive.with_name("fsdp.yaml")
    config.write_text("optimizer: {name: sgd, lr: 0.01}\n")
    plan = archive.with_name(f"{world}.json")
    command = [BIN / "fsdp-opt", archive, "--config", config, "--world-size", world]
    execute([*command, "--emit", "plan", "-o", plan])
    return plan


def capture_on_meta(name: str, directory: Path, **options: Any) -> Path:
    factory, inputs = MODELS[name]
    with torch.device("meta"):
        model = factory()
    archive = directory / "model.pt"
    fsdp_mlir.capture(model, kwargs=inputs, path=archive, **options)
    assert not archive.with_suffix(".safetensors").exists()
    return archive


@pytest.fixture(scope="module", params=list(MODELS))
def on_meta(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[Path, Factory]:
    factory = MODELS[request.param][0]
    directory = tmp_path_factory.mktemp(request.param)
    return capture_on_meta(request.param, directory, init=factory), factory


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_are_those_of_one_device(on_meta: tuple[Path, Factory], world: int) -> None:
    archive, factory = on_meta
    plan = compile_plan(archive, world)
    weights = plan.with_suffix(".safetensors")
    execute([BIN / "fsdp-run", plan, "--steps", 0, "--seed", SEED, "--save-weights", weights])
    got, (want, _) = load_file(weights), initial_state(factory, SEED)
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, f"initial weights differ: {different}"


def test_training_goes_on_as_from_a_weights_file(on_meta: tuple[Path, Factory]) -> None:
    """The buffers that are not saved are right too, and --seed holds after --init-seed."""
    archive, factory = on_meta
    plan = compile_plan(archive, 2)
    weights = archive.with_name("initial.safetensors")
    save_tensors(weights, {n: x.clone() for n, x in initial_state(factory, SEED + 1)[1].items()})
    folder = archive.with_name("folder")
    folder.mkdir()
    execute([BIN / "fsdp-checkpoint", "convert", weights, folder, "--to", "huggingface"])
    runs = []
    given = [("init", ["--init-seed", SEED + 1])]
    given += [("file", ["--weights", weights]), ("whole", ["--weights", folder])]
    for stem, words in given:
        metrics, trained = plan.with_name(f"{stem}.jsonl"), plan.with_name(f"{stem}.safetensors")
        command = [BIN / "fsdp-run", plan, "--steps", 3, "--seed", SEED, *words]
        execute([*command, "--metrics", metrics, "--save-weights", trained])
        runs.append(read_run(metrics, trained))
    assert len(runs[0].rank_losses) == 3
    for run in runs[1:]:
        assert runs[0].rank_losses == run.rank_losses
        assert all(torch.equal(x, run.weights[name]) for name, x in runs[0].weights.items())
    (folder / "more.safetensors.index.json").write_text("{}")
    done = execute([BIN / "fsdp-run", plan, "--weights", folder], check=False)
    assert done.returncode == 2 and "got a folder with 2" in done.stderr


def test_a_rank_holds_one_whole_parameter_at_a_time(tmp_path: Path) -> None:
    """Eight equal layers, each initialised twice: no more memory than training, but for one."""
    size = 1024

    def factory() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(8)))
        for weight in model.parameters():
            nn.init.normal_(weight, std=0.02)
        return model

    with torch.device("meta"):
        model = factory()
    archive = tmp_path / "model.pt"
    fsdp_mlir.capture(model, [torch.zeros(1, size)], loss=torch.sum, init=factory, path=archive)
    plan = compile_plan(archive, 4)
    weights = tmp_path / "weights.safetensors"
    peaks = []
    for words in (["--save-weights", weights], ["--weights", weights]):
        metrics = tmp_path / "metrics.jsonl"
        execute([BIN / "fsdp-run", plan, "--steps", 1, "--metrics", metrics, *words])
        peaks.append(read_run(metrics, None).metrics[0]["peak_bytes"])
    assert peaks[0] <= peaks[1] + 4 * size * size + 65536


def test_without_init_weights_are_needed(tmp_path: Path) -> None:
    plan = compile_plan(capture_on_meta("llama", tmp_path), 2)
    done = execute([BIN / "fsdp-run", plan, "--steps", 1], check=False)
    assert done.returncode == 2
    assert "names no weights" in done.stderr


def test_llama_3_8b_shape_compiles(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        return llama3_8b(4)

    with torch.device("meta"):
        model = factory()
    archive = tmp_path / "model.pt"
    inputs = {"input_ids": TOKENS, "labels": TOKENS}
    fsdp_mlir.capture(model, kwargs=inputs, init=factory, path=archive)
    text = compile_plan(archive, 8).read_text()
    assert text.count('"write_param"') == len(list(model.parameters()))
    assert text.count('"write_buffer"') == len(list(model.buffers()))
