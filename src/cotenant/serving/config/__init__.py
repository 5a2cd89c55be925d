"""services.yaml: models, server settings and the planning problem made of them."""
