"""Sinks in their short form whose address holds what is easily lost."""

import pytest

from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.loader import Flags
from penstock_video.sinks.kafka import KafkaOptions
from tests.deepstream_pipeline.settings.reading import from_flags

WRONG = {
    "mqtt://host/a/#": "--sink: topic is 'a/#': a topic to publish to has no wildcard",
    "mqtt://host/a/%23": "--sink: topic is 'a/#': a topic to publish to has no wildcard",
    "mqtt://host/a/+": "--sink: topic is 'a/+': a topic to publish to has no wildcard",
    "mqtt://host#a": "--sink: topic is '#a': a topic to publish to has no wildcard",
    "mqtt://host/a?qos=1#b": "--sink: qos is '1#b': a whole number",
    "mqtt://host/a/{foo}": "--sink: topic is 'a/{foo}': {foo} is no placeholder; there are {source_id} and {kind}",
    "mqtt://host/a/{kind": "--sink: topic is 'a/{kind': a { stands alone; there are {source_id} and {kind}",
}


@pytest.mark.parametrize(("sink", "fault"), WRONG.items())
def test_mqtt_topic_that_cannot_be_published_to_is_refused_at_reading(sink: str, fault: str) -> None:
    """As in a file: nothing of the topic is dropped on the way, and nothing runs."""
    with pytest.raises(InvalidSettings) as refused:
        from_flags(Flags(sources=("rtsp://cam",), model="m", sinks=(sink,)))
    assert refused.value.message.startswith(fault)


def test_kafka_topic_with_a_sign_that_ends_other_addresses_is_kept_whole() -> None:
    """A # begins no fragment here: what cannot be a topic is for the broker to refuse, not for us to shorten."""
    (kafka,) = from_flags(Flags(sources=("rtsp://cam",), model="m", sinks=("kafka://b/t#x",))).sinks
    assert kafka == KafkaOptions("b", "t#x")
