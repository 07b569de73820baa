"""Small checkpoints for tests: a tokenizer trained on the spot and a random Llama of a few layers, as Hugging Face directories."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = [
    "The quick brown fox jumps over the lazy dog, again and again and again, number 0 1 2 3 4 5 6 7 8 9.",
    "def add(a, b):\n    return a + b\n",
    "Count to three. Then write the same words again: one two three, one two three.",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_tokenizer(folder: Path, text: list[str] = TEXT, vocab_size: int = 384) -> int:
    """A byte-level BPE tokenizer with a chat template; returns the number of its tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return int(tokenizer.get_vocab_size())


def write_llama(folder: Path, *, layers: int = 2, hidden: int = 64, seed: int = 0, text: list[str] = TEXT) -> Path:
    """A random Llama with its tokenizer in `folder`. Context 512 tokens, float32."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = write_tokenizer(folder, text)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=0,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
