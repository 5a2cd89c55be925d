"""Command lines of an unmodified vLLM, and a model's folder without weights, for models_vllm.py and models_switch.py.

    python bench/gpu/vllm_engine.py serve SHAPE PORT NAME FOLDER     # writes the folder and becomes that vLLM
    python bench/gpu/vllm_engine.py limits SHAPE                     # its limits, as options of `cotenant profile llm`

ENGINE_SITE is the folder with vLLM's packages if they are not installed (thin_wheels.py). ENGINE_OPTIONS are more
options for vLLM, such as `--enforce-eager`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stream_client import WORDS

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}  # fmt: skip
# vLLM 0.20 reads CUDA_VISIBLE_DEVICES as an index, and ends if it is a UUID
BY_INDEX = """case $CUDA_VISIBLE_DEVICES in GPU-*) export CUDA_VISIBLE_DEVICES=$(
nvidia-smi -i $CUDA_VISIBLE_DEVICES --query-gpu=index --format=csv,noheader);; esac; exec "$@" """
# options of all engines: requests and tokens of a step, tokens of a request and of a block of the cache
SEQUENCES, STEP_TOKENS, LENGTH, BLOCK = 32, 8192, 2560, 16
CACHES_GIB = {"4b": 11, "8b": 4, "tiny": 1}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
SHAPES = {
    "4b": {
        "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": WORDS,
    },
}  # fmt: skip


def model(folder: Path, shape: str) -> Path:
    """Write the configuration of a Qwen3 without weights. Each number below the size of its vocabulary, but the last,
    is one token of prompts and answers, and no token ends an answer.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    size = SHAPES[shape]["vocab_size"]
    # vLLM refuses prompts with more characters than tokens of the longest word have, so one word is long
    words = [str(i) for i in range(size - 1)] + ["-" * 64]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "rope_theta": 1e6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "attention_bias": False, "use_cache": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | SHAPES[shape]))
    return folder


def kv_tokens(shape: str) -> int:
    """Return how many tokens the cache of a model holds, in bf16, as vLLM prints it."""
    size = SHAPES[shape]
    block = BLOCK * 4 * size["num_hidden_layers"] * size["num_key_value_heads"] * size["head_dim"]
    return (CACHES_GIB[shape] << 30) // block * BLOCK


def limits(shape: str) -> str:
    """Return the limits of an engine as options of `cotenant profile llm`."""
    return f"--max-sequences {SEQUENCES} --kv-tokens {kv_tokens(shape)} --step-tokens {STEP_TOKENS} --schedules-ahead"


def command(model: str, name: str, port: str, shape: str, *more: str) -> list[str]:
    """`vllm serve`, which records CUDA graphs of decode steps and compiles nothing. The size of the KV cache is that of
    the shape. With a given size, vLLM does not use up the part of the GPU that --gpu-memory-utilization states, but
    refuses to start if that part is not free.
    """
    search = os.pathsep.join(filter(None, (os.environ.get("ENGINE_SITE"), os.environ.get("PYTHONPATH"))))
    words = ["env", *(f"{key}={value}" for key, value in (ENVIRONMENT | {"PYTHONPATH": search}).items())]
    words += ["sh", "-c", BY_INDEX, "sh", sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    words += ["--host", "127.0.0.1", "--port", port, "--served-model-name", name]
    words += ["--max-model-len", str(LENGTH), "--max-num-seqs", str(SEQUENCES), "--block-size", str(BLOCK)]
    words += ["--enable-chunked-prefill", "--max-num-batched-tokens", str(STEP_TOKENS)]
    words += ["--kv-cache-memory-bytes", f"{CACHES_GIB[shape]}G", "--gpu-memory-utilization", "0.1"]
    words += ["--no-enable-prefix-caching", "-cc.mode=0", "-cc.cudagraph_mode=FULL_DECODE_ONLY"]
    return [*words, *more, *os.environ.get("ENGINE_OPTIONS", "").split()]


def main() -> None:
    """Print the limits of an engine, or become one."""
    what, shape = sys.argv[1:3]
    if what == "limits":
        print(limits(shape))
        return
    port, name, folder = sys.argv[3:6]
    Path(folder).mkdir(parents=True, exist_ok=True)
    words = command(str(model(Path(folder), shape)), name, port, shape, "--load-format", "dummy")
    os.execvp(words[0], words)


if __name__ == "__main__":
    main()
