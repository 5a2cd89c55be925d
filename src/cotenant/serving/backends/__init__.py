"""What runs a model inside a worker: one module per runtime, one list of them in base.py."""
