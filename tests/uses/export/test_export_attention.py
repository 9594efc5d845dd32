"""Recorded attention computes the same numbers with fewer and cheaper operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import models
from dubito.uses.export import export_network
from dubito.uses.export.graph import record
from extras import needs

aten = torch.ops.aten


class Attention(nn.Module):
    """Attention over the states of tokens and positions; `heads` has the numbers of queries, keys and values."""

    def __init__(self, masked: float = -1e38, heads: tuple[int, int, int] = (2, 2, 2), bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(30, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 4 * each, bias) for each in heads)
        self.masked = masked

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        (tokens,) = inputs
        states = self.tokens(tokens) + self.tokens(torch.arange(5).expand(tokens.shape[0], 5))
        q, k, v = (layer(states).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in self.layers)
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k.expand(-1, q.shape[1], -1, -1)) / 2
        scores = scores.masked_fill((tokens == 0)[:, None, None], self.masked)
        return (torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v),)


@pytest.mark.parametrize(
    ("module", "masks"),
    [
        (Attention(), 0),
        (Attention(heads=(2, 1, 2)), 0),
        (Attention(masked=float("-inf"), bias=False), 0),
        (Attention(masked=-1e4), 1),  # scores beside it are not lost in rounding
        (Attention(masked=-1e300).double(), 0),
    ],
)
def test_attention_takes_few_operations(module: Attention, masks: int) -> None:
    tokens = torch.randint(1, 30, (6, 5), generator=torch.Generator().manual_seed(0))
    tokens[:3, 3:] = 0
    if module.masked > float("-inf"):
        tokens[0] = 0  # nothing but padding
    program = record(module, (tokens,))
    found = [node.target for node in program.graph.nodes]
    assert found.count(aten.linear.default) == 1
    assert found.count(aten.embedding.default) == 1
    assert found.count(aten.masked_fill.Scalar) == masks
    assert aten.einsum.default not in found
    for rows in (1, 6):
        torch.testing.assert_close(program.module()(tokens[:rows]), module(tokens[:rows]), rtol=1e-5, atol=1e-6)


class Mixer(nn.Module):
    """Dense layers of sequences, with and without a bias, a function between them, and a shape that is changed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(4, 3, bias=False)

    def forward(self, *inputs: Tensor) -> tuple[Tensor]:
        (x,) = inputs
        x = x + self.second(F.gelu(self.first(x), approximate="tanh"))
        return (self.third(x.flatten(1).unflatten(1, (-1, 4))),)


@pytest.mark.parametrize("length", [(5,), (2, 3)])  # axes between the batch and the features
def test_dense_layers_of_sequences_see_rows(length: tuple[int, ...]) -> None:
    module, x = Mixer(), torch.randn(7, *length, 6, generator=torch.Generator().manual_seed(0))
    if length == (5,):
        x = torch.cat([x, x[:, :1]], 1)  # 6 x 6 divides into rows of 4
    program = record(module, (x,))
    layers = [node for node in program.graph.nodes if node.target == aten.linear.default]
    assert [node.meta["val"].ndim for node in layers] == [2, 2, 3]
    assert layers[1].args[0].target == aten.gelu.default  # nothing but the function between them
    assert [node.target for node in program.graph.nodes].count(aten.flatten.using_ints) == 0
    for rows in (1, 7):
        torch.testing.assert_close(program.module()(x[:rows]), module(x[:rows]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("equation", "is_product"),
    [
        ("bij,bjk->bik", True), ("bij,bkj->bik", True), ("bji,bjk->bik", True), ("bji,bkj->bik", True),
        ("bij,bjk->bki", False), ("bij,bjk->bk", False), ("bij,bij->bi", False), ("...ij,...jk->...ik", False),
        ("bij,bjk", False), ("bij,cjk->ik", False),
    ],
)  # fmt: skip
def test_an_einsum_is_a_product_where_it_is_one(equation: str, is_product: bool) -> None:
    class Program(nn.Module):
        def forward(self, *inputs: Tensor) -> tuple[Tensor]:
            (x,) = inputs
            return (torch.einsum(equation, x, 2 * x + 1),)

    x = torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(0))
    program = record(Program(), (x,))
    assert (aten.matmul.default in {node.target for node in program.graph.nodes}) == is_product
    torch.testing.assert_close(program.module()(x[:2])[0], torch.einsum(equation, x[:2], 2 * x[:2] + 1))


def test_layers_that_are_used_otherwise_stay_apart() -> None:
    class Program(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, *inputs: Tensor) -> tuple[Tensor]:
            (x,) = inputs
            first, second = self.one(x), self.other(x)
            heads = [each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (first, second)]
            return (heads[0] * heads[1] + F.gelu(first).sum(),)

    module, x = Program(), torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(0))
    program = record(module, (x,))
    assert [node.target for node in program.graph.nodes].count(aten.linear.default) == 2
    torch.testing.assert_close(program.module()(x), module(x))


def test_onnxruntime_joins_what_is_written(tmp_path: Path) -> None:
    onnx, onnxruntime = needs("onnx"), needs("onnxruntime")
    model = models.transformer(30, 2, length=6, width=16, depth=1, heads=4)
    made = export_network(model, tmp_path / "net.onnx", torch.randint(0, 30, (4, 6)))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fast.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(made.path), options, providers=["CPUExecutionProvider"])
    found = {node.op_type for node in onnx.load(tmp_path / "fast.onnx").graph.node}
    assert {"Gelu", "Gemm", "FusedMatMul"} <= found
    assert not found & {"Einsum", "Erf", "Expand"}
