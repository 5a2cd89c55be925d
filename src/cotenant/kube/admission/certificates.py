"""Certificates of the webhook: creates a self-signed CA with a server certificate, and decides when to renew them."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cotenant.core.errors import InputError

AUTHORITY_DAYS, SERVER_DAYS = 3650, 365
RENEW_BEFORE_DAYS = 30
# certificates are valid from this long before now, since the clocks of a cluster's machines differ
SKEW = datetime.timedelta(minutes=5)


@dataclass(frozen=True)
class Certificates:
    """PEM texts: the CA that the API server trusts, and the webhook's certificate and key."""

    ca: bytes
    certificate: bytes
    key: bytes

    def as_secret_data(self) -> dict[str, bytes]:
        """The certificates as the data of a kubernetes.io/tls Secret."""
        return {"ca.crt": self.ca, "tls.crt": self.certificate, "tls.key": self.key}


def server_names(service: str, namespace: str) -> list[str]:
    """Host names by which the API server calls the webhook's Service."""
    base = f"{service}.{namespace}"
    return [f"{base}.svc", base, f"{base}.svc.cluster.local"]


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    pkcs8 = serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _builder(subject: x509.Name, days: float, now: datetime.datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def make(dns_names: list[str], now: datetime.datetime | None = None, days: float = SERVER_DAYS) -> Certificates:
    """Create a CA and a server certificate. The CA's key is discarded at once, since it signs only this certificate."""
    now = now or datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    name = _name("cotenant webhook authority")
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    authority = (
        _builder(name, max(days, AUTHORITY_DAYS), now)
        .issuer_name(name)
        .public_key(ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _builder(_name(dns_names[0]), days, now)
        .issuer_name(name)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name) for name in dns_names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return Certificates(authority.public_bytes(pem), certificate.public_bytes(pem), _key_pem(key))


def fault(found: Certificates, dns_names: list[str], now: datetime.datetime | None = None) -> str:
    """Return why these certificates should be replaced, as a sentence; empty if they are valid for 30 more days."""
    now = now or datetime.datetime.now(datetime.UTC)
    try:
        ca = x509.load_pem_x509_certificate(found.ca)
        certificate = x509.load_pem_x509_certificate(found.certificate)
        key = serialization.load_pem_private_key(found.key, None)
    except (ValueError, TypeError) as error:
        return f"the certificates cannot be read: {error}"
    if key.public_key() != certificate.public_key():
        return "the key is not that of the certificate"
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return "the certificate is not signed by the CA that is stored with it"
    begins = max(certificate.not_valid_before_utc, ca.not_valid_before_utc)
    # a replica whose clock is ahead has made the certificates; the API server refuses them until the time in the
    # message
    if begins > now:
        return f"the certificates are not valid before {begins:%Y-%m-%d %H:%M} UTC"
    ends = min(certificate.not_valid_after_utc, ca.not_valid_after_utc)
    if ends - now < datetime.timedelta(days=RENEW_BEFORE_DAYS):
        return f"the certificates expire at {ends:%Y-%m-%d %H:%M} UTC"
    try:
        held = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return "the certificate names no host"
    missing = set(dns_names) - set(held.get_values_for_type(x509.DNSName))
    return f"the certificate is not for {', '.join(sorted(missing))}" if missing else ""


def check_pair(certificate: bytes, key: bytes, file: str) -> None:
    """Raise InputError unless the PEM texts are a certificate and its key."""
    try:
        found = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise InputError("not a certificate in PEM form", file=file) from None
    try:
        private = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError):
        raise InputError("the key is not a private key in PEM form without a password", file=file) from None
    if private.public_key() != found.public_key():
        raise InputError("the key is not that of the certificate", file=file)
