"""Simulated engines of other shapes: adapters, salts, images, two KV-cache groups, drafts, thinking, block sizes."""

import pytest

from kvroute.sim import tokens
from kvroute.sim.sequence import Image, find_images
from tests.support.simlab import PROMPT, Lab, back, first_turn, reply

PLAIN = {"plugin": False, "prefix_caching": False}
MORE = tokens.encode(" and then the sea went out again")
IMAGE = [*tokens.encode("look at "), *[tokens.PAD] * tokens.IMAGE_TOKENS, *PROMPT]


@pytest.fixture
def lab():
    return Lab()


def cold(lab, prompt, **members):
    return reply(lab.run(lab.core("cold", "both"), prompt, **members))


def handle(sequence):
    assert sequence.held is not None
    return sequence.held


def second(lab, pair, done, prompt, **members):
    """The text of a turn whose prefill reads ``done`` back."""
    first = lab.run(pair[0], prompt, params=back(done.held), max_tokens=1, **members)
    return reply(lab.run(pair[1], prompt, params=dict(handle(first)), **members))


@pytest.mark.parametrize("plugin", [True, False])
@pytest.mark.parametrize(
    ("before", "after"),
    [({}, {"lora": "a"}), ({"lora": "a"}, {"lora": "b"}), ({"images": (Image(3, "x"),)}, {"images": (Image(3, "y"),)})],
)
def test_kv_of_another_adapter_or_image_is_other_kv(lab, plugin, before, after):
    members = PLAIN | {"plugin": plugin}
    pair = lab.core("p", "prefill", **members), lab.core("d", "decode", **members)
    start = IMAGE if "images" in before else PROMPT
    done = first_turn(lab, pair, prompt=start, **before)
    prompt = [*done.tokens, *MORE]
    right = cold(lab, prompt, **after)
    assert right != cold(lab, prompt, **before)
    assert (second(lab, pair, done, prompt, **after) == right) == plugin


@pytest.mark.parametrize("plugin", [True, False])
def test_kv_of_another_salt_is_the_same_and_nobody_elses_business(lab, plugin):
    members = PLAIN | {"plugin": plugin}
    pair = lab.core("p", "prefill", **members), lab.core("d", "decode", **members)
    done = first_turn(lab, pair, salt="mine")
    prompt = [*done.tokens, *MORE]
    assert second(lab, pair, done, prompt, salt="yours") == cold(lab, prompt)
    assert [violation.kind for violation in pair[0].violations] == ([] if plugin else ["other_salt"])


def test_images_separate_the_cache_from_where_they_stand(lab):
    core = lab.core("e", "both")
    for digest in ("x", "y"):
        sequence = lab.run(core, IMAGE, images=(Image(3, digest),))
        assert sequence.cached["device"] == 0
    assert lab.run(core, IMAGE, images=(Image(3, "y"),)).cached["device"] > 0
    assert sequence.extra_keys(0, 16) == (("mm", "y", 3),)
    assert sequence.extra_keys(16, 32) == (("mm", "y", -13),)
    assert sequence.extra_keys(32, 48) == ()


def test_images_are_placeholders_in_the_prompt():
    def shown(name):
        parts = [{"type": "image_url", "image_url": {"url": name}}, {"type": "text", "text": "what is this?"}]
        return [{"role": "user", "content": parts}]

    one, other = shown("a"), shown("b")
    prompt = tokens.render(one)
    assert prompt == tokens.render(other)
    assert prompt.count(tokens.PAD) == tokens.IMAGE_TOKENS
    first, second = tokens.images_of([*one, *other])
    assert first != second
    images = find_images(tokens.render([*one, *other]), [first, second])
    assert [image.digest for image in images] == [first, second]
    assert images[0].offset < images[1].offset - tokens.IMAGE_TOKENS


