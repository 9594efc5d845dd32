"""Networks: hand-counted weights, padding that changes nothing, weights that can be redrawn, building by name."""

from __future__ import annotations

import pytest
import torch
from dubito.errors import InputError
from torch import Tensor, nn

from dubito import models
from dubito.fitting.initialization import reset_parameters
from dubito.networks.models.convolutional import PadShortcut

VOCABULARY, LENGTH = 30, 12


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def tokens(generator: torch.Generator, num: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (num, length), generator=generator)


# Each with one batch of inputs that fits it.
CASES = {
    "mlp": (lambda: models.mlp(5, 3, hidden=(7, 4), activation="tanh"), lambda g: torch.randn(3, 5, generator=g)),
    "lenet_300_100": (models.lenet_300_100, lambda g: torch.randn(3, 1, 28, 28, generator=g)),
    "lenet5": (models.lenet5, lambda g: torch.randn(3, 1, 28, 28, generator=g)),
    "resnet20": (lambda: models.resnet20(width=4), lambda g: torch.randn(3, 3, 32, 32, generator=g)),
    "resnet20-projection": (
        lambda: models.resnet20((1, 28, 28), width=4, shortcut="projection"),
        lambda g: torch.randn(3, 1, 28, 28, generator=g),
    ),
    "resnet18": (lambda: models.resnet18((1, 8, 8), width=4), lambda g: torch.randn(3, 1, 8, 8, generator=g)),
    "transformer": (lambda: models.transformer(VOCABULARY, 2, length=LENGTH, width=16), tokens),
    "lstm": (lambda: models.lstm(VOCABULARY, 2, width=16, embedding=8, depth=2), tokens),
}


def block(fan_in: int, fan_out: int, projection: bool = False) -> int:
    """Weights of a basic block: two 3 x 3 convolutions and two batch norms, and a 1 x 1 convolution with its norm."""
    return 9 * fan_in * fan_out + 9 * fan_out**2 + 4 * fan_out + (fan_in * fan_out + 2 * fan_out if projection else 0)


class TestCounts:
    def test_mlp(self) -> None:
        assert count(models.mlp(13, 2, hidden=(50, 20))) == 14 * 50 + 51 * 20 + 21 * 2
        assert count(models.mlp(13, 2, hidden=())) == 14 * 2

    def test_lenet_300_100(self) -> None:
        assert count(models.lenet_300_100()) == 785 * 300 + 301 * 100 + 101 * 10 == 266_610

    def test_lenet5(self) -> None:
        assert count(models.lenet5()) == (25 + 1) * 20 + (25 * 20 + 1) * 50 + 801 * 500 + 501 * 10 == 431_080

    def test_resnet20(self) -> None:
        stem, head = 27 * 16 + 32, 65 * 10
        blocks = 3 * block(16, 16) + block(16, 32) + 2 * block(32, 32) + block(32, 64) + 2 * block(64, 64)
        assert count(models.resnet20()) == stem + blocks + head == 269_722
        projections = 16 * 32 + 64 + 32 * 64 + 128
        assert count(models.resnet20(shortcut="projection")) == 269_722 + projections
        assert count(models.resnet20((1, 28, 28))) == 269_722 - 2 * 9 * 16

    def test_resnet18(self) -> None:
        stages = [(64, 64), (64, 128), (128, 256), (256, 512)]
        blocks = sum(block(a, b, projection=a != b) + block(b, b) for a, b in stages)
        assert count(models.resnet18()) == 27 * 64 + 128 + blocks + 513 * 10 == 11_173_962

    def test_transformer(self) -> None:
        width, depth = 16, 3
        a_block = 4 * (width + 1) * width + 2 * 2 * width + (width + 1) * 4 * width + (4 * width + 1) * width
        expected = (VOCABULARY + LENGTH) * width + depth * a_block + 2 * width + (width + 1) * 2
        assert count(models.transformer(VOCABULARY, 2, length=LENGTH, width=width, depth=depth)) == expected

    def test_lstm(self) -> None:
        gates = 4 * 16 * (8 + 16 + 2)  # torch keeps two biases per gate
        assert count(models.lstm(VOCABULARY, 3, width=16, embedding=8)) == VOCABULARY * 8 + gates + 17 * 3


