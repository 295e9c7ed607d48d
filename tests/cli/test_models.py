"""`penstock models`: list, pull, load, unload, against a stand-in of the gateway."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import models as models_command
from penstock.gateway.settings import SHIPPED_MODELS
from penstock.models.catalogue import read_catalogue
from tests.cli.conftest import Call, StandIn

UNUSED_URL = "http://127.0.0.1:9"


def home() -> Path:
    """The home that the fixture gave this test."""
    return Path(os.environ["PENSTOCK_HOME"])


def write_model(name: str, config: str, versions: tuple[str, ...] = ("1",)) -> Path:
    """A model folder in the home's repository."""
    folder = home() / "models" / name
    folder.mkdir(parents=True)
    for version in versions:
        (folder / version).mkdir()
    (folder / "config.pbtxt").write_text(config)
    return folder


def listed(penstock: Call, url: str) -> dict[str, dict[str, object]]:
    """`penstock models list --json`, by name."""
    answer = penstock("models", "list", "--json", "--url", url)
    assert answer.exit_code == 0, answer.stderr
    return {row["name"]: row for row in json.loads(answer.stdout)}


def test_list_brings_folders_catalogue_and_gateway_together(penstock: Call, stand_in: StandIn) -> None:
    """Where a model is, its versions, its state in the gateway with the reason, and who forms its batches."""
    write_model("mine", 'backend: "python"\ndynamic_batching { }\nmax_batch_size: 8\n', ("10", "9", "x"))
    write_model("bad", "this is no config")
    write_model("hollow", 'backend: "onnxruntime"\n', ())
    stand_in.index = [
        {"name": "people", "version": "1", "state": "READY", "reason": ""},
        {"name": "mine", "version": "10", "state": "UNAVAILABLE", "reason": "no such backend"},
        {"name": "elsewhere", "version": "3", "state": "READY"},
        {"name": "bad"},
        {"name": "hollow"},
    ]
    rows = listed(penstock, stand_in.url)
    columns = {name: [row[key] for key in ("where", "versions", "state", "owner")] for name, row in rows.items()}
    expected = {
        "people": ["shipped", ["1"], "READY", "off"],
        "mine": ["home", ["9", "10"], "UNAVAILABLE", "triton"],
        "bad": ["home", ["1"], "not loaded", ""],
        "hollow": ["home", [], "not loaded", "off"],
        "elsewhere": ["gateway", ["3"], "READY", ""],
        "fastestdet": ["catalogue", [], "not loaded", "off"],
        "resnet50": ["catalogue", [], "not loaded", "triton"],
    }
    assert {name: columns[name] for name in expected} == expected
    assert set(columns) == {*expected, *read_catalogue(), *os.listdir(SHIPPED_MODELS)}
    assert rows["mine"]["reason"] == "no such backend"
    assert rows["hollow"]["reason"] == f"it has no version: put its files into {home() / 'models' / 'hollow' / '1'}"
    assert "config.pbtxt:1:" in str(rows["bad"]["reason"])


