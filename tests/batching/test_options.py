"""Batching options: from config.pbtxt and settings, and the log of a model's load."""

import dataclasses
from pathlib import Path

import pytest
import structlog

from penstock.gateway.batching.batcher import log_and_get_refusal
from penstock.gateway.batching.options import (
    OPTION_NAMES,
    UNTRIED,
    BatchOptions,
    DeclaredOptions,
    check_options,
    merge_batching_settings,
    misspelt_parameters,
    read_batching_settings,
    read_options,
)
from penstock.gateway.settings import Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.protocol.engine import ModelConfig
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.inference import BatchOwner

MODEL = ModelConfig("street", "onnxruntime", 16, (), (), instance_count=2)


def with_parameters(model: ModelConfig = MODEL, **parameters: str) -> ModelConfig:
    return dataclasses.replace(model, parameters=parameters)


def test_config_without_a_word_of_batching_leaves_everything_at_its_default() -> None:
    """Batches of such a model have no owner, and the bounds are the defaults."""
    assert read_options(MODEL) == BatchOptions(BatchOwner.OFF, max_batch_size=16, instances=2)


def test_every_parameter_of_the_config_is_read() -> None:
    """Each option can stand in config.pbtxt's parameters, in the unit of its name."""
    config = with_parameters(
        batch_owner="gateway",
        slo_p99_ms="7.5",
        execution_timeout_ms="2500",
        max_batch_size="8",
        max_queue_delay_us="500",
        max_queue_size="64",
        max_queue_bytes="1048576",
    )
    assert read_options(config) == BatchOptions(BatchOwner.GATEWAY, 8, 2, 0.0075, 0.0005, 64, 1 << 20, 2.5)


@pytest.mark.parametrize(
    ("measured_on", "is_on_gpu", "settings", "rows"),
    [("cpu", False, {}, 2), ("cpu", True, {}, 16), ("cpu", True, {"max_batch_size": "4"}, 4), ("", True, {}, 2)],
)
def test_limit_that_was_measured_on_a_cpu_does_not_apply_on_a_gpu(
    measured_on: str, *, is_on_gpu: bool, settings: dict[str, str], rows: int
) -> None:
    """There config.pbtxt's own max_batch_size is the limit; one in the settings, or without that mark, applies."""
    config = with_parameters(max_batch_size="2", max_batch_size_measured_on=measured_on)
    assert read_options(dataclasses.replace(config, is_on_gpu=is_on_gpu), settings).max_batch_size == rows
    assert misspelt_parameters(config) == {}


@pytest.mark.parametrize(
    ("backend", "decoder", "reads_slab"),
    [("torch", "engine", True), ("torch", " Engine", True), ("torch", "gateway", False), ("python", "engine", False)],
)
def test_only_our_backend_that_decodes_pictures_reads_the_slab(backend: str, decoder: str, *, reads_slab: bool) -> None:
    """A model of another backend gets the pictures, whatever it does with them."""
    config = dataclasses.replace(with_parameters(**{"image-decoder": decoder}), backend=backend)
    assert read_options(config).reads_slab is reads_slab


@pytest.mark.parametrize(
    ("said", "timeout_s"),
    [({}, 4.0), ({"slo_p99_ms": "100"}, 4.0), ({"slo_p99_ms": "2000"}, 20.0), ({"execution_timeout_ms": "100"}, 0.1)],
)
def test_execution_timeout_is_the_models_or_the_operators_or_ten_times_the_slo(
    said: dict[str, str], timeout_s: float
) -> None:
    """A model without a time-out has the operator's, and at least ten times its SLO."""
    assert read_options(with_parameters(**said), execution_timeout_s=4.0).execution_timeout_s == timeout_s


def test_operator_wins_over_the_config_word_by_word() -> None:
    """What the operator said replaces the same word of config.pbtxt, and no other."""
    options = read_options(with_parameters(batch_owner="off", slo_p99_ms="7"), {"batch_owner": "gateway"})
    assert (options.owner, options.slo_s) == (BatchOwner.GATEWAY, 0.007)


