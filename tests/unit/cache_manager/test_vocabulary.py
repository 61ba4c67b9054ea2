import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_manager.core.vocabulary import MAX_VOCAB_SIZE, Vocabulary


@pytest.mark.parametrize("size", [1, 255, 256, 1000, 49152, 50257, 65536, 128256, MAX_VOCAB_SIZE])
@pytest.mark.parametrize("count", [1, 2, 32, 33, 1025])
@pytest.mark.parametrize("stranger", [-1, 0, 1, 1 << 31, (1 << 32) - 1, 1 << 32])
def test_one_stranger_among_many_tokens_is_found(size, count, stranger):
    """At every seam: of the vocabulary, and between few tokens and many."""
    vocabulary = Vocabulary(size)
    wrong = stranger if stranger < 0 or stranger >= size else size + stranger
    for place in {0, count // 2, count - 1}:
        tokens = [size - 1] * count
        assert vocabulary.holds(tokens)
        tokens[place] = wrong
        assert not vocabulary.holds(tokens)
        assert vocabulary.first_stranger(tokens) == wrong


@given(st.integers(1, 40), st.lists(st.integers(-2, 41), max_size=9))
def test_it_agrees_with_comparing_one_by_one(size, tokens):
    strangers = [token for token in tokens if not 0 <= token < size]
    assert Vocabulary(size).first_stranger(tokens) == (strangers[0] if strangers else None)


@given(st.data())
def test_many_tokens_are_judged_right_where_all_but_one_byte_are_the_sizes(data):
    size = data.draw(st.integers(1, MAX_VOCAB_SIZE))
    byte, bits = data.draw(st.integers(0, 255)), data.draw(st.sampled_from([0, 8, 16, 24]))
    token = size & ~(255 << bits) | byte << bits
    assert Vocabulary(size).holds([token] * 40) == (token < size)


def test_no_tokens_are_no_strangers():
    assert Vocabulary(10).holds([])
