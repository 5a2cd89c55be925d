"""Recognises the format of a job trace by its header, for the error message after a wrong format was given. It is
outside the package of the readers, which need polars.
"""

from __future__ import annotations

from collections.abc import Sequence

# columns by which a format is recognized -> prefix of its paths; the first entry that matches is used
SIGNS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset(("id", "arrival_s", "gpus")), "native:"),
    (frozenset(("timestamp", "duration", "num_gpus")), "philly:"),
    (frozenset(("job_id", "num_gpu", "submit_time", "duration", "expect_time_list")), "chronus:"),
    (frozenset(("job_id", "num_gpu", "submit_time", "duration")), "tiresias:"),
    (frozenset(("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")), "openb:"),
    (frozenset(("job_name", "gpu_request", "worker_num", "job_type")), "alibaba-spot:"),
    (frozenset(("predict_type", "exec_time_seconds", "checkpoint_model_version_id")), "alibaba-genai:"),
    (frozenset(("timestamp_anon", "value", "container_ip")), "alibaba-genai:"),
    (frozenset(("job_id", "vc", "gpu_num", "submit_time", "start_time", "end_time")), "helios:"),
    (frozenset(("job_id", "type", "gpu_num", "submit_time", "start_time", "end_time")), "acme:"),
    (frozenset(("name", "time", "application", "num_replicas")), "sia:"),
    (frozenset(("job_id", "num_gpus", "submit_time", "duration")), "blox:"),
    (frozenset(("arrival_s", "num_iters", "launch_s")), "miso:"),
    (frozenset(("TIMESTAMP", "NumImages", "ContextTokens")), "--serving MODELS.yaml --trace azure-lmm:"),
    (frozenset(("TIMESTAMP", "ContextTokens", "GeneratedTokens")), "--serving MODELS.yaml --trace azure-llm:"),
    (frozenset(("Timestamp", "Request tokens", "Response tokens")), "--serving MODELS.yaml --trace burstgpt:"),
    (frozenset(("sn", "cpu_milli", "memory_mib", "gpu", "model")), "--cluster openb:"),
    (frozenset(("node_name", "gpu_model", "gpu_capacity_num", "cpu_num")), "--cluster alibaba-spot:"),
    (frozenset(("num_switch", "num_node_p_switch", "num_gpu_p_node")), "--cluster tiresias:"),
)
GAVEL_CELLS = (6, 7, 10)


def looks_like(header: Sequence[str]) -> str | None:
    """Return the format prefix for the path of a file with this header, such as `philly:`, or None if no known format
    matches.

    Three formats have no header. A first row of id, model and three numbers is a replay file of the public Synergy
    simulator. Cells separated by tabs, of which the last is a number, are Gavel's. A JSON list is Philly's job log.
    """
    for columns, words in SIGNS:
        if columns <= set(header):
            return words
    if len(header) == 5 and not _is_number(header[1]) and all(map(_is_number, header[2:])):
        return "synergy:"
    cells = ",".join(header).split("\t")
    if len(cells) in GAVEL_CELLS and not _is_number(cells[0]) and _is_number(cells[-1]):
        return "gavel:"
    if header and header[0].startswith("["):
        return "philly-json:"
    return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
