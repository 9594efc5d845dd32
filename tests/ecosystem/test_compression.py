"""Heads and hidden widths of the transformers of Hugging Face go, and the small network equals the masked one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.compression import Budget, compress

from dubito import Laplace, Posterior, compression, rules
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.shrink import largest_difference
from ecosystem import tiny_models
from extras import needs

needs("transformers")

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}


def make(name: str) -> tuple[Posterior, Any]:
    model, data = tiny_models.make(name)
    if name == "Llama":
        torch.manual_seed(0)
        model = tiny_models.llama(**GROUPED).eval()
    return Laplace(structure="diag", prior_precision=10.0).fit(model, data, progress=False), data


@pytest.mark.parametrize(
    ("name", "reader", "inputs"),
    [
        ("GPT-2", "transformer.h.1.attn.c_proj", 8),
        ("Llama", "model.layers.1.self_attn.o_proj", 8),
        ("T5", "transformer.encoder.block.1.layer.0.SelfAttention.o", 8),
        ("BERT", "bert.encoder.layer.1.attention.output.dense", 8),
    ],
)
def test_heads_and_widths(name: str, reader: str, inputs: int, tmp_path: Path) -> None:
    posterior, data = make(name)
    made = compress(posterior, rules.Magnitude(0.5, scope="layer"), structure="units", data=data)
    assert largest_difference(made.plan.masked(made.dense), made.model, data[0]) < 1e-5
    weight = made.model.get_parameter(f"{reader}.weight")
    assert sorted(weight.shape) == sorted((inputs, 16))
    assert num_macs(made.model, data[0]) < 0.6 * num_macs(made.dense, data[0])
    made.save(tmp_path / "small", format="dense")
    assert largest_difference(compression.load(tmp_path / "small", made.dense), made.model, data[0]) == 0
    heads = compress(posterior, rules.Magnitude(0.5, scope="layer"), structure="heads", data=data)
    assert set(heads.plan.units) < set(made.plan.units)
    small = compress(posterior, budget=Budget(macs=0.7), data=data)
    assert num_macs(small.model, data[0]) <= 0.7 * num_macs(small.dense, data[0])
