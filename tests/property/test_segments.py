"""Pieces encoded one by one are the whole text encoded at once, or are not used."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers

from kvroute.tokens.segments import SegmentedEncoder
from tests.support import tokenizer as small

TOKENIZERS = {
    "byte level": small.make(),
    "normalised": small.make(normalizer=normalizers.NFC()),
    "first piece": small.sentencepiece_like(),
    # A token that begins like one to cut at, one in it, and ones that take the space beside them.
    "nested": small.make(
        AddedToken("<|im_start|>user", special=True),
        AddedToken("<think>", special=False),
        AddedToken("<|im", special=True),
        AddedToken("<|right|>", special=True, rstrip=True),
        AddedToken("<|left|>", special=True, lstrip=True),
        AddedToken("_word", special=False, normalized=True),
    ),
}
ENCODERS = {name: SegmentedEncoder(tokenizer, cache_bytes=20_000) for name, tokenizer in TOKENIZERS.items()}
PARTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [*small.SPECIAL, "<|im", "_start|>", "<|right|>", "<|left|>", "<think>", "_word", " ", "\n", "  ", "user\n"]
    ),
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(PARTS, max_size=20))
def test_pieces_are_the_whole(name, parts):
    encoder, text = ENCODERS[name], "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # half a surrogate pair is not text
    assert encoder.encode(text) == encoder.encode_whole(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_they_are_used(name):
    assert ENCODERS[name].splits


def test_a_tokenizer_that_looks_at_letters_around_its_tokens_is_not_cut():
    encoder = SegmentedEncoder(small.make(AddedToken("word", single_word=True)), cache_bytes=1000)

    assert not encoder.splits
    assert encoder.encode("a word, words<|im_end|>word") == encoder.encode_whole("a word, words<|im_end|>word")


def test_a_tokenizer_whose_pieces_do_not_make_the_whole_is_not_cut():
    tokenizer = small.make()
    # What stands before a token is joined with it and with what follows: no piece can be encoded by itself.
    tokenizer.normalizer = normalizers.Replace("<|im_end|>", "x")
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", normalized=False)])

    class Joining:
        def to_str(self):
            return tokenizer.to_str()

        def encode(self, text, **members):
            return tokenizer.encode(text.replace("hello<|im_end|>", "h"), **members)

    joining: Any = Joining()
    assert not SegmentedEncoder(joining, cache_bytes=1000).splits


def test_a_long_history_is_encoded_once_and_memory_is_bounded():
    class Counting:
        def __init__(self, tokenizer):
            self.tokenizer, self.encoded = tokenizer, 0

        def to_str(self):
            return self.tokenizer.to_str()

        def encode(self, text, **members):
            self.encoded += len(text)
            return self.tokenizer.encode(text, **members)

    counting: Any = Counting(small.make())
    encoder = SegmentedEncoder(counting, cache_bytes=50_000)
    history = "".join(f"<|im_start|>user\nturn {number} {'text ' * 30}<|im_end|>\n" for number in range(20))
    encoder.encode(history)
    assert encoder.uncached(history) == 0

    counting.encoded = 0
    new = "<|im_start|>user\nnew<|im_end|>\n"
    assert encoder.uncached(history + new) == len("<|im_start|>user\nnew")
    encoder.encode(history + new)
    assert counting.encoded == len("<|im_start|>user\nnew")

    for number in range(300):
        encoder.encode(f"<|im_start|>other {number} {'text ' * 50}<|im_end|>\n")
    assert encoder._used <= 50_000
    assert encoder.uncached(history) > 0
