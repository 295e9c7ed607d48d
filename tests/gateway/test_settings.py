"""Settings are read once; a mistake is named with its place and the fix."""

import re
import socket
import tomllib
from pathlib import Path

import pytest
import structlog
from typer.testing import CliRunner

from penstock.cli.main import build_app
from penstock.gateway.composition import describe_engine, engine_addresses
from penstock.gateway.settings import Settings, default_workers
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.gateway.stack.stack import announcement
from penstock.gateway.stack.startup import CannotStart, check_repositories, choose_engine, resolve_ports
from penstock.gateway.workers.gateway_process import GatewayReady, GatewayServes
from penstock.testing import FakeEngine, FakeMode
from tests.support.stack import CHECKOUT

RUN_DIR = Path("/run/penstock")
ANY_PORTS = dict.fromkeys(("http_port", "grpc_port", "metrics_port", "console_port"), 0)  # others may be taken


def test_settings_precedence_is_flag_then_variable_then_file(tmp_path: Path) -> None:
    """A flag wins over a variable, a variable over the file, the file over the default."""
    file = tmp_path / "penstock.toml"
    file.write_text("http_port = 1\ngrpc_port = 2\nmetrics_port = 3\n")
    environ = {"PENSTOCK_GRPC_PORT": "20", "PENSTOCK_METRICS_PORT": "30"}
    settings = read_settings({"metrics_port": 300, "host": None}, environ=environ, file=file)
    assert (settings.http_port, settings.grpc_port, settings.metrics_port) == (1, 20, 300)
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PENSTOCK_HTP_PORT": "1"}, "PENSTOCK_HTP_PORT: unknown setting 'htp_port'; did you mean PENSTOCK_HTTP_PORT?"),
        ({"PENSTOCK_ZZZ": "1"}, "unknown setting 'zzz'; `penstock up --help`"),
        ({"PENSTOCK_HTTP_PORT": "x"}, "PENSTOCK_HTTP_PORT is 'x': it should be a whole number"),
        ({"PENSTOCK_GRACE_S": "x"}, "PENSTOCK_GRACE_S is 'x': it should be a number"),
        ({"PENSTOCK_LOG_LEVEL": "loud"}, "it should be 'debug', 'info', 'warning' or 'error'"),
        ({"PENSTOCK_HTTP_PORT": "70000"}, "less than or equal to 65535"),
        ({"PENSTOCK_ENGINE": "tritno"}, "engine is 'tritno'; it takes auto, triton, embedded, the http:// address"),
        ({"PENSTOCK_ENGINE": "http://"}, "engine is 'http://'; a Triton's address looks like http://host:8000"),
        ({"PENSTOCK_ENGINE": "http://h:1,triton"}, "engine is 'triton'; a Triton's address looks like"),
        ({"PENSTOCK_ENGINE": "http://h:1, http://h:1"}, "engine names 'http://h:1' twice; give each replica once"),
        (
            {"PENSTOCK_ENGINE": "http://h:1,http://g:1", "PENSTOCK_ENGINE_GRPC": "h:2"},
            "engine_grpc names 1 addresses for 2 engines; give one for each, in the same order",
        ),
        ({"PENSTOCK_ENGINE": "http://h:99999"}, "a Triton's address looks like"),
        ({"PENSTOCK_ENGINE": "http://[::1"}, "a Triton's address looks like"),
        ({"PENSTOCK_ENGINE_GRPC": "h:1"}, "engine_grpc needs an engine given by URL"),
        (
            {"PENSTOCK_ALLOW_OUTBOUND": "10.0.0.1/8"},
            "--allow-outbound '10.0.0.1/8' is not an address, a network or a host",
        ),
        ({"PENSTOCK_OTLP_ENDPOINT": "collector:4318"}, "the collector's address looks like http://host:4318"),
        ({"PENSTOCK_OTLP_ENDPOINT": "http://"}, "the collector's address looks like http://host:4318"),
        ({"PENSTOCK_OTLP_ENDPOINT": "http://a:secret@h:1"}, "a password; pass it in OTEL_EXPORTER_OTLP_HEADERS"),
        ({"PENSTOCK_HTTP_PORT": "9000", "PENSTOCK_ENGINE_GRPC_PORT": "9000"}, "port 9000 is given twice"),
        (
            {"PENSTOCK_TRACE_FILE": "/tmp/traces.json", "PENSTOCK_ENGINE": "embedded"},
            "trace_file needs a Triton that this command starts; leave it out, or use --engine triton",
        ),
        (
            {"PENSTOCK_ALLOW_CLIENT_SHM": "true", "PENSTOCK_GRPC_MAX_CONNECTION_AGE_S": "300"},
            "a client without a key loses its regions with its connection; leave one of them out, or give clients keys",
        ),
        (
            {"PENSTOCK_MODELS": "a,b", "PENSTOCK_REQUIRED_MODELS": "a,c"},
            "required_models has 'c', which is not in models; add it there, too",
        ),
        (
            {"PENSTOCK_METRICS_KEY_REQUIRED": "true"},
            "metrics_key_required needs API keys: give access_file or PENSTOCK_API_KEYS, or leave it out",
        ),
        ({"PENSTOCK_ALLOWED_HOST": "http://h"}, "PENSTOCK_ALLOWED_HOST: allowed_host is 'http://h'; give a name"),
        ({"PENSTOCK_TRUSTED_PROXY": "h"}, "PENSTOCK_TRUSTED_PROXY: trusted_proxy is not valid ('h' does not appear"),
        ({"PENSTOCK_REQUIRED_MODELS": "a,*"}, "required_models has * and names; * alone requires every loaded model"),
        ({"PENSTOCK_CONFIG": "/nonexistent.toml"}, "/nonexistent.toml: cannot be read"),
    ],
)
def test_settings_mistake_is_refused_with_place_and_fix(environ: dict[str, str], message: str) -> None:
    """Unknown names, bad values and impossible pairs do not start the stack."""
    with pytest.raises(SettingsError) as refusal:
        read_settings({}, environ=environ)
    assert message in str(refusal.value)


