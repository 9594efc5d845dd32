"""Units of transformers, found by probing: heads and hidden widths, also where the code reads the number of heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dubito.compression import Budget, compress
from dubito.errors import FileFormatError, UnsupportedError
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import MAP, Laplace, Posterior, compression, rules
from dubito.uses.compression import storage
from dubito.uses.compression.report import num_macs
from dubito.uses.compression.shrink import largest_difference
from dubito.uses.compression.units_by_probing import probe

WIDTH, HEADS, TOKENS, CLASSES = 12, 3, 11, 3


class Fused(nn.Module):
    """Attention with one layer for queries, keys and values, whose code reads its width and its heads, as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.num_heads, self.head_dim = WIDTH, HEADS, WIDTH // HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.view(*each.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)
            for each in self.qkv(x).split(self.split_size, dim=2)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Grouped(nn.Module):
    """Attention whose heads share keys and values in pairs, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = 3
        self.q, self.k, self.v = (nn.Linear(WIDTH, 3 * heads, bias=False) for heads in (4, 2, 2))
        self.out = nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 10, bias=False), nn.Linear(WIDTH, 10, bias=False)
        self.down = nn.Linear(10, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Reader(nn.Module):
    """Reads tokens, and returns a dict as the models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        plain = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))
        self.blocks = nn.ModuleList([Block(Fused(), plain), Block(Grouped(), Gated())])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x.mean(1))}


@pytest.fixture(scope="module")
def data() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (64, 5), generator=generator)
    return {"input_ids": tokens}, tokens.sum(1) % CLASSES


@pytest.fixture(scope="module")
def posterior(data: Any) -> Posterior:
    torch.manual_seed(0)
    return Laplace(structure="diag", prior_precision=1.0).fit(Reader(), data, progress=False)


def test_heads_and_widths_are_found(data: Any) -> None:
    found = {group.name: group for group in probe(Reader().eval(), data[0])}
    sizes = {name: (group.size, len(group.producers)) for name, group in found.items()}
    assert sizes == {
        "blocks.0.attention.qkv": (HEADS, 1), "blocks.0.mlp.0": (8, 1),
        "blocks.1.attention.q": (2, 3), "blocks.1.mlp.gate": (10, 2),
    }  # fmt: skip
    fused = found["blocks.0.attention.qkv"]
    assert set(fused.counts) == {("blocks.0.attention", "split_size", 4), ("blocks.0.attention", "num_heads", 1)}
    assert fused.producers[0].index[fused.producers[0].unit == 1].tolist() == [
        start + 4 + i for start in (0, WIDTH, 2 * WIDTH) for i in range(4)
    ]
    shared = found["blocks.1.attention.q"]
    assert [part.index[part.unit == 1].tolist() for part in shared.producers] == [[*range(6, 12)], *[[3, 4, 5]] * 2]


@pytest.mark.parametrize("structure", ["units", "heads"])
def test_the_small_network_equals_the_masked_one(
    posterior: Posterior, data: Any, structure: Any, tmp_path: Path
) -> None:
    made = compress(posterior, rules.Magnitude(0.5, scope="layer"), structure=structure, data=data)
    assert largest_difference(made.plan.masked(made.dense), made.model, data[0]) < 1e-6
    assert made.plan.counts == {"blocks.0.attention": {"split_size": 4, "num_heads": 1}}
    assert made.model.get_submodule("blocks.1.attention.v").out_features == 3  # type: ignore[comparison-overlap]
    assert (made.model.get_submodule("blocks.1.mlp.down").in_features == 5) == (structure == "units")  # type: ignore[comparison-overlap]
    for form in ("dense", "csr"):
        made.save(tmp_path / form, format=form)  # type: ignore[arg-type]
        assert largest_difference(compression.load(tmp_path / form, Reader()), made.model, data[0]) == 0
    compression.save(tmp_path / "plain", made.model)  # knows nothing of the plan
    assert largest_difference(compression.load(tmp_path / "plain", Reader()), made.model, data[0]) == 0
    made.save(tmp_path / "coded")
    assert largest_difference(compression.load(tmp_path / "coded", Reader()), made.model, data[0]) < 0.1
    with pytest.raises(FileFormatError, match="saved for another network"):
        compression.load(tmp_path / "dense", Reader().blocks)


def test_an_old_file_without_numbers_of_heads_warns(
    posterior: Posterior, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = compress(posterior, rules.Magnitude(0.5, scope="layer"), structure="heads", data=data).model
    narrow = rules.Magnitude({"blocks.0.mlp.0": 0.5}, scope="layer")
    widths = compress(posterior, narrow, structure="units", data=data).model
    with monkeypatch.context() as old:
        old.setattr(storage, "_integers", lambda model: {})
        compression.save(tmp_path / "heads", heads)
        compression.save(tmp_path / "widths", widths)
    with pytest.warns(UserWarning, match="'num_heads', .* of 'blocks.0.attention', and 'qkv' is narrower"):
        compression.load(tmp_path / "heads", Reader())
    assert largest_difference(compression.load(tmp_path / "widths", Reader()), widths, data[0]) == 0  # no warning


@pytest.mark.slow
def test_a_budget_of_operations_is_met(posterior: Posterior, data: Any) -> None:
    made = compress(posterior, budget=Budget(macs=0.6), data=data)
    assert num_macs(made.model, data[0]) <= 0.6 * num_macs(made.dense, data[0])
    assert "blocks.0.mlp.0" in made.plan.units or "blocks.1.mlp.gate" in made.plan.units


def test_no_heads_is_one_sentence(data: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    point = MAP(train=False).fit(model, (torch.randn(20, 4), torch.arange(20) % 3), progress=False)
    with pytest.raises(UnsupportedError, match="No attention heads were found"):
        compress(point, rules.Magnitude(0.5), structure="heads", example=torch.randn(2, 4))
