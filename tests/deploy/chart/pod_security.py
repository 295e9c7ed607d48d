"""Kubernetes' Pod Security Standards, level restricted, as published for 1.34 and later: what a pod breaks, and where.

Source: kubernetes.io/docs/concepts/security/pod-security-standards. `image` among the volume types is what the
admission plugin (policy/check_restrictedVolumes.go of k8s.io/pod-security-admission) takes beyond the page.
"""

from collections.abc import Iterator
from typing import Any

Spec = dict[str, Any]

VOLUME_TYPES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
SAFE_SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
SELINUX_TYPES = {None, "", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
PROFILES = ("RuntimeDefault", "Localhost")


def violations(template: Spec) -> list[str]:
    """What a pod (metadata and spec) breaks; empty: a namespace that enforces `restricted` takes it."""
    return [*_of_pod(template.get("metadata", {}), template["spec"]), *_of_containers(template["spec"])]


def all_containers(spec: Spec) -> list[Spec]:
    """Init, native sidecar, usual and ephemeral ones."""
    return [each for kind in ("initContainers", "containers", "ephemeralContainers") for each in spec.get(kind) or []]


def _of_pod(metadata: Spec, spec: Spec) -> Iterator[str]:
    context = spec.get("securityContext") or {}
    yield from (f"{name} is true" for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    for volume in spec.get("volumes") or []:
        yield from (f"volume {volume['name']} is a {kind}" for kind in volume.keys() - {"name"} - VOLUME_TYPES)
    for sysctl in context.get("sysctls") or []:
        if sysctl["name"] not in SAFE_SYSCTLS:
            yield f"sysctl {sysctl['name']}"
    for key, value in (metadata.get("annotations") or {}).items():
        is_profile = value == "runtime/default" or value.startswith("localhost/")
        if key.startswith("container.apparmor.security.beta.kubernetes.io/") and not is_profile:
            yield f"annotation {key}: {value}"
    yield from _of_context("the pod", context)


def _of_containers(spec: Spec) -> Iterator[str]:
    pod = spec.get("securityContext") or {}
    for container in all_containers(spec):
        name, own = container["name"], container.get("securityContext") or {}
        yield from _of_context(name, own)
        yield from _of_container(name, container, own)
        if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
            yield f"{name}: runAsNonRoot is not true"
        if (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type") not in PROFILES:
            yield f"{name}: no seccompProfile"


def _of_context(where: str, context: Spec) -> Iterator[str]:
    """What holds of a pod's and of a container's securityContext alike."""
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield f"{where}: hostProcess"
    if context.get("runAsUser") == 0:
        yield f"{where}: runAsUser is 0"
    if context.get("runAsNonRoot") is False:
        yield f"{where}: runAsNonRoot is false"
    if (context.get("seccompProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
        yield f"{where}: seccompProfile is {context['seccompProfile']['type']}"
    if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
        yield f"{where}: appArmorProfile is {context['appArmorProfile']['type']}"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield f"{where}: seLinuxOptions are {selinux}"


def _of_container(name: str, container: Spec, context: Spec) -> Iterator[str]:
    if context.get("privileged"):
        yield f"{name}: privileged"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation is not false"
    if context.get("procMount", "Default") != "Default":
        yield f"{name}: procMount is {context['procMount']}"
    capabilities = context.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield f"{name}: capabilities are not dropped"
    yield from (f"{name}: capability {each}" for each in capabilities.get("add") or [] if each != "NET_BIND_SERVICE")
    yield from (f"{name}: hostPort {each['hostPort']}" for each in container.get("ports") or [] if each.get("hostPort"))
    hooks = [*(container.get("lifecycle") or {}).values()]
    probes = [container.get(f"{kind}Probe") or {} for kind in ("liveness", "readiness", "startup")]
    for handler in hooks + probes:
        if any((handler.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
            yield f"{name}: a probe or hook names a host"
