"""The live page, its feed and the exposition of metrics, with the standard library alone."""