def test_list_shows_the_owner_that_settings_or_config_name(
    penstock: Call, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's owner is who `penstock up` would let form its batches here, and why it cannot be stands below."""
    word = 'parameters {{ key: "batch_owner" value {{ string_value: "{}" }} }}'
    write_model("mine", f'backend: "python"\nmax_batch_size: 8\n{word.format("gateway")}')
    write_model("said", 'backend: "python"\nmax_batch_size: 8\n')
    write_model("twice", f'backend: "python"\nmax_batch_size: 8\ndynamic_batching {{ }}\n{word.format("gateway")}')
    monkeypatch.setenv("PENSTOCK_BATCHING", "said=gateway")
    rows = listed(penstock, stand_in.url)
    assert [rows[name]["owner"] for name in ("mine", "said", "twice")] == ["gateway", "gateway", ""]
    assert "two batchers in series add two delays" in str(rows["twice"]["reason"])
    assert "two batchers in series" in penstock("models", "check", "twice", "--json", "--url", stand_in.url).stdout


def test_list_believes_the_gateway_of_who_forms_a_served_models_batches(penstock: Call, stand_in: StandIn) -> None:
    """Its settings may say something else than the files here, and of a model that is only there no file tells."""
    options = {"max_batch_size": 8, "instances": 1, "slo_p99_ms": None}
    limits = {"max_queue_delay_us": 0.0, "max_queue_size": 512, "max_queue_bytes": 1}
    report = {"model": "any", "owner": "gateway", "options": options | limits, "queue": None, "fit": None}
    stand_in.page = report | {"batches": [], "closed_by": {}, "dropped": {}, "proposed_config": ""}
    stand_in.index = [{"name": name, "version": "1", "state": "READY"} for name in ("street", "elsewhere")]
    rows = listed(penstock, stand_in.url)
    assert [rows[name]["owner"] for name in ("street", "elsewhere", "people")] == ["gateway", "gateway", "off"]


def test_list_without_a_gateway_leaves_the_states_open(penstock: Call) -> None:
    """Standard output stays JSON; that no gateway answers is said on standard error."""
    answer = penstock("models", "list", "--json", "--url", UNUSED_URL)
    assert {row["state"] for row in json.loads(answer.stdout)} == {None}
    assert answer.stderr == (
        f"penstock: states are not known: nothing answers at {UNUSED_URL}: "
        "start it with `penstock up`, or give its address with --url\n"
    )


def test_list_table_shows_a_row_a_model(penstock: Call, stand_in: StandIn) -> None:
    """For a person the same as a table, reasons only where there are some."""
    stand_in.index = [{"name": "people", "version": "1", "state": "READY"}]
    answer = penstock("models", "list", "--url", stand_in.url)
    assert answer.exit_code == 0
    people = next(line for line in answer.stdout.splitlines() if "people" in line)
    assert people.split() == ["people", "shipped", "1", "READY", "off", *people.split()[5:7], "Apache-2.0"]
    assert "reason" not in answer.stdout


def test_list_shows_licence_and_size_of_what_the_catalogue_has(penstock: Call, stand_in: StandIn) -> None:
    """Before and after a pull; another folder with a catalogue name is not the catalogue's model."""
    write_model("mnist", 'backend: "onnxruntime"\n')
    rows = listed(penstock, stand_in.url)
    shown = {name: (rows[name]["where"], rows[name]["licence"], rows[name]["size_bytes"]) for name in rows}
    assert shown["resnet50"] == ("catalogue", "Apache-2.0", 102576593)
    assert shown["fastestdet"] == ("catalogue", "BSD-3-Clause", 998169)
    assert shown["mnist"] == ("home", "Apache-2.0", 0)
    lines = penstock("models", "list", "--url", stand_in.url).stdout.splitlines()
    (resnet50,) = [line.split() for line in lines if line.startswith("resnet50 ")]
    assert resnet50[-3:] == ["102.6", "MB", "Apache-2.0"]


def test_list_tells_size_and_licence_of_what_lies_on_disk(penstock: Call, stand_in: StandIn) -> None:
    """A user's own model too: the files of the versions that are served, and MODEL.md's licence where it has one."""
    folder = write_model("mine", 'backend: "python"\n', ("1", "2"))
    (folder / "1" / "model.py").write_bytes(b"x" * 100)
    for inside in ("part", "__pycache__", "tensorrt-rtx"):
        (folder / "2" / inside).mkdir()
    for name, count in (("model.py", 20), ("part/weights", 5), ("__pycache__/model.pyc", 7), ("tensorrt-rtx/e", 9)):
        (folder / "2" / name).write_bytes(b"x" * count)
    assert (listed(penstock, UNUSED_URL)["mine"]["size_bytes"], listed(penstock, UNUSED_URL)["mine"]["licence"]) == (
        25,
        "",
    )
    (folder / "MODEL.md").write_text("# mine\n\n| | |\n|---|---|\n| licence | MIT (mine); as is |\n")
    stand_in.index = [{"name": "mine", "version": "1", "state": "READY"}]
    rows = listed(penstock, stand_in.url)
    assert (rows["mine"]["size_bytes"], rows["mine"]["licence"]) == (100, "MIT")
    assert (rows["people"]["licence"], rows["street"]["licence"]) == ("Apache-2.0", "Apache-2.0")


def test_list_beside_the_embedded_engine_says_that_nothing_is_batched(penstock: Call, stand_in: StandIn) -> None:
    """What config.pbtxt asks for is not what that engine does."""
    write_model("mine", "dynamic_batching { }\nmax_batch_size: 8\n")
    assert listed(penstock, stand_in.url)["mine"]["owner"] == "triton"
    stand_in.engine = "penstock-embedded"
    rows = listed(penstock, stand_in.url)
    assert {rows[name]["owner"] for name in ("mine", "resnet50")} == {"off"}


@pytest.mark.usefixtures("narrow_terminal")
def test_list_fits_eighty_columns(penstock: Call, stand_in: StandIn) -> None:
    """One line a model and nothing cut off, with the longest words that the engine and the catalogue have."""
    write_model("resnet50-random-int8", 'backend: "onnxruntime"\n')
    stand_in.index = [{"name": "resnet50-random-int8", "version": "1", "state": "UNAVAILABLE"}]
    lines = penstock("models", "list", "--url", stand_in.url).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    (random,) = [line.split() for line in lines if line.startswith("resnet50-random")]
    assert random == ["resnet50-random-int8", "home", "1", "UNAVAILABLE", "off", "0.0", "kB", "-"]
    assert [line.split()[-1] for line in lines if line.startswith("fastestdet")] == ["BSD-3-Clause"]


def test_list_marks_random_weights(penstock: Call, stand_in: StandIn) -> None:
    """A model that is there to be measured is not mistaken for one that knows anything."""
    write_model("resnet50-random", 'parameters { key: "weights" value { string_value: "random" } }\n')
    assert listed(penstock, stand_in.url)["resnet50-random"]["weights"] == "random"
    lines = penstock("models", "list", "--url", stand_in.url).stdout.splitlines()
    assert lines[-1] == "resnet50-random: random weights: its speed can be measured, its answers mean nothing"


def test_list_names_the_untried_models(penstock: Call, stand_in: StandIn) -> None:
    """The catalogue's weights that this project never decoded are named under the table, and marked in the JSON."""
    rows = listed(penstock, stand_in.url)
    assert rows["yolox-m"]["untried"] is True
    assert rows["yolox-nano"]["untried"] is False
    text = " ".join(penstock("models", "list", "--url", stand_in.url).stdout.split())
    untried = [name for name, row in rows.items() if row["untried"]]
    assert f"untried: this project has never decoded the real weights of {', '.join(untried)}" in text


def test_pull_of_an_untried_model_says_so(penstock: Call, shared_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning stands between the licence and the gateway's answer."""
    entry = replace(read_catalogue()["fastestdet"], untried=True)
    monkeypatch.setattr(models_command, "read_catalogue", lambda: {"fastestdet": entry})
    answer = penstock("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", UNUSED_URL)
    assert answer.exit_code == 0, answer.stderr
    warning = answer.stdout.splitlines()[1]
    assert warning.startswith(
        "untried: this project has never decoded the real weights of fastestdet: check its answers"
    )


def test_pull_without_a_gateway_lands_and_says_when_it_is_loaded(penstock: Call, shared_dir: Path) -> None:
    """The real file of the real inputs lands verified in the home; no gateway is no failure."""
    answer = penstock("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", UNUSED_URL)
    assert answer.exit_code == 0, answer.stderr
    folder = home() / "models" / "fastestdet"
    assert (folder / "1" / "model.onnx").stat().st_size == 998169
    assert answer.stdout.splitlines() == [
        f"fastestdet is in {folder} (SHA-256 verified, licence BSD-3-Clause)",
        f"no gateway runs at {UNUSED_URL}: fastestdet will be loaded at the next `penstock up`",
    ]


def test_pull_of_a_present_model_says_that_nothing_was_read(penstock: Call, shared_dir: Path, tmp_path: Path) -> None:
    """A truncated file in --from is not read, and not called verified."""
    (tmp_path / "fastestdet.onnx").write_bytes(b"truncated")
    for source in (shared_dir / "models", tmp_path):
        answer = penstock("models", "pull", "fastestdet", "--from", source, "--url", UNUSED_URL)
    folder = home() / "models" / "fastestdet"
    assert answer.stdout.splitlines()[:2] == [
        f"fastestdet is already in {folder}, its model file unchanged (SHA-256 verified, licence BSD-3-Clause)",
        f"{tmp_path} was not read; to install from it, remove {folder / '1' / 'model.onnx'} and pull again",
    ]


def test_pull_beside_a_gateway_has_it_loaded(penstock: Call, stand_in: StandIn, shared_dir: Path) -> None:
    """The running gateway is asked to load what came, after it has landed."""
    answer = penstock("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", stand_in.url)
    assert answer.exit_code == 0, answer.stderr
    assert [asked.path for asked in stand_in.asked] == ["/v2/repository/models/fastestdet/load"]
    assert answer.stdout.splitlines()[1] == (
        f"fastestdet is loaded at {stand_in.url}: penstock infer fastestdet photo.jpg"
    )


def test_pull_that_the_gateway_cannot_load_fails_with_its_reason(
    penstock: Call, stand_in: StandIn, shared_dir: Path, tmp_path: Path
) -> None:
    """The model is in place, in the folder of --home whatever PENSTOCK_HOME is; the exit code is 1."""
    stand_in.refusals["/load"] = (400, json.dumps({"error": "failed to load 'fastestdet', no such file"}), {})
    flags = ("--from", shared_dir / "models", "--home", tmp_path / "other", "--url", stand_in.url)
    answer = penstock("models", "pull", "fastestdet", *flags)
    assert answer.exit_code == 1
    assert (tmp_path / "other" / "models" / "fastestdet" / "1" / "model.onnx").is_file()
    assert not (home() / "models").exists()
    assert answer.stderr == (
        f"penstock: fastestdet is in place, but the gateway at {stand_in.url} did not load it: "
        "failed to load 'fastestdet', no such file\n"
    )


def test_pull_again_says_what_it_kept_and_how_to_have_the_catalogues(penstock: Call, shared_dir: Path) -> None:
    """An edited config.pbtxt survives, in one line that names the way back."""
    words = ("models", "pull", "fastestdet", "--from", shared_dir / "models", "--url", UNUSED_URL)
    assert penstock(*words).exit_code == 0
    config = home() / "models" / "fastestdet" / "config.pbtxt"
    config.write_text(config.read_text().replace("count: 2", "count: 4"))
    assert penstock(*words).stdout.splitlines()[2] == (
        f"kept your config.pbtxt, which differs from the catalogue's; to replace it, remove {config} and pull again"
    )
    assert "count: 4" in config.read_text()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("fastesdet",), "the catalogue has no model 'fastesdet': did you mean fastestdet?"),
        (("fastestdet", "--from", "/absent/folder"), "there is no /absent/folder: give the folder that holds"),
        (("mnist", "--from", "http://127.0.0.1:9/"), "http://127.0.0.1:9/mnist-12.onnx cannot be reached"),
        (("mnist", "--from", "ftp://127.0.0.1/"), "ftp://127.0.0.1/ cannot be read from here"),
    ],
)
def test_pull_that_cannot_be_done_is_one_sentence(penstock: Call, words: tuple[str, ...], why: str) -> None:
    """A wrong name or a wrong place ends with one line and exit code 1, and leaves no model."""
    answer = penstock("models", "pull", *words, "--url", UNUSED_URL)
    assert (answer.exit_code, answer.stdout) == (1, "")
    assert answer.stderr.startswith(f"penstock: {why}")
    assert answer.stderr.count("\n") == 1
    assert list(home().glob("models/*")) == []