@pytest.mark.parametrize(
    ("change", "owner"),
    [
        ({}, BatchOwner.OFF),
        ({"has_dynamic_batching": True}, BatchOwner.TRITON),
        ({"has_sequence_batching": True}, BatchOwner.TRITON),
    ],
)
def test_owner_of_a_model_of_which_nothing_is_said_is_its_configs_batcher(
    change: dict[str, bool], owner: BatchOwner
) -> None:
    """Without a declaration Triton owns what config.pbtxt has a batcher for, and the rest has no owner."""
    config = dataclasses.replace(MODEL, **change)  # type: ignore[arg-type]  # flags only
    assert read_options(config).owner is owner


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("batch_owner", "me", "batch_owner is 'me' in config.pbtxt, and must be one of gateway, triton, off"),
        ("slo_p99_ms", "fast", "slo_p99_ms is 'fast' in config.pbtxt, and must be a number of milliseconds above 0"),
        ("slo_p99_ms", "0", "slo_p99_ms is '0' in config.pbtxt, and must be a number of milliseconds above 0"),
        ("slo_p99_ms", "inf", "slo_p99_ms is 'inf' in config.pbtxt, and must be a number of milliseconds above 0"),
        (
            "max_queue_delay_us",
            "-1",
            "max_queue_delay_us is '-1' in config.pbtxt, and must be a number of microseconds, 0 or more",
        ),
        ("max_queue_size", "0", "max_queue_size is '0' in config.pbtxt, and must be a whole number, 1 or more"),
        ("max_queue_bytes", "1e6", "max_queue_bytes is '1e6' in config.pbtxt, and must be a whole number, 1 or more"),
        ("max_batch_size", "x", "max_batch_size is 'x' in config.pbtxt, and must be a whole number, 1 or more"),
        (
            "max_batch_size",
            "17",
            "max_batch_size is '17' in config.pbtxt, but config.pbtxt allows 16; raise that, or name less",
        ),
    ],
)
def test_malformed_word_is_refused_with_the_word_and_what_is_allowed(name: str, word: str, sentence: str) -> None:
    """A mistake in config.pbtxt is one sentence: which model, which word, what it may be."""
    with pytest.raises(InvalidRequest) as caught:
        read_options(with_parameters(**{name: word}))
    assert caught.value.message == f"model 'street': {sentence}"


@pytest.mark.parametrize(
    ("owner", "change", "why"),
    [
        ("gateway", {"has_dynamic_batching": True}, "two batchers in series add two delays; remove it, or name triton"),
        ("gateway", {"has_sequence_batching": True}, "requests of a sequence cannot share a batch"),
        ("gateway", {"is_decoupled": True}, "a decoupled model answers any number of times"),
        ("gateway", {"is_ensemble": True}, "an ensemble's batches are formed by the models in it"),
        ("gateway", {"max_batch_size": 0}, "its max_batch_size is 0: it has no batch dimension; name triton or off"),
        ("triton", {}, "config.pbtxt has no dynamic_batching; add it, or name another owner"),
        ("off", {"has_dynamic_batching": True}, "config.pbtxt has dynamic_batching; remove it, or name triton"),
    ],
)
def test_owner_that_the_config_contradicts_is_refused(owner: str, change: dict[str, bool], why: str) -> None:
    """Two batchers in series, or a batcher that cannot be, is said and not guessed at."""
    config = dataclasses.replace(with_parameters(batch_owner=owner), **change)  # type: ignore[arg-type]  # flags only
    with pytest.raises(InvalidRequest, match=why):
        read_options(config)


def test_word_that_is_no_option_is_refused_with_those_that_there_are() -> None:
    """A misspelt option of the settings is an error, not ignored."""
    with pytest.raises(InvalidRequest, match=r"no batching option 'slo_ms'; there are batch_owner, slo_p99_ms"):
        check_options("street", {"slo_ms": "7"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("slo_p99ms", "slo_p99_ms"),
        ("batch_ower", "batch_owner"),
        ("batch-owner", "batch_owner"),
        ("max_queue_delay_ms", "max_queue_delay_us"),
        ("max_batchsize", "max_batch_size"),
    ],
)
def test_parameter_that_is_nearly_an_option_is_reported_with_the_option(written: str, meant: str) -> None:
    """It is not read: a promise that was meant does not vanish silently."""
    assert misspelt_parameters(with_parameters(**{written: "1", "batch_owner": "gateway"})) == {written: meant}


