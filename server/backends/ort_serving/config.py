"""Triton's model configuration against the ONNX file: completed as NGC's backend does, then checked as it does.

The rules are those of onnxruntime_backend's AutoCompleteConfig, ValidateInputs and ValidateOutputs, so that a
configuration that loads here loads there; only the sentences are ours.
"""

from typing import Any

from .errors import LoadError
from .signature import Signature, TensorSpec

DEFAULT_MAX_BATCH_SIZE = 4  # Triton's --backend-config default-max-batch-size does not reach a Python-based backend

Config = dict[str, Any]  # the configuration as Triton hands it over: parsed JSON
Dims = tuple[int, ...]


def needs_completion(config: Config) -> bool:
    """As there, all or nothing: a configuration with inputs and outputs is left alone."""
    return not config.get("input") or not config.get("output")


def complete(config: Config, signature: Signature) -> None:
    """Fill in max_batch_size, dynamic_batching and whichever of the inputs and outputs is missing, in place."""
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
            raise LoadError(
                f"max_batch_size is {config['max_batch_size']}, but not every tensor of the ONNX file has a dynamic "
                "first dimension: export it with one or set max_batch_size to 0"
            )
        return
    if config["max_batch_size"] == 0:
        config["max_batch_size"] = DEFAULT_MAX_BATCH_SIZE
    if config["max_batch_size"] > 1 and not config.get("sequence_batching"):
        config.setdefault("dynamic_batching", {})


def _entry(spec: TensorSpec, max_batch_size: int) -> Config:
    """A scalar has dims [1]; with a batch dimension before it, a reshape takes the 1 away again."""
    _refuse_unsupported(spec)
    dims = spec.dims[1:] if max_batch_size > 0 else spec.dims
    entry: Config = {"name": spec.name, "data_type": spec.data_type, "dims": list(dims) or [1]}
    if not dims and max_batch_size > 0:
        entry["reshape"] = {"shape": []}
    return entry


def validate(config: Config, signature: Signature) -> None:
    """LoadError names the tensor, what the ONNX file has and what the configuration says."""
    _refuse_what_only_the_native_backend_has(config)
    inputs = {spec.name: spec for spec in (*signature.inputs, *signature.overridable)}
    outputs = {spec.name: spec for spec in signature.outputs}
    _check_input_names(config, signature)
    for entry in config.get("input", []):
        _check_optional(entry, config["max_batch_size"])
        _check_tensor("input", entry, inputs, config["max_batch_size"])
    for entry in config.get("output", []):
        _check_tensor("output", entry, outputs, config["max_batch_size"])


def _refuse_what_only_the_native_backend_has(config: Config) -> None:
    found = [key for key in ("batch_input", "batch_output") if config.get(key)]
    ragged = [entry["name"] for entry in config.get("input", []) if entry.get("allow_ragged_batch")]
    found += [f"allow_ragged_batch of input '{name}'" for name in ragged]
    if (config.get("sequence_batching") or {}).get("state"):
        found.append("the implicit state of sequence_batching")
    if (config.get("model_transaction_policy") or {}).get("decoupled"):
        found.append("the decoupled transaction policy")
    if found:
        raise LoadError(f"this onnxruntime backend does not have {' and '.join(found)}: NGC's has")


def _check_input_names(config: Config, signature: Signature) -> None:
    """What the file requires and what the configuration requires must be the same names."""
    given = {entry["name"] for entry in config.get("input", [])} | set(_control_names(config))
    missing = [spec for spec in signature.inputs if spec.name not in given]
    if missing:
        lacking = ", ".join(
            f"'{spec.name}' ({spec.data_type or spec.onnx_type} {_text(spec.dims)})" for spec in missing
        )
        raise LoadError(f"the ONNX file requires input {lacking}, which the configuration does not name")
    for name in _control_names(config):
        if name not in {spec.name for spec in signature.inputs}:
            raise LoadError(f"sequence_batching names the control input '{name}', which the ONNX file does not have")
    for entry in config.get("input", []):
        if entry.get("optional") and entry["name"] in {spec.name for spec in signature.inputs}:
            raise LoadError(f"input '{entry['name']}' is optional in the configuration, required by the ONNX file")


def _control_names(config: Config) -> list[str]:
    sequence = config.get("sequence_batching") or {}
    return [entry["name"] for entry in sequence.get("control_input", [])]


def _check_optional(entry: Config, max_batch_size: int) -> None:
    if entry.get("optional") and max_batch_size > 0:
        raise LoadError(f"input '{entry['name']}' is optional, which a model with max_batch_size > 0 cannot have")


def _check_tensor(role: str, entry: Config, specs: dict[str, TensorSpec], max_batch_size: int) -> None:
    name, data_type = entry["name"], entry.get("data_type", "TYPE_INVALID")
    if name not in specs:
        known = ", ".join(f"'{known}'" for known in specs) or "none"
        raise LoadError(f"the configuration names {role} '{name}', the ONNX file's {role}s are {known}")
    spec = specs[name]
    _refuse_unsupported(spec)
    if data_type != spec.data_type:
        raise LoadError(f"{role} '{name}' is {spec.data_type} in the ONNX file, {data_type} in the configuration")
    _check_dims(role, spec, _model_dims(entry), max_batch_size)


def _refuse_unsupported(spec: TensorSpec) -> None:
    if not spec.data_type:
        raise LoadError(f"'{spec.name}' is a {spec.onnx_type} in the ONNX file, which Triton's backends cannot carry")


def _model_dims(entry: Config) -> Dims:
    """The dims that the model sees: those of the reshape where there is one."""
    shape = entry["reshape"]["shape"] if entry.get("reshape") else entry.get("dims", [])
    return tuple(int(dim) for dim in shape)


def _check_dims(role: str, spec: TensorSpec, dims: Dims, max_batch_size: int) -> None:
    if not spec.dims:
        if any(dim != 1 for dim in dims):
            raise LoadError(f"{role} '{spec.name}' is a scalar in the ONNX file, {_text(dims)} in the configuration")
        return
    if max_batch_size > 0 and spec.dims[0] != -1:
        raise LoadError(
            f"max_batch_size is {max_batch_size}, but {role} '{spec.name}' is {_text(spec.dims)} in the ONNX file: "
            "export it with a dynamic first dimension or set max_batch_size to 0"
        )
    full = (-1, *dims) if max_batch_size > 0 else dims
    if not _is_same(spec.dims, full, is_exact=role == "output"):
        sentence = f"{role} '{spec.name}' is {_text(spec.dims)} in the ONNX file, {_text(full)} in the configuration"
        raise LoadError(sentence + (" (max_batch_size > 0 puts a -1 before its dims)" if max_batch_size > 0 else ""))


def _is_same(model: Dims, configured: Dims, *, is_exact: bool) -> bool:
    """A dynamic dimension of an input may be configured fixed; an output's may not."""
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