def test_list_where_a_folder_may_not_be_read_tells_which(penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed model is a row with its reason, a closed repository one sentence."""
    closed = write_model("closed", "")
    real = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert listed(penstock, UNUSED_URL)["closed"]["reason"] == (
        f"{closed} cannot be read (Permission denied): let this user read it"
    )
    closed = home() / "models"
    answer = penstock("models", "list", "--url", UNUSED_URL)
    assert (answer.exit_code, answer.stderr) == (
        1,
        f"penstock: {closed} cannot be read (Permission denied): let this user read it\n",
    )


def test_list_at_an_address_of_something_else_says_so(penstock: Call, stand_in: StandIn) -> None:
    """The message for another program's port, such as our metrics, differs from the one for an unknown model."""
    stand_in.refusals["/index"] = (404, json.dumps({"error": "no such page"}), {})
    answer = penstock("models", "list", "--url", stand_in.url)
    assert f"the server at {stand_in.url} is not a gateway (no such page): check the address\n" in answer.stderr
    answer = penstock("models", "list", "--url", stand_in.url.replace("http:", "https:"))
    assert "http:// if the server has no TLS" in answer.stderr


@pytest.mark.parametrize(("verb", "done"), [("load", "loaded"), ("unload", "unloaded")])
def test_load_and_unload_ask_the_gateway(penstock: Call, stand_in: StandIn, verb: str, done: str) -> None:
    """The answer is said in a line."""
    stand_in.index = [{"name": "people", "version": "1", "state": "READY"}]
    answer = penstock("models", verb, "people", "--url", stand_in.url)
    assert answer.exit_code == 0
    assert answer.stdout == f"people is {done} at {stand_in.url}\n"
    assert stand_in.asked[-1].path == f"/v2/repository/models/people/{verb}"


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_load_and_unload_pass_refusals_on(penstock: Call, stand_in: StandIn, verb: str) -> None:
    """What the gateway says is the sentence; no gateway is one too."""
    stand_in.index = [{"name": "x"}]
    stand_in.refusals[f"/{verb}"] = (400, json.dumps({"error": "not now"}), {})
    answer = penstock("models", verb, "x", "--url", stand_in.url)
    assert (answer.exit_code, answer.stderr) == (1, "penstock: not now\n")
    answer = penstock("models", verb, "x", "--url", UNUSED_URL)
    assert (answer.exit_code, answer.stderr) == (
        1,
        f"penstock: nothing answers at {UNUSED_URL}: start it with `penstock up`, or give its address with --url\n",
    )


def test_unload_of_an_unknown_model_is_a_failure(penstock: Call, stand_in: StandIn) -> None:
    """Triton calls that done; a person has misspelt a name and should know."""
    stand_in.index = [{"name": "people", "version": "1", "state": "READY"}]
    answer = penstock("models", "unload", "poeple", "--url", stand_in.url)
    assert answer.exit_code == 1
    assert answer.stderr == f"penstock: there is no model 'poeple' at {stand_in.url}: did you mean people?\n"
    assert [asked.path for asked in stand_in.asked] == ["/v2/repository/index"]


def test_unload_needs_no_role_read(penstock: Call, stand_in: StandIn) -> None:
    """A key with only the role admin cannot read the repository index, but it can unload a model."""
    stand_in.refusals["/index"] = (403, json.dumps({"error": "'adm' lacks the role read, which this needs"}), {})
    answer = penstock("models", "unload", "people", "--url", stand_in.url)
    assert (answer.exit_code, answer.stdout) == (0, f"people is unloaded at {stand_in.url}\n"), answer.stderr
    assert stand_in.asked[-1].path == "/v2/repository/models/people/unload"


@pytest.mark.parametrize("status", [401, 403])
def test_unload_without_a_valid_key_or_the_role_admin_fails(penstock: Call, stand_in: StandIn, status: int) -> None:
    """The reason is the server's."""
    for end in ("/index", "/unload"):
        stand_in.refusals[end] = (status, json.dumps({"error": "'cam' lacks the role admin"}), {})
    answer = penstock("models", "unload", "people", "--url", stand_in.url)
    assert answer.exit_code == 1
    assert ("requires an API key" if status == 401 else "'cam' lacks the role admin") in answer.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [("bad", "config.pbtxt:1:"), ("absent", ": there is no model 'absent' in "), ("bda", ": did you mean bad?")],
)
def test_load_that_the_engine_cannot_explain_tells_what_the_folders_do(
    penstock: Call, stand_in: StandIn, name: str, why: str
) -> None:
    """Triton's words are the same for a folder that is not there and for a config.pbtxt that it cannot read."""
    write_model("bad", "this is no config")
    refusal = f"failed to load '{name}', failed to poll from model repository"
    stand_in.refusals["/load"] = (400, json.dumps({"error": refusal}), {})
    answer = penstock("models", "load", name, "--url", stand_in.url)
    assert answer.exit_code == 1
    assert answer.stderr.startswith(f"penstock: {refusal}: ")
    assert why in answer.stderr


