"""A language model with random weights and a tokenizer of bytes, as a folder that engines load."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def make(folder: Path, seed: int, **shape: int) -> Path:
    """Write the model. The same seed gives the same answers. `shape`: fields of LlamaConfig. Answers consist of
    letters, digits and punctuation and never end by themselves, so that each token is one event of a stream.
    """
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
    with torch.no_grad():
        for letter, token in vocabulary.items():
            if not "!" <= letter <= "~" or len(letter) > 1:
                model.lm_head.weight[token] = 0.0
    model.save_pretrained(folder)
    if model.device.type == "cuda":
        del model
        torch.cuda.empty_cache()  # frees memory for the engines
    fast.save_pretrained(folder)
    return folder


def make_gguf(path: Path, seed: int) -> Path:
    """Write a similar model for llama.cpp, with a vocabulary of bytes and half a megabyte of weights. Answers consist
    of letters, digits and punctuation, since llama.cpp's Python server leaves parts of longer characters out of
    streams."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(seed)
    width, inner, layers, heads = 64, 128, 2, 2
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL]
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(512)
    out.add_embedding_length(width)
    out.add_block_count(layers)
    out.add_feed_forward_length(inner)
    out.add_head_count(heads)
    out.add_head_count_kv(heads)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_dimension_count(width // heads)
    out.add_vocab_size(len(tokens))
    out.add_tokenizer_model("llama")
    out.add_token_list(tokens)
    out.add_token_scores([0.0] * len(tokens))
    out.add_token_types(kinds)
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    out.add_chat_template(TEMPLATE)

    def add(name: str, *shape: int) -> None:
        values = np.ones(shape) if "norm" in name else rng.normal(0.0, 0.3, shape)
        if name == "output":
            values[: 3 + ord(" ")] = values[3 + ord("~") + 1 :] = 0.0
        out.add_tensor(f"{name}.weight", values.astype(np.float32))

    add("token_embd", len(tokens), width)
    add("output_norm", width)
    add("output", len(tokens), width)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_norm", "ffn_norm"):
            add(block + name, width)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(block + name, width, width)
        for name in ("ffn_gate", "ffn_up"):
            add(block + name, inner, width)
        add(block + "ffn_down", width, inner)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path
