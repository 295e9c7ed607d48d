"""The video program: what each camera sends, where frames are lost, how late a result is, what leaves by the sinks."""

from deploy.monitoring.build.board import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    YELLOW,
    Board,
    Choice,
    Look,
    Panel,
    Query,
    Row,
    figure,
    heatmap,
    mean,
    one,
    quantile,
    quantiles,
)
from deploy.monitoring.build.on_kubernetes import on_kubernetes
from deploy.monitoring.build.processes import processes
from deploy.monitoring.build.runbook import runbook

JOB = 'namespace=~"$namespace", job=~"$job"'
SOURCE = f'{JOB}, source=~"$source"'
RATE = "[$__rate_interval]"
# The states of a source, in the program's words; a timeline wants numbers.
STATES = (
    ("connecting", YELLOW),
    ("running", GREEN),
    ("stalled", ORANGE),
    ("reconnecting", ORANGE),
    ("auth_failed", RED),
    ("paused", BLUE),
    ("ended", GREY),
    ("failed", RED),
)


def _by(label: str, name: str, matchers: str = SOURCE) -> str:
    return f"sum by ({label}) (rate(penstock_video_{name}{{{matchers}}}{RATE}))"


AT_A_GLANCE = Row(
    "At a glance",
    (
        figure(
            "Sources running",
            "Cameras and files that send frames now.",
            "short",
            one(f'sum(penstock_video_state{{{SOURCE}, state="running"}})', "running"),
        ),
        figure(
            "Sources in trouble",
            "Stalled, reconnecting, refused by the camera, or given up.",
            "short",
            one(
                f'sum(penstock_video_state{{{SOURCE}, state=~"stalled|reconnecting|auth_failed|failed"}})', "in trouble"
            ),
            steps=((None, GREEN), (1, RED)),
        ),
        figure(
            "Frames",
            "Decoded a second, of the chosen sources.",
            "cps",
            one(f"sum(rate(penstock_video_frames_total{{{SOURCE}}}{RATE}))", "frames"),
        ),
        figure(
            "Frames given up",
            "Share of decoded frames that came to no result. By design it is what does not fit: the newest frame wins.",
            "percentunit",
            one(
                f"sum(rate(penstock_video_dropped_total{{{SOURCE}}}{RATE})) "
                f"/ sum(rate(penstock_video_frames_total{{{SOURCE}}}{RATE}))",
                "given up",
            ),
            steps=((None, GREEN), (0.05, ORANGE), (0.5, RED)),
        ),
        figure(
            "p99 glass to event",
            "From the coming of a frame's packet to its result, of the chosen sources together.",
            "s",
            one(quantile(0.99, "penstock_video_glass_to_event_seconds_bucket", SOURCE), "p99"),
        ),
        figure(
            "Lost by sinks",
            "Results and messages a second that a sink gave up.",
            "cps",
            one(f"sum(rate(penstock_video_sink_dropped_total{{{JOB}}}{RATE}))", "lost"),
            steps=((None, GREEN), (0.001, RED)),
        ),
    ),
)


def _state_codes() -> str:
    """One number a source, its state's place in STATES."""
    each = (
        f'{code} * (penstock_video_state{{{SOURCE}, state="{name}"}} == 1)' for code, (name, _) in enumerate(STATES)
    )
    return f"max by (source) ({' or '.join(each)})"


