"""The LS gate: best-effort launches wait while latency-sensitive work is active."""
