"""Checks of single settings. Each raises ValueError with the value and the fix; pydantic turns it into the message."""

import importlib.util
from ipaddress import ip_network
from pathlib import Path
from urllib.parse import urlsplit

from penstock.port_policy import Network


def listed(text: str) -> tuple[str, ...]:
    """The items of a comma-separated list, stripped, without empty ones."""
    return tuple(word for word in map(str.strip, text.split(",")) if word)


def networks(proxies: tuple[str, ...]) -> tuple[Network, ...]:
    """The networks of `trusted_proxy`. Raises ValueError for an invalid address or network."""
    try:
        return tuple(ip_network(proxy.strip()) for proxy in proxies)
    except ValueError as error:
        raise ValueError(
            f"trusted_proxy is not valid ({error}); give addresses or networks, such as 10.0.0.5 or 10.0.0.0/24"
        ) from None


def require_addresses(urls: tuple[str, ...], grpcs: tuple[str, ...], header_file: Path | None) -> None:
    """Raises ValueError for invalid or duplicate engine URLs, and unpaired gRPC addresses or header files."""
    if header_file is not None and not urls:
        raise ValueError("engine_header_file needs an engine given by URL; leave it out")
    for url in urls:
        if not url.startswith(("http://", "https://")) or not _has_host(url):
            raise ValueError(f"engine is {url!r}; a Triton's address looks like http://host:8000")
        if urls.count(url) > 1:
            raise ValueError(f"engine names {url!r} twice; give each replica once")
    if grpcs and not urls:
        raise ValueError("engine_grpc needs an engine given by URL; leave it out")
    if grpcs and len(grpcs) != len(urls):
        raise ValueError(
            f"engine_grpc names {len(grpcs)} addresses for {len(urls)} engines; give one for each, in the same order"
        )


def require_video(config: Path | None, *, has_video: bool) -> None:
    """Raises ValueError for a settings file of a video program that is not started."""
    if config is not None and not has_video:
        raise ValueError("video_config is of the stack's video program; give --video (PENSTOCK_VIDEO=true), too")


def require_web_addresses(console_url: str, video_url: str) -> None:
    """Raises ValueError if an address is not http:// or https:// with a host. console_url: may be empty."""
    for name, url in (("console_url", console_url), ("video_url", video_url)):
        if url and (not url.startswith(("http://", "https://")) or not _has_host(url) or "@" in url):
            raise ValueError(f"{name} is {url!r}; it looks like https://host:8003")
    if not video_url:
        raise ValueError("video_url is empty; leave it out, or give the video program's address, http://host:8010")


def checked_load_targets(urls: tuple[str, ...]) -> tuple[str, ...]:
    """URLs of --load-target without a slash at their end. Raises ValueError."""
    for url in urls:
        if not url.startswith(("http://", "https://")) or not _has_host(url) or "@" in url or not url.isprintable():
            raise ValueError(
                f"load_target is {url!r}; it looks like http://host:8000 (a key is given with the run, not in the URL)"
            )
    return tuple(url.rstrip("/") for url in urls)


def require_tracing(endpoint: str) -> None:
    """Raises ValueError for a malformed collector address, one with a password, or without OpenTelemetry installed."""
    if not endpoint.startswith(("http://", "https://")) or not _has_host(endpoint):
        raise ValueError(f"otlp_endpoint is {endpoint!r}; the collector's address looks like http://host:4318")
    if "@" in endpoint:
        raise ValueError("otlp_endpoint contains a password; pass it in OTEL_EXPORTER_OTLP_HEADERS in the environment")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        packages = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
        raise ValueError(f"otlp_endpoint needs OpenTelemetry, which is not installed; install {packages}")


def require_trace_folder(trace_file: Path, *, has_triton: bool) -> None:
    """Raises ValueError for a trace file without a Triton that we start, or whose folder does not exist."""
    if not has_triton:
        raise ValueError("trace_file needs a Triton that this command starts; leave it out, or use --engine triton")
    if not trace_file.absolute().parent.is_dir():
        raise ValueError(f"trace_file is {str(trace_file)!r}, whose folder does not exist; create it or name another")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed either
        return False


def require_known_user(path: Path) -> None:
    """Raises ValueError for a path such as ~name/x whose user does not exist on this machine."""
    try:
        path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path} names a user who does not exist on this machine; give the full path") from error


def _has_host(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port, or unbalanced brackets
        return False


def require_tls_pair(certificate: Path | None, key: Path | None, client_ca: Path | None) -> None:
    """Raises ValueError for a certificate without its key, a key without its certificate, a client CA without both."""
    if (certificate is None) is not (key is None) or (client_ca is not None and certificate is None):
        raise ValueError("TLS needs both tls_cert and tls_key; tls_client_ca also needs both")


def require_loaded(required_models: tuple[str, ...] | None, models: tuple[str, ...] | None) -> None:
    """Raises ValueError if a required model is not loaded, or `*` is combined with names. models: None for all."""
    named = set(required_models or ())
    if "*" in named and len(named) > 1:
        raise ValueError("required_models has * and names; * alone requires every loaded model")
    left_out = named.difference(models, {"*"}) if models is not None else set()
    if left_out:
        raise ValueError(f"required_models has {min(left_out)!r}, which is not in models; add it there, too")


def require_keys_for_metrics(*, is_required: bool, has_keys: bool) -> None:
    """Raises ValueError if metrics require a key but there are no keys."""
    if is_required and not has_keys:
        raise ValueError("metrics_key_required needs API keys: give access_file or PENSTOCK_API_KEYS, or leave it out")
