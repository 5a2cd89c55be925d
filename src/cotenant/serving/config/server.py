"""The keys of services.yaml for the server: addresses, limits, backends and models."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cotenant.core.checked import Bytes, Seconds, Strict, check, parsed
from cotenant.core.errors import InputError
from cotenant.core.textfile import read_text
from cotenant.observability.http import parse_address
from cotenant.serving.config import backends
from cotenant.serving.config.services import Deployment


class ListenEntry(Strict):
    """`listen`: addresses, authentication, and limits on sizes and times."""

    http: str | None = "127.0.0.1:8000"
    """HOST:PORT of the HTTP endpoint; port 0 chooses a free one, `none` disables it."""
    grpc: str | None = "127.0.0.1:8001"
    """HOST:PORT of the gRPC endpoint."""
    tls_certificate: str | None = None
    """Certificate for both endpoints, relative to this file."""
    tls_key: str | None = None
    """Private key of the certificate, relative to this file."""
    tokens: str | None = None
    """File with a bearer token per line, one of which clients must send; without it no token is required."""
    max_body: Bytes = Field(default=64 << 20, ge=1024, le=1 << 33)
    """Largest size of a request's body."""
    max_in_flight: int = Field(default=10_000, ge=1, le=1_000_000)
    """Largest number of requests in the server; close to it, requests of low priority are refused."""
    max_connections: int = Field(default=20_000, ge=1, le=1_000_000)
    """Largest number of client connections."""
    read_timeout: Seconds = Field(default=30.0, gt=0)
    """How long a request may take to arrive."""
    write_timeout: Seconds = Field(default=30.0, gt=0)
    """How long a client may take to read an answer."""
    idle_timeout: Seconds = Field(default=300.0, gt=0)
    """How long a connection may be idle."""
    drain: Seconds = Field(default=30.0, ge=0)
    """Time for answering the remaining requests after SIGTERM."""


class ServingEntry(Strict):
    """The top-level keys of services.yaml that only the server uses."""

    listen: ListenEntry = ListenEntry()
    """Addresses on which the server listens, authentication, and limits on requests."""
    backend: Annotated[str, parsed(backends.check)] = backends.AUTO
    """Backend of all models; by default chosen by their files. `timed`: batches take the time of the profile."""
    models: str | None = None
    """Folder that contains the models whose names have no slash, relative to this file."""
    autoscale: bool = True
    """Whether GPUs are added and removed as rates change."""
    forecast: Literal["ewma", "trend"] = "trend"
    """Forecast of the rates of the next period."""
    patience: int = Field(default=3, ge=1, le=1000)
    """Number of successive periods that must need fewer GPUs before GPUs are released."""
    least_rate: float = Field(default=0.1, ge=0, le=1)
    """An idle service is planned for this fraction of the rate in its file."""
    verify: bool = True
    """Whether plans are simulated before they are used."""
    hold: float = Field(default=0.0, ge=0, le=1)
    """How long an incomplete batch waits for more requests, as a fraction of the planned cycle, in which a part of a
    GPU runs one batch of each of its models."""
    poll_models: Seconds = Field(default=0.0, ge=0)
    """Interval at which folders are checked for new versions; 0: never."""
    load_timeout: Seconds = Field(default=300.0, gt=0)
    """How long a model may take to load."""


@dataclass(frozen=True)
class ModelEntry:
    """Source of a service's model: `path` of its folder in a repository (None: not named). `sample`: a file with an
    inference request for measurements.
    """

    service: str
    model: str
    backend: str
    path: Path | None
    version: int | None = None
    sample: Path | None = None


@dataclass(frozen=True)
class ServingConfig:
    """Everything that a server needs besides the planning problem."""

    deployment: Deployment
    entry: ServingEntry
    models: Mapping[str, ModelEntry]
    concurrency: Mapping[str, int] = field(default_factory=dict)
    wiring: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)


def read_serving(deployment: Deployment) -> ServingConfig:
    """Read the server's settings from a services file. InputError names line and key."""
    with deployment.located():
        return _read_serving(deployment)


def _read_serving(deployment: Deployment) -> ServingConfig:
    raw = deployment.raw
    assert raw is not None
    entry = check(ServingEntry, raw.model_extra or {}, deployment.file)
    for door in ("http", "grpc"):
        address = getattr(entry.listen, door)
        if address not in (None, "", "none"):
            parse_address(address, f"listen.{door}")
    base = Path(deployment.file).parent
    folder = None if entry.models is None else base / entry.models
    models: dict[str, ModelEntry] = {}
    for i, service in enumerate(raw.services):
        backend = service.backend or entry.backend
        with deployment.located():
            backends.check(backend, f"services[{i}].backend")
        path = _path(service.model, service.name, base, folder)
        sample = None if service.sample is None else base / service.sample
        models[service.name] = ModelEntry(service.name, service.profile_model, backend, path, service.version, sample)
    for app in deployment.applications:
        for stage in app.stages:
            own = None if folder is None else folder / stage
            models[f"{app.name}:{stage}"] = ModelEntry(f"{app.name}:{stage}", stage, entry.backend, own)
    return ServingConfig(
        deployment, entry, models,
        {s.name: s.max_concurrency for s in raw.services if s.max_concurrency is not None},
        {a.name: a.inputs for a in raw.applications},
    )  # fmt: skip


def _path(model: str | None, name: str, base: Path, folder: Path | None) -> Path | None:
    """Path of a model's folder. A name with a slash is a path relative to the services file; another name is a folder
    in `models`, or next to the services file if `models` is not set."""
    if model is not None and ("/" in model or (folder is None and (base / model).is_dir())):
        return base / model
    return None if folder is None else folder / (model or name)


def tls_context(entry: ListenEntry, alpn: str, file: str) -> ssl.SSLContext | None:
    """The server's TLS context, None without a certificate."""
    if entry.tls_certificate is None:
        if entry.tls_key is not None:
            raise InputError("tls_key needs tls_certificate", file=file, field="listen.tls_key")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    base = Path(file).parent
    key = None if entry.tls_key is None else str(base / entry.tls_key)
    try:
        context.load_cert_chain(str(base / entry.tls_certificate), key)
    except (OSError, ssl.SSLError) as error:
        why = error.strerror or str(error)
        raise InputError(f"cannot use the certificate: {why}", file=file, field="listen.tls_certificate") from None
    context.set_alpn_protocols([alpn])
    return context


def read_tokens(entry: ListenEntry, file: str) -> tuple[str, ...]:
    """Bearer tokens, one per line of the file `tokens`; empty: no authentication."""
    if entry.tokens is None:
        return ()
    path = Path(file).parent / entry.tokens
    lines = read_text(path).splitlines()
    tokens = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not tokens or any(len(token) < 8 for token in tokens):
        raise InputError("needs a token of at least 8 characters on each line", file=path)
    return tokens