@pytest.mark.parametrize("name", CASES)
class TestEveryNetwork:
    def test_maps_a_batch_to_outputs_row_by_row(self, name: str, generator: torch.Generator) -> None:
        make, inputs_of = CASES[name]
        model, inputs = make().double().eval(), inputs_of(generator)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        outputs = model(inputs)
        assert outputs.shape == (3, list(model.modules())[-1].out_features)
        torch.testing.assert_close(model(inputs[1:2]), outputs[1:2], rtol=1e-10, atol=1e-12)

    def test_every_weight_matters(self, name: str, generator: torch.Generator) -> None:
        make, inputs_of = CASES[name]
        model = make()
        model(inputs_of(generator)).square().sum().backward()
        untouched = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        # A key's bias shifts all scores of a query alike, so the softmax does not see it.
        assert [n for n in untouched if not n.endswith("key.bias")] == []

    def test_redraws_all_weights_like_new_ones(self, name: str, generator: torch.Generator) -> None:
        model = CASES[name][0]()
        fresh = {n: p.detach().clone() for n, p in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        torch.manual_seed(3)
        reset_parameters(model)
        for n, parameter in model.named_parameters():
            assert not (parameter == 9.0).any(), n
            if parameter.numel() >= 64:
                torch.testing.assert_close(parameter.std(), fresh[n].std(), rtol=0.35, atol=1e-6, msg=n)
                torch.testing.assert_close(parameter.mean(), fresh[n].mean(), rtol=0.0, atol=0.3, msg=n)

    def test_is_a_plain_module_of_parts_that_can_be_copied_and_saved(
        self, name: str, generator: torch.Generator
    ) -> None:
        make, inputs_of = CASES[name]
        first, second, inputs = make().eval(), make().eval(), inputs_of(generator)
        second.load_state_dict(first.state_dict())
        assert torch.equal(first(inputs), second(inputs))


class TestSequences:
    @pytest.mark.parametrize("name", ["transformer", "lstm"])
    def test_padding_changes_nothing(self, name: str, generator: torch.Generator) -> None:
        model = CASES[name][0]().double().eval()
        short = tokens(generator, length=7)
        padded = torch.cat([short, torch.zeros(3, LENGTH - 7, dtype=torch.long)], dim=1)
        torch.testing.assert_close(model(padded), model(short), rtol=1e-12, atol=1e-12)

    @pytest.mark.parametrize("name", ["transformer", "lstm"])
    def test_order_matters_and_an_empty_row_is_finite(self, name: str, generator: torch.Generator) -> None:
        model, inputs = CASES[name][0]().eval(), tokens(generator)
        assert not torch.allclose(model(inputs), model(inputs.flip(1)))
        assert model(torch.zeros(2, LENGTH, dtype=torch.long)).isfinite().all()

    def test_attention_is_that_of_torch(self, generator: torch.Generator) -> None:
        ours = models.sequence.Attention(16, heads=4).double()
        theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
        parts = (ours.query, ours.key, ours.value)
        with torch.no_grad():
            theirs.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
            theirs.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
            theirs.out_proj.load_state_dict(ours.out.state_dict())
        x = torch.randn(3, 5, 16, dtype=torch.float64, generator=generator)
        is_token = torch.tensor([[True] * 5, [True] * 3 + [False] * 2, [True] + [False] * 4])
        expected, _ = theirs(x, x, x, key_padding_mask=~is_token)
        torch.testing.assert_close(ours(x, is_token), expected, rtol=1e-12, atol=1e-12)

    def test_too_long_a_sequence(self) -> None:
        with pytest.raises(InputError, match="13 tokens is too long"):
            models.transformer(VOCABULARY, 2, length=LENGTH)(torch.ones(1, 13, dtype=torch.long))


def test_pad_shortcut_by_hand() -> None:
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    out = PadShortcut(1, 2, stride=2)(image)
    assert out.tolist() == [[[[0.0, 2.0], [6.0, 8.0]], [[0.0, 0.0], [0.0, 0.0]]]]


class TestBuild:
    @pytest.mark.parametrize("name", ["mlp", "lenet_300_100", "lenet5", "resnet20(width=4)", "resnet18(width=4)"])
    @pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
    def test_images(self, name: str, shape: tuple[int, ...]) -> None:
        assert models.build(name, shape, 7).eval()(torch.zeros(2, *shape)).shape == (2, 7)

    @pytest.mark.parametrize("name", ["transformer", "lstm"])
    def test_tokens(self, name: str) -> None:
        model = models.build(name, (LENGTH,), 2, vocabulary=VOCABULARY)
        assert model(torch.ones(2, LENGTH, dtype=torch.long)).shape == (2, 2)

    def test_text_is_read_like_a_recipe(self) -> None:
        model = models.build("mlp(hidden=[50, 20], activation=tanh)", (13,), 1)
        assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [50, 20, 1]
        assert isinstance(model[2], nn.Tanh)
        assert len(models.build("mlp(hidden=[])", (13,), 1)) == 2
        assert models.build("mlp(hidden=9)", (13,), 1)[1].out_features == 9

    def test_text_wins_over_options(self) -> None:
        assert models.build("mlp(hidden=[9])", (4,), 1, hidden=(5,), activation="gelu")[1].out_features == 9

    def test_every_name_is_known(self) -> None:
        assert {name.partition("-")[0] for name in CASES} == set(models.names())

    @pytest.mark.parametrize(
        ("text", "shape", "vocabulary", "message"),
        [
            ("lenet6", (1, 28, 28), None, "There is no model 'lenet6'; did you mean 'lenet5'?"),
            ("zzz", (1, 28, 28), None, "There is no model 'zzz'; known are mlp, lenet_300_100"),
            ("mlp(width=3)", (4,), None, "has no option 'width'; its options are: hidden, activation"),
            ("mlp(hidden=[0])", (4,), None, "`hidden` must be"),
            ("mlp(hidden=wide)", (4,), None, "`hidden` must be"),
            ("mlp(activation=swish)", (4,), None, "There is no activation 'swish'"),
            ("mlp(", (4,), None, "write a name, or name(argument=value"),
            ("mlp() mlp", (4,), None, "write a name, or name(argument=value"),
            ("mlp(50)", (4,), None, "with their names"),
            ("lenet5", (1, 8, 8), None, "at least 16 x 16 pixels"),
            ("lenet5", (4,), None, "needs images"),
            ("resnet20(width=0)", (1, 8, 8), None, "`width` must be"),
            ("resnet20(shortcut=conv)", (1, 8, 8), None, "`shortcut` must be"),
            ("lstm", (4,), None, "needs inputs of integer tokens"),
            ("mlp", (4,), 30, "needs inputs of numbers, not tokens"),
            ("lstm(dropout=much)", (4,), 30, "`dropout` must be a number"),
            ("lstm(depth=0)", (4,), 30, "`depth` must be"),
            ("transformer(heads=7)", (4,), 30, "must be a multiple of heads"),
        ],
    )
    def test_kind_errors(self, text: str, shape: tuple[int, ...], vocabulary: int | None, message: str) -> None:
        with pytest.raises(InputError) as error:
            models.build(text, shape, 2, vocabulary=vocabulary)
        assert message in str(error.value)
