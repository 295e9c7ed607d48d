from pathlib import Path

import pytest

from server.batching.said import merged, read_said
from server.core.errors import InvalidRequest
from server.settings import Settings, SettingsError, read_settings

FILE = """
http_port = 0

[batching.street]
batch_owner = "gateway"
slo_p99_ms = 50
max_queue_size = 64
"""


def test_words_and_tables_say_the_same() -> None:
    """A flag's words are the table of a file, written in a line."""
    words = ("street=gateway,slo_p99_ms=50", "identity=off")
    table = {"street": {"batch_owner": "gateway", "slo_p99_ms": 50}, "identity": {"batch_owner": "off"}}
    assert read_said(words) == read_said(table)


def test_later_source_wins_option_by_option() -> None:
    """What a flag does not name stays as the file has it."""
    below = {"street": {"slo_p99_ms": "50", "batch_owner": "gateway"}}
    above = {"street": {"slo_p99_ms": "20"}, "other": {"batch_owner": "off"}}
    assert merged(below, above) == {
        "street": {"slo_p99_ms": "20", "batch_owner": "gateway"},
        "other": {"batch_owner": "off"},
    }


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("street",), "batching is 'street'; write MODEL=OWNER"),
        (("=gateway",), "batching is '=gateway'; write MODEL=OWNER"),
        (("street=gateway,slo_p99_ms",), "write MODEL=OWNER"),
        (
            ("street=slo_p99_ms",),
            "batch_owner is 'slo_p99_ms' in the settings, and must be one of gateway, triton, off",
        ),
        (("street=gateway,slo=5",), "has no batching option 'slo'; there are batch_owner"),
        ({"street": {"slo_p99_ms": "fast"}}, "slo_p99_ms is 'fast' in the settings, and must be"),
        ({"street": {"max_queue_size": True}}, "max_queue_size is True; it must be a word or a number"),
        ({"street": "gateway"}, r"batching of model 'street' is 'gateway'; write a table, \[batching.street\]"),
        ("street", r"batching is 'street'; write a table a model, \[batching.MODEL\], or MODEL=OWNER"),
    ],
)
def test_what_has_neither_form_is_refused_with_the_form(given: object, why: str) -> None:
    """Every mistake says what stood there and how it is written."""
    with pytest.raises(InvalidRequest, match=why):
        read_said(given)


def test_settings_of_batching_come_from_file_variable_and_flag(tmp_path: Path) -> None:
    """A flag wins over a variable, a variable over the file, for each option of each model."""
    file = tmp_path / "penstock.toml"
    file.write_text(FILE)
    environ = {"PENSTOCK_BATCHING": "street=gateway,slo_p99_ms=40,max_queue_bytes=1000;other=off"}
    settings = read_settings({"batching": ("street=triton",)}, environ=environ, file=file)
    assert settings.batching == {
        "street": {
            "batch_owner": "triton",
            "slo_p99_ms": "40",
            "max_queue_size": "64",
            "max_queue_bytes": "1000",
        },
        "other": {"batch_owner": "off"},
    }
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_mistake_in_a_files_table_names_its_line(tmp_path: Path) -> None:
    """The reader is sent to the line of the table."""
    file = tmp_path / "penstock.toml"
    file.write_text(FILE.replace("50", '"fast"'))
    with pytest.raises(SettingsError, match=r"penstock.toml:4: model 'street': slo_p99_ms is 'fast' in the settings"):
        read_settings({}, environ={}, file=file)
