"""A small model made on the spot, sharp enough to show wrong KV.

No weights are downloaded: a byte-level BPE tokenizer and seeded random weights with a *large spread*. With small
weights the output hardly depends on the context, and KV of another text would go unnoticed. The model writes token
sequences that no tokenizer would produce for their text, and bytes that are not UTF-8, so a conversation sent back as
messages is tokenised differently than it was generated: the common case in the field, made frequent.

This file is imported by the tests (which have no torch) and run as a script by the engine environment's Python.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SERVED_NAME = "tiny"
MAX_POSITIONS = 32_768
TRAINING_WORDS = 60_000

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""ChatML, and of what else changes a prompt: tools, and one argument."""

WORDS = """
a about above across act add after again air all also always an and animal answer any are around as ask at away back
be because bed before begin below between big bird block blue boat body book both bring build but by cache call came
can car carry case change child city clear close cold color come cook could country cover cross cut day decode did
different do does dog done door down draw dry each earth east easy eat end engine enough even ever every example eye
face fact fall family far farm fast father feel few field find fire first fish five fly follow food foot for form
found four free friend from front full game gave get girl give go gold good great green ground group grow had half
hand hard has have he head hear heat help her here high him his hold home horse hot hour house how hundred idea if in
interest is island it just keep key kind king know land language large last late laugh lead learn leave left less let
letter life light like line list listen little live long look love low machine made main make man many map mark may
mean measure men might mile mind minute miss moon more morning most mother mountain move much music must my name near
need never new next night no north note nothing notice now number object of off often old on once one only open or
order other our out over own page paper part pass pattern people perhaps person picture piece place plain plan plant
play point port pose power prefill press problem product pull put question quick rain ran reach read ready real red
remember rest right river road rock room round rule run said same saw say school science sea second see seem self send
sentence set seven several shape she ship short should show side simple since sing sit six size sleep slow small snow
so some song soon sound south special spell stand star start state stay step still stood stop story street strong
study such sun sure surface table tail take talk teach tell ten test than that the their them then there these they
thing think this those though thought thousand three through time to together token told too took top toward town
transfer travel tree true try turn two under unit until up us use usual verb very voice vowel walk want war warm was
watch water way we week weight well went were west what wheel when where which while white who whole why will wind
with wonder wood word work world would write year yes yet you young your
""".split()  # noqa: SIM905 - a list of quoted words would hide them


@dataclass(frozen=True, slots=True)
class Variant:
    """The size of a model.

    Attributes:
        window: Tokens that every second layer sees, which gives the engine two KV-cache groups; 0: all see everything.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0


VARIANTS = {
    "small": Variant(layers=2, hidden=128, intermediate=384, heads=4, kv_heads=2, head_dim=32),
    # 17M parameters: prefill is slow enough on a CPU for a visible gain from reuse.
    "timed": Variant(layers=8, hidden=384, intermediate=1152, heads=6, kv_heads=2, head_dim=64),
    "windowed": Variant(layers=2, hidden=128, intermediate=384, heads=4, kv_heads=2, head_dim=32, window=64),
}
ADAPTERS = ("adapter-a", "adapter-b")
"""LoRA adapters that are made beside each model, in directories of these names."""


def ensure(python: Path, variant: str = "small") -> Path:
    """Make a model, or reuse the one that this file made before.

    Args:
        python: The engine environment's interpreter.
        variant: A key of `VARIANTS`.

    Returns:
        The model's directory.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    directory = Path("~/.cache/kvroute").expanduser() / f"model-{variant}-{digest}"
    if not directory.exists():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run([str(python), __file__, "--out", str(partial), "--variant", variant], check=True)
        partial.rename(directory)
    return directory


def text(seed: int, words: int) -> str:
    """Plain sentences, equal for equal arguments."""
    rng = random.Random(seed)
    out: list[str] = []
    while words > 0:
        length = min(words, rng.randint(4, 12))
        out.append(" ".join(rng.choices(WORDS, k=length)).capitalize() + rng.choice(".?!,"))
        words -= length
    return " ".join(out)


def make(directory: Path, variant: Variant) -> None:
    """Write tokenizer, configuration and weights."""
    # Only the engine environment has these, and this module is imported outside it.
    import torch  # noqa: PLC0415
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        LlamaConfig,
        LlamaForCausalLM,
        PreTrainedTokenizerFast,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    torch.set_num_threads(1)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text(seed, 100) for seed in range(TRAINING_WORDS // 100)], trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    directory.mkdir(parents=True)
    wrapped.save_pretrained(directory)
    shape = {
        "vocab_size": len(wrapped),
        "hidden_size": variant.hidden,
        "intermediate_size": variant.intermediate,
        "num_hidden_layers": variant.layers,
        "num_attention_heads": variant.heads,
        "num_key_value_heads": variant.kv_heads,
        "head_dim": variant.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": wrapped.eos_token_id,
        "dtype": "float32",
    }
    if variant.window:
        # vLLM knows windows of single layers for Llama, not for Qwen3.
        layers = ["sliding_attention" if layer % 2 else "full_attention" for layer in range(variant.layers)]
        model = LlamaForCausalLM(LlamaConfig(**shape, layer_types=layers, sliding_window=variant.window))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if "norm" not in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread(name, weight))
            elif "q_norm" in name:
                # Sharper attention: the text then never settles into a loop, where a wrong history would not show.
                weight.fill_(3.0)
    model.save_pretrained(directory)
    for name in ADAPTERS:
        _make_adapter(directory / name, variant, generator)


def _make_adapter(directory: Path, variant: Variant, generator: torch.Generator) -> None:
    """Write a LoRA adapter of the values alone: that changes the KV, and the text with it."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    rank, width = 8, variant.kv_heads * variant.head_dim
    weights = {}
    for layer in range(variant.layers):
        stem = f"base_model.model.model.layers.{layer}.self_attn.v_proj"
        weights[f"{stem}.lora_A.weight"] = torch.randn((rank, variant.hidden), generator=generator) * 0.3
        weights[f"{stem}.lora_B.weight"] = torch.randn((width, rank), generator=generator) * 0.3
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"target_modules": ["v_proj"], "base_model_name_or_path": None}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def spread(name: str, weight: torch.Tensor) -> float:
    """Standard deviation of a weight: wide enough that the last token depends on all tokens before it."""
    if "embed_tokens" in name or "lm_head" in name:
        return 1.0
    scale = 0.12 if weight.shape[-1] <= 128 else 0.12 * (128 / weight.shape[-1]) ** 0.5
    return scale * 3 if "v_proj" in name or "o_proj" in name else scale


def main() -> None:
    """Run by the engine environment's Python."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--variant", choices=sorted(VARIANTS), default="small")
    options = parser.parse_args()
    make(options.out, VARIANTS[options.variant])


if __name__ == "__main__":
    main()
