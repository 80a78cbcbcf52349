import dataclasses
import json
import sys

import pytest

from kvroute._core import Body
from kvroute.tokens import NoTokens, TokenizerError, read_ask
from kvroute.tokens.local import LocalTokenizer
from kvroute.tokens.template import ChatTemplate
from tests.support import tokenizer as small

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "hello <|im_end|> 日本"},
    {"role": "assistant", "content": "fox"},
    {"role": "user", "content": "and?"},
]


def ask(messages=TALK, **members):
    return read_ask("chat", Body.scan(json.dumps({"messages": messages, **members}).encode()))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return small.save(small.make(), tmp_path_factory.mktemp("model"))


def test_a_chat_is_rendered_and_encoded(model):
    tokenizer = small.make()
    local = LocalTokenizer.load(model, cache_bytes=10_000)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in TALK) + "<|im_start|>assistant\n"

    assert list(local.tokens(ask(), "string")) == tokenizer.encode(text, add_special_tokens=False).ids
    text += "<think>\n\n</think>\n\n"
    quiet = ask(chat_template_kwargs={"enable_thinking": False, "unused": 1})
    assert list(local.tokens(quiet, "string")) == tokenizer.encode(text, add_special_tokens=False).ids


def test_what_is_not_plain_is_left_to_the_engine(model):
    local = LocalTokenizer.load(model, cache_bytes=10_000)
    tools = ask(tools=[{"type": "function", "function": {"name": "f"}}])

    assert not local.renders(tools)
    assert not local.renders(ask(messages=[{"role": "user", "content": ""}]))
    with pytest.raises(NoTokens):
        local.tokens(tools, "string")
    with pytest.raises(NoTokens, match="arguments"):
        local.tokens(dataclasses.replace(ask(), arguments={"add_generation_prompt": False}), "string")


def test_a_template_in_a_file_of_its_own_wins(tmp_path):
    directory = small.save(small.make(), tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    local = LocalTokenizer.load(directory, cache_bytes=0)

    assert list(local.tokens(ask([{"role": "user", "content": "fox"}]), "string")) == small.make().encode("fox").ids


def test_a_template_that_tells_the_time_is_not_used(tmp_path):
    directory = small.save(small.make(), tmp_path, "{{ strftime_now('%d %b %Y') }}")
    local = LocalTokenizer.load(directory, cache_bytes=0)

    assert not local.renders(ask())
    assert "date" in local.why_not()


def test_files_that_are_missing_are_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LocalTokenizer.load(tmp_path, cache_bytes=0)


def test_the_extra_that_is_missing_is_named(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(TokenizerError, match=r"pip install 'kvroute\[tokenizer\]'"):
        LocalTokenizer.load(model, cache_bytes=0)


def rendered(source, messages=TALK, content="string", **arguments):
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, content=content, arguments=arguments)


def test_templates_are_rendered_as_transformers_does():
    assert rendered("{{ bos_token }}{{ messages | length }}") == "<s>4"
    assert rendered("{%- if true %}\n    {%- set x = 1 %}\n  {% endif %}\nx") == "x"  # trim_blocks, lstrip_blocks
    assert rendered("{{ {'é': '<'} | tojson }}") == '{"é": "<"}'
    assert rendered("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert rendered("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}") == (
        "system"
    )
    assert rendered("{% generation %}{% set x = 1 %}a{% endgeneration %}b{{ x }}") == "ab"
    assert rendered("{{ messages[1].content[0].text }}", content="parts") == TALK[1]["content"]
    assert rendered("{{ tools is none }} {{ documents is none }} {{ add_generation_prompt }}") == "True True True"
    assert rendered("{{ x is defined }}{{ y is defined }}", x=None, y="auto") == "FalseFalse"
    assert rendered("{{ x }}", x=3) == "3"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no system') }}", "{{ messages[9].role }}", "{{ messages.append(1) }}", "{{ ''.__class__ }}"],
)
def test_a_template_that_fails_or_reaches_out_gives_no_tokens(source):
    if "__class__" in source:
        assert "str" not in rendered(source)
        return
    with pytest.raises(NoTokens):
        rendered(source)


def test_a_template_that_is_none_is_refused():
    with pytest.raises(NoTokens, match="compiled"):
        ChatTemplate("{% if %}", {})
