"""Creates, shares and renews the webhook's self-signed certificates: in a Secret, with their CA in the webhook's
configuration.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

from cotenant.core.errors import WorkError
from cotenant.kube.admission import certificates
from cotenant.kube.admission.certificates import Certificates
from cotenant.kube.client import ApiError, KubeApi

MOST_TRIES = 20
RENEW_S = 60.0  # interval between two checks of the Secret and of the webhook configuration
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"


@dataclass(frozen=True)
class Bootstrap:
    """Names of the Secret that stores the certificates, and of the webhook configuration that must trust them."""

    namespace: str
    service: str
    secret: str
    configuration: str

    @property
    def dns_names(self) -> list[str]:
        """Host names for which the webhook's certificate must be valid."""
        return certificates.server_names(self.service, self.namespace)

    @property
    def secret_path(self) -> str:
        """API path of the Secret that stores the certificates."""
        return f"/api/v1/namespaces/{self.namespace}/secrets/{self.secret}"


def ensure(api: KubeApi, where: Bootstrap) -> Certificates:
    """Return valid certificates: those in the Secret, or new ones, which are stored in it. Their CA is written into the
    webhook's configuration. Several replicas may run this at the same time: the first replica to write the Secret
    wins, and the other replicas use its certificates.
    """
    for _ in range(MOST_TRIES):
        found = api.find(where.secret_path)
        held = _decode(found)
        before = held.ca if held else b""
        try:
            if held is None or certificates.fault(held, where.dns_names):
                held = certificates.make(where.dns_names)
                _store(api, where, found, held)
            trust(api, where, held.ca, before)
        except ApiError as error:
            if error.status == 409:  # another replica has created the Secret in the meantime
                continue
            raise
        return held
    raise WorkError(f"the Secret {where.namespace}/{where.secret} is changed by another client at the same time")


def trust(api: KubeApi, where: Bootstrap, ca: bytes, before: bytes = b"") -> bool:
    """Fill caBundle of every webhook in the configuration; returns whether anything changed.

    The previous CA stays in the bundle, so that a replica which still has the old certificate is trusted.
    """
    path = f"{CONFIGURATIONS}/{where.configuration}"
    found = api.get(path)
    changed = False
    for webhook in found.get("webhooks") or []:
        client = webhook.setdefault("clientConfig", {})
        bundle = _unpack(client.get("caBundle", ""))
        if ca in bundle:
            continue
        keep = before if before and before != ca else b""
        client["caBundle"] = base64.b64encode(ca + keep).decode()
        changed = True
    if changed:
        api.replace(path, found)
    return changed


def _store(api: KubeApi, where: Bootstrap, found: dict[str, object] | None, held: Certificates) -> None:
    data = {key: base64.b64encode(value).decode() for key, value in held.as_secret_data().items()}
    if found is None:
        metadata = {"name": where.secret, "namespace": where.namespace}
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "kubernetes.io/tls", "data": data}
        api.create(where.secret_path.rpartition("/")[0], secret)
    else:
        # the object contains its resourceVersion, so a concurrent change makes this fail with status 409
        api.replace(where.secret_path, found | {"data": data})


def _decode(secret: dict[str, object] | None) -> Certificates | None:
    data = secret.get("data") if secret else None
    if not isinstance(data, dict):
        return None
    parts = [_unpack(str(data.get(key, ""))) for key in ("ca.crt", "tls.crt", "tls.key")]
    return Certificates(*parts) if all(parts) else None


def _unpack(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""
