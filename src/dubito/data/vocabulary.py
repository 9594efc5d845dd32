"""Turn texts into padded integer sequences, with a small tokenizer and a vocabulary from the training part."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from dubito.core.arguments import checked_arguments
from dubito.core.constraints import Count
from dubito.core.errors import FileFormatError, InputError

PADDING, UNKNOWN = 0, 1
_SPECIAL = ("<pad>", "<unk>")
_TOKEN = re.compile(r"'?\w+|[^\w\s]")


@checked_arguments
def tokenize(text: str) -> list[str]:
    """Split into lower-case words, clitics and single punctuation marks.

    Example:
        >>> tokenize("It's the Rock -- again!")
        ['it', "'s", 'the', 'rock', '-', '-', 'again', '!']
    """
    return _TOKEN.findall(text.lower())


@dataclass(frozen=True)
class Vocabulary:
    """The words that have a number of their own, and the length to which inputs are padded or cut.

    Token 0 is padding, token 1 stands for every unknown word; the others follow by falling frequency.

    Example:
        >>> vocabulary = Vocabulary.fit(["a fine film", "a bad film"], min_count=2)
        >>> vocabulary.words
        ('<pad>', '<unk>', 'a', 'film')
        >>> vocabulary.encode(["a great film", "film"]).tolist()
        [[2, 1, 3], [3, 0, 0]]
    """

    words: tuple[str, ...]
    length: int

    @classmethod
    @checked_arguments
    def fit(
        cls, texts: Iterable[str], *, max_words: Count = 20_000, min_count: Count = 2, max_length: Count = 64
    ) -> Vocabulary:
        """Build the vocabulary of the training texts.

        Args:
            texts: The training texts.
            max_words: Keep at most this many words, the most frequent ones; ties are broken alphabetically.
            min_count: A word seen less often is unknown, so that the unknown token is trained too.
            max_length: Sequences get the length of the longest training text, but at most this.
        """
        tokens = _tokens(texts)
        if not tokens:
            raise InputError("A vocabulary needs at least one text, got none.")
        counts = Counter(chain.from_iterable(tokens))
        frequent = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
        length = min(max_length, max(1, max(map(len, tokens))))
        return cls((*_SPECIAL, *frequent[:max_words]), length)

    def __len__(self) -> int:
        return len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @checked_arguments
    def encode(self, texts: Iterable[str]) -> Tensor:
        """Return int64 tokens `[N, length]`, cut or padded at the end; an empty text becomes one unknown word."""
        texts_tokens = _tokens(texts)
        numbers = torch.full((len(texts_tokens), self.length), PADDING, dtype=torch.int64)
        for row, tokens in enumerate(texts_tokens):
            # A row of padding alone would leave a masked network nothing to attend to.
            known = [self._numbers.get(token, UNKNOWN) for token in tokens[: self.length]] or [UNKNOWN]
            numbers[row, : len(known)] = torch.tensor(known)
        return numbers

    @checked_arguments
    def decode(self, numbers: Tensor) -> list[str]:
        """Return the words of tokens `[N, length]`, joined by spaces, without the padding."""
        if numbers.ndim != 2 or numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
            raise InputError(f"Tokens are whole numbers [N, length], got {tuple(numbers.shape)} of {numbers.dtype}.")
        if bool(((numbers < 0) | (numbers >= len(self.words))).any()):
            raise InputError(f"Tokens of this vocabulary are 0 to {len(self.words) - 1}, got other numbers.")
        return [" ".join(self.words[token] for token in row if token != PADDING) for row in numbers.tolist()]

    def to_json(self) -> str:
        """Return the vocabulary as JSON, to be saved with the network that was trained with it."""
        return json.dumps({"format": "dubito.vocabulary/1", "length": self.length, "words": self.words})

    @classmethod
    @checked_arguments
    def from_json(cls, text: str) -> Vocabulary:
        """Read what `to_json` wrote."""
        try:
            content = json.loads(text)
            if content["format"] != "dubito.vocabulary/1":
                raise ValueError(f"its format is {content['format']!r}")
            return cls(tuple(content["words"]), int(content["length"]))
        except (ValueError, KeyError, TypeError) as error:
            raise FileFormatError(f"This JSON was not written by Vocabulary.to_json ({error}).") from error


def _tokens(texts: Iterable[str]) -> list[list[str]]:
    """Return the tokens of each text."""
    try:
        listed = None if isinstance(texts, str | bytes) else list(texts)
    except TypeError:  # not iterable, which a tensor says only when it is tried
        listed = None
    if listed is None:
        raise InputError(f"`texts` must be a list of texts, got a {type(texts).__name__}: wrap one text in a list.")
    return [tokenize(text) for text in listed]
