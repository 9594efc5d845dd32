"""Tiny networks of other libraries with random weights, each with a few examples of what it takes.

Nothing is downloaded. `benchmarks/ecosystem.py` uses the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from extras import allow_torchvision

Data = tuple[Any, Tensor]

CLASSES, TOKENS, LENGTH = 3, 50, 6


def images(size: int = 32, count: int = 12) -> Data:
    """Return random pictures with random classes."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(count, 3, size, size, generator=generator)
    return pictures, torch.randint(CLASSES, (count,), generator=generator)


def sentences(count: int = 12) -> Data:
    """Return random tokens with random classes."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, TOKENS, (count, LENGTH), generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, labels


def texts(count: int = 12) -> Data:
    """Return random tokens, labelled by themselves as for a causal language model."""
    inputs, _ = sentences(count)
    return inputs, inputs["input_ids"].clone()


def texts_with_classes(count: int = 12) -> Data:
    """Return random tokens with a class for each of them."""
    inputs, _ = sentences(count)
    return inputs, inputs["input_ids"] % CLASSES


def _timm(name: str, **settings: Any) -> nn.Module:
    allow_torchvision()
    import timm

    return timm.create_model(name, num_classes=CLASSES, **settings)


def _narrow(kind: str, generator: str, width: float, **settings: Any) -> nn.Module:
    """Return an efficient network that is narrower than any that timm has a name for."""
    allow_torchvision()
    import timm.models

    build = getattr(getattr(timm.models, kind), generator)
    return build(num_classes=CLASSES, channel_multiplier=width, **settings)


def _hugging_face(config: str, model: str, **settings: Any) -> nn.Module:
    allow_torchvision()  # transformers imports torchvision if it is there
    import transformers

    transformers.logging.set_verbosity_error()
    return getattr(transformers, model)(getattr(transformers, config)(num_labels=CLASSES, **settings))


_BERT = {
    "vocab_size": TOKENS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip
_LLAMA = _BERT | {"num_key_value_heads": 1, "pad_token_id": 0}


def lora(base: nn.Module, **settings: Any) -> nn.Module:
    """Return a network of Hugging Face with LoRA adapters beside its attention, and its head trainable."""
    import peft

    return peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, **settings))


def bert(**settings: Any) -> nn.Module:
    """Return a BERT that classifies sentences."""
    return _hugging_face("BertConfig", "BertForSequenceClassification", **(_BERT | settings))


def gpt2(model: str = "GPT2ForSequenceClassification", **settings: Any) -> nn.Module:
    """Return a GPT-2."""
    size = {"vocab_size": TOKENS, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}
    return _hugging_face("GPT2Config", model, **(size | settings))


def llama(model: str = "LlamaForSequenceClassification", **settings: Any) -> nn.Module:
    """Return a Llama."""
    return _hugging_face("LlamaConfig", model, **(_LLAMA | settings))


def vit(**settings: Any) -> nn.Module:
    """Return a ViT of Hugging Face."""
    size = {
        "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 32,
        "patch_size": 8,
    }  # fmt: skip
    return _hugging_face("ViTConfig", "ViTForImageClassification", **(size | settings))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Data]]] = {
    "timm resnet18": (lambda: _timm("resnet18", channels=(8, 8, 16, 16)), images),
    "timm ConvNeXt": (lambda: _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), images),
    "timm ViT": (
        lambda: _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2), images,
    ),
    "timm MobileNetV3": (
        lambda: _narrow("mobilenetv3", "_gen_mobilenet_v3", 0.1, variant="mobilenetv3_small_050"), images,
    ),
    "timm EfficientNet": (
        lambda: _narrow("efficientnet", "_gen_efficientnet", 0.1, variant="efficientnet_b0", depth_multiplier=0.1),
        images,
    ),
    "BERT": (bert, sentences),
    "RoBERTa": (
        lambda: _hugging_face("RobertaConfig", "RobertaForSequenceClassification", **(_BERT | {"pad_token_id": 0})),
        sentences,
    ),
    "GPT-2": (gpt2, sentences),
    "Llama": (llama, sentences),
    "Qwen2": (lambda: _hugging_face("Qwen2Config", "Qwen2ForSequenceClassification", **_LLAMA), sentences),
    "T5": (
        lambda: _hugging_face(
            "T5Config", "T5ForTokenClassification", vocab_size=TOKENS, d_model=16, d_kv=8, d_ff=32, num_layers=2,
            num_heads=2, pad_token_id=0,
        ),
        texts_with_classes,
    ),
    "ViT": (vit, images),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, Data]:
    """Return one of `MODELS` in evaluation mode, with data."""
    build, data = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().eval(), data()