def test_list_tells_reasons_in_a_line_each(penstock: Call, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal: whole paths, no cells of one word a line, and not the interpreter's own frames."""
    monkeypatch.setenv("COLUMNS", "80")
    reason = (
        "Internal: ModuleNotFoundError: No module named 'torch'\n\nAt:\n  /m/1/model.py(1): <module>\n  <frozen>(2)\n"
    )
    stand_in.index = [{"name": "mine", "version": "1", "state": "UNAVAILABLE", "reason": reason}]
    write_model("bad", "this is no config")
    lines = penstock("models", "list", "--url", stand_in.url).stdout.splitlines()
    assert lines[-1] == "mine: Internal: ModuleNotFoundError: No module named 'torch'"
    assert lines[-2].startswith(f"bad: {home() / 'models' / 'bad' / 'config.pbtxt'}:1:")


def test_models_with_an_unknown_setting_is_refused(penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt PENSTOCK_ variable is not passed over in silence."""
    monkeypatch.setenv("PENSTOCK_HOMES", "x")
    answer = penstock("models", "list", "--url", UNUSED_URL)
    assert answer.exit_code == 2
    assert "did you mean PENSTOCK_HOME?" in answer.stderr


def test_list_in_a_pipe_keeps_each_model_in_its_line(
    penstock: Call, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long a name and a path: grep finds them."""
    monkeypatch.setenv("COLUMNS", "40")
    name = "a-model-of-our-own-whose-name-is-long"
    write_model(name, "")
    lines = penstock("models", "list", "--url", stand_in.url).stdout.splitlines()
    assert [line.split() for line in lines if name in line] == [
        [name, "home", "1", "not", "loaded", "off", "0.0", "kB", "-"]
    ]
