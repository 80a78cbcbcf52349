"""The simulator's tokens, blocks and text: right KV gives the text of the tokens, wrong KV gives another one."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.sim import tokens
from kvroute.sim.blocks import Block, BlockPool, block_hashes
from kvroute.sim.model import START, UNIT, Cursor

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(st.text(max_size=200))
def test_text_survives_the_tokenizer(text):
    plain = text.replace("<|", "<")
    assert tokens.decode(tokens.encode(plain)) == plain


def test_special_tokens_in_text_are_special_as_in_vllm():
    assert tokens.encode("<|im_end|>") == [tokens.IM_END]


def test_generated_tokens_need_not_be_what_the_tokenizer_makes_of_their_text():
    pieces = [next(i for i in tokens.PIECES if tokens.VOCABULARY[i] == piece) for piece in (b"re", b"turn")]
    assert tokens.decode(pieces) == "return"
    assert tokens.encode("return") != pieces


def test_a_split_character_waits_for_its_other_bytes():
    decoder = tokens.StreamDecoder()
    ids = tokens.encode("é")
    assert len(ids) == 2
    assert [decoder.feed(ids[0]), decoder.feed(ids[1], last=True)] == ["", "é"]


def test_the_template_renders_what_a_next_turn_starts_with():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    first = tokens.render(messages[:1])
    whole = tokens.render(messages, generate=False)
    assert whole[: len(first)] == first


def fill(ids, block_size, cursor):
    """Blocks with the KV of ``ids``."""
    blocks: list[Block] = []
    for start in range(0, len(ids), block_size):
        block = Block(len(blocks))
        block.context = cursor.state
        block.tokens = list(ids[start : start + block_size])
        cursor.feed(block.tokens)
        block.after = cursor.state if len(block.tokens) == block_size else None
        blocks.append(block)
    return blocks


@unhurried
@given(st.lists(st.integers(0, 900), min_size=1, max_size=300), st.sampled_from([16, 32, 128]), st.data())
def test_the_next_token_depends_on_the_tokens_alone(ids, block_size, data):
    cold = Cursor()
    cold.feed(ids)
    cut = data.draw(st.integers(0, len(ids)))
    split = Cursor()
    split.feed(ids[:cut])
    split.feed(ids[cut:])
    reading = Cursor()
    for block in fill(ids, block_size, Cursor()):
        reading.use(block, len(block.tokens))
    assert cold.next_token(0) == split.next_token(0) == reading.next_token(0)
    assert (cold.state, cold.tail) == (split.state, split.tail) == (reading.state, reading.tail)


def seen(blocks, counts=None):
    cursor = Cursor()
    for number, block in enumerate(blocks):
        cursor.use(block, counts[number] if counts else len(block.tokens))
    return cursor.state, cursor.tail


@pytest.mark.parametrize("wrong", ["other tokens", "other order", "other place", "never written"])
def test_wrong_blocks_are_seen(wrong):
    ids = list(range(100, 148))
    blocks = fill(ids, UNIT, Cursor())
    right = seen(blocks)
    other = fill([*ids[:4], 7, *ids[5:]], UNIT, Cursor())
    if wrong == "other tokens":
        assert seen([other[0], *blocks[1:]]) != right
        # The same tokens, computed behind another prefix: attention carries the difference on.
        assert seen([blocks[0], other[1], blocks[2]]) != right
    elif wrong == "other order":
        assert seen([blocks[1], blocks[0], blocks[2]]) != right
    elif wrong == "other place":
        assert seen(blocks[1:]) != right
    else:
        assert seen([*blocks[:2], Block(9)], [UNIT] * 3) != right


def test_hashes_cover_salt_lora_and_everything_before():
    ids = list(range(64))
    plain = block_hashes(ids, 16, salt=None, lora=None)
    salted = block_hashes(ids, 16, salt="a", lora=None)
    assert len(plain) == 4
    assert not set(plain) & set(salted)
    assert not set(plain) & set(block_hashes(ids, 16, salt=None, lora="a"))
    assert block_hashes([9, *ids[1:]], 16, salt=None, lora=None)[3] != plain[3]
    assert block_hashes(ids[:63], 16, salt=None, lora=None) == plain[:3]


def taken(pool, count):
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_the_least_recently_used_block_goes_first_and_of_a_sequence_the_last():
    evicted: list[Block] = []
    pool = BlockPool(4, 16, evicted.append)
    first, second = taken(pool, 2), taken(pool, 2)
    for block, name in zip(first + second, [b"a", b"b", b"c", b"d"], strict=True):
        block.tokens = [1] * 16
        assert pool.cache(block, name)
    pool.release(first)
    pool.release(second)
    pool.take(pool.match([b"a"]))
    pool.release([first[0]])

    assert pool.allocate(5) is None
    pool.allocate(3)
    assert [block.id for block in evicted] == [first[1].id, second[1].id, second[0].id]
    assert pool.match([b"a", b"b"]) == [first[0]]


def test_a_cache_in_use_cannot_be_reset():
    pool = BlockPool(2, 16, lambda block: None)
    (block,) = taken(pool, 1)
    pool.cache(block, b"a")
    assert not pool.reset()
    pool.release([block])
    assert pool.reset()
    assert pool.match([b"a"]) == []
    with pytest.raises(AssertionError, match="twice"):
        pool.release([block])


def test_the_empty_context_is_one_value():
    assert Cursor().state == START
