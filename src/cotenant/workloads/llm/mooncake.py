"""Reads Mooncake's traces of language-model requests: a JSON object a line with timestamp [ms], input_length,
output_length, hash_ids of the prompt's blocks.

Many timestamps are equal. Blocks of earlier requests count as cached, as if the prefix cache were unbounded.
"""

from __future__ import annotations

from array import array

from cotenant.workloads.llm.json_lines import files_of, objects, whole
from cotenant.workloads.llm.trace import TokenOptions, TokenTrace, make_trace

BLOCK = 512  # number of tokens in a block of a prompt


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the requests of a file or folder."""
    times, prompt, output, cached = array("d"), array("q"), array("q"), array("q")
    seen: set[int] = set()
    for file in files_of(path):
        for line, content in objects(file):
            times.append(whole(content, "timestamp", file, line) / 1000)
            prompt.append(whole(content, "input_length", file, line))
            output.append(whole(content, "output_length", file, line))
            blocks = content.get("hash_ids") or []
            known = next((n for n, block in enumerate(blocks) if block not in seen), len(blocks))
            cached.append(min(known * BLOCK, prompt[-1]))
            seen.update(blocks)
    return make_trace(f"mooncake:{path}", times, None, prompt, output, cached=cached, options=options)
