"""The architectures of transformers and torchvision that the zoo trains, in tiny configurations.

Each row of ARCHITECTURES is built by its library's own classes: sizes are cut down by the
configuration's keys alone. Both sides of a comparison import `build`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB = 64
CLASSES = 2
IMAGE = 64  # pixels a side, of torchvision's

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
}


@dataclass(frozen=True)
class Architecture:
    """A model type of transformers, or a factory of torchvision.models.

    `task` says what it is trained on: causal, masked and seq2seq text, image, audio (waveforms),
    or torchvision (images). `changes` are further keys of the configuration, or
    arguments of the factory.
    """

    name: str
    task: str
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}-{self.task}"


def _rows(task: str, names: str, **changes: Any) -> list[Architecture]:
    return [Architecture(name, task, changes) for name in names.split()]


ARCHITECTURES = [
    *_rows(
        "causal",
        "llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neo "
        "gpt_neox gptj opt bloom falcon mpt stablelm starcoder2 olmo olmo2 olmo3 cohere cohere2 "
        "granite glm glm4 persimmon codegen biogpt xglm ctrl openai-gpt gpt_bigcode nemotron "
        "helium smollm3 ernie4_5 exaone4 seed_oss arcee apertus diffllama hunyuan_v1_dense "
        "jais2 nanochat modernbert-decoder bitnet mamba falcon_mamba",
    ),
    *_rows(
        "masked",
        "bert roberta albert distilbert electra deberta deberta-v2 mpnet camembert xlm-roberta "
        "layoutlm squeezebert mobilebert convbert roformer nystromformer fnet ernie rembert ibert "
        "megatron-bert modernbert data2vec-text eurobert esm longformer big_bird "
        "roberta-prelayernorm luke mra yoso",
    ),
    *_rows(
        "seq2seq",
        "bart mbart pegasus m2m_100 blenderbot blenderbot-small led plbart mvp "
        "bigbird_pegasus fsmt pegasus_x",
    ),
    *_rows("seq2seq", "t5 mt5 umt5 longt5 switch_transformers", decoder_start_token_id=1),
    *_rows("seq2seq", "marian", decoder_vocab_size=VOCAB),
    *_rows(
        "image",
        "vit beit resnet regnet mobilenet_v1 mobilenet_v2 "
        "mobilevit poolformer dinov2 dinov2_with_registers "
        "data2vec-vision focalnet ijepa vit_msn cvt bit swiftformer "
        "hgnet_v2 textnet",
    ),
    *_rows(
        "image", "swin swinv2", embed_dim=16, depths=[2], num_heads=[2], window_size=2, patch_size=4
    ),
    *_rows("image", "convnext convnextv2", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    *_rows(
        "image",
        "pvt_v2 segformer",
        hidden_sizes=[16, 32],
        depths=[2, 2],
        num_encoder_blocks=2,
        num_attention_heads=[1, 2],
    ),
    *_rows(
        "audio",
        "wav2vec2 hubert unispeech unispeech-sat wavlm data2vec-audio sew sew-d",
        apply_spec_augment=False,  # its spans are drawn by NumPy
    ),
    *_rows(
        "torchvision",
        "resnet18 resnet50 vgg11_bn densenet121 mobilenet_v2 mobilenet_v3_small efficientnet_b0 "
        "convnext_tiny swin_t swin_v2_t regnet_y_400mf squeezenet1_1 shufflenet_v2_x0_5 "
        "mnasnet0_5 alexnet wide_resnet50_2 resnext50_32x4d",
    ),
    *_rows("torchvision", "vit_b_16", image_size=IMAGE),
    *_rows("torchvision", "maxvit_t", input_size=(224, 224)),
]

BY_KEY = {architecture.key: architecture for architecture in ARCHITECTURES}

_AUTO = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image": "AutoModelForImageClassification",
    "audio": "AutoModelForSequenceClassification",
}


class _Classifier(nn.Module):
    """A model of torchvision with its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(pixel_values), labels)


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
    for name, value in _TINY.items():
        if _takes(config, name) and name not in architecture.changes:
            setattr(config, name, value)
    for name, value in architecture.changes.items():
        setattr(config, name, value)
    if architecture.task == "audio":
        auto = transformers.AutoModelForAudioClassification
    else:
        auto = getattr(transformers, _AUTO[architecture.task])
    return auto.from_config(config).train()


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
    if architecture.task in ("image", "torchvision"):
        size, _ = architecture.changes.get("input_size", (IMAGE, IMAGE))
        if architecture.task == "image":
            size = 32
        pixels = torch.randn(samples, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": labels}
    if architecture.task == "audio":
        return {
            "input_values": torch.randn(samples, 4000, generator=generator),
            "labels": labels,
        }
    tokens = torch.randint(4, VOCAB, (samples, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens.clone()}
