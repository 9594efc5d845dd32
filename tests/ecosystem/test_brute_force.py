"""Laplace on networks of Hugging Face and peft against Jacobians of `torch.func` and the definition of the factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dubito.likelihoods import Categorical

from curvature.curvature_cases import Case, gauss_newton, randomised
from curvature.kronecker_definition import definition
from dubito import Laplace, select
from dubito.curvature import Engine
from dubito.networks.selection import Selection
from ecosystem import tiny_models
from extras import needs

needs("transformers")
needs("peft")

SMALL = {
    "vocab_size": 10, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6,
    "max_position_embeddings": 8,
}  # fmt: skip
NETWORKS = {
    "BERT": lambda: tiny_models.bert(**SMALL),
    "GPT-2": lambda: tiny_models.gpt2(vocab_size=10, n_positions=8, n_embd=4, n_layer=1),
    "Llama": lambda: tiny_models.llama(**SMALL),
    "ViT": lambda: tiny_models.vit(hidden_size=4, num_hidden_layers=1, intermediate_size=6, image_size=8, patch_size=4),
    "LoRA": lambda: tiny_models.lora(tiny_models.bert(**SMALL)),
}


def case(name: str) -> Case:
    torch.manual_seed(0)
    model = randomised(NETWORKS[name]())
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(tiny_models.CLASSES, (4,), generator=generator)
    if name == "ViT":
        return Case(model, torch.randn(4, 3, 8, 8, generator=generator).double(), Categorical(), targets)
    tokens = torch.randint(1, 10, (4, 5), generator=generator)
    return Case(model, {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, Categorical(), targets)


def variances(drawn: Case, structure: Any, **options: Any) -> dict[str, torch.Tensor]:
    recipe = Laplace(structure, prior_precision=1.0, **options)
    posterior = recipe.fit(drawn.model, (drawn.inputs, drawn.targets), progress=False)
    return posterior.marginals()[1]


@pytest.mark.parametrize("name", NETWORKS)
def test_full_and_diagonal_posteriors_equal_brute_force(name: str) -> None:
    drawn = case(name)
    selection = Selection.all_of(drawn.model)
    matrix = gauss_newton(drawn, selection)
    precision = matrix + torch.eye(len(matrix), dtype=matrix.dtype)
    # the normalization of Llama computes in float32
    tolerance = 1e-5 if name == "Llama" else 1e-10
    for structure, expected in (("full", precision.inverse().diagonal()), ("diag", 1 / precision.diagonal())):
        found = variances(drawn, structure)
        for key, value in selection.fill(expected).items():
            if key in selection.names:
                torch.testing.assert_close(found[key].double(), value, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", NETWORKS)
def test_kronecker_factors_equal_their_definition(name: str) -> None:
    drawn = case(name)
    engine = Engine(drawn.model, Selection.all_of(drawn.model).names)
    engine.run(drawn.inputs)
    ruled = [key for key in engine.names if key not in engine.unruled]
    sizes = {key: value.numel() for key, value in drawn.model.named_parameters() if value.requires_grad}
    assert sum(sizes[key] for key in ruled) > 0.8 * sum(sizes.values())  # the others are positions and normalizations
    found = variances(drawn, "kron", weights=select.layers(tuple(ruled)))
    blocks = definition(drawn, "expand")
    tolerance = 1e-5 if name == "Llama" else 1e-10
    for key in ruled:
        block = blocks[key] + torch.eye(len(blocks[key]), dtype=torch.float64)
        expected = block.inverse().diagonal().reshape(found[key].shape)
        torch.testing.assert_close(found[key].double(), expected, rtol=tolerance, atol=tolerance, msg=key)
