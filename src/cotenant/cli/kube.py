"""`cotenant kube`: commands that run in a Kubernetes cluster; kube_objects.py has those that print objects."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from cotenant.cli import kube_objects
from cotenant.cli.shared_options import LogFormat, LogLevel
from cotenant.core.errors import InputError, check_choice

LOG = logging.getLogger(__name__)

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Shares of GPUs for pods: webhook, plugin, claims.")
kube_objects.add_to(app)

Text = str | None
Server = Annotated[
    Text, typer.Option("--api-server", metavar="URL", help="URL of the API server (default: the pod's own).")
]
Token = Annotated[
    Path | None, typer.Option("--api-token", metavar="FILE", help="File with the token for the API server.")
]
Authority = Annotated[Path | None, typer.Option("--api-ca", metavar="FILE", help="CA certificate of the API server.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Metrics = Annotated[int | None, typer.Option("--metrics-port", metavar="PORT", help="Port of /metrics and /healthz.")]


@app.command()
def webhook(
    cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="TLS certificate (PEM); read again when it changes.")
    ] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    self_signed: Annotated[
        bool, typer.Option("--self-signed", help="Create certificates, keep them in a Secret and fill in caBundle.")
    ] = False,
    namespace: Annotated[str, typer.Option(help="Namespace of the Service and the Secret.")] = "cotenant-system",
    service: Annotated[str, typer.Option(help="Name of the webhook's Service.")] = "cotenant-webhook",
    secret: Annotated[str, typer.Option(help="Name of the Secret with the certificates.")] = "cotenant-webhook-tls",
    configuration: Annotated[
        str, typer.Option(help="Name of the MutatingWebhookConfiguration to fill in.")
    ] = "cotenant",
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the webhook.", min=0, max=65535)] = 8443,
    metrics_port: Metrics = None,
    fail: Annotated[
        str, typer.Option(metavar="open|closed", help="Pods that cannot be handled: admit or refuse them.")
    ] = "closed",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the bearer token that callers must present.")
    ] = None,
    client_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CA that must have signed callers' certificates.")
    ] = None,
    mounts: kube_objects.Mounts = "webhook",
    runtime_class: Annotated[str, typer.Option(metavar="NAME", help="Runtime class for pods that set none.")] = "",
    memory_hook: Annotated[
        str, typer.Option(metavar="true|false", help="Memory limits of pods are set by NVIDIA's hook on the nodes.")
    ] = "false",
    api_server: Server = None,
    api_token: Token = None,
    api_ca: Authority = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Serve the mutating admission webhook, which rewrites pods that request a GPU share. Runs until stopped."""
    import asyncio

    from cotenant.core import logs
    from cotenant.kube.admission import bootstrap
    from cotenant.kube.admission.mutate import Injection
    from cotenant.kube.admission.review import WebhookSettings
    from cotenant.kube.admission.webhook import LOOK_S, FilePair, Listening, LiveContext, Refresh, WebhookApp, serve
    from cotenant.kube.client import connect

    logs.configure(log_format, log_level)
    check_choice(fail, ("open", "closed"), "--fail")
    check_choice(mounts, ("webhook", "plugin"), "--mounts")
    check_choice(memory_hook, ("true", "false"), "--memory-hook")
    if self_signed == (cert is not None and key is not None) or (cert is None) != (key is None):
        raise InputError("give --cert and --key, or --self-signed", field="--cert")
    if token_file is not None and not token_file.is_file():
        raise InputError("there is no such file", file=token_file, field="--token-file")
    injection = Injection(
        mounts=mounts == "webhook", runtime_class=runtime_class or None, memory_hook=memory_hook == "true"
    )
    server = WebhookApp(WebhookSettings(injection, fail == "open"), token_file)
    refresh: Refresh
    if cert is not None and key is not None:
        refresh, every_s = FilePair(cert, key).refresh, LOOK_S
    else:
        where = bootstrap.Bootstrap(namespace, service, secret, configuration)
        api, every_s = connect(api_server, api_token, api_ca), bootstrap.RENEW_S
        held: list[bytes] = []

        def refresh(context: LiveContext) -> bool:
            found = bootstrap.ensure(api, where)
            if held == [found.certificate]:
                return False
            context.use(found.certificate, found.key, f"Secret {namespace}/{secret}")
            held[:] = [found.certificate]
            return True

    listening = Listening(host, port, metrics_port, client_ca)

    def ready(at: int) -> None:
        LOG.info("webhook ready on %s port %d", host, at)

    asyncio.run(serve(server, listening, refresh, every_s, ready=ready))


