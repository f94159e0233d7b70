"""The models of the zoo, in tiny configurations, and their inputs.

Each row of ARCHITECTURES (zoo_rows.py) is built by its library's own classes: sizes are cut down by
the configuration's keys alone. Both sides of a comparison import `build`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from zoo_rows import BY_KEY
from zoo_tasks import IMAGE, IMAGE_TOKEN, TASKS, VOCAB, Task

CLASSES = 2

# Keys of transformers' configurations that make a model small, where it has them.
_TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "dim": 32,
    "hidden_dim": 64,
    "embedding_size": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "num_hidden_layers": 3,
    "n_layer": 3,
    "n_layers": 3,
    "num_layers": 3,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "num_decoder_layers": 3,
    "num_encoder_layers": 3,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_kv": 8,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "n_ctx": 64,
    "type_vocab_size": 2,
    "rotary_dim": 8,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "sep_token_id": 3,
    "layerdrop": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    # State spaces.
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    # Several modalities.
    "projection_dim": 16,
    "num_mel_bins": 16,
    "max_source_positions": 32,
    "max_target_positions": 32,
}


class _Classifier(nn.Module):
    """A model of torchvision with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(pixel_values), labels)


class _Loss(nn.Module):
    """A model of transformers with a loss made of its outputs, or with constant arguments."""

    def __init__(self, net: nn.Module, task: Task) -> None:
        super().__init__()
        self.net = net
        self.task = task

    def forward(self, **inputs: Tensor) -> Tensor:
        output = self.net(**inputs, **self.task.constants)
        if not self.task.squares:
            return output.loss
        return sum(x.square().mean() for x in _floats(output))


def _floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() and output.requires_grad else []
    if isinstance(output, dict):
        output = output.values()
    if not isinstance(output, str | Iterable):
        return []
    return [x for item in output for x in _floats(item)]


def build(key: str) -> nn.Module:
    """The model in train mode, from seed 0."""
    architecture = BY_KEY[key]
    torch.manual_seed(0)
    if architecture.task == "torchvision":
        import torchvision

        factory = getattr(torchvision.models, architecture.name)
        return _Classifier(factory(num_classes=CLASSES, **architecture.changes)).train()
    import transformers

    config = transformers.AutoConfig.for_model(architecture.name)
    config = type(config)(**_tiny(config, architecture.changes))
    for name, value in architecture.changes.items():  # some constructors pass over some
        if name not in config.sub_configs:
            setattr(config, name, value)
    task = TASKS[architecture.task]
    if "*" in task.head:
        family = transformers.MODEL_MAPPING[type(config)].__name__.removesuffix("Model")
        model = getattr(transformers, task.head.replace("*", family))(config)
    else:
        model = getattr(transformers, task.head).from_config(config)
    _reshape_scalars(model)
    if task.squares or task.constants:
        model = _Loss(model, task)
    return model.train()


def _reshape_scalars(model: nn.Module) -> None:
    """FSDP2 takes no scalar parameters (the scale of contrastive losses): each becomes [1]."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.dim() == 0:
                setattr(module, name, nn.Parameter(parameter.detach().reshape(1)))


def _tiny(config: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make a small configuration of this one's class."""
    values = {key: value for key, value in _TINY.items() if _takes(config, key)}
    for key in config.sub_configs:
        inner = getattr(config, key, None)
        if "model_type" in changes.get(key, {}):
            values[key] = changes[key]
        elif inner is not None:
            values[key] = _tiny(inner, changes.get(key, {}))
            values[key]["model_type"] = inner.model_type
    return values | {key: value for key, value in changes.items() if key not in config.sub_configs}


def _takes(config: Any, name: str) -> bool:
    """Whether a configuration has one number, or nothing yet, under this key, and it can be set."""
    derived = isinstance(getattr(type(config), name, None), property)
    return (
        hasattr(config, name)
        and not derived
        and not isinstance(getattr(config, name), (list, tuple))
    )


def longest_list(model: nn.Module) -> str:
    """The pattern of the modules in the longest ModuleList or Sequential: the units."""
    lists = [
        (len(module), path)
        for path, module in model.named_modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and path
        if any(child._parameters or list(child.parameters()) for child in module)
    ]
    if not lists:
        return "*"
    return max(lists, key=lambda entry: entry[0])[1] + ".*"


def batch(key: str, samples: int) -> dict[str, Tensor]:
    """Inputs by name, the same in every run."""
    architecture = BY_KEY[key]
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    if architecture.task == "torchvision":
        size, _ = architecture.changes.get("input_size", (IMAGE, IMAGE))
        pixels = torch.randn(samples, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    inputs = {**TASKS[architecture.task].inputs, **architecture.inputs}
    made: dict[str, Tensor] = {}
    for name, spec in inputs.items():
        if spec is None:
            made[name] = made["input_ids"].clone()
            continue
        kind, shape = spec if isinstance(spec[0], str) else ("noise", spec)
        size = (samples, *shape)
        if kind == "noise":
            made[name] = torch.randn(size, generator=generator)
        elif kind == "tokens":
            made[name] = torch.randint(4, VOCAB, size, generator=generator)
        elif kind == "images":
            made[name] = torch.randint(4, VOCAB, size, generator=generator)
            made[name][:, : architecture.changes.get("image_seq_length", 4)] = IMAGE_TOKEN
        elif kind == "classes":
            made[name] = (
                torch.randint(CLASSES, size, generator=generator) if shape else labels.clone()
            )
        else:
            made[name] = torch.full(size, {"ones": 1, "fours": 4}[kind])
    return made
