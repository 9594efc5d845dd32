"""Training steps of other libraries for variational inference, each as its own documentation writes them.

Every function takes a plain network, a batch and the number of data, and returns a function that takes one step. A
library that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], Any]
SCALE = 0.03


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


def _loop(model: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimizer = _adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step


def bayesian_torch(kind: str) -> Callable[..., Step]:
    """Intel's bayesian-torch; its KL is a mean over weights, so only the time is comparable."""

    def make(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
        from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

        prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -3.0}
        dnn_to_bnn(network, {**prior, "type": kind, "moped_enable": False, "moped_delta": 0.5})
        return _loop(network, lambda: F.cross_entropy(network(x), y) + get_kl_loss(network) / num_data)

    return make


def torchbnn(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """The library torchbnn."""
    import torchbnn as bnn

    own = {"prior_mu": 0.0, "prior_sigma": 1.0}

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return bnn.BayesLinear(in_features=layer.in_features, out_features=layer.out_features, **own)
        if isinstance(layer, nn.Conv2d):
            sizes = {"in_channels": layer.in_channels, "out_channels": layer.out_channels}
            return bnn.BayesConv2d(kernel_size=layer.kernel_size, padding=layer.padding, **sizes, **own)
        return layer

    model, kl = _rebuilt(network, convert), bnn.BKLLoss(reduction="sum", last_layer_only=False)
    return _loop(model, lambda: F.cross_entropy(model(x), y) + kl(model) / num_data)


def blitz(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """The library blitz-bayesian-pytorch."""
    from blitz.modules import BayesianConv2d, BayesianLinear

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return BayesianLinear(layer.in_features, layer.out_features)
        if isinstance(layer, nn.Conv2d):
            padding = layer.padding[0]
            return BayesianConv2d(layer.in_channels, layer.out_channels, layer.kernel_size, padding=padding)
        return layer

    model = _rebuilt(network, convert)
    layers = [m for m in model.modules() if isinstance(m, BayesianLinear | BayesianConv2d)]

    def loss() -> Tensor:
        nll = F.cross_entropy(model(x), y)
        return nll + sum(m.log_variational_posterior - m.log_prior for m in layers) / num_data

    return _loop(model, loss)


def pyro(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """Pyro with an automatic normal guide and its mean-field bound; its optimizer is its own Adam."""
    import pyro as library
    import pyro.distributions as dist
    from pyro.infer import SVI, TraceMeanField_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn.module import to_pyro_module_

    library.clear_param_store()
    to_pyro_module_(network)
    for module in network.modules():
        for name, value in list(module.named_parameters(recurse=False)):
            setattr(module, name, library.nn.PyroSample(dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.ndim)))

    def model(x: Tensor, y: Tensor) -> None:
        logits = network(x)
        with library.plate("data", num_data, subsample_size=len(x)):
            library.sample("y", dist.Categorical(logits=logits), obs=y)

    guide = AutoNormal(model, init_scale=SCALE)
    inference = SVI(model, guide, library.optim.Adam({"lr": 1e-3}), TraceMeanField_ELBO())
    return lambda: inference.step(x, y)


def posteriors(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """posteriors, diagonal; its optimizer is that of torchopt."""
    import posteriors as library
    import torchopt

    parameters = {name: value.detach().clone() for name, value in network.named_parameters()}

    def log_posterior(values: Any, batch: Any) -> tuple[Tensor, Tensor]:
        output = torch.func.functional_call(network, values, batch[0])
        prior = library.diag_normal_log_prob(values, 0.0, 1.0)
        return -F.cross_entropy(output, batch[1]) + prior / num_data, output

    method = library.vi.diag.build(log_posterior, torchopt.adam(1e-3), temperature=1 / num_data, init_log_sds=-3.5)
    state = method.init(parameters)

    def step() -> None:
        nonlocal state
        state = method.update(state, (x, y))[0]

    return step


def torch_blue(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """torch-blue with one sample and its analytic divergence."""
    from torch_blue import vi
    from torch_blue.vi.distributions import Categorical

    def convert(layer: nn.Module) -> nn.Module:
        if isinstance(layer, nn.Linear):
            return vi.VILinear(layer.in_features, layer.out_features, return_log_probs=False)
        if isinstance(layer, nn.Conv2d):
            sizes = (layer.in_channels, layer.out_channels, layer.kernel_size)
            return vi.VIConv2d(*sizes, padding=layer.padding, return_log_probs=False)
        return layer

    model = vi.VISequential(*_rebuilt(network, convert))
    loss = vi.AnalyticalKullbackLeiblerLoss(model, Categorical(), dataset_size=num_data)
    return _loop(model, lambda: loss(model(x, samples=1), y))


def ivon_opt(network: nn.Module, x: Tensor, y: Tensor, num_data: int) -> Step:
    """ivon-opt, the natural gradient method of its authors."""
    import ivon

    optimizer = ivon.IVON(network.parameters(), lr=0.1, ess=num_data)

    def step() -> None:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            F.cross_entropy(network(x), y).backward()
        optimizer.step()

    return step


def _rebuilt(network: nn.Module, convert: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """The same sequence with some layers replaced: these libraries have no conversion of their own."""
    return nn.Sequential(*(convert(layer) for layer in network))  # type: ignore[arg-type]


PEERS: dict[str, tuple[str, Callable[..., Step]]] = {
    "torchbnn": ("torchbnn", torchbnn),
    "bayesian-torch reparameterization": ("bayesian_torch", bayesian_torch("Reparameterization")),
    "bayesian-torch flipout": ("bayesian_torch", bayesian_torch("Flipout")),
    "blitz": ("blitz", blitz),
    "pyro": ("pyro", pyro),
    "posteriors": ("posteriors", posteriors),
    "torch-blue": ("torch_blue", torch_blue),
    "ivon-opt": ("ivon", ivon_opt),
}


def installed() -> dict[str, Callable[..., Step]]:
    """The peers that can be imported here."""
    found = {}
    for name, (module, make) in PEERS.items():
        if importlib.util.find_spec(module) is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(module)
            found[name] = make
    return found
