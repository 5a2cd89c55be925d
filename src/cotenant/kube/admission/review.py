"""Answers AdmissionReviews. Pure functions: they turn the bytes of a request into the status and bytes of an answer."""

from __future__ import annotations

import base64
import logging
from dataclasses import dataclass, field
from typing import Any

import orjson

from cotenant.core.errors import InputError
from cotenant.kube import names
from cotenant.kube.admission.mutate import Injection, mutate
from cotenant.kube.shares import annotations_of, containers_of, shares_of

LOG = logging.getLogger(__name__)

API_VERSION = "admission.k8s.io/v1"
MAX_BODY_BYTES = 8 << 20  # larger bodies are refused; the API server limits its own objects to less than 3 MiB
MOST_SAID = 1000


@dataclass(frozen=True)
class WebhookSettings:
    """Settings for reviews. `fail_open`: pods that cannot be handled are admitted unchanged with a warning; otherwise
    they are refused."""

    injection: Injection = field(default_factory=Injection)
    fail_open: bool = False


@dataclass(frozen=True)
class Answer:
    """An HTTP answer to a review. `outcome`: value of the label `outcome` in the metrics."""

    status: int
    body: bytes
    outcome: str
    content_type: str = "application/json"


def answer(body: bytes, settings: WebhookSettings) -> Answer:
    """Answer one review. A body that is no review is answered by an HTTP error with one sentence. Never raises."""
    try:
        review = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        return refuse(400, f"the body is not JSON: {error}")
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        return refuse(400, "the body is not an AdmissionReview")
    if review.get("apiVersion") != API_VERSION:
        return refuse(400, f"{review.get('apiVersion')!r:.80} is not supported; send AdmissionReview of {API_VERSION}")
    request = review.get("request")
    uid = request.get("uid") if isinstance(request, dict) else None
    if not isinstance(request, dict) or not isinstance(uid, str) or not uid or len(uid) > 256:
        return refuse(400, "the review has no request with a uid")
    try:
        return _decide(uid, request, settings)
    except InputError as error:
        return _response(uid, "denied", message=str(error))
    except Exception as error:  # the cause is an error in Cotenant, not in the request, so the server continues
        LOG.exception("review %s failed", uid)
        return _unhandled(uid, f"cotenant failed on this pod ({type(error).__name__})", settings)


def _decide(uid: str, request: dict[str, Any], settings: WebhookSettings) -> Answer:
    resource = request.get("resource")
    plural = resource.get("resource") if isinstance(resource, dict) else None
    group = resource.get("group") if isinstance(resource, dict) else None
    if plural != "pods" or group or request.get("subResource"):
        sub = f"/{request['subResource']}" if request.get("subResource") else ""
        what = f"{plural}{sub}.{group}" if group else f"{plural}{sub}"
        text = f"cotenant handles pods, not {what:.120}: correct the rules of its MutatingWebhookConfiguration"
        return _unhandled(uid, text, settings)
    if request.get("operation") not in ("CREATE", "UPDATE"):
        return _response(uid, "unchanged")
    pod = request.get("object")
    if not isinstance(pod, dict):
        raise InputError("the review contains no pod", field="request.object")
    # a running pod keeps its share even if its annotations change, but the changed annotations must be valid
    if request["operation"] == "UPDATE":
        if _own_annotations(pod) != _own_annotations(request.get("oldObject")):
            shares_of(pod)
        return _response(uid, "unchanged")
    namespace = request.get("namespace")
    namespace = namespace if isinstance(namespace, str) else None
    patch = mutate(pod, settings.injection, namespace)
    return _response(uid, "injected" if patch else "unchanged", patch=patch, warnings=_warnings(pod, namespace))


def _warnings(pod: dict[str, Any], namespace: str | None) -> list[str]:
    """Warnings for the user about a valid pod."""
    if namespace in names.SKIPPED_NAMESPACES:
        asks = _own_annotations(pod)
        return [f"pods in {namespace} get no share of a GPU; {', '.join(asks)} is ignored"] if asks else []
    shares = shares_of(pod)
    annotations = annotations_of(pod)
    said = []
    regular = [c["name"] for kind, _, c in containers_of(pod) if kind == "containers"]
    if len(shares) == 1 and len(regular) > 1 and names.CONTAINERS not in annotations and names.REQUEST in annotations:
        said.append(f"container {shares[0].container} gets the share; {names.CONTAINERS} selects others")
    if shares and not any(share.whole or share.memory_bytes for share in shares):
        said.append(f"{names.MEMORY} is not set: the pod may use all memory of its GPU")
    return said


def _own_annotations(pod: Any) -> dict[str, Any]:
    """The pod's annotations in Cotenant's domain, valid or not."""
    try:
        return {key: value for key, value in pod["metadata"]["annotations"].items() if names.in_domain(key)}
    except (TypeError, KeyError, AttributeError):
        return {}


def _unhandled(uid: str, text: str, settings: WebhookSettings) -> Answer:
    if settings.fail_open:
        return _response(uid, "failed", warnings=[f"{text}; the object was left unchanged"])
    return _response(uid, "failed", message=text, code=500)


def _response(
    uid: str,
    outcome: str,
    *,
    patch: list[dict[str, Any]] | None = None,
    warnings: list[str] | None = None,
    message: str = "",
    code: int = 422,
) -> Answer:
    response: dict[str, Any] = {"uid": uid, "allowed": not message}
    if message:
        reason = "Invalid" if code == 422 else "InternalError"
        response["status"] = {"code": code, "reason": reason, "message": clean(message)}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(orjson.dumps(patch)).decode()
    if warnings:
        response["warnings"] = [clean(text) for text in warnings]
    body = orjson.dumps({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})
    return Answer(200, body, outcome)


def refuse(status: int, sentence: str) -> Answer:
    """An HTTP error with one sentence, for requests that are not reviews."""
    return Answer(status, clean(sentence).encode() + b"\n", "rejected", "text/plain; charset=utf-8")


def clean(text: str) -> str:
    """Make a text one printable line of bounded length, since quoted text may contain anything."""
    line = " ".join("".join(c if c.isprintable() else "\ufffd" for c in word) for word in text.split())
    return line if len(line) <= MOST_SAID else line[: MOST_SAID - 3] + "..."
