"""The compiled libraries that programs and the agent load, and how a tenant is given them."""
