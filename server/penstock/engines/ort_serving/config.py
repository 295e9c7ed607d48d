"""The tensors of an ONNX file; completes and checks Triton's model configuration with them.

The rules are those of onnxruntime_backend, so that a configuration also loads in NGC's backend.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class OrtLoadError(Exception):
    """The model cannot be loaded; the text is the reason in Triton's response."""


class OrtRequestError(Exception):
    """One request fails; others of the same batch do not."""

    def __init__(self, message: str, *, is_client_error: bool) -> None:
        super().__init__(message)
        self.is_client_error = is_client_error


class OrtDeviceLost(OrtRequestError):
    """The CUDA context is lost: no run on a GPU succeeds until the process ends."""

    def __init__(self, message: str) -> None:
        super().__init__(f"the CUDA context is lost, and the process restarts: {message}", is_client_error=False)


def refuse_numpy_2(version: str) -> None:
    """Raises OrtLoadError for a numpy with which Triton 2.51's Python backend returns empty outputs silently."""
    if not version.startswith("1."):
        raise OrtLoadError(
            f"Triton's Python backend returns empty outputs with numpy {version}: "
            f"install numpy 1.26.4 into {sys.prefix} (`make clean up` builds that environment anew)"
        )


TRITON_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(uint16)": "TYPE_UINT16",
    "tensor(uint32)": "TYPE_UINT32",
    "tensor(uint64)": "TYPE_UINT64",
    "tensor(int8)": "TYPE_INT8",
    "tensor(int16)": "TYPE_INT16",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(string)": "TYPE_STRING",
}  # as in NGC's backend: no bfloat16, float8, int4 or complex


@dataclass(frozen=True)
class OnnxTensorSpec:
    """One input or output of the ONNX file."""

    name: str
    onnx_type: str
    data_type: str  # empty if Triton does not support it
    dims: tuple[int, ...]  # -1: dynamic; () for a scalar or, in ONNX Runtime, an unknown rank


@dataclass(frozen=True)
class Signature:
    """overridable: initializers that a request may replace; Triton's optional inputs."""

    inputs: tuple[OnnxTensorSpec, ...]
    outputs: tuple[OnnxTensorSpec, ...]
    overridable: tuple[OnnxTensorSpec, ...]

    @property
    def is_batchable(self) -> bool:
        """Every input and output has a dynamic first dimension."""
        return all(spec.dims[:1] == (-1,) for spec in (*self.inputs, *self.outputs))


def read_signature(session: Any) -> Signature:
    """The tensors of an open session, in the file's order. Raises OrtLoadError for sequences, maps and optionals."""
    return Signature(
        inputs=_specs(session.get_inputs()),
        outputs=_specs(session.get_outputs()),
        overridable=_specs(session.get_overridable_initializers()),
    )


def _specs(node_args: Iterable[Any]) -> tuple[OnnxTensorSpec, ...]:
    return tuple(_spec(node.name, node.type, node.shape) for node in node_args)


def _spec(name: str, onnx_type: str, shape: Iterable[int | str | None]) -> OnnxTensorSpec:
    if not onnx_type.startswith("tensor("):
        raise OrtLoadError(f"'{name}' is a {onnx_type}, and Triton carries tensors only: export the model without it")
    dims = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape)
    return OnnxTensorSpec(name, onnx_type, TRITON_TYPES.get(onnx_type, ""), dims)


DEFAULT_MAX_BATCH_SIZE = 4  # Triton's --backend-config default-max-batch-size does not reach a Python-based backend

Config = dict[str, Any]  # Triton's configuration as parsed JSON
Dims = tuple[int, ...]


def needs_completion(config: Config) -> bool:
    """As in onnxruntime_backend: a configuration with inputs and outputs is not changed."""
    return not config.get("input") or not config.get("output")


def complete(config: Config, signature: Signature) -> None:
    """Adds max_batch_size, dynamic_batching, and missing inputs or outputs, in place."""
    if not needs_completion(config):
        return
    _complete_batching(config, signature)
    if not config.get("input"):
        config["input"] = [_entry(spec, config["max_batch_size"]) for spec in signature.inputs]
    if not config.get("output"):
        config["output"] = [_entry(spec, config["max_batch_size"]) for spec in signature.outputs]


