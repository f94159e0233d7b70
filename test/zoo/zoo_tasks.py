"""What the zoo trains models on: the classes of transformers that make them, and their inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

VOCAB = 64
IMAGE = 64  # pixels a side, of torchvision's


@dataclass(frozen=True)
class Task:
    """The class of transformers that makes the model, and its inputs by name.

    A class with a * is the family's own, such as PatchTSTForPrediction of *ForPrediction. An input
    is the shape of noise, or ("kind", shape): `tokens`, `classes`, `ones`, or `images`: tokens of
    which the first ones are IMAGE_TOKEN. None are the tokens again. With `squares` the loss is the
    mean square of all outputs, not the model's own. `constants` are arguments that are no tensors.
    """

    head: str
    inputs: dict[str, Any]
    squares: bool = False
    constants: dict[str, Any] = field(default_factory=dict)


IMAGE_TOKEN = 3
_TOKENS = ("tokens", (16,))
_CLASS = ("classes", ())
_TEXT = {"input_ids": _TOKENS, "labels": None}
_PIXELS = (3, 32, 32)
_IMAGE = {"pixel_values": _PIXELS}
TASKS = {
    "causal": Task("AutoModelForCausalLM", _TEXT),
    "masked": Task("AutoModelForMaskedLM", _TEXT),
    "seq2seq": Task("AutoModelForSeq2SeqLM", _TEXT),
    "classification": Task(
        "AutoModelForSequenceClassification", {"input_ids": _TOKENS, "labels": _CLASS}
    ),
    "token-classification": Task(
        "AutoModelForTokenClassification", {"input_ids": _TOKENS, "labels": ("classes", (16,))}
    ),
    "question": Task(
        "AutoModelForQuestionAnswering",
        {"input_ids": _TOKENS, "start_positions": _CLASS, "end_positions": _CLASS},
    ),
    "text-encoder": Task("AutoModel", {"input_ids": _TOKENS}, squares=True),
    "image": Task("AutoModelForImageClassification", {**_IMAGE, "labels": _CLASS}),
    "image-classifier": Task("*ForImageClassification", {**_IMAGE, "labels": _CLASS}),
    "image-encoder": Task("AutoModel", _IMAGE, squares=True),
    "image-pretraining": Task("AutoModelForPreTraining", _IMAGE),
    "video": Task(
        "AutoModelForVideoClassification", {"pixel_values": (4, *_PIXELS), "labels": _CLASS}
    ),
    "detection": Task("AutoModelForObjectDetection", {"pixel_values": (3, 64, 64)}, squares=True),
    "depth": Task("AutoModelForDepthEstimation", _IMAGE, squares=True),
    "contrastive": Task(
        "AutoModel", {"input_ids": _TOKENS, **_IMAGE}, constants={"return_loss": True}
    ),
    "pair-encoder": Task("AutoModel", {"input_ids": _TOKENS, **_IMAGE}, squares=True),
    "image-text": Task(
        "AutoModelForImageTextToText", {"input_ids": ("images", (16,)), "labels": _TOKENS, **_IMAGE}
    ),
    "audio": Task("AutoModelForAudioClassification", {"input_values": (4000,), "labels": _CLASS}),
    "features": Task(
        "AutoModelForAudioClassification", {"input_features": (16, 64), "labels": _CLASS}
    ),
    "speech": Task("AutoModelForSpeechSeq2Seq", {"input_features": (16, 64), "labels": _TOKENS}),
    "spoken": Task("AutoModelForSpeechSeq2Seq", {"input_values": (4000,), "labels": _TOKENS}),
    "waveform": Task("AutoModel", {"input_values": (1, 4000)}, squares=True),
    "patches": Task("*ForPrediction", {"past_values": (32, 3), "future_values": (8, 3)}),
    "series": Task(
        "*ForPrediction",
        {
            "past_values": (19,),
            "past_time_features": (19, 2),
            "past_observed_mask": ("ones", (19,)),
            "future_values": (8,),
            "future_time_features": (8, 2),
        },
    ),
    "decision": Task(
        "AutoModel",
        {
            "states": (8, 5),
            "actions": (8, 3),
            "rewards": (8, 1),
            "returns_to_go": (8, 1),
            "timesteps": ("tokens", (8,)),
            "attention_mask": ("ones", (8,)),
        },
        squares=True,
    ),
}
