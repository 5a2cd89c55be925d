"""What the agent has in common with memory_limit_probe, which sets a memory limit as a trial: names of control groups,
rounding of limits, and the reasons why a limit is refused.
"""

from __future__ import annotations

from cotenant.devices.cards import (
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    NO_LIMIT,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    NvmlError,
)

OWN = "cotenant-"  # names of the control groups that agents create begin with this
ROUNDING_BYTES = 256 << 20  # largest step to which the driver is known to round limits
REASONS = {
    INVALID_ARGUMENT: "the driver refuses the limit as invalid",
    NOT_SUPPORTED: "the driver does not support memory limits of control groups",
    NO_PERMISSION: "only root may set it",
    NOT_FOUND: "the group has no dmem files",
    GPU_IS_LOST: "the GPU is lost",
}


def near(found: int, limit_bytes: int) -> bool:
    """Whether a limit that was read back is the one that was set; the driver may round it."""
    return abs(found - limit_bytes) <= max(limit_bytes // 8, ROUNDING_BYTES)


def limit_text(limit_bytes: int) -> str:
    """Return a memory limit, as the driver reports it, as text for messages."""
    return "no limit" if limit_bytes == NO_LIMIT else f"{limit_bytes / 2**30:.2f} GiB"


def reason_of(error: Exception) -> str:
    """An error about a memory limit or a control group, in words."""
    if isinstance(error, NvmlError):
        return REASONS.get(error.code, f"NVML error {error.code}")
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
