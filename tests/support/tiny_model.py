"""Real models of a few hundred kilobytes: seeded weights in Hugging Face layout, with tokenizer and chat template.

Their weights are drawn wide, so that logits lie far apart and greedy texts wander instead of repeating one token.
The tokenizer has one token per byte behind three special tokens: every text is as many tokens as it has bytes.
"""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedConfig, Qwen3Config

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = 2
VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
MAX_TOKENS = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN,
    "pad_token_id": EOS_TOKEN,
}


def save_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """A Llama of two layers, heads of 32, two query heads a key/value head, tied head. Returns `folder`."""
    return save(LlamaConfig(**SHAPE, tie_word_embeddings=True), folder, seed)


def save_tiny_qwen3(folder: Path, seed: int = 0) -> Path:
    """A Qwen3: queries and keys are normalised, the head has weights of its own. Returns `folder`."""
    return save(Qwen3Config(**SHAPE, tie_word_embeddings=False, use_sliding_window=False), folder, seed)


def save(config: PreTrainedConfig, folder: Path, seed: int) -> Path:
    """Any causal language model with weights drawn from `seed`, saved with the tiny tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts, indent=2))
    return folder


def tiny_tokenizer() -> Tokenizer:
    """One token per byte, from id 3 on, in the order of the byte-level alphabet."""
    pieces = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={piece: token for token, piece in enumerate(pieces)}, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
