"""Where models run, by the lines of Triton's log."""

from penstock.engines.ort_serving.placement import EngineFacts
from penstock.engines.triton.model_facts import ModelFacts, merged_facts

GPU = EngineFacts("cuda", 0, "fp16", (1, 8))
CPU = EngineFacts(fallbacks=("the model runs on the CPU instead of GPU 0: no driver",))


def line(model: str, instance: str, facts: EngineFacts) -> str:
    """As our onnxruntime backend logs it."""
    return (
        f"onnxruntime backend ready instance={instance} model={model} version=1 kind=GPU {facts.log_fields()} cores=2"
    )


def test_facts_are_read_from_the_log_and_every_line_is_passed_on() -> None:
    """Each model has the different facts of its instances, and a change is reported once."""
    passed: list[str] = []
    changes: list[int] = []
    facts = ModelFacts(lambda level, event, /, **_: passed.append(event), lambda: changes.append(1))
    lines = [line("street", "street_0_0", GPU), line("street", "street_0_1", GPU), "loading", line("m", "m_0", CPU)]
    for text in [*lines, lines[0]]:
        facts(20, text)
    assert passed == [*lines, lines[0]]
    assert len(changes) == 3
    assert facts.by_model() == {"street": (GPU,), "m": (CPU,)}


def test_facts_name_the_card_of_the_machine() -> None:
    """A Triton that sees one card calls it 0; the report has NVML's number, and joins the engines of all cards."""
    engines = []
    for index in (0, 3):
        facts = ModelFacts(lambda level, event, /, **_: None, lambda: None)
        facts(20, line("street", "street_0_0", GPU))
        engines.append(facts.by_model(index))
    assert [one.device for one in merged_facts(engines)["street"]] == ["cuda:0", "cuda:3"]
    assert merged_facts([]) == {}
