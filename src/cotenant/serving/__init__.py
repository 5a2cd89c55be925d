"""The serving runtime: gateway, live dispatch, workers, replanning. docs/architecture.md has the map."""
