"""A language model with random weights and a tokenizer of bytes, as a folder that engines load."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def make(folder: Path, seed: int, **shape: int) -> Path:
    """Write it; the same seed gives the same answers. `shape`: fields of LlamaConfig."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2}
    vocabulary |= {letter: i + 3 for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = TEMPLATE
    tiny = {
        "vocab_size": len(vocabulary), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    config = LlamaConfig(**(tiny | shape), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if shape and torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder
