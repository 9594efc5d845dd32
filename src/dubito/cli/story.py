"""What `dubito demo` tells before it compares methods: one network, its posterior, and what the two say and save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dubito import data
from dubito.cli.options import scrambled
from dubito.data import DataSet
from dubito.fitting.posterior import Posterior
from dubito.fitting.training import Training
from dubito.methods.ensembles import Ensemble
from dubito.methods.laplace import Laplace
from dubito.methods.map import MAP
from dubito.uses.compression import rules
from dubito.uses.compression.compress import compress
from dubito.uses.reporting import bars, evaluate, plots, readings
from dubito.uses.reporting.parts import Panel, Section

LETTERS = "ACEFGHJKLMNPRTUVWXYZ"
# The share of predictions that the network may refuse, and the shares of weights that are dropped, in two steps.
REFUSED, DROPPED, ALARMS = 0.1, (0.8, 0.95), 0.05
MEMBERS, SHOWN = 5, 5


@dataclass(frozen=True)
class Story:
    """A chapter for each thing that a posterior is good for, in words and figures."""

    sections: tuple[Section, ...]  # the chapters, for the report
    epochs: int  # the number of epochs that training took

    def lines(self) -> Iterator[str]:
        """Yield the story for a terminal."""
        for section in self.sections:
            yield ""
            yield section.title
            yield from (f"  {sentence}" for sentence in section.words)


def tell(
    dataset: DataSet, network: nn.Module, seed: int = 0, *, epochs: int | None = None, progress: bool = True
) -> Story:
    """Train the network on digits, give it a posterior, and look at both; without `epochs`, their number is found."""
    options: dict[str, Any] = {"validation": dataset.validation, "progress": progress}
    training, fewest = (Training(), 60) if epochs is None else (Training(epochs=epochs), 1)
    generator = torch.Generator().manual_seed(seed)
    plain = MAP().fit(network, dataset.train, generator=generator, training=training, **options)
    assert plain.fit_record is not None
    epochs = int(plain.fit_record.epochs or 0)
    posterior = Ensemble(members=MEMBERS).fit(network, dataset.train, training=Training(epochs=epochs), **options)
    sections = [chapter(dataset, plain, posterior) for chapter in (_strangers, _refusals, _calibration)]
    around = Laplace().fit(plain.model, dataset.train, **options)
    return Story((*sections, _small(dataset, plain, around, max(3 * epochs, fewest))), epochs)


def _strangers(dataset: DataSet, plain: Posterior, posterior: Posterior) -> Section:
    """Return what both say about pictures that are no digits."""
    digits = dataset.test[0]
    sets = {
        "digits": digits,
        "letters": letters(digits),
        "digits turned by 90 degrees": digits.rot90(1, (2, 3)),
        "digits with scrambled pixels": scrambled(dataset.test)[0],
    }
    words, panels = [], []
    limits = [_uncertainty(each, _validation(dataset)).quantile(1 - ALARMS) for each in (plain, posterior)]
    for name, images in sets.items():
        both = [_sure(each, images) for each in (plain, posterior)]
        pairs = zip((plain, posterior), limits, strict=True)
        found = [float((_uncertainty(each, images) > limit).double().mean()) for each, limit in pairs]
        words.append(
            f"{name}: the network is {both[0].mean():.0%} sure and marks {found[0]:.0%} of them as strange; the "
            f"posterior is {both[1].mean():.0%} sure and marks {found[1]:.0%}."
        )
        if name != "digits":
            chosen = (both[0] - both[1]).argsort(descending=True)[:SHOWN]
            captions = [f"{both[0][k]:.0%} → {both[1][k]:.0%}" for k in chosen]
            alt = f"{name}; confidence of the network and of the posterior: {', '.join(captions)}"
            shown = [(image[0] - image.min()) / (image.max() - image.min()) for image in images[chosen]]
            panels.append(Panel(bars.pictures(shown, captions), name, alt))
    note = (
        f"A network must name a digit, whatever it is shown. Its posterior, here {MEMBERS} networks, also says how far "
        f"they disagree. A picture is called strange if they disagree more about it than about {1 - ALARMS:.0%} of all "
        "digits. Shown are the pictures on which the two differ most; below each, how sure the network is, and then "
        "how sure its posterior is."
    )
    return Section("strangers", "1. It doubts what it has never seen the like of", note, groups=(tuple(panels),),
                   words=tuple(words))  # fmt: skip


def _refusals(dataset: DataSet, plain: Posterior, posterior: Posterior) -> Section:
    """Return how many errors are avoided if the most doubtful predictions are refused."""
    images, labels = dataset.test
    shifted = images + 0.9 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    words = []
    for name, given in (("On clean digits", images), ("On noisy digits", shifted)):
        alone: Any = plain.predict(given)
        prediction: Any = posterior.predict(given)
        wrong = prediction.mode != labels
        kept = prediction.entropy.argsort()[: round((1 - REFUSED) * len(labels))]
        words.append(
            f"{name}: the network gives {int((alone.mode != labels).sum())} wrong answers of {len(labels)}, the "
            f"posterior {int(wrong.sum())}; when it may pass one picture in ten to a person, {int(wrong[kept].sum())}."
        )
    note = "The most doubtful tenth of the pictures is refused; the errors are found there more often than by chance."
    return Section("refusals", "2. It says when to ask a person", note, words=tuple(words))


def _calibration(dataset: DataSet, plain: Posterior, posterior: Posterior) -> Section:
    """Return whether confidence and accuracy agree, before and after."""
    images, labels = dataset.test
    turned = data.shifts(dataset, ["rotation"], (3,))["rotation"][3][0]
    words, panels = [], []
    for name, given in (("upright digits", images), ("digits turned a little", turned)):
        found = [evaluate(each, (given, labels)) for each in (plain, posterior)]
        errors = [each.scores["ece"] for each in found]
        nlls = [each.scores["nll"] for each in found]
        words.append(
            f"{name}: calibration error {errors[0]:.3f} before and {errors[1]:.3f} after; negative log-likelihood "
            f"{nlls[0]:.3f} and {nlls[1]:.3f}."
        )
        if name != "upright digits":
            for title, each in zip(("the network", "its posterior"), found, strict=True):
                assert each.curves.reliability is not None
                figure = plots.reliability(each.curves.reliability)
                alt = f"Accuracy by confidence of {title} on {name}."
                found_here = readings.reliability(figure, each.curves.reliability)
                panels.append(Panel(figure, f"{title}, {name}", alt, found_here))
    note = "Of answers with 90 % confidence, 90 % should be right: bars on the diagonal."
    return Section("before-after", "3. How often its confidence is right", note, groups=(tuple(panels),),
                   words=tuple(words))  # fmt: skip


def _small(dataset: DataSet, plain: Posterior, posterior: Posterior, epochs: int) -> Section:
    """Return what is left at a twentieth of the size."""
    training = Training(epochs=epochs, lr=3e-3, schedule="linear", batch_size=64)
    first, second = (rules.PosteriorDamage(share) for share in DROPPED)
    options: dict[str, Any] = {"finetune": dataset.train, "data": dataset.validation, "training": training}
    half = compress(posterior, first, **options)
    between = half.posterior(Laplace(structure="diag"), dataset.train, validation=dataset.validation, progress=False)
    small = compress(between, second, **options)
    images, labels = dataset.test
    before = float((_mode(plain, images) == labels).double().mean())
    with torch.no_grad():
        after = float((small.model(images).argmax(1) == labels).double().mean())
    remaining = small.posterior(Laplace(), dataset.train, validation=dataset.validation, progress=False)
    strange = scrambled(dataset.test)[0]
    sure = [float(_sure(remaining, part).mean()) for part in (images, strange)]
    matrices = [value for value in small.model.parameters() if value.ndim > 1]
    kept, total = sum(int((value != 0).sum()) for value in matrices), sum(value.numel() for value in matrices)
    words = (
        f"{kept:,} of {total:,} weights are left, {kept / total:.0%}.",
        f"Accuracy: {before:.1%} before, {after:.1%} after.",
        f"The posterior over what is left is {sure[0]:.0%} sure of digits and {sure[1]:.0%} of scrambled ones.",
    )
    note = (
        "A posterior knows which weights the data do not need. They are removed in two steps, and the others are "
        "trained once more after each."
    )
    return Section("small", "4. The same network at a twentieth of its size", note, words=words)


def letters(like: Tensor) -> Tensor:
    """Return pictures of letters, prepared as the pictures of digits are.

    Args:
        like: Digits ``[B, 1, H, W]``, whose darkest and lightest values are those of the letters.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size, found = 4 * like.shape[-1], []
    for letter in LETTERS:
        figure = Figure(figsize=(1, 1), dpi=size)
        canvas = FigureCanvasAgg(figure)
        figure.text(0.5, 0.45, letter, ha="center", va="center", fontsize=60, family="DejaVu Sans", weight="bold")
        canvas.draw()
        ink = 1 - torch.tensor(canvas.buffer_rgba().tolist(), dtype=like.dtype)[..., 0] / 255
        found.append(F.avg_pool2d(ink[None, None], 4)[0])
    drawn = torch.stack(found)
    return like.min() + (like.max() - like.min()) * drawn / drawn.amax((1, 2, 3), keepdim=True)


def _sure(posterior: Posterior, images: Tensor) -> Tensor:
    prediction: Any = posterior.predict(images)
    found: Tensor = prediction.confidence
    return found


def _validation(dataset: DataSet) -> Tensor:
    assert dataset.validation is not None
    inputs: Tensor = dataset.validation[0]
    return inputs


def _uncertainty(posterior: Posterior, images: Tensor) -> Tensor:
    """Return the epistemic uncertainty, or the entropy if there is none."""
    prediction: Any = posterior.predict(images)
    found: Tensor = prediction.epistemic if posterior.has_spread else prediction.entropy
    return found


def _mode(posterior: Posterior, images: Tensor) -> Tensor:
    prediction: Any = posterior.predict(images)
    found: Tensor = prediction.mode
    return found