def test_settings_leave_variables_of_other_commands_alone() -> None:
    """PENSTOCK_GATEWAY_URL is read by `penstock video run` only, and does not stop other commands from running."""
    assert read_settings({}, environ={"PENSTOCK_GATEWAY_URL": "http://gpu:8000"}).http_port == 8000


def test_settings_unknown_key_in_file_names_its_line(tmp_path: Path) -> None:
    """A typo in the file is shown as path:line with a suggestion."""
    file = tmp_path / "penstock.toml"
    file.write_text("# ports\nhttp_port = 1\nmax_pixel = 3\n")
    with pytest.raises(SettingsError, match=rf"{file}:3: unknown setting 'max_pixel'; did you mean max_pixels\?"):
        read_settings({}, environ={}, file=file)


def test_settings_bad_value_in_file_names_its_line(tmp_path: Path) -> None:
    """A value of the wrong type is shown as path:line too."""
    file = tmp_path / "penstock.toml"
    file.write_text('http_port = 1\ngrace_s = "soon"\n')
    with pytest.raises(SettingsError, match=rf"{file}:2: grace_s is 'soon'"):
        read_settings({}, environ={}, file=file)


def test_settings_text_for_a_list_in_file_shows_how_a_list_is_written(tmp_path: Path) -> None:
    """TOML has lists of its own; the error shows one."""
    file = tmp_path / "penstock.toml"
    file.write_text('models = "people"\n')
    with pytest.raises(SettingsError, match=r':1: models is \'people\': it should be a list, such as \["people"\]'):
        read_settings({}, environ={}, file=file)


def test_help_of_up_names_every_setting() -> None:
    """What can be set can be found: as a flag, or among the limits."""
    answer = CliRunner().invoke(build_app(["up"]), ["up", "--help"])
    missing = {
        name
        for name in Settings.model_fields
        if f"--{name.replace('_', '-')} " not in answer.stdout and f"{name} " not in " ".join(answer.stdout.split())
    }
    assert not missing


def test_settings_lists_in_variables_are_split() -> None:
    """Models are split at commas, repositories as PATH is."""
    environ = {"PENSTOCK_MODELS": "a,b", "PENSTOCK_MODEL_REPOSITORY": "/r1:/r2", "PENSTOCK_HOME": "/h"}
    settings = read_settings({}, environ=environ)
    assert settings.models == ("a", "b")
    assert settings.repositories == (Path("/r1"), Path("/r2"), Path("/h/models"))


