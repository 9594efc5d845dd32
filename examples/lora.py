"""LoRA with few labels: what a posterior over the adapters adds to a fine-tuned language model.

A small Llama first learns to predict the next word of movie reviews, without their labels. LoRA adapters then learn
from 400 labelled reviews whether a review is positive. Text messages are the out-of-distribution data. It needs the
extra `ecosystem` and the data sets `mr` and `sms`. Run it as

    python examples/lora.py --backbone backbone.safetensors  # one seed; the first run also pretrains
    python examples/lora.py --backbone backbone.safetensors --seeds 3 --picture docs/img/lora.png
    python examples/lora.py --backbone backbone.safetensors --first 2 --only networks  # one method, one more seed
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import dubito
from dubito import MAP, Ensemble, Laplace, Training, Variational, data, decisions, rules, select

LENGTH, WORDS, WIDTH = 32, 3000, 64
LABELS, HELD_OUT = 400, 100  # the held-out labels choose epochs, temperatures and prior precisions
RANK, MEMBERS = 8, 5
EPOCHS, BATCH = 8, 64  # of pretraining
FINE_TUNING = Training(epochs=15, lr=3e-3, batch_size=32)
REMOVED = (0.0, 0.25, 0.5, 0.75)
RULES: dict[str, Callable[[float], Any]] = {
    # the share is one of the ranks that may go: one of each adapter always stays
    "posterior damage": lambda share: rules.PosteriorDamage(share * RANK / (RANK - 1), kind="obs", update=True),
    "magnitude": lambda share: rules.Magnitude(share, scope="layer"),
    "random": lambda share: rules.Random(share, scope="layer"),
}
Pair = tuple[Tensor, Tensor]
Scores = dict[str, float]


def shortened(tokens: Tensor) -> Tensor:
    """Return the first tokens of each text; rare words become unknown, as the most frequent ones have low numbers."""
    return torch.where(tokens < WORDS, tokens, 1)[:, :LENGTH]


def network(head: str) -> nn.Module:
    """Return a small Llama with random weights; `head` is the class of transformers."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=LENGTH, pad_token_id=0, num_labels=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return getattr(transformers, head)(config)


def pretrain(tokens: Tensor) -> dict[str, Tensor]:
    """Return the weights of a body that was trained to predict the next word."""
    torch.manual_seed(0)
    model = network("LlamaForCausalLM")
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    steps = EPOCHS * -(-len(tokens) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for epoch in range(EPOCHS):
        losses = []
        for rows in torch.randperm(len(tokens)).split(BATCH):
            batch = tokens[rows]
            batch = batch[:, : int((batch > 0).sum(1).max())]
            logits = model(batch).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        print(f"pretraining, epoch {epoch + 1} of {EPOCHS}: {statistics.mean(losses):.3f} nats per word", flush=True)
    return {name: value.detach().clone() for name, value in model.model.state_dict().items()}


def adapted(body: dict[str, Tensor], seed: int) -> nn.Module:
    """Return the pretrained network, frozen, with new LoRA adapters and a new head."""
    import peft

    torch.manual_seed(seed)
    model = network("LlamaForSequenceClassification")
    model.model.load_state_dict(body)
    lora = peft.LoraConfig(
        task_type="SEQ_CLS", r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], lora_dropout=0.0
    )
    return peft.get_peft_model(model, lora)


def posteriors(model: nn.Module, train: Pair, held_out: Pair, seed: int) -> dict[str, Callable[[], Any]]:
    """Return the fits to compare, by name; all see the same labels."""
    weights = select.adapters()
    point: dict[str, Any] = {}

    def fit(recipe: Any, on: nn.Module | None = None, training: Training = FINE_TUNING) -> Any:
        generator = torch.Generator().manual_seed(seed)
        own = {"training": training} if on is None else {}
        return recipe.fit(on or model, train, validation=held_out, generator=generator, progress=False, **own)

    def trained() -> Any:
        if not point:
            point["of"] = fit(MAP())
        return point["of"]

    return {
        "MAP": trained,
        "MAP, best epoch": lambda: fit(MAP(), training=FINE_TUNING.replace(restore_best=True)),
        "MAP + temperature": lambda: decisions.temper(trained(), held_out),
        "last layer": lambda: fit(Laplace(weights=select.last_layer()), trained().model),
        "Laplace-LoRA": lambda: fit(Laplace(weights=weights), trained().model),
        "Laplace-LoRA, whole factors": lambda: fit(Laplace(weights=weights, factor_rank=None), trained().model),
        "natural-gradient LoRA": lambda: fit(Variational(weights=weights, optimizer="natural")),
        f"{MEMBERS} LoRA networks": lambda: fit(Ensemble(MEMBERS)),
    }


