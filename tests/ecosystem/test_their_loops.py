"""Posteriors from the loops of Lightning and of Hugging Face's Trainer: the page shows them, and these tests run it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dubito
from dubito import MAP, Laplace, Training, select
from ecosystem import tiny_models
from extras import needs

needs("transformers")
needs("lightning")
datasets = needs("datasets")

PAGE = Path(__file__).parents[2] / "docs" / "your-own-loop.md"
BLOCKS = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_the_page(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in BLOCKS if f"import {library}" in block or f"from {library}" in block]
    names: dict[str, Any] = {}
    exec(compile(block, f"{PAGE.name} {library}", "exec"), names)
    inputs = names["inputs"] if library == "lightning" else names["data"]
    assert len(names["posteriors"]) == 4
    for posterior in names["posteriors"].values():
        found = posterior.predict(inputs)
        assert found.probs.isfinite().all()
        assert (found.epistemic > 0).any()
    if library == "lightning":  # the module itself was given to `fit`, with its trainer
        plain = Laplace().fit(names["lit"].net, (inputs, names["targets"]), progress=False)
        torch.testing.assert_close(names["posteriors"]["Laplace"].predict(inputs).probs, plain.predict(inputs).probs)


def test_a_model_that_a_trainer_runs_in_half_precision(tmp_path: Path) -> None:
    transformers = needs("transformers")
    inputs, targets = tiny_models.sentences()
    columns = {name: value.tolist() for name, value in inputs.items()}
    data = datasets.Dataset.from_dict({**columns, "labels": targets.tolist()})
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), num_train_epochs=1, bf16=True, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=True,
    )  # fmt: skip
    trainer = transformers.Trainer(tiny_models.bert(), settings, train_dataset=data)
    trainer.train()
    assert "forward" in vars(trainer.model)  # under autocast, by a method of this one network
    for recipe, own in ((Laplace(weights=select.last_layer()), {}), (MAP(), {"training": Training(epochs=1)})):
        posterior = recipe.fit(trainer.model, data, progress=False, **own)
        torch.testing.assert_close(posterior.predict(data).probs, posterior.predict(inputs).probs)
        assert dubito.evaluate(posterior, data).scores["nll"] > 0