WORDS = tuple((str(code), name.replace("_", " "), colour) for code, (name, colour) in enumerate(STATES))
SOURCES = Row(
    "Sources",
    (
        Panel(
            "State",
            "Of each source. auth_failed is asked again once a minute; stalled means that the camera says nothing.",
            "none",
            one(_state_codes(), "{{source}}"),
            Look.STATES,
            words=WORDS,
            width=12,
            steps=((None, GREY),),
        ),
        Panel(
            "Frames a second",
            "Decoded, over the last seconds, by source.",
            "cps",
            one(f"max by (source) (penstock_video_fps{{{SOURCE}}})", "{{source}}"),
            width=12,
        ),
        Panel(
            "Decoded and inferred",
            "Frames a second: decoded, and answered by the network. The distance is what `interval` skips and "
            "what is given up.",
            "cps",
            (
                Query(f"sum(rate(penstock_video_frames_total{{{SOURCE}}}{RATE}))", "decoded"),
                Query(f"sum(rate(penstock_video_inferred_total{{{SOURCE}}}{RATE}))", "inferred"),
            ),
        ),
        Panel(
            "Given up, by reason",
            "ring_full: the source's ring had no room; queue_full: a newer frame took its place; too_old: it "
            "waited too long; refused: the gate could not answer in time; infer_failed; corrupt; stopped.",
            "cps",
            one(_by("reason", "dropped_total"), "{{reason}}"),
            Look.STACKED,
        ),
        Panel(
            "Given up, by source",
            "Share of the source's decoded frames, over five minutes.",
            "percentunit",
            one(f"max by (source) (penstock:video_dropped:ratio_rate5m{{{SOURCE}}})", "{{source}}"),
        ),
        Panel(
            "Restarts",
            "Times that a source was opened anew, in each interval: a camera that reboots, a network that breaks, "
            "a decoder that died.",
            "short",
            one(f"sum by (source) (increase(penstock_video_restarts_total{{{SOURCE}}}{RATE}))", "{{source}}"),
            Look.STEPS,
            steps=((None, GREEN), (1, ORANGE)),
            width=12,
        ),
        Panel(
            "Frozen pictures",
            "A source that sends the same picture again and again: a covered, hung or spoofed camera.",
            "none",
            one(f"max by (source) (penstock_video_frozen{{{SOURCE}}})", "{{source}}"),
            Look.STATES,
            steps=((None, GREEN), (1, RED)),
            words=(("0", "moves", GREEN), ("1", "frozen", RED)),
            width=12,
        ),
    ),
)


DECODING = Row(
    "Decoding",
    (
        Panel(
            "CPU of a frame",
            "Mean CPU time of decoding and of making ready for the network, by source. Times frames a second: cores.",
            "s",
            (
                Query(mean("penstock_video_decode_seconds", SOURCE, "source"), "{{source}} decode"),
                Query(mean("penstock_video_prepare_seconds", SOURCE, "source"), "{{source}} prepare"),
            ),
        ),
        Panel(
            "Decoders",
            "Sources and decode processes by decoder: cpu (FFmpeg, a process each) or nvdec (a card's video engine, "
            "cameras-per-process of them together).",
            "short",
            (
                Query(f"sum by (decoder) (penstock_video_decoder{{{SOURCE}}})", "{{decoder}} sources"),
                Query(f"sum by (decoder) (penstock_video_decode_processes{{{JOB}}})", "{{decoder}} processes"),
            ),
            Look.STEPS,
        ),
        Panel(
            "Rows for the engine",
            "A second, by where they lay: device (in the memory of a card that the engine shares) or host.",
            "cps",
            one(_by("hand_over", "rows_total", JOB), "{{hand_over}}"),
            Look.STACKED,
        ),
    ),
)


LATENCY = Row(
    "How late a result is",
    (
        Panel(
            "Glass to event, quantiles",
            "From the coming of a frame's packet to its result, of the chosen sources together; and p90 of each "
            "program with all of its sources, over five minutes.",
            "s",
            (
                *quantiles("penstock_video_glass_to_event_seconds_bucket", SOURCE),
                Query(f"penstock:video_glass_to_event_seconds:p90_5m{{{JOB}}}", "{{instance}} p90"),
            ),
        ),
        Panel(
            "Wait for a batch, quantiles",
            "From the coming of a frame's packet to its batch. batched-push-timeout bounds it while the engine keeps "
            "up.",
            "s",
            quantiles("penstock_video_mux_wait_seconds_bucket", JOB),
        ),
        Panel(
            "Call to the engine, quantiles",
            "Of a batch, by model.",
            "s",
            quantiles("penstock_video_infer_seconds_bucket", JOB, "model"),
        ),
        Panel(
            "Glass to event",
            "How many frames took how long.",
            "s",
            heatmap("penstock_video_glass_to_event_seconds_bucket", SOURCE),
            Look.HEATMAP,
            width=24,
        ),
    ),
)


