"""The webhook: what a pod asks for, checked and written into it; its certificates."""