def test_settings_survive_the_way_to_the_gateway_process() -> None:
    """What the parent writes is what the gateway reads."""
    settings = read_settings({"models": ("a",), "engine": "http://h:1"}, environ={})
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_engine_by_default_is_embedded_where_no_triton_can_run_and_says_why(no_triton: dict[str, Path]) -> None:
    """Decided before anything starts, and said outright in the settings that the gateway gets."""
    with structlog.testing.capture_logs() as logged:
        choice = choose_engine(read_settings(no_triton, environ={}))
    assert (choice.settings.engine, choice.triton) == ("embedded", None)
    assert [line["log_level"] for line in logged] == ["info"]
    assert logged[0]["event"].startswith("engine: embedded, since no tritonserver on PATH and none of nvidia-pytriton")


def test_engine_by_default_is_triton_where_it_can_run(triton_on_path: Path) -> None:
    """The one that was found is the one that is started."""
    with structlog.testing.capture_logs() as logged:
        choice = choose_engine(read_settings({}, environ={}))
    assert choice.triton is not None
    assert (choice.settings.engine, choice.triton.binary) == ("triton", triton_on_path)
    assert not logged


def test_engine_triton_where_it_cannot_run_is_refused_with_the_other_engines(no_triton: dict[str, Path]) -> None:
    """Who asks for Triton does not get something else in silence."""
    with pytest.raises(CannotStart, match=r"penstock setup triton.* or use --engine embedded .* --engine URL"):
        choose_engine(read_settings({"engine": "triton", **no_triton}, environ={}))


def test_collector_without_the_extra_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything starts, and without a word of Python."""
    monkeypatch.setattr("penstock.gateway.settings_checks.importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="install opentelemetry-sdk and "):
        read_settings({"otlp_endpoint": "http://h:4318"}, environ={})


@pytest.mark.parametrize("engine", ["embedded", "http://h:1"])
def test_engine_without_a_process_of_ours_is_taken_at_its_word(engine: str, triton_on_path: Path) -> None:
    """No Triton is searched for, and the engine's ports are ignored: taken or given twice, they are no mistake."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"engine_http_port": taken.getsockname()[1]}
        settings = read_settings(
            {"engine": engine, **ANY_PORTS, **ports, "engine_grpc_port": ports["engine_http_port"]}, environ={}
        )
        choice = choose_engine(settings)
        assert (choice.settings, choice.triton) == (settings, None)
        assert resolve_ports(settings).engine_http_port == ports["engine_http_port"]


@pytest.mark.parametrize(
    ("engine", "mode", "said"),
    [
        ("triton", FakeMode.NORMAL, "fake 0"),
        ("http://h:7000", FakeMode.NORMAL, "fake 0 at http://h:7000"),
        ("http://h:7000", FakeMode.UNAVAILABLE, "triton at http://h:7000"),
        ("embedded", FakeMode.UNAVAILABLE, r"embedded \(ONNX Runtime \d+\.\d+\.\d+ on the [CG]PU\)"),
    ],
)
async def test_engine_is_described_by_the_name_and_version_that_it_gives_itself(
    engine: str, mode: FakeMode, said: str
) -> None:
    """Nothing is claimed that was not asked, and an engine that is gone meanwhile is named all the same."""
    settings = read_settings({"engine": engine}, environ={})
    assert re.fullmatch(said, await describe_engine(settings, FakeEngine(mode=mode)))


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Path]:
    """A PATH without tritonserver, and the setting of an environment that has none."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return {"engine_environment": tmp_path / "absent"}


@pytest.fixture
def triton_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A tritonserver on PATH, as in NVIDIA's container."""
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return binary


def test_version_is_that_of_the_package() -> None:
    """`penstock --version` works from a checkout, and says what pyproject.toml says."""
    with (CHECKOUT / "pyproject.toml").open("rb") as file:
        version = tomllib.load(file)["project"]["version"]
    assert CliRunner().invoke(build_app(["--version"]), ["--version"]).stdout == f"penstock {version}\n"


