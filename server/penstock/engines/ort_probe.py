"""The process that loads ONNX Runtime, and CUDA on a GPU: a native library that does not fit ends only this process."""

import json
import sys
from importlib.metadata import distributions
from importlib.resources import as_file, files

from penstock.engines.ort_serving.placement import has_nvidia_driver, why_no_cuda

PACKAGES = ("onnxruntime", "onnxruntime-gpu")


def installed_packages() -> dict[str, str]:
    """Version by name of the packages that hold ONNX Runtime."""
    return {one.metadata["Name"]: one.version for one in distributions() if one.metadata["Name"] in PACKAGES}


def why_not_on_gpu() -> str:
    """Why ONNX Runtime cannot use the GPU of this machine, which has NVIDIA's driver; empty if it can."""
    import onnxruntime as ort

    from penstock.engines.ort_serving.cudart import CudaRuntime, CudaUnavailable
    from penstock.engines.ort_serving.session import ORT_ERRORS, ort_error_text

    if why := why_no_cuda(ort.get_available_providers(), installed_packages()):
        return why
    try:
        CudaRuntime(0).close()
        with as_file(files("penstock.models").joinpath("shipped", "identity_fp32", "1", "model.onnx")) as model:
            session = ort.InferenceSession(str(model), providers=["CUDAExecutionProvider", "CPUExecutionProvider"])
    except CudaUnavailable as error:
        return str(error)
    except ORT_ERRORS as error:
        return ort_error_text(error)
    found = session.get_providers()
    return "" if "CUDAExecutionProvider" in found else "a library of CUDA 13 or of cuDNN 9 is missing"


def main() -> None:
    """Prints version, providers, and why the GPU is not used, as JSON."""
    import onnxruntime as ort

    facts = {"version": ort.__version__, "providers": ort.get_available_providers(), "has_driver": has_nvidia_driver()}
    sys.stdout.write(json.dumps(facts | {"why_not_on_gpu": why_not_on_gpu() if facts["has_driver"] else ""}))


if __name__ == "__main__":
    main()
