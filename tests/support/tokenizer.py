"""A small byte-level BPE tokenizer with a ChatML template, trained on the spot."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_TEXT = ["the quick brown fox jumps over the lazy dog", "def value(): return None", "user assistant system\n\n"] * 9


def make(*added: AddedToken, normalizer: Any = None) -> Tokenizer:
    """Train a tokenizer; ``added`` are further added tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(list(added))
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """One that puts a mark in front of a text's beginning, as those of the Llama 2 family do."""
    tokenizer = make()
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_", prepend_scheme="first", split=False)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, template: str | None = TEMPLATE) -> Path:
    """Write a model's directory as it comes from a hub."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|endoftext|>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
