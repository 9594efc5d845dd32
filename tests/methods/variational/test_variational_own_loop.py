"""Training in the user's own loop: moments shared with `kl`, and natural gradients as an optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import Training, Variational, objectives, priors, variational
from dubito.methods.variational import natural


def converted(estimator: str = "local") -> variational.VariationalModule:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return variational.convert(network, estimator=estimator, biases="random")  # type: ignore[arg-type]


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 3, generator=generator, dtype=torch.float64), torch.arange(8) % 2


def gradients(module: nn.Module, backward: Callable[[], None]) -> list[Tensor]:
    torch.manual_seed(5)
    module.zero_grad()
    backward()
    return [value.grad.clone() for value in module.parameters() if value.grad is not None]


@pytest.mark.parametrize("estimator", ["local", "flipout", "weight"])
def test_a_shared_kl_is_that_of_its_own(estimator: str) -> None:
    module, (x, y) = converted(estimator).train(), data()
    alone = module.kl()
    module(x)
    shared = module.kl()
    torch.testing.assert_close(shared, alone, rtol=1e-12, atol=0)
    assert module.kl().grad_fn is not shared.grad_fn  # one use only

    def together() -> None:
        loss = F.cross_entropy(module(x), y)
        (loss + 0.3 * module.kl()).backward()

    def apart() -> None:  # the first pass frees the graph that both share
        F.cross_entropy(module(x), y).backward()
        (0.3 * module.kl()).backward()

    for first, second in zip(gradients(module, together), gradients(module, apart), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-12)


def test_a_known_kl_is_not_used_after_a_change() -> None:
    module, (x, _) = converted().train(), data()
    module(x)
    with torch.no_grad():
        next(module.network.parameters()).add_(1.0)
    changed = module.kl()
    fresh = copy.deepcopy(module)  # also while a KL divergence is kept
    torch.testing.assert_close(changed, fresh.kl(), rtol=1e-12, atol=0)
    module(x)
    torch.save(module, io.BytesIO())
    with torch.no_grad():
        assert module.kl().grad_fn is None
    module.eval()(x)
    assert module.known_kl.value is None


def test_the_natural_optimizer_takes_the_steps_of_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = data()
    source: dict[str, torch.Generator] = {}

    def draw(noise: Tensor, generator: torch.Generator) -> None:
        noise.normal_(generator=source["now"])

    monkeypatch.setattr(natural, "_normal_", draw)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    steps, prior = 7, priors.Normal(0.0, 1.0)
    source["now"] = torch.Generator().manual_seed(3)
    recipe = Variational(
        optimizer="natural", prior=prior, biases="random", objective=objectives.ELBO(1), temperature=0.5
    )
    training = Training(epochs=steps, batch_size=8, shuffle=False, lr=1e-2, schedule="constant")
    fitted = recipe.fit(network, (x, y), training=training, progress=False)

    source["now"] = torch.Generator().manual_seed(3)
    module = variational.convert(network, prior=prior, biases="random", estimator="weight").train()
    optimizer = variational.NaturalOptimizer(module, num_data=8, total_steps=steps, lr=1e-2, temperature=0.5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(module(x), y)
        loss.backward()
        return loss

    for step in range(steps):
        if step == 3:  # continues from a saved state
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step(closure)
    for name, value in fitted.mean().items():
        torch.testing.assert_close(
            dict(module.network.named_parameters())[name].detach(), value, rtol=1e-10, atol=1e-12
        )
    torch.testing.assert_close(module.scales(), fitted.scale, rtol=1e-10, atol=0)
    assert module.to_posterior((x, y)).predict(x).epistemic.min() > 0


def test_the_natural_optimizer_says_what_it_needs() -> None:
    with pytest.raises(InputError, match="estimator='weight'"):
        variational.NaturalOptimizer(converted("local"), num_data=8, total_steps=10)
    optimizer = variational.NaturalOptimizer(converted("weight"), num_data=8, total_steps=10)
    with pytest.raises(InputError, match="closure"):
        optimizer.step()
