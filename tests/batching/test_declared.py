import dataclasses

import pytest

from server.batching.declared import NAMES, UNTRIED, DeclaredOptions, check_said, default_owner, misspelt, read_options
from server.batching.options import DEFAULT_MAX_QUEUE_BYTES, DEFAULT_MAX_QUEUE_SIZE, BatchOptions
from server.core.batching import Owner
from server.core.errors import InvalidRequest
from server.core.model import ModelConfig

MODEL = ModelConfig("street", "onnxruntime", 16, (), (), instance_count=2)


def with_parameters(model: ModelConfig = MODEL, **parameters: str) -> ModelConfig:
    return dataclasses.replace(model, parameters=parameters)


def test_config_without_a_word_of_batching_leaves_everything_at_its_default() -> None:
    """Nobody owns the batches of such a model, and the bounds are the defaults."""
    assert read_options(MODEL) == BatchOptions(
        owner=Owner.OFF,
        max_batch_size=16,
        instances=2,
        slo_s=None,
        max_queue_delay_s=0.0,
        max_queue_size=DEFAULT_MAX_QUEUE_SIZE,
        max_queue_bytes=DEFAULT_MAX_QUEUE_BYTES,
    )


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
    assert read_options(config) == BatchOptions(Owner.GATEWAY, 8, 2, 0.0075, 0.0005, 64, 1 << 20, 2.5)


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
    assert (options.owner, options.slo_s) == (Owner.GATEWAY, 0.007)


@pytest.mark.parametrize(
    ("change", "owner"),
    [
        ({}, Owner.OFF),
        ({"has_dynamic_batching": True}, Owner.TRITON),
        ({"has_sequence_batching": True}, Owner.TRITON),
    ],
)
def test_owner_of_a_model_of_which_nothing_is_said_is_its_configs_batcher(
    change: dict[str, bool], owner: Owner
) -> None:
    """Without a declaration Triton owns what config.pbtxt has a batcher for, and nobody the rest."""
    config = dataclasses.replace(MODEL, **change)  # type: ignore[arg-type]  # flags only
    assert (read_options(config).owner, default_owner(config)) == (owner, owner)


@pytest.mark.parametrize(
    ("name", "word", "sentence"),
    [
        ("batch_owner", "me", "batch_owner is 'me' in config.pbtxt, and must be one of gateway, triton, off"),
        ("slo_p99_ms", "fast", "slo_p99_ms is 'fast' in config.pbtxt, and must be a number of milliseconds above 0"),
        ("slo_p99_ms", "0", "slo_p99_ms is '0' in config.pbtxt, and must be a number of milliseconds above 0"),
        ("slo_p99_ms", "-3", "slo_p99_ms is '-3' in config.pbtxt, and must be a number of milliseconds above 0"),
        ("slo_p99_ms", "inf", "slo_p99_ms is 'inf' in config.pbtxt, and must be a number of milliseconds above 0"),
        (
            "max_queue_delay_us",
            "-1",
            "max_queue_delay_us is '-1' in config.pbtxt, and must be a number of microseconds, 0 or more",
        ),
        ("max_queue_size", "0", "max_queue_size is '0' in config.pbtxt, and must be a whole number, 1 or more"),
        ("max_queue_bytes", "1e6", "max_queue_bytes is '1e6' in config.pbtxt, and must be a whole number, 1 or more"),
        ("max_batch_size", "x", "max_batch_size is 'x' in config.pbtxt, and must be a whole number, 1 or more"),
    ],
)
def test_malformed_word_is_refused_with_the_word_and_what_is_allowed(name: str, word: str, sentence: str) -> None:
    """A mistake in config.pbtxt is one sentence: which model, which word, what it may be."""
    with pytest.raises(InvalidRequest) as caught:
        read_options(with_parameters(**{name: word}))
    assert caught.value.message == f"model 'street': {sentence}"


