"""The exporter's command line, as far as it goes without PyTorch."""

import pytest

from deploy.models.resnet50_torch import run


@pytest.mark.parametrize(
    "words", [["--instances", "0"], ["--instances", "-1"], ["--max-batch", "0"], ["--max-batch", "x"]]
)
def test_number_that_makes_no_model_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is exported, with the option and what was said."""
    with pytest.raises(SystemExit, match="2"):
        run(words)
    assert f"argument {words[0]}: {words[1]!r} is not a whole number above 0" in capsys.readouterr().err
