"""Encode a column of free text as numbers: which of the frequent words each text holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from dubito.data.cells import Cells, Floats
from dubito.data.tally import Tally
from dubito.data.vocabulary import tokenize

# How many words have a feature of their own, and in how many training rows each of them must be.
MAX_WORDS, FEWEST_TEXTS = 1000, 3
# A column is free text if its texts have so many words (the median), and at least so many, a half of all, differ.
USUAL_WORDS, FEWEST_DIFFERENT = 4, 50


@dataclass(frozen=True)
class TextColumn:
    r"""Free text: one feature per frequent word, by its inverse document frequency.

    A word w that is in $n_w$ of N training texts weighs $1 + \log(N / n_w)$ in a text that holds it. The features of a
    text are divided by their norm and multiplied by the square root of the usual number of known words, so that a word
    counts more in a short text. A missing text, and one without a known word, are all zeros.
    """

    name: str  # the name of the column
    words: tuple[str, ...]  # the words, the most frequent first
    weights: tuple[float, ...]  # the weight of each word
    size: float  # the norm of the features of a text
    holds: ClassVar[str] = "text"
    indicator: ClassVar[bool] = False
    fill: ClassVar[str] = ""

    @classmethod
    def fit(cls, cells: Cells) -> TextColumn | None:
        """Return the column as the training rows show it; None if no word is in several of them."""
        texts = [set(words_of(label)) for label in cells.labels() if label is not None]
        counts = Counter(word for words in texts for word in words)
        frequent = sorted((w for w, n in counts.items() if n >= FEWEST_TEXTS), key=lambda w: (-counts[w], w))
        words = tuple(frequent[:MAX_WORDS])
        if not words:
            return None
        known = set(words)
        usual = sum(len(each & known) for each in texts) / len(texts)
        weights = tuple(1 + math.log(len(texts) / counts[word]) for word in words)
        return cls(cells.name, words, weights, math.sqrt(max(usual, 1.0)))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Return the names of the features that the column becomes."""
        return tuple(f"{self.name}: {word}" for word in self.words)

    def ranges(self) -> list[tuple[float, float]]:
        """Return the ends of each feature; a text is never outside of them."""
        return [(-np.inf, np.inf)] * len(self.words)

    def widened(self, cells: Cells) -> TextColumn:
        """Return the column itself: a new word has no feature."""
        return self

    @cached_property
    def _places(self) -> dict[str, int]:
        return {word: place for place, word in enumerate(self.words)}

    def encode(self, cells: Cells, tally: Tally | None = None) -> Floats:
        """Encode texts `[N]` as features `[N, words]`; a tally counts texts without a known word."""
        labels, weights = cells.labels(), np.array(self.weights)
        features = np.zeros((len(labels), len(self.words)))
        for row, label in enumerate(labels):
            found = {self._places[word] for word in words_of(label or "") if word in self._places}
            if found:
                chosen = sorted(found)
                features[row, chosen] = weights[chosen] * (self.size / np.linalg.norm(weights[chosen]))
        if tally is not None:
            tally.count_texts(cells, ~features.any(axis=1) & ~cells.missing())
        return features

    def decode(self, features: Floats) -> list[Any]:
        """Return the known words of each text, the most frequent first: their order is lost."""
        return [" ".join(self.words[place] for place in np.flatnonzero(row)) or None for row in features]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation marks and numbers.

    >>> words_of("It's 2 fine films!")
    ['it', "'s", 'fine', 'films']
    """
    return [word for word in tokenize(text) if any(letter.isalpha() for letter in word)]


def is_free_text(texts: Sequence[str]) -> bool:
    """Return whether texts are sentences, and neither names of categories nor ids.

    >>> is_free_text([f"a fine film about the number {'x' * place}" for place in range(60)])
    True
    >>> is_free_text(["a fine film about trains"] * 60), is_free_text([f"H{place}" for place in range(60)])
    (False, False)
    """
    different = set(texts)
    if len(different) < max(FEWEST_DIFFERENT, len(texts) / 2):
        return False
    return float(np.median([len(words_of(text)) for text in texts])) >= USUAL_WORDS