def test_parameters_of_others_are_nobodys_misspelling() -> None:
    """Triton's, its backends', ours that are no batching options, and the options themselves."""
    known = (
        *("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "FORCE_CPU_ONLY_INPUT_TENSORS"),
        *("EXECUTION_ENV_PATH", "enable_mem_arena", "cudnn_conv_algo_search", "max_beam_width", "max_num_tokens"),
        *("batch_scheduler_policy", "batching_strategy", "max_tokens_in_paged_kv_cache", "gpt_model_type"),
        *("min_batch_size", "preferred_batch_size", "max_batch_tokens", "max_queue_delay_microseconds", "max_seq_len"),
        *("network-type", "max-side", "topk", "labels", "canary", "DISABLE_OPTIMIZED_EXECUTION", "INFERENCE_MODE"),
        *OPTION_NAMES,
    )
    assert misspelt_parameters(with_parameters(**dict.fromkeys(known, "1"))) == {}


def test_declared_options_are_read_anew_when_the_config_changes() -> None:
    """A model that was loaded with another config gets that config's options, and the same one costs no reading."""
    declared = DeclaredOptions({"street": {"max_queue_size": "9"}})
    first = declared.of(MODEL)
    assert declared.of(MODEL) is first
    assert declared.of(with_parameters(slo_p99_ms="20")).slo_s == 0.02
    assert declared.of(MODEL).max_queue_size == 9


def test_engine_that_forms_no_batches_owns_none() -> None:
    """The embedded engine ignores dynamic_batching: batches of such a model have no owner there."""
    config = dataclasses.replace(MODEL, has_dynamic_batching=True)
    assert DeclaredOptions(engine_batches=False).of(config).owner is BatchOwner.OFF
    assert DeclaredOptions().of(config).owner is BatchOwner.TRITON


def test_requests_are_merged_after_a_trial_and_only_those_that_we_merge_are_tried() -> None:
    """This covers the gateway's batches, those that our backends merge under Triton, and pictures, for each config."""
    declared = DeclaredOptions(merging_backends=("onnxruntime",))
    owned = dataclasses.replace(MODEL, parameters={"batch_owner": "gateway"})
    tritons = dataclasses.replace(MODEL, has_dynamic_batching=True, backend="onnxruntime")
    others = (MODEL, dataclasses.replace(tritons, backend="python"), dataclasses.replace(owned, max_batch_size=1))
    seeing = with_parameters(**{"network-type": "0"})
    ones = (*others, dataclasses.replace(seeing, max_batch_size=1))
    assert [declared.wants_trial(config) for config in (owned, tritons, seeing)] == [True, True, True]
    assert [declared.wants_trial(config) for config in ones] == [False, False, False, False]
    for config in (owned, tritons, seeing):
        assert declared.of(config).unmerged == UNTRIED
        for why in ("its rows go astray", ""):
            assert declared.of(dataclasses.replace(config, unmerged=why)).unmerged == why
    assert declared.of(MODEL).unmerged == ""
    assert DeclaredOptions().of(owned).unmerged == ""


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
    assert read_batching_settings(words) == read_batching_settings(table)


def test_later_source_wins_option_by_option() -> None:
    """What a flag does not name stays as the file has it."""
    below = {"street": {"slo_p99_ms": "50", "batch_owner": "gateway"}}
    above = {"street": {"slo_p99_ms": "20"}, "other": {"batch_owner": "off"}}
    assert merge_batching_settings(below, above) == {
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
        read_batching_settings(given)


def test_settings_of_batching_come_from_file_variable_and_flag(tmp_path: Path) -> None:
    """A flag wins over a variable, a variable over the file, for each option of each model."""
    file = tmp_path / "penstock.toml"
    file.write_text(FILE)
    environ = {"PENSTOCK_BATCHING": "street=gateway,slo_p99_ms=40,max_queue_bytes=1000;other=off"}
    settings = read_settings({"batching": ("street=triton",)}, environ=environ, file=file)
    assert settings.batching == {
        "street": {"batch_owner": "triton", "slo_p99_ms": "40", "max_queue_size": "64", "max_queue_bytes": "1000"},
        "other": {"batch_owner": "off"},
    }
    assert Settings.model_validate_json(settings.model_dump_json()) == settings


def test_mistake_in_a_files_table_names_its_line(tmp_path: Path) -> None:
    """The reader is sent to the line of the table."""
    file = tmp_path / "penstock.toml"
    file.write_text(FILE.replace("50", '"fast"'))
    with pytest.raises(SettingsError, match=r"penstock.toml:4: model 'street': slo_p99_ms is 'fast' in the settings"):
        read_settings({}, environ={}, file=file)


def test_load_of_a_model_with_a_misspelt_option_warns_once_for_each() -> None:
    """With the model, the word and what was meant; the model is served, or refused for what is read."""
    config = ModelConfig("street", "onnxruntime", 16, (), (), {"slo_p99ms": "7", "max_que_size": "9", "topk": "5"})
    with structlog.testing.capture_logs() as logged:
        assert log_and_get_refusal(DeclaredOptions(), config) == ""
    warnings = [(line["log_level"], line["model"], line["parameter"], line["did_you_mean"]) for line in logged]
    assert warnings == [
        ("warning", "street", "slo_p99ms", "slo_p99_ms"),
        ("warning", "street", "max_que_size", "max_queue_size"),
    ]


@pytest.mark.parametrize(("slo", "said"), [("7", ""), ("fast", "slo_p99_ms is 'fast'")])
def test_load_of_a_model_that_is_spelt_well_logs_nothing(slo: str, said: str) -> None:
    """A model that cannot be served is refused with the same sentence as everywhere."""
    with structlog.testing.capture_logs() as logged:
        refusal = log_and_get_refusal(DeclaredOptions(), with_parameters(slo_p99_ms=slo))
    assert (said in refusal, bool(refusal), logged) == (True, bool(said), [])
