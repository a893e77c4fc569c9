"""The text, its split, and batches that are functions of the step."""

import numpy as np
import pytest

from language_model.data import (
    END,
    IGNORE,
    Text,
    standard_library,
    training_batch,
    validation_batches,
)


@pytest.fixture(scope="module")
def text():
    return standard_library()


def test_text(text):
    assert len(text.train) > 5_000_000
    assert 0.02 < len(text.validation) / len(text.train) < 0.1
    for tokens in (text.train, text.validation):
        assert tokens.max() == END
        assert b"\r" not in tokens[tokens < END].astype(np.uint8).tobytes()
    assert standard_library().digest == text.digest
    assert Text(text.train[1:], text.validation).digest != text.digest


def test_nothing_is_in_both_parts(text):
    def files(tokens):
        ends = np.flatnonzero(tokens == END)
        return {part.tobytes() for part in np.split(tokens, ends + 1) if len(part) > 200}

    train, held_out = files(text.train), files(text.validation)
    assert len(train) > 300
    assert len(held_out) > 10
    assert not train & held_out


def test_batches_are_functions_of_the_step(text):
    tokens, labels = training_batch(text, 3, 20, seed=1, step=5)
    assert tokens.shape == labels.shape == (3, 20)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    again, _ = training_batch(text, 3, 20, seed=1, step=5)
    np.testing.assert_array_equal(tokens, again)
    for seed, step in ((1, 6), (2, 5)):
        assert (training_batch(text, 3, 20, seed, step)[0] != tokens).any()


def test_a_text_of_one_sequence():
    text = Text(np.arange(5, dtype=np.uint16), np.arange(2, dtype=np.uint16))
    tokens, labels = training_batch(text, 2, 4, seed=0, step=0)
    np.testing.assert_array_equal(tokens, [[0, 1, 2, 3]] * 2)
    np.testing.assert_array_equal(labels, [[1, 2, 3, 4]] * 2)
    with pytest.raises(ValueError, match="sequences of 5 tokens and one to predict do not fit"):
        training_batch(text, 2, 5, seed=0, step=0)


def test_validation_covers_the_text_once():
    text = Text(np.zeros(9, np.uint16), np.arange(12, dtype=np.uint16))
    batches = list(validation_batches(text, batch=2, sequence=4, count=9))
    assert [tokens.shape for tokens, _ in batches] == [(2, 4), (1, 4)]
    labels = np.concatenate([labels.ravel() for _, labels in batches])
    np.testing.assert_array_equal(labels, [*range(1, 12), IGNORE])
    assert len(list(validation_batches(text, 2, 4, count=1))) == 1
