"""A row on the programs' own processes: memory, descriptors, CPU."""

from deploy.monitoring.build.board import GREEN, ORANGE, RED, Panel, Query, Row, one

RATE = "[$__rate_interval]"


def processes(matchers: str) -> Row:
    """Of the process that has the metrics page: the gateway (the core, where there are fronts) or the video program."""
    return Row(
        "Process",
        (
            Panel(
                "Memory",
                "Resident memory of the process that answers, not of its children. A line that only rises is a leak: "
                "the next panel says how fast.",
                "bytes",
                one(f"process_resident_memory_bytes{{{matchers}}}"),
                width=6,
            ),
            Panel(
                "Memory, slope",
                "Bytes a second over an hour. It may rise while caches and models fill; it should fall back to "
                "nothing.",
                "binBps",
                one(f"penstock:process_memory:deriv1h{{{matchers}}}"),
                width=6,
                minimum=None,
            ),
            Panel(
                "Descriptors, of their limit",
                "Open files and sockets by the process' limit. At 1 no connection is taken.",
                "percentunit",
                one(f"process_open_fds{{{matchers}}} / process_max_fds{{{matchers}}}"),
                width=6,
                maximum=1,
                steps=((None, GREEN), (0.8, ORANGE), (0.95, RED)),
            ),
            Panel(
                "CPU and age",
                "Cores in use by the process that answers; hours since it started.",
                "short",
                (
                    Query(f"rate(process_cpu_seconds_total{{{matchers}}}{RATE})", "{{instance}} cores"),
                    Query(f"(time() - process_start_time_seconds{{{matchers}}}) / 3600", "{{instance}} hours"),
                ),
                width=6,
                right=((".*hours", "h"),),
            ),
        ),
    )
