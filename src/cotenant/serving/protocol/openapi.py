"""The server's HTTP interface as an OpenAPI 3.1 document."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from cotenant.serving.protocol.tensors import DTYPES

_NAME = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_VERSION = {"name": "version", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _answer(what: str, schema: dict[str, Any] | None = None, kind: str = "application/json") -> dict[str, Any]:
    return {"description": what} | ({} if schema is None else {"content": {kind: {"schema": schema}}})


_ERRORS = {
    "400": "the request is invalid", "401": "no valid bearer token", "404": "no such model",
    "413": "the body is over the limit", "429": "the queue is full: try again after Retry-After",
    "500": "the model failed on this request",
    "503": "the request was dropped as late, a model is not ready, or the server is shutting down",
    "408": "the request did not arrive in time", "414": "the URL is too long", "431": "the headers are too large",
}  # fmt: skip
_ALWAYS = ("400", "401", "408", "413", "414", "431", "500")


def _operation(
    name: str, what: str, ok: dict[str, Any], *errors: str, body: Any = None, path: Any = ()
) -> dict[str, Any]:
    refused = {code: _answer(_ERRORS[code], _ref("Error")) for code in sorted({*errors, *_ALWAYS})}
    out: dict[str, Any] = {"operationId": name, "summary": what, "responses": {"200": ok} | refused}
    if path:
        out["parameters"] = list(path)
    if body is not None:
        out["requestBody"] = body
    return out


def _schemas() -> dict[str, Any]:
    name = {"type": "string", "minLength": 1}
    parameters = {"type": "object", "additionalProperties": True}
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 32}
    tensor = {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": name, "shape": shape, "datatype": {"type": "string", "enum": sorted(DTYPES)},
            "parameters": parameters, "data": {"type": "array"},
        },
    }  # fmt: skip
    spec = {
        "type": "object", "required": ["name", "datatype", "shape"],
        "properties": {
            "name": name, "datatype": {"type": "string"}, "shape": {"type": "array", "items": {"type": "integer"}},
        },
    }  # fmt: skip
    output = {"type": "object", "required": ["name"], "properties": {"name": name, "parameters": parameters}}
    return {
        "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
        "Tensor": tensor,
        "InferRequest": {
            "type": "object", "required": ["inputs"],
            "properties": {
                "id": {"type": "string"}, "parameters": parameters,
                "inputs": {"type": "array", "items": _ref("Tensor"), "minItems": 1, "maxItems": 256},
                "outputs": {"type": "array", "items": output, "maxItems": 256},
            },
        },
        "InferAnswer": {
            "type": "object", "required": ["model_name", "outputs"],
            "properties": {
                "id": {"type": "string"}, "model_name": name, "model_version": {"type": "string"},
                "outputs": {"type": "array", "items": _ref("Tensor")},
            },
        },
        "Metadata": {
            "type": "object", "required": ["name", "versions", "platform", "inputs", "outputs"],
            "properties": {
                "name": name, "versions": {"type": "array", "items": {"type": "string"}},
                "platform": {"type": "string"},
                "inputs": {"type": "array", "items": spec}, "outputs": {"type": "array", "items": spec},
            },
        },
        "Server": {
            "type": "object", "required": ["name", "version", "extensions"],
            "properties": {"name": name, "version": name, "extensions": {"type": "array", "items": name}},
        },
        "Index": {
            "type": "array",
            "items": {
                "type": "object", "required": ["name", "state"],
                "properties": {
                    "name": name, "version": {"type": "string"}, "reason": {"type": "string"},
                    "state": {"type": "string", "enum": ["READY", "UNAVAILABLE"]},
                },
            },
        },
    }  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """Return the complete OpenAPI document."""
    anything: dict[str, Any] = {"type": "object"}
    infer_body = {"required": True, "content": {"application/json": {"schema": _ref("InferRequest")}}}
    only_ready = {"type": "object", "properties": {"ready": {"type": "boolean"}}}
    index_body = {"content": {"application/json": {"schema": only_ready}}}

    def of_model(name: str, path: Any) -> dict[str, Any]:
        base = "/v2/models/{model}" + ("/versions/{version}" if len(path) > 1 else "")
        metadata, outputs = _answer("inputs and outputs", _ref("Metadata")), _answer("the outputs", _ref("InferAnswer"))
        infer = _operation(
            f"infer{name}", "An inference.", outputs, "404", "429", "503", body=infer_body, path=path
        )  # fmt: skip

        def ask(key: str, what: str, ok: dict[str, Any]) -> dict[str, Any]:
            return {"get": _operation(f"{key}{name}", what, ok, "404", "503", path=path)}

        return {
            base: ask("metadata", "What a model takes and returns.", metadata),
            f"{base}/ready": ask("ready", "Whether a model can answer.", _answer("it can")),
            f"{base}/config": ask("config", "Its configuration.", _answer("it", anything)),
            f"{base}/stats": ask("stats", "Its counts.", _answer("they", anything)),
            f"{base}/infer": {"post": infer},
        }

    def get(name: str, what: str, schema: dict[str, Any] | None, *errors: str, kind: str = "application/json") -> Any:
        return {"get": _operation(name, what, _answer("done", schema, kind), *errors)}

    repository = {
        f"/v2/repository/models/{{model}}/{verb}": {
            "post": _operation(verb, f"{verb} a model's files.", _answer("done"), "404", "503", path=[_NAME])
        }
        for verb in ("load", "unload")
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "cotenant serve", "version": version("cotenant")},
        "components": {"schemas": _schemas(), "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/v2": get("server", "Name and extensions of the server.", _ref("Server")),
            "/v2/health/live": get("live", "Whether the server's process runs.", None),
            "/v2/health/ready": get("allReady", "Whether every service can answer.", None, "503"),
            **of_model("", [_NAME]),
            **of_model("OfVersion", [_NAME, _VERSION]),
            "/v2/models/stats": get("allStats", "Counts of all models.", anything),
            "/v2/repository/index": {
                "post": _operation("index", "All models.", _answer("they", _ref("Index")), body=index_body)
            },
            **repository,
            "/": get("livePage", "The live page.", {"type": "string"}, kind="text/html"),
            "/state.json": get("state", "The data that the live page shows.", anything),
            "/metrics": get("metrics", "Metrics for Prometheus.", {"type": "string"}, kind="text/plain"),
            "/cotenant/status": get("status", "The server's state.", anything),
            "/cotenant/plan": get("plan", "The plan that the server uses now.", anything),
        },
    }
