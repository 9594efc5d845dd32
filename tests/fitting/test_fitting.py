"""The one loop: what it leaves alone, what it repeats, what it refuses, and how it stops."""

from __future__ import annotations

import copy
import io as text_io
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dubito.errors import InputError, NonFiniteError, UnsupportedError
from dubito.likelihoods import Categorical
from fitting_cases import Average, classification, network
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dubito import MAP, Training
from dubito.core import params
from dubito.core.batches import Batch
from dubito.core.settings import setting
from dubito.fitting.gradient_training import GradientDescent
from dubito.fitting.inference import Inference, NonFinite, Problem, State
from dubito.fitting.initialization import reset_parameters
from dubito.fitting.optimizers import Optimizer
from dubito.fitting.recipe import Recipe
from oracles import weights_of

QUICK = Training(epochs=2, lr=1e-2, batch_size=16)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of every training step that is taken."""
    seen: list[Batch] = []
    original = GradientDescent.update

    def update(self: GradientDescent, state: State, batch: Batch, generator: torch.Generator) -> Any:
        seen.append(batch)
        return original(self, state, batch, generator)

    monkeypatch.setattr(GradientDescent, "update", update)
    return seen


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_may_be_turned_off_around_a_fit(off: Any) -> None:
    expected = weights_of(MAP().fit(network(), classification(), training=QUICK))
    model, data = network(), classification()
    with off():
        found = MAP().fit(model, data, training=QUICK)
    assert torch.equal(weights_of(found), expected)


class TestNothingOfTheUsersChanges:
    @pytest.mark.parametrize("mode", [True, False])
    def test_the_model(self, mode: bool) -> None:
        model = network(dropout=0.5).train(mode)
        model[1].eval()
        model[0].bias.requires_grad_(False)
        model[4].weight.grad = torch.full_like(model[4].weight, 7.0)
        model[4].register_forward_hook(lambda *_: None)
        before = copy.deepcopy(model.state_dict())
        flags = [(m.training, dict(m._forward_hooks), dict(m._backward_hooks)) for m in model.modules()]
        keys = [set(vars(m)) for m in model.modules()]
        MAP().fit(model, classification(), training=QUICK)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert [(m.training, dict(m._forward_hooks), dict(m._backward_hooks)) for m in model.modules()] == flags
        assert [set(vars(m)) for m in model.modules()] == keys
        assert [p.requires_grad for p in model.parameters()] == [True, False, True, True, True, True]
        assert model[4].weight.grad is not None
        assert bool((model[4].weight.grad == 7.0).all())
        assert model[0].weight.grad is None

    def test_the_data(self) -> None:
        x, y = classification()
        before = x.clone(), y.clone()
        MAP().fit(network(), (x, y), training=QUICK)
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])

    def test_the_global_generators(self) -> None:
        class Drawing(Dataset[Any]):
            def __len__(self) -> int:
                return 50

            def __getitem__(self, index: int) -> Any:
                noise = random.random() + float(np.random.rand()) + torch.rand(4)  # noqa: NPY002
                return noise, index % 3

        def states() -> Any:
            return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

        before = states()
        posterior = MAP(start="fresh").fit(network(dropout=0.5), Drawing(), validation=Drawing(), training=QUICK)
        posterior.predict(DataLoader(Drawing(), shuffle=True))
        assert states() == before


class TestTheSameAgain:
    def test_the_same_call_gives_the_same_result(self) -> None:
        results = []
        for seed in (1, 2):
            model = network(dropout=0.5)
            torch.manual_seed(seed)  # the user's own randomness does not matter
            results.append(weights_of(MAP().fit(model, classification(), training=QUICK)))
        assert torch.equal(*results)

    @pytest.mark.parametrize("data", [classification(), TensorDataset(*classification())])
    def test_the_generator_decides(self, data: Any) -> None:
        results = [
            weights_of(
                MAP(start="fresh").fit(
                    network(dropout=0.5), data, training=QUICK, generator=torch.Generator().manual_seed(seed)
                )
            )
            for seed in (1, 1, 2)
        ]
        assert torch.equal(results[0], results[1])
        assert not torch.equal(results[0], results[2])

    def test_shuffling_and_dropout_differ_from_epoch_to_epoch(self, updates: list[Batch]) -> None:
        seen: list[Tensor] = []
        model = network(dropout=0.5)
        model[3].register_forward_hook(lambda module, _, output: seen.append(output == 0) if module.training else None)
        MAP().fit(model, classification(32), training=QUICK.replace(batch_size=32))
        assert len(updates) == len(seen) == 2
        assert not torch.equal(updates[0].targets, updates[1].targets)
        assert sorted(updates[0].targets.tolist()) == sorted(updates[1].targets.tolist())
        assert not torch.equal(seen[0], seen[1])

    def test_kinds_of_data_agree(self) -> None:
        x, y = classification()
        training = QUICK.replace(shuffle=False)
        parts = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 50, 16)]
        kinds = [(x, y), (x.numpy(), y.numpy()), TensorDataset(x, y), DataLoader(TensorDataset(x, y), 16), parts]
        results = [weights_of(MAP().fit(network(), data, training=training)) for data in kinds]
        for other in results[1:]:
            assert torch.equal(results[0], other)


class TestSchedule:
    @pytest.fixture
    def rates(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        seen: list[float] = []
        original = Optimizer.step

        def step(self: Optimizer, values: Any, grads: Any, state: Any, lr: float) -> None:
            seen.append(lr)
            original(self, values, grads, state, lr)

        monkeypatch.setattr(Optimizer, "step", step)
        return seen

    def test_the_rate_falls_over_all_steps(self, rates: list[float]) -> None:
        training = Training(epochs=3, lr=0.1, batch_size=20, schedule="linear", warmup=0.25)
        MAP().fit(network(), classification(), training=training)
        assert rates == pytest.approx([training.rate(i / 9) for i in range(9)])
        assert rates[0] == 0.0

    @pytest.mark.parametrize("wrap", [lambda d: d, lambda d: DataLoader(d, batch_size=20)])
    def test_also_where_the_number_of_batches_is_not_known(self, rates: list[float], wrap: Any) -> None:
        training = Training(epochs=2, lr=0.1, batch_size=20, schedule="linear")
        MAP().fit(network(), wrap(Streamed()), training=training, num_data=50)
        assert rates == pytest.approx([0.1 * (1 - i / 6) for i in range(6)])


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*classification(), strict=True))


class TestValidation:
    x, y = classification()
    contrary = (x, (y + 1) % 3)  # the better the fit, the worse the score

    def test_early_stopping_goes_back_to_the_best(self, updates: list[Batch]) -> None:
        training = Training(epochs=50, lr=1e-2, batch_size=50, schedule="constant", early_stopping=3)
        stopped = MAP().fit(network(), (self.x, self.y), validation=self.contrary, training=training)
        assert len(updates) == 1 + 3  # the first was the best
        first = MAP().fit(network(), (self.x, self.y), training=training.replace(epochs=1, early_stopping=None))
        assert torch.equal(weights_of(stopped), weights_of(first))

    def test_the_best_is_restored_after_all_epochs(self, updates: list[Batch]) -> None:
        training = Training(epochs=5, lr=1e-2, batch_size=50, schedule="constant", restore_best=True)
        best = MAP().fit(network(), (self.x, self.y), validation=self.contrary, training=training)
        assert len(updates) == 5
        first = MAP().fit(network(), (self.x, self.y), training=training.replace(epochs=1, restore_best=False))
        assert torch.equal(weights_of(best), weights_of(first))

    def test_where_it_always_gets_better_the_last_is_the_best(self) -> None:
        training = Training(epochs=5, lr=0.1, batch_size=50, optimizer="sgd", momentum=0.0, early_stopping=1)
        model = nn.Linear(4, 3)
        plain = MAP().fit(model, (self.x, self.y), training=training.replace(early_stopping=None))
        stopped = MAP().fit(model, (self.x, self.y), validation=(self.x, self.y), training=training)
        assert torch.equal(weights_of(stopped), weights_of(plain))

    def test_the_score_is_the_mean_log_probability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        scores: list[float] = []
        monkeypatch.setattr("dubito.fitting.loop.Best", lambda score, *_: scores.append(score) or _Best(score))
        model = network()
        loader = DataLoader(TensorDataset(self.x, self.y), batch_size=7, shuffle=True)
        training = Training(epochs=1, lr=1e-9, restore_best=True)

        class _Best:
            def __init__(self, score: float) -> None:
                self.score, self.epoch, self.state = score, 0, None

        posterior = MAP().fit(model, (self.x, self.y), validation=loader, training=training)
        expected = Categorical().log_prob(posterior.model(self.x), self.y).mean()
        assert scores == pytest.approx([expected.item()], rel=1e-6)

    @pytest.mark.parametrize("setting", [{"early_stopping": 1}, {"restore_best": True}])
    def test_it_needs_data(self, updates: list[Batch], setting: Any) -> None:
        with pytest.raises(InputError, match="pass `validation=`"):
            MAP().fit(network(), classification(), training=QUICK.replace(**setting))
        assert updates == []


class TestNonFinite:
    def test_the_message_and_the_last_good_posterior(self) -> None:
        x, y = classification()
        x[40] = 1e30  # in the last batch: its step is finite, but no loss is afterwards
        training = Training(epochs=3, lr=0.1, batch_size=10, optimizer="sgd", momentum=0.0, shuffle=False)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        with pytest.raises(NonFiniteError) as caught:
            MAP().fit(model, (x, y), training=training)
        assert str(caught.value) == (
            "The loss became nan in epoch 2, batch 1: lower the learning rate (now 0.1), clip gradients with "
            "Training(clip=1.0), or check that batch for extreme inputs; the last good posterior is in this error's "
            "`.posterior`."
        )
        posterior = caught.value.posterior
        assert torch.equal(posterior.predict(x[:10]).mode, model(x[:10]).argmax(1))  # as before the first epoch

    def test_good_epochs_are_not_lost(self) -> None:
        class Late(Dataset[Any]):
            """The data breaks in the middle of the third epoch."""

            count = 0

            def __len__(self) -> int:
                return 50

            def __getitem__(self, index: int) -> Any:
                self.count += 1
                x, y = classification()
                return (x[index] if self.count <= 25 + 2 * 50 + 25 else x[index] * 1e38), y[index]

        training = Training(epochs=5, lr=0.1, batch_size=25, schedule="constant", optimizer="sgd", shuffle=False)
        model = nn.Linear(4, 3)
        with pytest.raises(NonFiniteError, match="in epoch 3, batch 2") as caught:
            MAP().fit(model, Late(), training=training)
        good = MAP().fit(model, classification(), training=training.replace(epochs=2))
        assert torch.equal(weights_of(caught.value.posterior), weights_of(good))

    def test_a_method_that_is_nothing_before_its_end(self) -> None:
        @setting
        class Unlucky(Recipe):
            def build(self, problem: Problem) -> Inference:
                def update(*_: Any) -> Any:
                    raise NonFinite("The curvature became inf")

                return Inference(lambda *_: {}, update, lambda _: None, epochs=1, anytime=False)  # type: ignore[arg-type, return-value]

        with pytest.raises(NonFiniteError) as caught:
            Unlucky().fit(network(), classification(), training=Training(epochs=1))
        assert str(caught.value) == (
            "The curvature became inf in epoch 1, batch 1: check that batch for extreme inputs, and the network for "
            "extreme weights."
        )
        assert caught.value.posterior is None

    def test_a_last_step_that_breaks_the_weights_does_not_go_unnoticed(self) -> None:
        class Fragile(nn.Module):
            """A finite loss whose gradient is not."""

            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                return x[:, :3] + self.weight.abs().sqrt()

        with pytest.raises(NonFiniteError, match="The weights became NaN or infinite in epoch 1") as caught:
            MAP().fit(Fragile(), classification(), training=Training(epochs=1, batch_size=50))
        assert weights_of(caught.value.posterior).tolist() == [0.0, 0.0, 0.0]

    def test_a_step_in_the_middle_of_an_epoch_goes_back_to_its_start(self) -> None:
        x, y = classification(48)
        training = Training(epochs=20, lr=1e30, batch_size=16, optimizer="sgd")
        with pytest.raises(NonFiniteError) as caught:
            MAP().fit(network(), (x, y), training=training)
        assert bool(weights_of(caught.value.posterior).isfinite().all())


class TestBadInput:
    """One clear sentence, before any training step."""

    x, y = classification()
    nan = x.clone()
    nan[41, 2] = float("nan")
    outside = y.clone()
    outside[41] = 3

    CASES: dict[str, tuple[Any, Any, str]] = {  # noqa: RUF012
        "NaN inputs": (None, (nan, y), "The inputs hold NaN or infinite values"),
        "infinite inputs": (None, (x / 0, y), "The inputs hold NaN or infinite values"),
        "label out of range": (None, (x, outside), "The label 3 is not one of the model's classes"),
        "label out of range in a list": (None, [(x[:30], y[:30]), (x[30:], outside[30:])], "The label 3 is not one of"),
        "empty": (None, (x[:0], y[:0]), "The data is empty"),
        "no batches": (None, [], "The data is empty"),
        "wrong width": (None, (x[:, :3], y), r"cannot be called on a batch of inputs \(\d+, 3\) torch.float32"),
        "wrong type": (None, (x.long(), y), r"cannot be called on a batch of inputs \(16, 4\) torch.int64"),
        "float labels": (None, (x, y.float()), "must be whole numbers"),
        "wrong target shape": (None, (x, torch.stack([y, y], 1)), "need labels of shape"),
        "one output": (nn.Linear(4, 1), (x, y), "use likelihood='bernoulli'"),
        "no targets": (None, [x[:16], x[16:32], x[32:]], "no targets"),
        "nested targets": (None, (x, (y, y)), "must be one tensor, not a tuple"),
        "no parameters": (nn.ReLU(), (x, y), "The model has no parameters"),
        "lazy": (nn.LazyLinear(3), (x, y), "call it once on a batch"),
        "frozen": (nn.Linear(4, 3).requires_grad_(False), (x, y), "Every parameter of the model is frozen"),
        "damaged": (None, (x, y), "holds NaN or infinite values"),
    }

    @pytest.mark.parametrize("case", CASES)
    def test_one_sentence(self, case: str, updates: list[Batch]) -> None:
        model, data, message = self.CASES[case]
        model = model or network()
        if case == "damaged":
            model[4].weight.data[0, 0] = float("nan")
        with pytest.raises(InputError, match=message) as caught:
            MAP().fit(model, data, training=QUICK.replace(shuffle=False))
        assert updates == []
        assert str(caught.value).count("\n") == 0

    @pytest.mark.parametrize("case", ["NaN inputs", "label out of range", "wrong width", "empty", "float labels"])
    def test_validation_data_too(self, case: str, updates: list[Batch]) -> None:
        _, data, message = self.CASES[case]
        with pytest.raises(InputError, match=message):
            MAP().fit(network(), (self.x, self.y), validation=data, training=QUICK)
        assert updates == []

    @pytest.mark.parametrize("case", ["NaN inputs", "label out of range"])
    def test_a_loader_is_checked_as_it_goes(self, case: str, updates: list[Batch]) -> None:
        _, data, message = self.CASES[case]
        with pytest.raises(InputError, match=message):
            MAP().fit(network(), DataLoader(TensorDataset(*data), 16), training=QUICK)
        assert len(updates) == 2  # the bad row is in the third batch

    def test_a_model_that_cannot_be_copied(self) -> None:
        model = nn.Linear(4, 3)
        model.lock = threading.Lock()  # type: ignore[assignment]
        with pytest.raises(InputError, match="The model cannot be copied"):
            MAP().fit(model, (self.x, self.y))

    def test_an_unknown_likelihood(self) -> None:
        with pytest.raises(InputError, match="no likelihood 'poison'"):
            MAP().fit(network(), (self.x, self.y), likelihood="poison")

    def test_sequences_of_different_lengths(self) -> None:
        """Later batches may have targets of another shape than the first: then the network itself is asked."""
        model = nn.Embedding(10, 3)
        parts = [(torch.randint(10, (5, length)), torch.randint(3, (5, length))) for length in (4, 7, 2)]
        MAP().fit(model, parts, training=QUICK)
        parts[2][1][0, 0] = 3
        with pytest.raises(InputError, match="The label 3"):
            MAP().fit(model, parts, training=QUICK)


class TestFrozen:
    @pytest.mark.parametrize("start", ["model", "fresh"])
    def test_what_is_frozen_stays(self, start: Any) -> None:
        model = network()
        model[0].requires_grad_(False)
        model[4].bias.requires_grad_(False)
        before = params.of(model)
        trained = params.of(MAP(start=start).fit(model, classification(), training=QUICK).model)
        stayed = [name for name in before if torch.equal(before[name], trained[name])]
        assert stayed == ["0.weight", "0.bias", "4.bias"]

    def test_a_frozen_model_can_be_taken_as_it_is(self) -> None:
        model = network().requires_grad_(False)
        posterior = MAP(train=False).fit(model, classification())
        before, after = params.of(model), params.of(posterior.model)
        assert all(torch.equal(before[name], after[name]) for name in before)


class TestFresh:
    def test_new_weights_are_drawn_by_each_layer(self) -> None:
        model = nn.Sequential(nn.Linear(3, 100), nn.BatchNorm1d(100), nn.MultiheadAttention(4, 2), nn.LSTM(2, 3))
        before = copy.deepcopy(model)
        for value in before.parameters():
            value.data.fill_(50.0)
        before[1].running_mean.fill_(3.0)
        reset_parameters(before)
        assert all(value.abs().max() <= 1.5 for value in before.parameters())
        assert bool((before[1].running_mean == 0).all())

    def test_a_model_that_initializes_its_parts_has_the_last_word(self) -> None:
        class Own(nn.Sequential):
            def reset_parameters(self) -> None:
                nn.init.constant_(self[0].weight, 3.0)

        model = Own(nn.Linear(2, 2))
        reset_parameters(model)
        assert model[0].weight.tolist() == [[3.0, 3.0], [3.0, 3.0]]

    def test_a_parameter_that_nobody_can_redraw(self) -> None:
        class Token(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.token = nn.Parameter(torch.zeros(3))
                self.head = nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.head(x) + self.token

        with pytest.raises(InputError, match=r"cannot reset 'token': its module has no reset_parameters\(\)"):
            MAP(start="fresh").fit(Token(), classification(), training=QUICK)
        MAP().fit(Token(), classification(), training=QUICK)


class TestKindsOfModels:
    def test_precision_follows_the_model(self) -> None:
        x, y = classification()
        posterior = MAP().fit(network().double(), (x, y), training=QUICK)
        assert posterior.dtype == torch.float64
        assert posterior.predict(x).probs.dtype == torch.float64
        narrow = MAP().fit(network(), (x.double(), y), training=QUICK)
        assert narrow.dtype == torch.float32

    def test_dict_batches_and_logits(self) -> None:
        class Answer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.head = nn.Linear(4, 3)

            def forward(self, *, values: Tensor, scale: Tensor) -> dict[str, Tensor]:
                return {"logits": self.head(values) * scale}

        x, y = classification()
        rows = [{"values": x[i], "scale": torch.ones(1), "labels": y[i]} for i in range(50)]
        posterior = MAP().fit(Answer(), DataLoader(rows, batch_size=16), training=QUICK)  # type: ignore[arg-type]
        whole = posterior.predict({"values": x, "scale": torch.ones(50, 1)})
        parts = posterior.predict(DataLoader(rows, batch_size=16))  # type: ignore[arg-type]
        torch.testing.assert_close(whole.log_probs, parts.log_probs)

    def test_several_inputs(self) -> None:
        x, y = classification()
        model = nn.Bilinear(4, 4, 3)
        posterior = MAP().fit(model, TensorDataset(x, x + 1, y), training=QUICK)
        assert len(posterior.predict((x, x + 1))) == 50

    def test_an_iterable_dataset(self, updates: list[Batch]) -> None:
        with pytest.raises(InputError, match="pass it as `num_data=`"):
            MAP().fit(network(), Streamed())
        posterior = MAP().fit(network(), Streamed(), num_data=50, training=QUICK)
        assert posterior.num_data == 50
        assert len(updates) == 2 * 4
        assert len(posterior.predict(Streamed())) == 50


class TestProgress:
    def test_quiet_where_there_is_no_terminal(self, capfd: pytest.CaptureFixture[str]) -> None:
        MAP().fit(network(), classification(), training=QUICK)
        assert capfd.readouterr() == ("", "")

    @pytest.mark.slow
    @pytest.mark.parametrize("progress", [True, False])
    def test_on_a_terminal(self, monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
        class Terminal(text_io.StringIO):
            def isatty(self) -> bool:
                return True

        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        MAP().fit(network(), classification(), training=Training(epochs=40, batch_size=2), progress=progress)
        shown = all(part in terminal.getvalue() for part in ("loss=", "lr=", "/1000", "batch/s"))
        assert shown == progress


class TestFullBatches:
    def test_the_data_is_read_once(self) -> None:
        reads: list[int] = []

        class Counted(Dataset[Any]):
            def __len__(self) -> int:
                return 50

            def __getitem__(self, index: int) -> Any:
                reads.append(index)
                return tuple(part[index] for part in classification())

        Average().fit(network(), Counted(), training=Training(epochs=1, batch_size=50, shuffle=False))
        assert reads == list(range(50)) * 3  # a look at the first batch, all of it, and a look at the result

    def test_no_evidence_is_one_sentence(self) -> None:
        posterior = Average().fit(network(), classification(), training=QUICK)
        with pytest.raises(UnsupportedError, match="MAP posterior defines no evidence"):
            posterior.log_evidence()


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("net", {}, "The model must be a torch.nn.Module, not str"),
        (nn.Linear(2, 2), {"training": "long"}, r"`training` must be a Training\(\.\.\.\), got 'long'"),
        (nn.Linear(2, 2), {"generator": 3}, "generator must be a torch.Generator, .* not 3"),
    ],
)
def test_arguments_of_a_wrong_kind(model: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MAP().fit(model, (torch.randn(4, 2), torch.tensor([0, 1, 0, 1])), progress=False, **options)


def test_sparse_embeddings_are_trained_with_whole_gradients() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 2))
    data = (torch.randint(5, (8, 2)), torch.tensor([0, 1] * 4))
    posterior = MAP(prior_precision=1.0).fit(model, data, training=Training(epochs=1), progress=False)
    assert model[0].sparse
    assert not torch.equal(posterior.model[0].weight, model[0].weight)
