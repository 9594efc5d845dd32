"""The converted module: any network, the exact divergence, and everything people do with modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, distributions, nn
from variational_cases import NETWORKS, TOKENS, Loop, Reading, Tied, convolutional, encoder, mlp

from dubito import objectives, priors, select, variational
from dubito.core import params
from dubito.methods.variational import convert
from dubito.methods.variational.layer import StochasticLayer
from oracles import fixed_normal, seeded

pytestmark = pytest.mark.slow

ESTIMATORS = ("local", "flipout", "weight")
each_network = pytest.mark.parametrize("name", NETWORKS)
each_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def case(name: str) -> tuple[nn.Module, Tensor]:
    make, x = NETWORKS[name]
    return seeded(make), x


@each_network
@each_estimator
@pytest.mark.parametrize("training", [True, False])
def test_every_call_is_another_draw(name: str, estimator: Any, training: bool) -> None:
    network, x = case(name)
    module = convert(network.train(training), estimator=estimator, initial_scale=0.1)
    assert module.training == training
    with torch.no_grad():
        first, second = module(x), module(x)
    assert first.shape == network(x).shape
    assert bool((first != second).all())


@each_network
@each_estimator
def test_without_noise_it_is_the_network(name: str, estimator: Any) -> None:
    network, x = case(name)
    module = convert(network.eval(), estimator=estimator, initial_scale=1e-12, biases="random")
    torch.testing.assert_close(module(x), network(x), rtol=1e-8, atol=1e-8)


@each_network
@each_estimator
def test_every_weight_is_trained(name: str, estimator: Any) -> None:
    network, x = case(name)
    module = convert(network, estimator=estimator, initial_scale=0.1, biases="random")
    module(x).square().sum().backward()
    for parameter, value in module.named_parameters():
        assert value.grad is not None, parameter
        assert bool((value.grad != 0).any()), parameter


@each_network
def test_the_divergence_is_summed_over_every_weight_once(name: str) -> None:
    network, x = case(name)
    module = convert(network, initial_scale=0.2, biases="random", prior=priors.Normal(0.1, 2.0))
    module(x)  # sampling does not change it
    prior = distributions.Normal(*torch.tensor([0.1, 2.0], dtype=torch.float64))
    expected = sum(
        distributions.kl_divergence(distributions.Normal(w, 0.2 * torch.ones_like(w)), prior).sum()
        for w in network.parameters()
    )
    torch.testing.assert_close(module.kl(), expected, rtol=1e-10, atol=0)


def test_a_large_layer_has_a_large_divergence() -> None:
    """Summed, not averaged, and not divided by anything."""
    layer = nn.Linear(100, 100, bias=False)
    kl = convert(layer).kl()
    q, p = distributions.Normal(layer.weight, 0.03), distributions.Normal(0.0, 1.0)
    torch.testing.assert_close(kl, distributions.kl_divergence(q, p).sum())
    assert kl > 30_000


@each_network
@each_estimator
def test_the_model_is_not_touched(name: str, estimator: Any) -> None:
    network, x = case(name)
    before, classes = copy.deepcopy(network.state_dict()), [type(m) for m in network.modules()]
    module = convert(network, estimator=estimator)
    module(x).sum().backward()
    assert [type(m) for m in network.modules()] == classes
    assert all(p.grad is None and p.requires_grad for p in network.parameters())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@each_network
@each_estimator
def test_there_and_back(name: str, estimator: Any) -> None:
    network, x = case(name)
    network.eval()
    module = convert(network, estimator=estimator, initial_scale=0.1)
    module(x)
    back = module.mean_module()
    assert [type(m) for m in back.modules()] == [type(m) for m in network.modules()]
    assert list(back.state_dict()) == list(network.state_dict())
    assert [sorted(vars(m)) for m in back.modules()] == [sorted(vars(m)) for m in network.modules()]
    torch.testing.assert_close(back(x), network(x), rtol=0, atol=0)
    generator = torch.Generator().manual_seed(3)
    frozen = module.freeze(generator)
    torch.testing.assert_close(frozen(x), frozen(x), rtol=0, atol=0)
    assert not torch.equal(frozen(x), module.freeze(generator)(x))
    torch.testing.assert_close(frozen(x), module.freeze(torch.Generator().manual_seed(3))(x), rtol=0, atol=0)


@each_network
@each_estimator
def test_copies_after_sampling(name: str, estimator: Any) -> None:
    """A copy draws what the original draws, and does not share anything with it."""
    network, x = case(name)
    module = convert(network.eval(), estimator=estimator, initial_scale=0.1, prior=priors.Normal("model", 0.1))
    module(x).sum().backward()
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):  # noqa: S301
        outputs = []
        for each in (module, copied):
            torch.manual_seed(0)
            outputs.append(each(x))
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        with torch.no_grad():
            for part in copied.parts():
                part[1].log_scale.fill_(3.0)
        assert copied.kl() > module.kl()
        assert copied(x).std() != module(x).std()


@each_network
def test_the_state_travels(name: str) -> None:
    network, x = case(name)
    module = convert(network.eval(), initial_scale=0.1, prior=priors.Normal("model", 0.1))
    with torch.no_grad():
        for value in module.parameters():
            value.add_(0.1 * torch.rand_like(value))
    other = convert(seeded(NETWORKS[name][0], seed=1).eval(), prior=priors.Normal("model", 0.1))
    other.load_state_dict(module.state_dict())
    outputs = []
    for each in (module, other):
        torch.manual_seed(0)
        outputs.append(each(x))
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    torch.testing.assert_close(other.kl(), module.kl(), rtol=0, atol=0)
    kept = {key.removeprefix("network.") for key in module.state_dict() if key.startswith("network.")}
    assert kept == set(network.state_dict())  # the user's own names


def test_inside_other_modules_and_precisions() -> None:
    inner = convert(seeded(mlp), initial_scale=0.1)
    outer = nn.Sequential(nn.Linear(2, 3).double(), inner, nn.Tanh())
    x = fixed_normal(4, 2)
    assert not torch.equal(outer(x), outer(x))
    torch.testing.assert_close(variational.kl(outer), inner.kl())
    assert variational.kl(nn.Linear(2, 2)) == 0
    narrow = outer.float()
    assert narrow(x.float()).dtype == torch.float32
    assert variational.kl(narrow).dtype == torch.float32
    assert outer.eval().training is False
    assert inner.network.training is False


@each_estimator
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, where a traced graph is cut
@pytest.mark.parametrize("name", ["mlp", "transformer_encoder"])
def test_compiled(name: str, estimator: Any) -> None:
    network, x = case(name)
    module = convert(network.eval(), estimator=estimator, initial_scale=0.1)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    torch.manual_seed(0)
    outputs = [compiled(x) for _ in range(2)]
    assert bool((outputs[0] != outputs[1]).all())
    torch.manual_seed(0)
    plain = [module(x) for _ in range(2)]
    torch.testing.assert_close(outputs, plain, rtol=1e-10, atol=1e-10)  # the same draws
    (outputs[1].sum() + module.kl()).backward()
    assert all(value.grad is not None for value in module.parameters())


class TestOneDrawPerPass:
    @pytest.mark.parametrize("name", ["lstm", "gru", "attention", "tied", "loop", "mlp", "transformer_encoder"])
    def test_weight_sampling_is_the_network_at_one_sample(self, name: str) -> None:
        network, x = case(name)
        module = convert(network.eval(), estimator="weight", initial_scale=0.3, biases="random")
        torch.manual_seed(0)
        drawn = module(x)
        torch.manual_seed(0)
        weights = module.sample_weights()
        torch.testing.assert_close(drawn, params.functional_call(network, weights, x), rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("estimator", ["local", "flipout"])
    def test_a_layer_that_is_called_often_keeps_its_draw(self, estimator: Any) -> None:
        """A hand-written recurrent net: with one weight sample, equal steps from equal states give equal noise."""
        module = convert(seeded(Loop).eval(), estimator=estimator, initial_scale=0.5)
        x = fixed_normal(2, 3, 2)
        module(x)
        cell, head = module.network.cell, module.network.head
        assert isinstance(cell, StochasticLayer)
        assert cell.shared
        assert not head.shared
        seen: list[Tensor] = []
        cell.register_forward_hook(lambda layer, args, output: seen.append(layer.weight))
        module(x)
        assert len(seen) == 3
        assert all(torch.equal(weight, seen[0]) for weight in seen)

    @pytest.mark.parametrize("estimator", ["local", "flipout"])
    def test_tied_weights_stay_tied(self, estimator: Any) -> None:
        module = convert(seeded(Tied), estimator=estimator, initial_scale=0.5)
        assert module.network.head.weight is module.network.embedding.weight
        assert [name for name, _ in module.parts()] == ["embedding.weight"]
        torch.manual_seed(0)
        drawn = module(TOKENS)
        torch.manual_seed(0)
        weight = module.sample_weights()["embedding.weight"]
        torch.testing.assert_close(drawn, weight[TOKENS].mean(1) @ weight.T)

    @pytest.mark.parametrize("estimator", ["local", "flipout"])
    def test_a_weight_that_is_read_is_a_sample(self, estimator: Any) -> None:
        """Attention and hand-written layers read weights without calling the layer: never silently the mean."""
        module = convert(seeded(Reading), estimator=estimator, initial_scale=0.5)
        network = module.network
        with torch.no_grad():
            network._modules["embedding"]._parameters["weight"].zero_()
        assert bool((module(TOKENS) != 0).all())  # the last product is with a sample, its mean would be 0
        assert not torch.equal(network.mix.weight, network.mix._parameters["weight"])
        assert torch.equal(network.mix.bias, network.mix._parameters["bias"])  # not random
        drawn: list[Tensor] = []  # the embedding is called and read: both see one sample
        network.embedding.register_forward_hook(lambda layer, args, output: drawn.extend([output, layer.weight]))
        module(TOKENS)
        torch.testing.assert_close(drawn[0], drawn[1][TOKENS])


class TestTransformer:
    @each_estimator
    def test_it_spreads_in_evaluation_without_gradients(self, estimator: Any) -> None:
        """Where torch would take a fused path that passes the layers by."""
        module = convert(seeded(encoder).eval(), estimator=estimator, initial_scale=0.1)
        before = torch.backends.mha.get_fastpath_enabled()
        with torch.no_grad():
            samples = torch.stack([module(fixed_normal(2, 3, 4)) for _ in range(20)])
        assert float(samples.std(0).min()) > 0.01
        assert torch.backends.mha.get_fastpath_enabled() == before
        if estimator != "weight":
            assert all(module.network.get_submodule(n).calls == 1 for n in ("linear1", "linear2"))

    def test_a_padded_stack_of_them(self) -> None:
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        stack = nn.TransformerEncoder(layer, 2).eval()
        module = convert(stack, initial_scale=0.1)
        padding = torch.tensor([[False, False, True], [False, True, True]])
        with torch.no_grad():
            first, second = (module(torch.ones(2, 3, 4), src_key_padding_mask=padding) for _ in range(2))
        assert bool((first[~padding] != second[~padding]).all())


class TestSelections:
    def test_biases_and_gains_are_points_by_default(self) -> None:
        module = convert(seeded(convolutional))
        assert [name for name, _ in module.parts()] == ["0.weight", "5.weight"]
        everything = convert(seeded(convolutional), biases="random")
        assert len(list(everything.parts())) == 6

    def test_batch_norm_keeps_its_statistics(self) -> None:
        module = convert(seeded(convolutional), biases="random").train()
        before = module.network[1].running_mean.clone()
        module(fixed_normal(8, 1, 4, 4))
        assert not torch.equal(module.network[1].running_mean, before)

    def test_a_padding_row_is_never_random(self) -> None:
        layer = seeded(lambda: nn.Embedding(4, 3, padding_idx=2))
        module = convert(layer, initial_scale=0.5)
        assert module.selection.num_weights == 9
        assert float(module(torch.tensor([2])).detach().abs().max()) < 1e-150
        expected = distributions.kl_divergence(
            distributions.Normal(layer.weight[[0, 1, 3]], 0.5 * torch.ones(3, 3, dtype=torch.float64)),
            distributions.Normal(*torch.tensor([0.0, 1.0], dtype=torch.float64)),
        ).sum()
        torch.testing.assert_close(module.kl(), expected)

    @each_estimator
    @pytest.mark.parametrize("rest", ["train", "hold"])
    def test_some_entries_only(self, estimator: Any, rest: Any) -> None:
        layer = seeded(lambda: nn.Linear(3, 2))
        mask = torch.tensor([[True, False, False], [False, False, True]])
        loc = fixed_normal(2, 3)
        module = convert(
            layer, estimator=estimator, initial_scale=0.5, weights=select.mask({"weight": mask}), rest=rest,
            prior=priors.Normal(loc, 1.0),
        )  # fmt: skip
        x = torch.eye(3, dtype=torch.float64)
        torch.manual_seed(0)
        samples = torch.stack([module(x) - layer.bias for _ in range(500)])  # [S, I, O]: the weights themselves
        spread = samples.std(0).T
        torch.testing.assert_close(spread[mask], torch.full((2,), 0.5, dtype=torch.float64), rtol=0.2, atol=0)
        assert bool((spread[~mask] < 1e-12).all())
        center = distributions.Normal(layer.weight[mask], 0.5 * torch.ones(2, dtype=torch.float64))
        expected = distributions.kl_divergence(center, distributions.Normal(loc[mask], 1.0)).sum()
        torch.testing.assert_close(module.kl(), expected)
        module(x).square().sum().backward()
        mean = module.network._parameters["weight"]
        assert bool((mean.grad[mask] != 0).all())
        assert bool((mean.grad[~mask] != 0).all()) == (rest == "train")

    def test_the_rest_can_be_held(self) -> None:
        module = convert(seeded(mlp), weights=select.layers("2"), rest="hold")
        trained = {name for name, value in module.named_parameters() if value.requires_grad}
        assert trained == {"network.2.weight", "network.2.bias", "posterior.2/weight.log_scale"}

    def test_single_weights_that_stay_points_are_said(self) -> None:
        mask = {"0.weight": torch.eye(5, 3, dtype=torch.bool), "0.bias": torch.arange(5) < 2}
        with pytest.warns(select.SelectionWarning, match="2 of the 5 chosen weights .* biases='random'"):
            module = convert(seeded(mlp), weights=select.mask(mask))
        assert module.selection.num_weights == 3
        assert convert(seeded(mlp), weights=select.mask(mask), biases="random").selection.num_weights == 5
        convert(seeded(mlp), weights=select.layers("0"))  # of a whole layer nothing is said
        convert(seeded(mlp), weights=select.mask({**mask, "0.bias": torch.ones(5, dtype=torch.bool)}))  # nor of a bias

    def test_priors_by_name(self) -> None:
        network = seeded(mlp)
        by_name = priors.ByName({"0.*": priors.Normal(0, 2), "*": priors.Normal("model", 0.1)})
        parts = dict(convert(network, prior=by_name, initial_scale=0.1).parts())
        assert parts["0.weight"].prior == priors.Normal(0, 2)
        torch.testing.assert_close(parts["2.weight"].kl(network[2].weight), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prior": priors.HalfCauchy()}, "only positive weights"),
        ({"prior": 1.0}, "one of dubito.priors"),
        ({"estimator": "exact"}, "`estimator` must be 'local'"),
        ({"biases": "maybe"}, "`biases` must be"),
        ({"rest": "perhaps"}, "`rest` must be"),
        ({"initial_scale": 0.0}, "initial_scale"),
        ({"initial_scale": "small"}, "initial_scale"),
        ({"initial_scale": {}}, "no entry for '0.weight', which is random"),
        ({"initial_scale": {"0.weight": torch.ones(2)}}, "must have shape"),
        ({"initial_scale": dict.fromkeys(("0.weight", "2.weight"), torch.tensor(-0.1))}, "no negative values"),
        ({"weights": "last"}, "one of dubito.select"),
        ({"weights": select.layers("*.bias")}, "biases='random'"),
        ({"prior": priors.Normal(torch.zeros(7))}, "has shape"),
    ],
)
def test_bad_input_is_one_sentence(options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert(seeded(mlp), **options)


@each_estimator
def test_sparse_gradients_become_dense(estimator: Any) -> None:
    network = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    module = convert(network, estimator=estimator)
    objectives.ELBO()(module, torch.tensor([[0, 1], [1, 1]]), torch.tensor([0, 1]), num_data=2).backward()
    assert not any(value.grad.is_sparse for value in module.parameters() if value.grad is not None)
    assert module.network[0]._parameters["weight"].grad is not None  # type: ignore[index]
    assert network[0].sparse


def test_only_networks_are_converted() -> None:
    with pytest.raises(InputError, match=r"must be a torch\.nn\.Module"):
        convert(lambda x: x)  # type: ignore[arg-type]


def test_a_draw_needs_a_generator() -> None:
    with pytest.raises(InputError, match=r"must be a torch\.Generator, seeded"):
        convert(seeded(mlp)).freeze(0)  # type: ignore[arg-type]


def test_a_converted_module_is_not_converted_again() -> None:
    module = convert(seeded(mlp))
    for again in (module, module.network):
        with pytest.raises(InputError, match="converted already"):
            convert(again)


def test_inputs_and_outputs_of_any_kind() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, a: Tensor, *, b: Tensor) -> dict[str, Tensor]:
            return {"logits": self.layer(a) + self.layer(b)}

    module = convert(seeded(Two), initial_scale=0.1)
    x = fixed_normal(4, 3)
    assert module(x, b=x)["logits"].shape == (4, 2)
    assert params.call(module, {"a": x, "b": x}).shape == (4, 2)
    noise = (module(x, b=-x)["logits"] - 2 * module.network.layer.bias).detach()
    assert float(noise.abs().max()) < 1e-12  # both calls see the same weights