def _complete_batching(config: Config, signature: Signature) -> None:
    if not signature.is_batchable:
        if config["max_batch_size"] > 0:
            raise OrtLoadError(
                f"max_batch_size is {config['max_batch_size']}, but not every tensor of the ONNX file has a dynamic "
                "first dimension: export it with one or set max_batch_size to 0"
            )
        return
    if config["max_batch_size"] == 0:
        config["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
    if config["max_batch_size"] > 1 and not config.get("sequence_batching"):
        config.setdefault("dynamic_batching", {})


def _entry(spec: OnnxTensorSpec, max_batch_size: int) -> Config:
    """A scalar has dims [1]; with a batch dimension, a reshape removes it."""
    _reject_unsupported_type(spec)
    dims = spec.dims[1:] if max_batch_size > 0 else spec.dims
    entry: Config = {"name": spec.name, "data_type": spec.data_type, "dims": list(dims) or [1]}
    if not dims and max_batch_size > 0:
        entry["reshape"] = {"shape": []}
    return entry


def validate(config: Config, signature: Signature) -> None:
    """Checks the configuration against the file. Raises OrtLoadError."""
    _reject_native_only_features(config)
    inputs = {spec.name: spec for spec in (*signature.inputs, *signature.overridable)}
    outputs = {spec.name: spec for spec in signature.outputs}
    _check_input_names(config, signature)
    for entry in config.get("input", []):
        _check_optional(entry, config["max_batch_size"])
        _check_tensor("input", entry, inputs, config["max_batch_size"])
    for entry in config.get("output", []):
        _check_tensor("output", entry, outputs, config["max_batch_size"])


def _reject_native_only_features(config: Config) -> None:
    found = [key for key in ("batch_input", "batch_output") if config.get(key)]
    ragged = [entry["name"] for entry in config.get("input", []) if entry.get("allow_ragged_batch")]
    found += [f"allow_ragged_batch of input '{name}'" for name in ragged]
    if (config.get("sequence_batching") or {}).get("state"):
        found.append("the implicit state of sequence_batching")
    if (config.get("model_transaction_policy") or {}).get("decoupled"):
        found.append("the decoupled transaction policy")
    if found:
        raise OrtLoadError(f"this onnxruntime backend does not have {' and '.join(found)}: NGC's has")


def _check_input_names(config: Config, signature: Signature) -> None:
    """The required inputs of file and configuration must have the same names."""
    given = {entry["name"] for entry in config.get("input", [])} | set(_control_names(config))
    missing = [spec for spec in signature.inputs if spec.name not in given]
    if missing:
        lacking = ", ".join(
            f"'{spec.name}' ({spec.data_type or spec.onnx_type} {_text(spec.dims)})" for spec in missing
        )
        raise OrtLoadError(f"the ONNX file requires input {lacking}, which the configuration does not name")
    for name in _control_names(config):
        if name not in {spec.name for spec in signature.inputs}:
            raise OrtLoadError(f"sequence_batching names the control input '{name}', which the ONNX file does not have")
    for entry in config.get("input", []):
        if entry.get("optional") and entry["name"] in {spec.name for spec in signature.inputs}:
            raise OrtLoadError(f"input '{entry['name']}' is optional in the configuration, required by the ONNX file")


def _control_names(config: Config) -> list[str]:
    sequence = config.get("sequence_batching") or {}
    return [entry["name"] for entry in sequence.get("control_input", [])]


def _check_optional(entry: Config, max_batch_size: int) -> None:
    if entry.get("optional") and max_batch_size > 0:
        raise OrtLoadError(f"input '{entry['name']}' is optional, which a model with max_batch_size > 0 cannot have")


def _check_tensor(role: str, entry: Config, specs: dict[str, OnnxTensorSpec], max_batch_size: int) -> None:
    name, data_type = entry["name"], entry.get("data_type", "TYPE_INVALID")
    if name not in specs:
        known = ", ".join(f"'{known}'" for known in specs) or "none"
        raise OrtLoadError(f"the configuration names {role} '{name}', the ONNX file's {role}s are {known}")
    spec = specs[name]
    _reject_unsupported_type(spec)
    if data_type != spec.data_type:
        raise OrtLoadError(f"{role} '{name}' is {spec.data_type} in the ONNX file, {data_type} in the configuration")
    _check_dims(role, spec, _model_dims(entry), max_batch_size)


def _reject_unsupported_type(spec: OnnxTensorSpec) -> None:
    if not spec.data_type:
        raise OrtLoadError(
            f"'{spec.name}' is a {spec.onnx_type} in the ONNX file, which Triton's backends cannot carry"
        )


def _model_dims(entry: Config) -> Dims:
    """The model's own dims: those of the reshape, if any."""
    shape = entry["reshape"]["shape"] if entry.get("reshape") else entry.get("dims", [])
    return tuple(int(dim) for dim in shape)


def _check_dims(role: str, spec: OnnxTensorSpec, dims: Dims, max_batch_size: int) -> None:
    if not spec.dims:
        if any(dim != 1 for dim in dims):
            raise OrtLoadError(f"{role} '{spec.name}' is a scalar in the ONNX file, {_text(dims)} in the configuration")
        return
    if max_batch_size > 0 and spec.dims[0] != -1:
        raise OrtLoadError(
            f"max_batch_size is {max_batch_size}, but {role} '{spec.name}' is {_text(spec.dims)} in the ONNX file: "
            "export it with a dynamic first dimension or set max_batch_size to 0"
        )
    full = (-1, *dims) if max_batch_size > 0 else dims
    if not _dims_match(spec.dims, full, is_exact=role == "output"):
        sentence = f"{role} '{spec.name}' is {_text(spec.dims)} in the ONNX file, {_text(full)} in the configuration"
        raise OrtLoadError(sentence + (" (max_batch_size > 0 puts a -1 before its dims)" if max_batch_size > 0 else ""))


def _dims_match(model: Dims, configured: Dims, *, is_exact: bool) -> bool:
    """A dynamic dimension may be configured as fixed for inputs, not for outputs."""
    if len(model) != len(configured):
        return False
    return all(a == b or (a == -1 and not is_exact) for a, b in zip(model, configured, strict=True))


def input_specs(config: Config) -> list[tuple[str, str, Dims]]:
    """(name, KServe v2 type, dims) of each input; dims without the batch dimension."""
    entries = config.get("input", [])
    types = [entry["data_type"].removeprefix("TYPE_").replace("STRING", "BYTES") for entry in entries]
    return [(entry["name"], kind, _model_dims(entry)) for entry, kind in zip(entries, types, strict=True)]


def _text(dims: Dims) -> str:
    return f"[{','.join(map(str, dims))}]"
