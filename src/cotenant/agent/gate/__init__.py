"""The LS gate: best-effort launches wait while latency-sensitive (LS) work is active on their GPU."""