@pytest.mark.parametrize("plugin", [True, False])
def test_two_groups_are_read_whole_or_not_at_all(lab, plugin):
    members = PLAIN | {"plugin": plugin, "sliding_window": 32}
    pair = lab.core("p", "prefill", **members), lab.core("d", "decode", **members)
    done = first_turn(lab, pair)
    assert [len(group) for group in handle(done)["remote_block_ids"]] == [-(-done.computed // 16), 3]
    prompt = [*done.tokens, *MORE]
    assert second(lab, pair, done, prompt) == cold(lab, prompt)
    assert pair[0].stats.by_source["external_kv_transfer"] == done.computed

    again = first_turn(lab, pair)
    shorter = [*again.tokens[:-12], *MORE]  # equal up to the middle of the reply
    assert (second(lab, pair, again, shorter) == cold(lab, shorter)) == plugin


def test_a_group_that_is_not_cut_with_the_other_gives_other_text(lab):
    members = PLAIN | {"sliding_window": 32}
    pair = lab.core("p", "prefill", **members), lab.core("d", "decode", **members)
    done = first_turn(lab, pair)
    full, window = handle(done)["remote_block_ids"]
    count = len(PROMPT) // 16 * 16
    handle(done).update({"remote_num_tokens": count, "remote_block_ids": [full[: count // 16], window]})
    prompt = [*PROMPT, *MORE]
    assert second(lab, pair, done, prompt) != cold(lab, prompt)


@pytest.mark.parametrize("plugin", [True, False])
def test_drafts_that_were_not_taken_are_no_kv(lab, plugin):
    members = PLAIN | {"plugin": plugin}
    pair = lab.core("p", "prefill", **members), lab.core("d", "decode", speculative_tokens=5, **members)
    done = first_turn(lab, pair)
    assert handle(done)["remote_num_tokens"] == done.computed + 5
    prompt = [*done.tokens, *MORE]
    assert (second(lab, pair, done, prompt) == cold(lab, prompt)) == plugin


def test_larger_blocks_are_filled_from_several_smaller_ones(lab):
    pair = lab.core("p", "prefill", block_size=16, **PLAIN), lab.core("d", "decode", block_size=32, **PLAIN)
    done = first_turn(lab, pair)
    assert reply(done) == cold(lab, PROMPT)


@pytest.mark.parametrize("plugin", [True, False])
def test_larger_blocks_are_paired_wrongly_behind_local_ones(lab, plugin):
    members = {"plugin": plugin}
    pair = lab.core("p", "prefill", block_size=16, **members), lab.core("d", "decode", block_size=32, **members)
    done = first_turn(lab, pair)
    prompt = [*done.tokens, *MORE[:5]]
    assert -(-len(prompt) // 16) % 2 == 1  # a last block of decode's is filled by half
    right = cold(lab, prompt)
    assert (reply(first_turn(lab, pair, prompt=prompt)) == right) == plugin


def test_smaller_blocks_cannot_be_filled_from_larger_ones(lab):
    pair = lab.core("p", "prefill", block_size=32, **PLAIN), lab.core("d", "decode", block_size=16, **PLAIN)
    assert first_turn(lab, pair).error is not None
    assert [violation.kind for violation in pair[1].violations] == ["read_failed"]


def test_engines_of_another_model_refuse_the_connection(lab):
    pair = lab.core("p", "prefill", model="one", **PLAIN), lab.core("d", "decode", model="two", **PLAIN)
    assert first_turn(lab, pair).error is not None


def test_a_model_that_thinks_ends_its_thoughts(lab):
    written = reply(lab.run(lab.core("e", "both", thinks=True), max_tokens=40))
    text = tokens.decode(written)
    assert text.startswith("<think>\n")
    assert "</think>\n\n" in text


def test_the_template_strips_reasoning_of_earlier_turns():
    question = {"role": "user", "content": "why?"}
    answer = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nso"}
    parted = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    plain = {"role": "assistant", "content": "so"}
    earlier = [tokens.render([question, message, question]) for message in (answer, parted, plain)]
    assert earlier[0] == earlier[1] == earlier[2]
    last = [tokens.render([question, message]) for message in (answer, parted, plain)]
    assert last[0] == last[1] != last[2]


def test_template_arguments_change_the_prompt():
    question = {"role": "user", "content": "why?"}
    answer = {"role": "assistant", "content": "so"}
    plain = tokens.render([question])
    quiet = tokens.render([question], thinking=False)
    assert quiet == [*plain, *tokens.encode(tokens.NO_THOUGHT)]
    assert tokens.render([question, answer], generate=False, go_on=True) == [*plain, *tokens.encode("so")]