BATCHES = Row(
    "Batches",
    (
        Panel(
            "Frames of a batch",
            "How many batches had how many frames; batch-size is the greatest.",
            "short",
            heatmap("penstock_video_batch_frames_bucket", JOB),
            Look.HEATMAP,
        ),
        Panel(
            "Mean batch",
            "Frames of a batch, by program.",
            "short",
            one(mean("penstock_video_batch_frames", JOB, "instance")),
            decimals=1,
        ),
        Panel(
            "Why batches closed",
            "Batches a second. full: it had batch-size frames; timeout: batched-push-timeout passed; slot_free: "
            "the engine idled.",
            "ops",
            one(_by("reason", "batches_total", JOB), "{{reason}}"),
            Look.STACKED,
        ),
    ),
)


SINKS = Row(
    "Events, sinks, recordings",
    (
        Panel(
            "Events",
            "Of the analytics rules, a second, by kind.",
            "cps",
            one(_by("kind", "events_total"), "{{kind}}"),
            Look.STACKED,
        ),
        Panel(
            "Waiting for a sink",
            "Results and messages in the sink's channel and spool. One that grows is a broker or disk that is "
            "slow or gone.",
            "short",
            one(f"sum by (sink) (penstock_video_sink_queue_results{{{JOB}}})", "{{sink}}"),
        ),
        Panel(
            "Waiting for a sink, bytes",
            "Where they are known: the spool of a broker's messages.",
            "bytes",
            one(f"sum by (sink) (penstock_video_sink_queue_bytes{{{JOB}}})", "{{sink}}"),
        ),
        Panel(
            "Lost and failed",
            "Results and messages that a sink lost, and times that it failed, in each interval.",
            "short",
            (
                Query(f"sum by (sink) (increase(penstock_video_sink_dropped_total{{{JOB}}}{RATE}))", "{{sink}} lost"),
                Query(f"sum by (sink) (increase(penstock_video_sink_errors_total{{{JOB}}}{RATE}))", "{{sink}} failed"),
            ),
            Look.STEPS,
        ),
        Panel(
            "Recordings",
            "That ended, in each interval: ok, short (less than was asked for), failed.",
            "short",
            one(f"sum by (result) (increase(penstock_video_recordings_total{{{SOURCE}}}{RATE}))", "{{result}}"),
            Look.STEPS,
        ),
        Panel(
            "Events without a recording",
            "In each interval: cool_down (too soon after the last), max_at_once (too many at a time).",
            "short",
            one(f"sum by (reason) (increase(penstock_video_unrecorded_events_total{{{SOURCE}}}{RATE}))", "{{reason}}"),
            Look.STEPS,
        ),
    ),
)


VIDEO = Board(
    "penstock-video",
    "Penstock: video",
    "What each camera sends, where frames are lost, how late a result is, what leaves by the sinks.",
    (AT_A_GLANCE, SOURCES, DECODING, LATENCY, BATCHES, SINKS, processes(JOB), on_kubernetes("video"), runbook("video")),
    (
        Choice("namespace", "Namespace", "label_values(penstock_video_state, namespace)"),
        Choice("job", "Job", 'label_values(penstock_video_state{namespace=~"$namespace"}, job)', is_always_there=True),
        Choice("source", "Source", f"label_values(penstock_video_state{{{JOB}}}, source)"),
    ),
)
