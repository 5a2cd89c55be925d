"""Reviews: whatever comes, the API server gets a status and one sentence, and the webhook goes on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from heard import heard
from hypothesis import given, settings
from hypothesis import strategies as st
from pods import decoded, patched, pod, review, share

from cotenant.kube.admission import review as reviews
from cotenant.kube.admission.review import Answer, WebhookSettings, answer

UID = "705ab4f5-6393-11e8-b7cc-42010a800002"
CLOSED, OPEN = WebhookSettings(), WebhookSettings(fail_open=True)


def response(found: Answer) -> dict[str, Any]:
    assert found.status == 200
    body = json.loads(found.body)
    assert body["apiVersion"] == "admission.k8s.io/v1"
    assert body["kind"] == "AdmissionReview"
    assert body["response"]["uid"] == UID
    result: dict[str, Any] = body["response"]
    return result


def test_a_pod_that_asks_is_patched() -> None:
    before = pod(annotations=share(memory="8Gi"))
    found = response(answer(review(before), CLOSED))
    assert found["allowed"] is True
    assert found["patchType"] == "JSONPatch"
    after = patched(before, decoded(found))
    assert after["spec"]["containers"][0]["resources"]["limits"]["cotenant.dev/share"] == "30"
    assert "warnings" not in found


def test_a_pod_that_does_not_ask_is_allowed_as_it_is() -> None:
    assert response(answer(review(pod()), CLOSED)) == {"uid": UID, "allowed": True}


def test_a_wrong_request_is_denied_with_its_reason() -> None:
    found = response(answer(review(pod(annotations=share("70%", limit="60%"))), OPEN))
    assert found["allowed"] is False
    assert found["status"]["code"] == 422
    assert found["status"]["message"] == (
        "field metadata.annotations[cotenant.dev/limit]: container main requests 70% of a GPU, over its limit of 60%"
    )
    assert "patch" not in found


def test_the_reviews_namespace_counts() -> None:
    found = response(answer(review(pod(annotations=share()), namespace="kube-system"), CLOSED))
    assert found["allowed"] is True
    assert "patch" not in found
    assert "pods in kube-system get no share of a GPU" in found["warnings"][0]


def test_what_one_should_know_is_a_warning() -> None:
    two = pod(annotations=share(), containers=[{"name": "main"}, {"name": "log"}])
    assert response(answer(review(two), CLOSED))["warnings"] == [
        "container main gets the share; cotenant.dev/containers selects others",
        "cotenant.dev/memory is not set: the pod may use all memory of its GPU",
    ]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (review({}, resource="deployments", group="apps"), "deployments.apps"),
        (review({}, subResource="ephemeralcontainers"), "pods/ephemeralcontainers"),
        (review({}, resource="pods", group="metrics.k8s.io"), "pods.metrics.k8s.io"),
    ],
)
def test_another_kind_is_named(body: bytes, what: str) -> None:
    sentence = f"cotenant handles pods, not {what}: correct the rules of its MutatingWebhookConfiguration"
    closed = response(answer(body, CLOSED))
    assert closed["allowed"] is False
    assert closed["status"]["message"] == sentence
    opened = response(answer(body, OPEN))
    assert opened["allowed"] is True
    assert opened["warnings"] == [f"{sentence}; the object was left unchanged"]


def test_changes_of_a_running_pod_are_only_looked_at() -> None:
    wrong = pod(annotations=share("130%"))
    same = response(answer(review(wrong, operation="UPDATE", oldObject=wrong), CLOSED))
    assert same["allowed"] is True, "what is wrong already must not stop its removal"
    edited = response(answer(review(wrong, operation="UPDATE", oldObject=pod(annotations=share())), CLOSED))
    assert edited["allowed"] is False
    assert response(answer(review(None, operation="DELETE"), CLOSED))["allowed"] is True


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is not JSON"),
        (b"\xff\xfe", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b"[]", "the body is not an AdmissionReview"),
        (b'{"kind": "Pod"}', "the body is not an AdmissionReview"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}',
         "'admission.k8s.io/v1beta1' is not supported; send AdmissionReview of admission.k8s.io/v1"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', "the review has no request with a uid"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": 7}}',
         "the review has no request with a uid"),
    ],
)  # fmt: skip
def test_what_is_no_review_is_one_sentence(body: bytes, sentence: str) -> None:
    found = answer(body, OPEN)
    assert found.status == 400
    assert sentence in found.body.decode()
    assert found.body.count(b"\n") == 1


def test_a_review_without_a_pod_is_denied() -> None:
    assert (
        response(answer(review([]), CLOSED))["status"]["message"] == "field request.object: the review contains no pod"
    )


def test_a_fault_of_ours_fails_open_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("of ours")

    monkeypatch.setattr(reviews, "mutate", broken)
    with heard() as said:
        closed = response(answer(review(pod(annotations=share())), WebhookSettings()))
    assert closed["allowed"] is False
    assert closed["status"]["message"] == "cotenant failed on this pod (RuntimeError)"
    assert "of ours" in said[0], "the log has what the user need not see"
    opened = response(answer(review(pod(annotations=share())), OPEN))
    assert opened["allowed"] is True
    assert "patch" not in opened


def test_what_is_quoted_is_short_and_printable() -> None:
    found = response(answer(review(pod(annotations={"cotenant.dev/" + "x\x1b[31m" * 200: "1"})), CLOSED))
    message = found["status"]["message"]
    assert len(message) <= 1000
    assert "\x1b" not in message


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
        st.sampled_from(["metadata", "spec", "containers", "annotations", "name", "cotenant.dev/request", "resources",
                         "limits", "cotenant.dev/share", "env", "volumes", "volumeMounts"]), inner, max_size=4)),
    max_leaves=20,
)  # fmt: skip


@given(JSON)
@settings(max_examples=300)
def test_any_object_is_answered_without_a_fault_of_ours(thing: Any) -> None:
    found = answer(review(thing), CLOSED)
    assert found.status == 200
    assert found.outcome in ("injected", "unchanged", "denied"), json.loads(found.body)