def measured(fit: Callable[[], Any], test: Pair, ood: Tensor) -> tuple[Any, Scores]:
    """Return a posterior with its scores, the memory that its fit took, and the size of its file."""
    before = peak(reset=True)
    posterior = fit()
    memory = peak() - before
    found = dubito.evaluate(posterior, test, ood={"messages": ood})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "posterior"
        posterior.save(path)
        size = path.stat().st_size
    auroc = found.ood["messages"]["entropy"]["auroc"]
    kept = {name: found.scores[name] for name in ("accuracy", "nll", "ece")}
    return posterior, {**kept, "OOD AUROC": auroc, "memory, MB": memory, "file, kB": size / 1000}


def peak(reset: bool = False) -> float:
    """Return the most memory that this process has held since the last reset, in megabytes; NaN if not on Linux."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return float(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 1000
    except OSError:
        return float("nan")


def prune(posterior: Any, train: Pair, test: Pair) -> dict[str, dict[float, float]]:
    """Return the test NLL after a share of the ranks of all adapters was removed, by rule."""
    found: dict[str, dict[float, float]] = {name: {} for name in RULES}
    for name, rule in RULES.items():
        for share in REMOVED:
            small = dubito.compress(
                posterior, rule(share), structure="units", data=train, generator=torch.Generator().manual_seed(0)
            )
            with torch.no_grad():
                found[name][share] = float(F.cross_entropy(small.model(test[0]).logits, test[1]))
    return found


def run(seed: int, body: dict[str, Tensor], labelled: Pair, test: Pair, ood: Tensor, only: str = "") -> dict[str, Any]:
    """Return scores by method (those with `only` in their names) and the NLL after pruning, for one draw of labels."""
    inputs, targets = labelled
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))[: LABELS + HELD_OUT]
    train, held_out = ((inputs[rows], targets[rows]) for rows in order.split([LABELS, HELD_OUT]))
    model = adapted(body, seed)
    scores, pruned = {}, {}
    chosen = {name: fit for name, fit in posteriors(model, train, held_out, seed).items() if only in name}
    for name, fit in chosen.items():
        posterior, scores[name] = measured(fit, test, ood)
        print(f"seed {seed}, {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in scores[name].items()), flush=True)
        if name == "Laplace-LoRA":
            pruned = prune(posterior, train, test)
            print(f"seed {seed}, pruned: {json.dumps(pruned)}", flush=True)
    return {"scores": scores, "pruned": pruned}


def table(runs: list[dict[str, Any]]) -> str:
    """Return the mean and the standard deviation over seeds (of memory the maximum), as a table in Markdown."""
    columns = list(next(iter(runs[0]["scores"].values())))
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for name in runs[0]["scores"]:
        cells = []
        for column in columns:
            values = [one["scores"][name][column] for one in runs]
            digits = 0 if "," in column else 3
            if column.startswith("memory"):  # later seeds reuse the memory of earlier ones
                values = [max(values)]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 and digits else ""
            cells.append(f"{statistics.mean(values):.{digits}f}{spread}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: list[dict[str, Any]], path: str) -> None:
    from dubito.uses.reporting import plots

    figure = plots.shift({name: [one["pruned"][name] for one in runs] for name in RULES}, score="Test NLL")
    figure.axes[0].set_xlabel("Share of the adapters' ranks removed")
    figure.set_facecolor("white")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", type=Path, required=True, help="file of the pretrained body; made if missing")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="part of the names of the methods to run")
    parser.add_argument("--picture", default=None)
    given = parser.parse_args()
    try:
        import peft  # noqa: F401
        import transformers
    except ImportError as error:
        sys.exit(f"This example needs transformers and peft ({error}): pip install 'dubito[ecosystem]'.")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    reviews = data.load("mr", validation=0)
    messages = data.load("sms", like=reviews, validation=0)
    labelled, test = ((shortened(inputs), targets) for inputs, targets in (reviews.train, reviews.test))
    if not given.backbone.exists():
        save_file(pretrain(labelled[0]), given.backbone)
    body, ood = load_file(given.backbone), shortened(messages.test[0])
    seeds = range(given.first, given.first + given.seeds)
    runs = [run(seed, body, labelled, test, ood, given.only) for seed in seeds]
    print(table(runs))
    if given.picture:
        draw(runs, given.picture)


if __name__ == "__main__":
    main()
