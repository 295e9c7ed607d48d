"""Users' classes by module:Name: what a failure says."""

from pathlib import Path

import pytest

from penstock.protocol.extensions import ExtensionError, load_extension

MODULES = {
    "good_sink": "class CsvSink: ...",
    "needy_sink": "import a_library_that_is_not_there",
    "lazy_sink": "def __getattr__(name): raise RuntimeError('not today')",
}


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("good_sink:CsvSnk", "the module good_sink has no CsvSnk; did you mean good_sink:CsvSink?"),
        ("good_sink:Quite", "the module good_sink has no Quite"),
        (
            "no_sink:CsvSink",
            "it cannot be loaded (ModuleNotFoundError: No module named 'no_sink'); is its folder in PYTHONPATH?",
        ),
        (
            "needy_sink:CsvSink",
            "it cannot be loaded (ModuleNotFoundError: No module named 'a_library_that_is_not_there')",
        ),
        ("lazy_sink:CsvSink", "it cannot be loaded (RuntimeError: not today)"),
    ],
)
def test_extension_that_cannot_be_loaded_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sentence: str
) -> None:
    """A class that is not there is named, with the nearest; PYTHONPATH only where the module itself is not found."""
    for module, text in MODULES.items():
        (tmp_path / f"{module}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ExtensionError) as refused:
        load_extension(name)
    assert str(refused.value) == sentence
