"""The embedded engine: ONNX Runtime in the gateway's own process, over Triton's repository layout.

engine               EmbeddedEngine: the Backend
repository · repository_reader    what lies on disk: folders, versions, config.pbtxt · read without waiting for ever
repository_config    a config completed and judged as Triton does it
loaded_opening · loaded_warmup    a model opened from disk · the requests that it answers before it is ready
loaded               one version in memory: its session, its threads, its runs
model · model_places what became of a name · who may run, who waits
validation           a request against the config, in Triton's words
statistics · metrics what was counted · as Prometheus has it
wire/                the protocol: bytes in, bytes out
"""