def test_cap_above_what_the_config_allows_is_refused() -> None:
    """max_batch_size of the parameters caps Triton's own, and cannot raise it."""
    with pytest.raises(InvalidRequest, match=r"'17' in config.pbtxt, but config.pbtxt allows 16; raise that"):
        read_options(with_parameters(max_batch_size="17"))


def test_operators_mistake_is_told_as_one_of_the_settings() -> None:
    """The sentence sends the reader to where the word stands."""
    with pytest.raises(InvalidRequest, match=r"slo_p99_ms is 'soon' in the settings, and must be"):
        read_options(with_parameters(slo_p99_ms="7"), {"slo_p99_ms": "soon"})


@pytest.mark.parametrize(
    ("owner", "change", "why"),
    [
        (
            "gateway",
            {"has_dynamic_batching": True},
            "two batchers in series add two delays; remove it, or name triton",
        ),
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
    """A misspelt option of the settings does not pass as one that nobody reads."""
    with pytest.raises(InvalidRequest, match=r"no batching option 'slo_ms'; there are batch_owner, slo_p99_ms"):
        check_said("street", {"slo_ms": "7"})


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("slo_p99ms", "slo_p99_ms"),
        ("SLO_P99_MS", "slo_p99_ms"),
        ("batch_ower", "batch_owner"),
        ("batch-owner", "batch_owner"),
        ("max_que_size", "max_queue_size"),
        ("max_queue_delay_ms", "max_queue_delay_us"),
        ("max_queue_byte", "max_queue_bytes"),
        ("max_batchsize", "max_batch_size"),
    ],
)
def test_parameter_that_is_nearly_an_option_is_told_with_the_option(written: str, meant: str) -> None:
    """Nobody reads it: a promise that was meant is not silently none."""
    assert misspelt(with_parameters(**{written: "1", "batch_owner": "gateway"})) == {written: meant}


def test_parameters_of_others_are_nobodys_misspelling() -> None:
    """Triton's, its backends', ours that are no batching options, and the options themselves."""
    known = (
        *("intra_op_thread_count", "inter_op_thread_count", "execution_mode", "FORCE_CPU_ONLY_INPUT_TENSORS"),
        *("EXECUTION_ENV_PATH", "enable_mem_arena", "cudnn_conv_algo_search", "max_beam_width", "max_num_tokens"),
        *("batch_scheduler_policy", "batching_strategy", "max_tokens_in_paged_kv_cache", "gpt_model_type"),
        *("min_batch_size", "preferred_batch_size", "max_batch_tokens", "max_queue_delay_microseconds", "max_seq_len"),
        *("network-type", "max-side", "topk", "labels", "canary", "DISABLE_OPTIMIZED_EXECUTION", "INFERENCE_MODE"),
        *NAMES,
    )
    assert misspelt(with_parameters(**dict.fromkeys(known, "1"))) == {}


def test_declared_options_are_read_anew_when_the_config_changes() -> None:
    """A model that was loaded with another config gets that config's options, and the same one costs no reading."""
    declared = DeclaredOptions({"street": {"max_queue_size": "9"}})
    first = declared.of(MODEL)
    assert declared.of(MODEL) is first
    assert declared.of(with_parameters(slo_p99_ms="20")).slo_s == 0.02
    assert declared.of(MODEL).max_queue_size == 9


def test_engine_that_forms_no_batches_owns_none() -> None:
    """The embedded engine does not act on dynamic_batching: such a model's batches are nobody's there."""
    config = dataclasses.replace(MODEL, has_dynamic_batching=True)
    assert DeclaredOptions(engine_batches=False).of(config).owner is Owner.OFF
    assert DeclaredOptions().of(config).owner is Owner.TRITON


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


def test_refusal_is_empty_for_a_model_that_can_be_served() -> None:
    """Whoever asks whether a model may be served gets a sentence or nothing."""
    declared = DeclaredOptions()
    assert declared.refusal(MODEL) == ""
    assert "slo_p99_ms is 'fast'" in declared.refusal(with_parameters(slo_p99_ms="fast"))
