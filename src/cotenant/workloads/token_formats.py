"""The names of the formats of token traces, which readers of job traces know, too."""

from __future__ import annotations

# format -> (module with the function `read(path, options) -> TokenTrace`, line of help)
FORMATS: dict[str, tuple[str, str]] = {
    "native": ("cotenant.workloads.llm.native", "CSV or Parquet: time_s, prompt_tokens, output_tokens, model, ..."),
    "azure-llm": ("cotenant.workloads.llm.azure_llm", "Azure LLM inference 2023 and 2024 (CSV)"),
    "azure-lmm": ("cotenant.workloads.llm.azure_lmm", "Azure LMM inference 2025, with images (CSV)"),
    "burstgpt": ("cotenant.workloads.llm.burstgpt", "BurstGPT: ChatGPT and GPT-4 of a campus (CSV)"),
    "copilot": ("cotenant.workloads.llm.copilot", "Copilot coding agents 2026, 37 models (JSONL, gzip, folders)"),
    "mooncake": ("cotenant.workloads.llm.mooncake", "Mooncake: lengths and blocks of prompts (JSONL)"),
    "servegen": ("cotenant.workloads.llm.servegen", "requests drawn from ServeGen's clients (folder or tar)"),
}
