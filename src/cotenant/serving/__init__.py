"""The serving runtime: gateway, dispatch of requests, workers, replanning. docs/architecture.md describes its parts."""
