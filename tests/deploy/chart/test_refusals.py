"""What cannot be is refused before anything is installed, in a sentence: the value, and what to do about it."""

import re
from functools import cache
from typing import Any

import pytest
import yaml

from tests.deploy.chart.rendering import CHART, Refused, render
from tests.deploy.chart.value_sets import SETS, merged, rendered

pytestmark = pytest.mark.xdist_group("chart")


def refusal(values: dict[str, Any]) -> str:
    """What the chart says of the values."""
    with pytest.raises(Refused) as refused:
        render(values)
    return str(refused.value)


@cache
def refusal_over(name: str, values: str) -> str:
    """What the chart says of these values over a set."""
    return refusal(merged(SETS[name], yaml.safe_load(values)))


def at(path: str, value: object) -> dict[str, Any]:
    """A value at a path with dots."""
    for part in reversed(path.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


IMPOSSIBLE: list[tuple[str, str, list[str]]] = [
    # over which set, the values, what the sentence has to say: the value, and the way out
    ("cpu", "gpu: {generation: turing}", ["bundled", "turing", "sidecar or separate"]),
    ("external", "gpu: {generation: hopper}", ["external", "hopper", "none"]),
    ("cpu", "triton: {replicas: 2}", ["2", "bundled", "separate"]),
    ("cpu", "topology: external", ["external.urls", "empty", "http://"]),
    ("cpu", "external: {urls: ['http://a:8000']}", ["external.urls", "bundled", "topology"]),
    ("external", "external: {grpc: ['a:8001']}", ["1", "2", "one for each"]),
    ("external", "external: {urls: ['http://a:8000', 'http://a:8000']}", ["twice"]),
    ("external", "models: {source: pvc, pvc: {claimName: m}}", ["pvc", "external", "image"]),
    ("cpu", "models: {source: objectStore, objectStore: {url: 's3://m'}}", ["objectStore", "bundled"]),
    ("t4", "models: {source: pvc}", ["models.pvc.claimName", "empty"]),
    ("t4", "models: {source: objectStore}", ["models.objectStore.url", "empty"]),
    ("t4", "models: {source: ociImage}", ["models.ociImage.reference", "empty"]),
    ("t4", "models: {source: git, git: {repository: 'https://g', image: 'a/b:1'}}", ["models.git.ref", "empty"]),
    ("t4", "models: {pvc: {claimName: m}}", ["models.pvc.claimName", '"m"', "image", "models.source"]),
    ("t4", "{models: {source: objectStore, objectStore: {url: 's3://m'}}}", ["objectStore", "networkPolicy.egress"]),
    ("cpu", "gateway: {auth: {anonymous: []}}", ["anonymous", "existingSecret", "Secret"]),
    ("cpu", "gateway: {extraEnv: [{name: PENSTOCK_WORKERS, value: '2'}]}", ["PENSTOCK_WORKERS", "gateway.settings"]),
    ("cpu", "gateway: {ingress: {enabled: true, host: a.b}}", ["ingress", "networkPolicy.gatewayFrom"]),
    ("cpu", "gateway: {service: {type: LoadBalancer}}", ["LoadBalancer", "networkPolicy.gatewayFrom"]),
    ("cpu", "gateway: {ingress: {tlsSecret: t}}", ["tlsSecret", "host"]),
    ("cpu", "gateway: {settings: {slab_bytes: 2000000000}}", ["2000000000", "1Gi", "shmSize"]),
    ("cpu", "gateway: {shmSize: 4Gi}", ["gateway.shmSize", "4Gi", "limit", "higher"]),
    ("separate", "triton: {shmSize: 16Gi}", ["triton.shmSize", "16Gi", "8Gi", "limit"]),
    (
        "video-shards",
        "networkPolicy: {egress: []}",
        ["rtsp://camera-1.example.com, rtsp://camera-2", "networkPolicy.egress"],
    ),
    ("cpu", "gateway: {shmSize: 8Gi}", ["gateway.shmSize", "8Gi", "4Gi", "lower"]),
    ("video-shards", "video: {shmSize: 4Gi}", ["video.shmSize", "4Gi", "higher"]),
    (
        "video-shards",
        "{video: {gatewayUrl: 'http://gateway.elsewhere:8000', config: {source: null}}, networkPolicy: {egress: []}}",
        ["video.gatewayUrl", "http://gateway.elsewhere:8000", "networkPolicy.egress"],
    ),
    ("external", "external: {urls: ['triton.ml:8000'], grpc: []}", ["triton.ml:8000", "write http://triton.ml:8000"]),
    ("cpu", "image: {registry: 'https://reg.example.com/ml'}", ["https://reg.example.com/ml", "scheme"]),
    ("cpu", "image: {registry: ghcr.io/MyOrg}", ["ghcr.io/MyOrg", "capitals", "small"]),
    # Triton's releases
    ("t4", "triton: {release: 26.07}", ["26.07", "26.10 is 26.1", "quotes"]),
    ("t4", "triton: {release: '26.06'}", ["26.06", "authentication bypass", "26.07", "acceptKnownVulnerabilities"]),
    ("t4", "triton: {image: {tag: 0.1.0-25.01}}", ["25.01", "26.07"]),
    ("p4", "triton: {acceptKnownVulnerabilities: false}", ["24.04", "26.07", "acceptKnownVulnerabilities"]),
    ("v100", "triton: {acceptKnownVulnerabilities: false}", ["24.10", "acceptKnownVulnerabilities"]),
    ("p4", "triton: {release: '24.10'}", ["24.10", "pascal", "24.04"]),
    ("v100", "triton: {release: '25.01'}", ["25.01", "volta", "24.10"]),
    ("b200", "triton: {release: '24.10', acceptKnownVulnerabilities: true}", ["24.10", "blackwell", "26.07"]),
    ("t4", "triton: {release: '', image: {tag: ours}}", ['"ours"', "triton.release"]),
    ("t4", f"triton: {{release: '', image: {{digest: 'sha256:{'0' * 64}'}}}}", ["digest", "triton.release"]),
    ("t4", "triton: {image: {tag: 0.1.0-26.10}}", ["26.07", "26.10", "the same"]),
    ("t4", "triton: {args: ['--http-port=1']}", ["--http-port", "leave it out"]),
    # GPUs and their sharing
    (
        "t4",
        "triton: {resources: {limits: {nvidia.com/gpu: 2}}}",
        ["triton.resources.limits", "nvidia.com/gpu", "gpu.count"],
    ),
    ("cpu", "gateway: {resources: {requests: {nvidia.com/gpu: 1}}}", ["gateway.resources.requests", "gpu.generation"]),
    ("cpu", "gpu: {sharing: {mode: mps}}", ["mps", "gpu.generation"]),
    ("cpu", "gpu: {mig: {profile: 1g.10gb}}", ["1g.10gb", "gpu.generation"]),
    ("t4", "gpu: {mig: {profile: 1g.10gb}}", ["1g.10gb", "turing", "MIG"]),
    ("mig", "gpu: {sharing: {mode: mps}}", ["1g.10gb", "time-slicing"]),
    ("mig", "gpu: {sharing: {mode: mps, provider: own}, nodeSelector: {a: b}}", ["1g.10gb", "visibleDevices"]),
    (
        "p4",
        "gpu: {sharing: {mode: mps, provider: own, own: {pinnedMemoryLimit: 2G}}}",
        ["pinnedMemoryLimit", "2G", "pascal", "leave it out"],
    ),
    ("mps-own", "triton: {extraEnv: [{name: CUDA_MPS_PIPE_DIRECTORY, value: /x}]}", ["CUDA_MPS_PIPE", "gpu.sharing"]),
    ("mps-plugin", "gpu: {count: 2}", ["gpu.count", "2", "1"]),
    ("p4", "gpu: {sharing: {mode: mps, provider: own, replicas: 17}}", ["17", "pascal", "16"]),
    ("v100", "gpu: {sharing: {mode: mps, replicas: 17}}", ["17", "older than Volta"]),
    ("p4", "gpu: {sharing: {mode: mps}}", ["device-plugin", "pascal", "own"]),
    ("mps-own", "gpu: {nodeSelector: null}", ["nodeSelector", "label"]),
    ("mps-own", "gpu: {sharing: {replicas: 3}}", ["triton.replicas", "4", "3"]),
    # video and autoscaling
    ("video-shards", "video: {config: {api: {port: 1}}}", ["api", "leave it out"]),
    ("video-shards", "video: {config: {primary-gie: null}}", ["model", "street"]),
    ("video-shards", "video: {apiKeySecret: ''}", ["apiKeySecret", "Secret"]),
    ("monitoring", "gateway: {settings: {metrics_key_required: true}}", ["serviceMonitor.apiKeySecret", "role read"]),
    (
        "video-shards",
        "video: {existingSecret: '', extraEnv: [{name: CAMERA_USER, value: u}]}",
        ["${CAMERA_PASSWORD}", "existingSecret", "extraEnv"],
    ),
    ("video-shards", "video: {config: {gpu: {hand-over: device}}}", ["hand-over", "another pod", "auto"]),
    ("video-gpu", "video: {gpu: {enabled: false}}", ["nvdec", "door", "video.gpu.enabled", "auto"]),
    ("video-gpu", "video: {resources: {limits: {nvidia.com/gpu: 1}}}", ["video.resources.limits", "nvidia.com/gpu"]),
    ("video-shards", "video: {graceSeconds: 5}", ["graceSeconds", "5", "20"]),
    ("monitoring", "gateway: {auth: {anonymous: [read], existingSecret: k}}", ["PENSTOCK_API_KEY", "existingSecret"]),
    ("hpa", "autoscaling: {minReplicas: 9}", ["minReplicas", "9", "6"]),
    ("hpa", "autoscaling: {targets: {inflightRequests: 4000}}", ["4000", "1024"]),
    ("keda", "autoscaling: {keda: {prometheusAddress: ''}}", ["prometheusAddress", "http://"]),
]


@pytest.mark.parametrize(("over", "values", "said"), IMPOSSIBLE, ids=lambda each: str(each)[:70])
def test_impossible_pair_is_refused_with_the_fix(over: str, values: str, said: list[str]) -> None:
    """Each pair that cannot work is one sentence that names the value and the way out; the set by itself is taken."""
    rendered(over)
    message = refusal_over(over, values)
    assert [word for word in said if word not in message] == [], message
    assert "\n" not in message, "one sentence"
    assert "template:" not in message


WRONG: list[tuple[str, object, str]] = [
    ("topology", "sidecars", "sidecar"),
    ("gateway.replicas", -1, "/gateway/replicas"),
    ("gateway.models", "street", "/gateway/models"),
    ("gateway.drain.delaySeconds", "5s", "/gateway/drain/delaySeconds"),
    ("gateway.auth.anonymous", ["everything"], "/gateway/auth/anonymous/0"),
    ("gateway.settings", {"wrokers": 4}, "wrokers"),
    ("gateway.settings", {"http_port": 9}, "http_port"),
    ("gateway.shmSize", "lots", "/gateway/shmSize"),
    ("gateway.image.digest", "0f4d", "/gateway/image/digest"),
    ("triton.release", "2.51", "/triton/release"),
    ("external.urls", ["tcp://triton:8000"], "/external/urls/0"),
    ("gpu.generation", "t4", "/gpu/generation"),
    ("gpu.mig.profile", "1g", "/gpu/mig/profile"),
    ("gpu.sharing.replicas", 49, "48"),
    ("gpu.sharing.own.activeThreadPercentage", 33.5, "/gpu/sharing/own/activeThreadPercentage"),
    ("gateway.podLabels", {"app.kubernetes.io/name": "other"}, "app.kubernetes.io/name"),
    ("video.podAnnotations", {"checksum/config": "0"}, "checksum/config"),
    ("monitoring.rules.labels", {"helm.sh/chart": "other"}, "helm.sh/chart"),
    ("video.gatewayUrl", "gateway:8000", "/video/gatewayUrl"),
    ("video.gpu.resourceName", "gpu", "/video/gpu/resourceName"),
    ("autoscaling.targets.queueSeconds", "50ms", "/autoscaling/targets/queueSeconds"),
    ("gateway.drain.misspelt", 1, "misspelt"),
    ("gateway.drain", None, "missing property 'drain'"),
]


@pytest.mark.parametrize(("path", "value", "said"), WRONG, ids=lambda each: str(each)[:60])
def test_value_of_a_wrong_kind_is_refused_where_it_stands(path: str, value: object, said: str) -> None:
    """The schema names the place, or the choices, of a value that it does not take."""
    assert said in refusal(at(path, value))


def test_known_holes_are_taken_only_with_the_waiver_and_said_again_in_the_notes() -> None:
    """P4's preset carries the waiver; who installs it reads what it risks."""
    notes = " ".join(render(SETS["p4"]).notes.split())
    assert "24.04" in notes
    assert "vulnerabilities" in notes
    assert "vulnerabilities" not in " ".join(render(SETS["t4"]).notes.split())


def sentences() -> list[str]:
    """What the templates may refuse values with, as patterns; a file of rules that cannot be read is no value."""
    text = "".join(path.read_text() for path in sorted((CHART / "templates").rglob("*.*")))
    found = re.findall(r'\bfail (?:\(printf )?"((?:[^"\\]|\\.)*)"', text)
    return [re.sub(r"%[sdqv]", ".*", re.escape(each)) for each in found if "cannot be read" not in each]


def test_every_sentence_of_refusal_is_said_to_some_values_here() -> None:
    """No check of the templates is untried, and none is dead: the table above hears each of their sentences."""
    said = [refusal_over(over, values) for over, values, _ in IMPOSSIBLE]
    patterns = sentences()
    assert len(patterns) > 20
    assert [each for each in patterns if not any(re.fullmatch(each, message) for message in said)] == []
