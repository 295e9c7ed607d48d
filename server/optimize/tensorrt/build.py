"""An ONNX network to a plan, by TensorRT's builder.

docs.nvidia.com/deeplearning/tensorrt/latest/_static/python-api: Builder, IBuilderConfig, INetworkDefinition,
IOptimizationProfile, OnnxParser. Nothing can be refitted: the plan holds its weights, and no flag asks for more.
"""

from typing import Any

from server.optimize.errors import OptimizeError
from server.optimize.tensorrt.binding import TensorRt
from server.optimize.tensorrt.cards import Precision
from server.optimize.tensorrt.errors import NoEngineHereError
from server.optimize.tensorrt.shapes import BatchProfile


def build_plan(
    tensorrt: TensorRt, network_file: bytes, profile: BatchProfile, precision: Precision, *, allows_half: bool
) -> bytes:
    """The serialized engine; takes minutes. network_file: ONNX, typed as it is to compute for a TensorRT without flags.

    allows_half: of an INT8 network, whether what is not quantised may run in FP16. Raises OptimizeError with
    TensorRT's reason.
    """
    builder = _builder(tensorrt)
    network = builder.create_network(_creation_flags(tensorrt))
    _parse(tensorrt, network, network_file)
    config = builder.create_builder_config()
    config.profiling_verbosity = tensorrt.module.ProfilingVerbosity.DETAILED  # for the report of what was fused
    for flag in _precision_flags(tensorrt, precision, allows_half=allows_half):
        config.set_flag(flag)
    _set_profile(tensorrt, builder, network, config, profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise OptimizeError(f"TensorRT {tensorrt.release} built no engine: {tensorrt.last_error()}")
    return bytes(plan)


def _builder(tensorrt: TensorRt) -> Any:
    try:
        return tensorrt.module.Builder(tensorrt.logger)
    except (RuntimeError, TypeError) as error:  # the binding's own: a factory that returned nothing
        raise NoEngineHereError(
            f"TensorRT {tensorrt.release} cannot start on this GPU: {tensorrt.last_error()}"
        ) from error


def _creation_flags(tensorrt: TensorRt) -> int:
    """8.x has to be told that the batch is an axis; 10.x has no other way; 11.x always takes the network's types."""
    kinds = tensorrt.module.NetworkDefinitionCreationFlag
    wanted = "EXPLICIT_BATCH" if tensorrt.is_weakly_typed else "STRONGLY_TYPED"
    return 1 << int(getattr(kinds, wanted)) if hasattr(kinds, wanted) else 0


def _precision_flags(tensorrt: TensorRt, precision: Precision, *, allows_half: bool) -> list[Any]:
    if not tensorrt.is_weakly_typed:
        return []
    flags = tensorrt.module.BuilderFlag
    wanted = [flags.INT8] if precision is Precision.INT8 else []
    return [*wanted, flags.FP16] if precision is Precision.FP16 or allows_half else wanted


def _parse(tensorrt: TensorRt, network: Any, network_file: bytes) -> None:
    parser = tensorrt.module.OnnxParser(network, tensorrt.logger)
    if parser.parse(network_file):
        return
    found = [str(parser.get_error(number).desc()).strip() for number in range(parser.num_errors)]
    reason = found[0] if found else tensorrt.last_error()
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise OptimizeError(f"TensorRT {tensorrt.release} does not read the network: {reason}{more}")


def _set_profile(tensorrt: TensorRt, builder: Any, network: Any, config: Any, profile: BatchProfile) -> None:
    """Only where an axis is open; an input of another name or more of them would go wrong later and less clearly."""
    names = [network.get_input(number).name for number in range(network.num_inputs)]
    if names != [profile.input_name]:
        raise OptimizeError(
            f"the network's inputs are {', '.join(names)}; config.pbtxt names {profile.input_name} alone"
        )
    shape = tuple(network.get_input(0).shape)
    if -1 not in shape:
        if shape != profile.least or shape != profile.most:
            raise OptimizeError(
                f"the network takes {list(shape)} only, and config.pbtxt wants {list(profile.least)} to "
                f"{list(profile.most)}: export it with a free first axis, or set max_batch_size: 0"
            )
        return
    ranges = builder.create_optimization_profile()
    ranges.set_shape(profile.input_name, profile.least, profile.best, profile.most)
    if config.add_optimization_profile(ranges) < 0:
        raise OptimizeError(f"TensorRT {tensorrt.release} refuses the shapes {profile}: {tensorrt.last_error()}")
