"""The flags of `penstock up`, each named after its setting; `config` is the settings file."""

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.logs import LogFormat

FLAGS: dict[str, Any] = {
    "config": Annotated[Path | None, typer.Option(help="TOML file of settings")],
    "host": Annotated[str | None, typer.Option(help="address to listen on [127.0.0.1 and ::1]")],
    "http_port": Annotated[int | None, typer.Option(help="REST [8000]; 0 picks a free one")],
    "grpc_port": Annotated[int | None, typer.Option(help="gRPC [8001]")],
    "metrics_port": Annotated[int | None, typer.Option(help="Prometheus metrics [8002]")],
    "console": Annotated[str | None, typer.Option(help="on or off: serve the web console [on]")],
    "console_port": Annotated[int | None, typer.Option(help="the console's port [8003]")],
    "console_url": Annotated[
        str | None, typer.Option(help="where / on the REST port redirects to [the console's port on the same host]")
    ],
    "video_url": Annotated[
        str | None, typer.Option(help="the video program whose streams the console shows [http://127.0.0.1:8010]")
    ],
    "video": Annotated[
        bool | None,
        typer.Option("--video", help="also run the video program: cameras, rules and events in the console [off]"),
    ],
    "video_config": Annotated[
        Path | None, typer.Option(help="settings file of the video program; changes are saved there [HOME/video.yaml]")
    ],
    "video_port": Annotated[int | None, typer.Option(help="port of the video program's API [8010]")],
    "allowed_host": Annotated[
        list[str] | None,
        typer.Option(
            help="name that clients without a key may use for this server (Host header) besides localhost and --host: "
            "a name, *.example.com, or * for any; may be repeated"
        ),
    ],
    "cors_origin": Annotated[
        list[str] | None,
        typer.Option(help="origin of web pages that may call it: https://console.example; may be repeated [its own]"),
    ],
    "engine": Annotated[
        str | None,
        typer.Option(
            help="auto, triton, embedded, a Triton's http:// address (several with commas), or module:Class [auto]"
        ),
    ],
    "engine_grpc": Annotated[
        str | None, typer.Option(help="that Triton's gRPC address, or each one's [the next port]")
    ],
    "engine_header_file": Annotated[
        Path | None,
        typer.Option(
            help="file with headers (NAME: VALUE lines) for every call to that Triton, "
            "if its APIs are restricted [none]"
        ),
    ],
    "engine_http_port": Annotated[
        int | None,
        typer.Option(
            help="also serve the REST API of the stack's Triton on this port of 127.0.0.1, to every local program; "
            "with several GPUs, each further Triton uses a port three higher; ignored if there are API keys [none]"
        ),
    ],
    "engine_grpc_port": Annotated[int | None, typer.Option(help="the same for its gRPC API [none]")],
    "engine_metrics_port": Annotated[int | None, typer.Option(help="the same for its metrics [none]")],
    "engine_environment": Annotated[Path | None, typer.Option(help="environment that holds Triton's wheel")],
    "gpus": Annotated[
        str | None,
        typer.Option(
            help="GPUs to serve on: all (that CUDA sees), or numbers or UUIDs of nvidia-smi -L with commas [all]"
        ),
    ],
    "mps": Annotated[
        str | None,
        typer.Option(
            help="off, on, auto: share the GPU among the supervised Triton's model processes under CUDA's MPS [off]"
        ),
    ],
    "mps_directory": Annotated[
        Path | None,
        typer.Option(help="folder of the MPS daemon's pipes; one that listens there is used [one of our own]"),
    ],
    "mps_active_thread_percentage": Annotated[
        str | None,
        typer.Option(
            help="percent of a GPU's threads that each MPS client may use; 0: no limit; auto: chosen by model [0]"
        ),
    ],
    "mps_pinned_memory": Annotated[
        str | None,
        typer.Option(help="memory that each MPS client may use: 4G, or for each GPU number 0=4G,1=2G [no limit]"),
    ],
    "model_repository": Annotated[
        list[Path] | None, typer.Option(help="folder of models, instead of the shipped one; may be repeated")
    ],
    "models": Annotated[str | None, typer.Option(help="names to load, with commas [all]")],
    "required_models": Annotated[
        str | None,
        typer.Option(
            help="models that must serve for the gateway to be ready: names, comma-separated, or * "
            "for all loaded [any one]"
        ),
    ],
    "batching": Annotated[
        list[str] | None,
        typer.Option(help="who forms a model's batches, MODEL=gateway, triton or off[,NAME=VALUE…]; may be repeated"),
    ],
    "home": Annotated[Path | None, typer.Option(help="where pulled models are [~/.penstock]")],
    "access_file": Annotated[Path | None, typer.Option(help="TOML file of API keys, their roles and rates")],
    "anonymous": Annotated[str | None, typer.Option(help="roles of a client without a key: infer,read,admin, or none")],
    "metrics_key_required": Annotated[
        bool | None, typer.Option("--metrics-key-required", help="port 8002 requires a key with the role read [off]")
    ],
    "audit_log": Annotated[
        Path | None, typer.Option(help="audit log: JSON lines of admin actions and refused authentications [none]")
    ],
    "tls_cert": Annotated[Path | None, typer.Option(help="PEM certificate chain; turns on TLS for every port [none]")],
    "tls_key": Annotated[Path | None, typer.Option(help="the certificate's key, PEM without a password")],
    "tls_client_ca": Annotated[
        Path | None, typer.Option(help="PEM file of a CA: clients need a certificate signed by it [none]")
    ],
    "allow_client_shm": Annotated[
        bool | None,
        typer.Option(
            "--allow-client-shm",
            help="let clients of this machine share memory with the engine; off, since they then may have it read and "
            "write any segment that it may, and may end it by cutting one [off]",
        ),
    ],
    "allow_model_code": Annotated[
        bool | None,
        typer.Option(
            "--allow-model-code",
            help="allow clients with the role admin to load models that can run code here; without it, load "
            "requests may contain ONNX models only [off]",
        ),
    ],
    "load_target": Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="further server that admins may run load tests against; may be repeated [none]"
        ),
    ],
    "allow_outbound": Annotated[
        list[str] | None,
        typer.Option(
            help="address or network of cameras that clients may add with --video (192.168.0.0/16), or of a cloud's "
            "metadata service that jwks_url of the access file may use; may be repeated [none]"
        ),
    ],
    "trusted_proxy": Annotated[
        str | None,
        typer.Option(
            help="proxies without a connection limit per address: addresses or networks, comma-separated [none]"
        ),
    ],
    "otlp_endpoint": Annotated[
        str | None, typer.Option(help="OpenTelemetry collector for traces, http://host:4318 [none]")
    ],
    "trace_file": Annotated[
        Path | None, typer.Option(help="where the supervised Triton writes traces, once a client asks for them [none]")
    ],
    "profile": Annotated[
        str | None,
        typer.Option(
            help="off, auto, nsys, ncu, nvtx: start Triton under NVIDIA's profiler, its report in HOME/profiles; nvtx "
            "marks stages only [off]"
        ),
    ],
    "workers": Annotated[
        int | None,
        typer.Option(min=0, help="processes that serve requests, over one core; 0 goes by the cores: 1 below 8 [0]"),
    ],
    "grace_s": Annotated[float | None, typer.Option(help="seconds that running requests get at the end [30]")],
    "drain_delay_s": Annotated[float | None, typer.Option(help="seconds not ready but serving before it [0]")],
    "log_format": Annotated[LogFormat | None, typer.Option(help="text or json [text]")],
    "log_level": Annotated[str | None, typer.Option(help="debug, info, warning, error [info]")],
}


def signature() -> inspect.Signature:
    """The flags as keyword parameters whose default is None, for typer."""
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=None, annotation=flag) for name, flag in FLAGS.items()]
    )
