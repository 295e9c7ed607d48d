"""A row that only a cluster fills: what kube-state-metrics and cAdvisor say of the chart's pods."""

from deploy.monitoring.build.board import GREEN, ORANGE, RED, Look, Panel, Query, Row, one

RATE = "[$__rate_interval]"


def on_kubernetes(*components: str) -> Row:
    """Of the pods that the chart names after components: gateway, triton, video."""
    pods = f'namespace=~"$namespace", pod=~".+-({"|".join(components)})-.+", container!=""'
    return Row(
        "On Kubernetes (needs kube-state-metrics and cAdvisor)",
        (
            Panel(
                "Containers restarted",
                "In each interval, by pod and container.",
                "short",
                one(f"increase(kube_pod_container_status_restarts_total{{{pods}}}{RATE}) > 0", "{{pod}} {{container}}"),
                Look.STEPS,
                steps=((None, GREEN), (1, RED)),
            ),
            Panel(
                "Memory, of its limit",
                "Working set by limit: at 1 the kernel kills the container. /dev/shm counts.",
                "percentunit",
                one(
                    f"max by (pod, container) (container_memory_working_set_bytes{{{pods}}}) / on (pod, container) "
                    f'max by (pod, container) (kube_pod_container_resource_limits{{{pods}, resource="memory"}})',
                    "{{pod}} {{container}}",
                ),
                steps=((None, GREEN), (0.8, ORANGE), (0.95, RED)),
            ),
            Panel(
                "Held back by a CPU limit",
                "Share of scheduling periods in which the container ran into its CPU limit. The chart sets none, so "
                "that deadlines are kept.",
                "percentunit",
                (
                    Query(
                        f"rate(container_cpu_cfs_throttled_periods_total{{{pods}}}{RATE}) "
                        f"/ rate(container_cpu_cfs_periods_total{{{pods}}}{RATE})",
                        "{{pod}} {{container}}",
                    ),
                ),
                steps=((None, GREEN), (0.1, ORANGE)),
            ),
        ),
        is_collapsed=True,
    )
