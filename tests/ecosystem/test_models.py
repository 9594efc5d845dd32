"""Networks of timm, torchvision, Hugging Face and peft are fitted, predict, and are saved and loaded as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dubito
from dubito import SGMCMC, SWAG, Ensemble, Laplace, MCDropout, Rank1, Training, Variational, select
from dubito.core.batches import Source
from dubito.core.params import Frozen
from dubito.fitting.initialization import reset_parameters
from ecosystem import tiny_models
from extras import needs

timm, torchvision = needs("timm"), needs("torchvision")
needs("transformers")
needs("peft")

BRIEF = Training(epochs=1, batch_size=6)
RECIPES: dict[str, Any] = {
    "Laplace": Laplace(),
    "Variational": Variational(),
    "Rank1": Rank1(components=2),
    "Ensemble": Ensemble(2),
    "MCDropout": MCDropout(),
    "SGMCMC": SGMCMC("sghmc", weights=select.last_layer(), num_samples=2, burn_in=2, thinning=2),
}


def fitted(recipe: Any, model: nn.Module, data: Any) -> Any:
    own = {} if isinstance(recipe, Laplace | SGMCMC) else {"training": BRIEF}
    return recipe.fit(model, data, progress=False, **own)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_the_default_posterior(name: str, tmp_path: Path) -> None:
    """No weight falls back to gradients example by example: that warning is an error here."""
    model, data = tiny_models.make(name)
    posterior = Laplace(prior_precision=10.0).fit(model, data, progress=False)
    found = posterior.predict(data[0])
    assert found.probs.dtype == torch.float32
    assert (found.epistemic > 0).all()
    posterior.save(tmp_path / "posterior.safetensors")
    again = dubito.load(tmp_path / "posterior.safetensors", tiny_models.make(name)[0])
    torch.testing.assert_close(again.predict(data[0]).probs, found.probs)


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "Laplace"])
@pytest.mark.parametrize("name", ["timm ViT", "timm ConvNeXt", "GPT-2", "Llama"])
def test_every_recipe(name: str, recipe: str) -> None:
    model, (inputs, targets) = tiny_models.make(name)
    found = fitted(RECIPES[recipe], model, (inputs, targets)).predict(inputs)
    assert found.probs.isfinite().all()
    assert (found.epistemic > 0).all()


SMALL: dict[str, Any] = {"embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
HEADS = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8},
    "deit_tiny_distilled_patch16_224": {"img_size": 32, "patch_size": 8},
    "eva02_tiny_patch14_224": {"img_size": 28},
    "beit_base_patch16_224": {"img_size": 32, "patch_size": 8},
    "xcit_nano_12_p16_224": {"img_size": 32},
}


@pytest.mark.parametrize("name", [*HEADS, "torchvision"])
def test_the_last_layer_is_the_head(name: str) -> None:
    size = HEADS.get(name, {}).get("img_size", 32)
    if name == "torchvision":
        model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=3)
    else:
        model = timm.create_model(name, **SMALL, **HEADS[name])
    names = select.last_layer().resolve(model, Source(tiny_models.images(size, 2))).names
    heads = {"deit_tiny_distilled_patch16_224": ["head", "head_dist"], "torchvision": ["heads.head"]}.get(
        name, ["head"]
    )
    assert names == [f"{head}.{part}" for head in heads for part in ("weight", "bias")]


@pytest.mark.parametrize(
    "build", [lambda: tiny_models.gpt2("GPT2LMHeadModel"), lambda: tiny_models.llama("LlamaForCausalLM")]
)
def test_language_models_learn_the_next_token(build: Any) -> None:
    torch.manual_seed(0)
    model, (inputs, labels) = build().eval(), tiny_models.texts()
    posterior = dubito.MAP().fit(model, (inputs, labels), training=Training(epochs=8, lr=3e-3), progress=False)
    before, after = (float(one(**inputs, labels=labels).loss) for one in (model, posterior.model))
    assert after < before - 0.1


def test_new_weights_are_drawn_as_the_model_draws_them() -> None:
    data, still = tiny_models.sentences(), Training(epochs=1, lr=1e-8)
    member = Ensemble(1).fit(tiny_models.bert(), data, training=still, progress=False).members[0].model
    assert 0.01 < float(member.bert.embeddings.word_embeddings.weight.std()) < 0.03
    adapted = tiny_models.lora(tiny_models.bert())
    member = Ensemble(1).fit(adapted, data, training=still, progress=False).members[0].model
    assert max(float(value.abs().max()) for name, value in member.named_parameters() if "lora_B" in name) < 1e-6


RELATIVES: dict[str, dict[str, Any]] = {
    "LoraConfig": {"use_dora": True},
    "AdaLoraConfig": {"total_step": 9},
    "IA3Config": {"feedforward_modules": []},
    "VeraConfig": {"d_initial": 0.3},
    "LoHaConfig": {},
    "OFTConfig": {"oft_block_size": 4},
}


@pytest.mark.parametrize("kind", RELATIVES)
def test_new_adapters_leave_the_base_as_it_is(kind: str) -> None:
    import peft

    torch.manual_seed(0)
    base, data = tiny_models.bert().eval(), tiny_models.sentences()
    inputs = data[0]
    expected = base.bert(**inputs).pooler_output.detach()
    config = getattr(peft, kind)(task_type="SEQ_CLS", target_modules=["query", "value"], **RELATIVES[kind])
    model: Any = peft.get_peft_model(base, config).eval()
    start = {name: value.clone() for name, value in model.named_parameters()}
    for name in ADAPTERS.resolve(model).names:
        model.get_parameter(name).data.add_(3 * torch.rand_like(model.get_parameter(name)))
    assert not torch.allclose(model.base_model.model.bert(**inputs).pooler_output, expected, atol=1e-5)
    reset_parameters(model)
    torch.testing.assert_close(model.base_model.model.bert(**inputs).pooler_output, expected)
    if kind in ("IA3Config", "VeraConfig"):  # which draw nothing
        assert all(torch.equal(start[name], model.get_parameter(name)) for name in ADAPTERS.resolve(model).names)
    variances = fitted(Variational(weights=ADAPTERS), model, data).marginals()[1]
    assert all(bool((variances[name] > 0).all()) for name in ADAPTERS.resolve(model).names)


ADAPTERS = select.adapters()


@pytest.mark.parametrize(
    "recipe",
    [
        Laplace(weights=ADAPTERS),
        Variational(weights=ADAPTERS, optimizer="natural"),
        SGMCMC("sghmc", weights=ADAPTERS, num_samples=2, burn_in=2, thinning=2),
        SWAG(weights=ADAPTERS, collect_every=1, burn_in=0),
        Rank1(components=2, weights=ADAPTERS),
        Ensemble(2),
    ],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_share_a_base_that_is_not_saved(
    recipe: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Frozen, "__deepcopy__", lambda *_: pytest.fail("the base is copied"))

    def adapted(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return tiny_models.lora(tiny_models.bert(vocab_size=5000).to(dtype)).eval()

    model, data = adapted(), tiny_models.sentences()
    posterior = fitted(recipe, model, data)
    for name, value in model.named_parameters():
        assert (posterior.model.get_parameter(name).data_ptr() == value.data_ptr()) == (not value.requires_grad)
    path = tmp_path / "adapters.safetensors"
    posterior.save(path)
    assert path.stat().st_size < 5000 * 16 * dtype.itemsize  # the word embeddings of the base
    probabilities = posterior.predict(data[0]).probs
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(dubito.load(path, adapted()).predict(data[0]).probs, probabilities)
    with pytest.raises(dubito.errors.FileFormatError, match="are not those that they were fitted on"):
        dubito.load(path, adapted(seed=1))


def test_ranks_of_adapters_are_removed_and_peft_reads_them_again(tmp_path: Path) -> None:
    import peft

    torch.manual_seed(0)
    base, data = tiny_models.bert(), tiny_models.sentences()
    point = dubito.MAP().fit(tiny_models.lora(base), data, training=BRIEF, progress=False)
    posterior = Laplace(weights=ADAPTERS, prior_precision=1.0).fit(point.model, data, progress=False)
    rule = dubito.rules.PosteriorDamage(0.5, kind="obs", update=True)
    small: Any = dubito.compress(posterior, rule, structure="units", data=data).model
    ranks = [layer.r["default"] for layer in small.modules() if isinstance(layer, peft.tuners.lora.LoraLayer)]
    assert sorted(ranks) == [1, 1, 2, 2]  # one rank of each always stays; half of the others went
    small.save_pretrained(tmp_path)
    torch.manual_seed(0)
    again = peft.PeftModel.from_pretrained(tiny_models.bert(), tmp_path).eval()
    torch.testing.assert_close(again(**data[0]).logits, small(**data[0]).logits)
