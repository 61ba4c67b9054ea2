"""A model folder with words but without a mind: a byte-level tokenizer whose tokens cross the borders of characters.

Made without torch. Its weights are one number, so that `octavo.models` can describe it; no worker could run it.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = 2
VOCAB_SIZE = 400
MAX_MODEL_TOKENS = 1024
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'nobody' %}{{ raise_exception('nobody may not speak') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_BOOK = """
An octavo is a book whose printed sheets fold into sixteen pages; the quick brown fox jumps over the lazy dog.
Größe, Straße, naïve, déjà vu, señor, 日本語の本, 本を読む, 八つ折り判, книга в осьмушку, βιβλίο, 🤗 🤗 📖 📖 👩‍🚀.
"""


@cache
def tokenizer() -> Tokenizer:
    """256 byte tokens, three special ones, and merges learned from a few lines in several scripts."""
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator([_BOOK] * 4, trainer)
    return words


def save_model(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """Everything that a gateway reads of a model. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    config = {"chat_template": chat_template, "eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_TOKENS, "eos_token_id": EOS_TOKEN}
    (folder / "config.json").write_text(json.dumps(shape))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return folder