@app.command()
def plugin(
    node: Annotated[str, typer.Option(metavar="NAME", help="Name of this node in the cluster.")],
    agent_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the agent's sockets.")] = Path(
        "/run/cotenant/agent"
    ),
    device_plugins: Annotated[Path, typer.Option(metavar="DIR", help="The kubelet's device-plugin folder.")] = Path(
        "/var/lib/kubelet/device-plugins"
    ),
    pod_resources: Annotated[Path, typer.Option(metavar="SOCKET", help="The kubelet's PodResources socket.")] = Path(
        "/var/lib/kubelet/pod-resources/kubelet.sock"
    ),
    whole: Annotated[
        str, typer.Option(metavar="all|UUID,...", help="GPUs offered only as whole GPUs (cotenant.dev/gpu).")
    ] = "",
    one_gpu: Annotated[
        str,
        typer.Option(
            metavar="true|false", help="Advertise at most the free units of one GPU, so that a pod always fits on one."
        ),
    ] = "true",
    mounts: kube_objects.Mounts = "webhook",
    refresh: Annotated[
        str, typer.Option(metavar="TIME", help="Interval between listings of the node's pods, at most 6s.")
    ] = "5s",
    cdi_kind: Annotated[
        str, typer.Option(metavar="KIND", help="Kind of the CDI devices that containers get, such as nvidia.com/gpu.")
    ] = "",
    claims: Annotated[
        str, typer.Option(metavar="true|false", help="Place pods through resource claims (DRA) instead of units.")
    ] = "false",
    kubelet_plugins: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder that contains the kubelet's plugins and plugins_registry.")
    ] = Path("/var/lib/kubelet"),
    host: Host = "127.0.0.1",
    metrics_port: Metrics = None,
    api_server: Server = None,
    api_token: Token = None,
    api_ca: Authority = None,
    log_format: LogFormat = None,
    log_level: LogLevel = None,
) -> None:
    """Register this node's GPUs with the kubelet and bind pods to their tenants. Runs until stopped."""
    from cotenant.core import logs
    from cotenant.core.units import parse_seconds
    from cotenant.kube.client import connect
    from cotenant.kube.dra import offer
    from cotenant.kube.dra.server import CDI_KIND, ClaimSettings
    from cotenant.kube.node import NodeSettings, run
    from cotenant.kube.plugin.state import Grant

    logs.configure(log_format, log_level)
    check_choice(mounts, ("webhook", "plugin"), "--mounts")
    check_choice(one_gpu, ("true", "false"), "--one-gpu")
    check_choice(claims, ("true", "false"), "--claims")
    list_every_s = parse_seconds(refresh, "--refresh")
    if not 0.1 <= list_every_s <= 6.0:
        raise InputError(
            f"must be between 0.1s and 6s, not {refresh}: a pod's processes wait at most 8s until its tenant is known",
            field="--refresh",
        )
    given = tuple(part for part in whole.split(",") if part)
    by_claims = ClaimSettings(
        node, kubelet_plugins / "plugins_registry", kubelet_plugins / "plugins" / offer.DRIVER, cdi_kind or CDI_KIND
    )
    settings = NodeSettings(
        node, agent_dir, device_plugins, pod_resources, given, list_every_s=list_every_s,
        claims=by_claims if claims == "true" else None,
        grant=Grant(mounts == "plugin", cdi_kind or None), one_gpu=one_gpu == "true",
    )  # fmt: skip
    metrics = None if metrics_port is None else (host, metrics_port)
    run(settings, connect(api_server, api_token, api_ca), metrics)


@app.command()
def install(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Folder on the node to install to.")] = Path(
        "/var/lib/cotenant/lib"
    ),
) -> None:
    """Install the driver shim where pods mount it from; versions that running pods have loaded are kept."""
    from cotenant.kube.install import install as put

    LOG.info("the shim is in %s", put(to))
