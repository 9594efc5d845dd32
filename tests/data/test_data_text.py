from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dubito.errors import FileFormatError, InputError
from tiny_files import write_text

from dubito import data
from dubito.data import Vocabulary, tokenize


def test_tokens():
    assert tokenize("Can't  stop,\tcafé 21st!") == ["can", "'t", "stop", ",", "café", "21st", "!"]
    assert tokenize("") == []


def test_words_are_ordered_by_frequency_then_name():
    vocabulary = Vocabulary.fit(["b a a c", "c b d"], min_count=1)
    assert vocabulary.words == ("<pad>", "<unk>", "a", "b", "c", "d")
    assert len(Vocabulary.fit(["b a a c", "c b d"], min_count=1, max_words=2)) == 4


def test_encoding_pads_cuts_and_marks_the_unknown():
    vocabulary = Vocabulary.fit(["x y z", "x y"], min_count=2, max_length=3)
    assert vocabulary.length == 3
    encoded = vocabulary.encode(["y x y x", "new", ""])
    assert encoded.dtype == torch.int64
    assert encoded.tolist() == [[3, 2, 3], [1, 0, 0], [1, 0, 0]]  # an empty text is one unknown word
    assert vocabulary.decode(encoded) == ["y x y", "<unk>", "<unk>"]


def test_json_round_trip():
    vocabulary = Vocabulary.fit(["a café"], min_count=1)
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary
    for text in ("", "[]", '{"format": "other/1", "words": [], "length": 1}', '{"format": "dubito.vocabulary/1"}'):
        with pytest.raises(FileFormatError, match="not written by Vocabulary"):
            Vocabulary.from_json(text)


def test_bad_input():
    with pytest.raises(InputError, match="at least one text"):
        Vocabulary.fit([])
    with pytest.raises(InputError, match="wrap one text in a list"):
        Vocabulary.fit(["a a"]).encode("a")


def test_movie_reviews_from_files(tiny_data: Path):
    reviews = data.load("mr", validation=0)
    assert (len(reviews.train[1]), len(reviews.test[1])) == (72, 8)
    assert reviews.test[1].bincount().tolist() == [4, 4]
    assert sorted(set(reviews.encoder.decode(reviews.train[0]))) == ["a bad film", "a fine film", "a moving café story"]
    by_text = dict(zip(reviews.encoder.decode(reviews.train[0]), reviews.train[1].tolist(), strict=True))
    assert by_text == {"a bad film": 0, "a fine film": 1, "a moving café story": 1}
    assert 10 < reviews.train[1][:40].sum() < 30  # not sorted by class, as the files are


def test_the_vocabulary_knows_the_training_part_only(tiny_data: Path):
    path = tiny_data / "text/SMSSpamCollection.tsv.gz"
    write_text(path, "".join(f"{'spam' if i % 2 else 'ham'}\tword{i} word{i}\n" for i in range(40)))
    messages = data.load("sms", validation=0.25)
    words = set(messages.encoder.words[2:])
    assert len(words) == len(messages.train[1]) == 27
    assert (messages.validation[0][:, :2] == 1).all()
    assert (messages.test[0][:, :2] == 1).all()


def test_text_can_be_encoded_like_another_text_set(tiny_data: Path):
    reviews = data.load("mr")
    messages = data.load("sms", like=reviews)
    assert messages.encoder is reviews.encoder
    assert messages.input_shape == reviews.input_shape
    with pytest.raises(InputError, match="has text, which cannot be prepared like 'digits'"):
        data.load("sms", like=data.load("digits"))


def test_foreign_messages_are_refused(tiny_data: Path):
    write_text(tiny_data / "text/SMSSpamCollection.tsv.gz", "a\tb\n")
    with pytest.raises(FileFormatError, match="`ham` or `spam`"):
        data.load("sms")
    write_text(tiny_data / "text/SMSSpamCollection.tsv.gz", "ham\té\n", "latin-1")
    with pytest.raises(FileFormatError, match="not text in utf-8"):
        data.load("sms")