def test_settings_in_a_file_that_is_no_text_are_refused(tmp_path: Path) -> None:
    """A binary file is a sentence with its path, not a traceback."""
    file = tmp_path / "penstock.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingsError, match=f"{file}: not valid TOML"):
        read_settings({}, environ={}, file=file)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("http://h:7000", ("http://h:7000", "h:7001", "http://h:7002/metrics")),
        ("http://h:7000/", ("http://h:7000", "h:7001", "http://h:7002/metrics")),
        ("http://h", ("http://h", "h:81", "http://h:82/metrics")),
        ("https://h", ("https://h", "h:444", "http://h:445/metrics")),
        ("http://[::1]:7000", ("http://[::1]:7000", "[::1]:7001", "http://[::1]:7002/metrics")),
    ],
)
def test_engine_address_is_the_urls_port_and_the_two_behind_it(engine: str, expected: tuple[str, str, str]) -> None:
    """REST, gRPC and metrics of one Triton agree, whatever the URL leaves out."""
    (address,) = engine_addresses(read_settings({"engine": engine}, environ={}), RUN_DIR)
    assert (address.http_url, address.grpc_address, address.metrics_url) == expected


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::1", "http://[::1]:1")]
)
def test_announcement_shows_addresses_that_can_be_typed(host: str, url: str) -> None:
    """The address of all interfaces is none to connect to, and IPv6 stands in brackets."""
    assert announcement(host, GatewayServes(1, 2, 3), GatewayReady("", [], {})).http_url == url


def test_several_engines_are_replicas_each_with_its_ports() -> None:
    """In their order; gRPC on the port after each one's, or as it is said."""
    flags = {"engine": "http://a:8000, https://b:9000/"}
    assert [
        (row.http_url, row.grpc_address) for row in engine_addresses(read_settings(flags, environ={}), RUN_DIR)
    ] == [("http://a:8000", "a:8001"), ("https://b:9000", "b:9001")]
    said = read_settings({**flags, "engine_grpc": "a:1,b:2"}, environ={})
    assert [row.grpc_address for row in engine_addresses(said, RUN_DIR)] == ["a:1", "b:2"]


def test_own_triton_listens_on_unix_sockets_unless_a_port_is_given() -> None:
    """By default it has no TCP port; each of the three can be opened alone."""
    (closed,) = engine_addresses(read_settings({}, environ={}), RUN_DIR)
    (opened,) = engine_addresses(read_settings({"engine_http_port": 9000}, environ={}), RUN_DIR)
    sockets = ("unix:/run/penstock/triton-grpc.sock:8001", "unix:///run/penstock/triton-metrics.sock")
    assert (closed.http_url, closed.grpc_address, closed.metrics_url) == (
        "unix:///run/penstock/triton-http.sock",
        *sockets,
    )
    assert (opened.http_url, opened.grpc_address, opened.metrics_url) == ("http://127.0.0.1:9000", *sockets)


@pytest.mark.parametrize(
    ("access", "is_open"),
    [
        ({}, True),
        ({"anonymous": ("infer", "read", "admin")}, True),
        ({"anonymous": ("infer", "read")}, False),
        ({"access_file": Path("access.toml")}, False),
        ({"api_keys": ("ops:infer:" + "0" * 64,)}, False),
        ({"api_keys": ("ops:infer:" + "0" * 64,), "anonymous": ("infer", "read", "admin")}, False),
    ],
)
def test_engine_ports_stay_closed_where_the_gateway_refuses_clients_anything(
    access: dict[str, object], is_open: bool
) -> None:
    """Triton checks no keys, so a given port is not opened; one warning names the flag."""
    settings = Settings(engine="triton", engine_http_port=0, **ANY_PORTS, **access)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logged:
        http_port, *others = resolve_ports(settings).engine_ports
    assert (http_port is not None, others) == (is_open, [None, None])
    warnings = [entry["event"] for entry in logged]
    assert [text.partition(":")[0] for text in warnings] == ([] if is_open else ["--engine-http-port"])


def test_batching_options_of_a_model_that_is_nowhere_are_a_warning(tmp_path: Path) -> None:
    """A misspelt name; the model may also come later, so it does not end the start."""
    (tmp_path / "models" / "street").mkdir(parents=True)
    batching = {"street": {"batch_owner": "gateway"}, "stret": {"batch_owner": "gateway"}}
    settings = Settings(home=tmp_path / "home", model_repository=(tmp_path / "models",), batching=batching)
    with structlog.testing.capture_logs() as lines:
        check_repositories(settings)
    assert [(line["log_level"], line["model"]) for line in lines] == [("warning", "stret")]


@pytest.mark.parametrize(
    ("cores", "has_gpu", "workers"),
    [(7, True, 1), (8, False, 2), (8, True, 6), (16, False, 4), (16, True, 11), (64, False, 8), (64, True, 16)],
)
def test_workers_by_default_leave_cores_to_models_on_the_cpu(cores: int, workers: int, *, has_gpu: bool) -> None:
    """With a GPU, requests have most cores. On a small machine one process does all."""
    assert default_workers(cores, has_gpu=has_gpu) == workers
