"""Reads Azure's trace of requests to a multimodal model of 2025: TIMESTAMP, NumImages, ContextTokens, GeneratedTokens.

Times end with Z and have milliseconds. The published description does not say whether the tokens of images are among
ContextTokens; they are taken as they are, and a remark counts the images. The reader follows the description.
"""

from __future__ import annotations

from cotenant.workloads.llm.azure_llm import COLUMNS, IMAGES, requests
from cotenant.workloads.llm.trace import TokenOptions, TokenTrace
from cotenant.workloads.table_files import read_csv

MAX_IMAGES = 100_000


def read(path: str, options: TokenOptions) -> TokenTrace:
    """Read the requests of one file. Images are counted in a remark; a request's tokens are those of the file."""
    table = read_csv(path, (*COLUMNS, IMAGES))
    table.require(*COLUMNS, IMAGES)
    images = table.numbers(IMAGES, least=0, most=MAX_IMAGES)
    table.remarks.append(
        f"{int((images > 0).sum()):,} of {len(images):,} requests have {int(images.sum()):,} images, which are no load "
        "here: the tokens are those of ContextTokens"
    )
    table.remarks.append("read by the published description of the trace; the file was not available")
    return requests(f"azure-lmm:{path}", table, options)
