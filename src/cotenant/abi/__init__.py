"""Definitions that C and Python share, generated from native/abi: messages, pages of shared memory, constants."""
