"""The exact Hessian of layers whose fast kernels torch cannot differentiate twice."""

from __future__ import annotations

import warnings

import pytest
import torch
from dubito.errors import UnsupportedError
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dubito import Laplace, Training
from fitting.valid_networks import Attention, Bag

HESSIAN = Laplace(structure="full", curvature="hessian", prior_precision=1.0)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.arange(9) % 2


def fit(model: nn.Module) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the layers have no rule: that they are slower is known here
        return HESSIAN.fit(model, data(), training=Training(epochs=0), progress=False)


def test_attention_equals_brute_force() -> None:
    torch.manual_seed(0)
    model = Attention(2).double()
    posterior = fit(model)
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    x, y = data()

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = flat.split([shape.numel() for shape in shapes])
        weights = {name: part.view(shape) for name, part, shape in zip(names, parts, shapes, strict=True)}
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (x,)), y, reduction="sum")

    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    with sdpa_kernel(SDPBackend.MATH):
        hessian = torch.autograd.functional.hessian(loss, flat)
    values, vectors = torch.linalg.eigh(hessian)
    nearest = vectors @ (values.clamp_min(0)[:, None] * vectors.T)
    precision = nearest + torch.eye(len(flat), dtype=torch.float64)
    variance = torch.cat([v.flatten() for v in posterior.marginals()[1].values()])
    assert torch.allclose(variance.double(), precision.inverse().diagonal(), rtol=1e-6)


def test_an_embedding_bag_is_refused_in_words() -> None:
    with pytest.raises(UnsupportedError, match=r"torch cannot differentiate a layer twice .*: choose curvature='ggn'"):
        fit(Bag(2).double())
