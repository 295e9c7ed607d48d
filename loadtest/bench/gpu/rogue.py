"""A CUDA process that makes an illegal memory access: `python -m loadtest.bench.gpu.rogue`.

A client of MPS where its environment says so, by the driver's library alone. It says "ready", waits for a line, writes
to address 8, says what the driver made of it, and ends.
"""

import ctypes
import sys

from loadtest.bench.gpu.cuda_region import CudaError, check, open_driver

_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry stray()
{
    .reg .u64 %place;
    .reg .u32 %value;
    mov.u64 %place, 8;
    mov.u32 %value, 1;
    st.global.u32 [%place], %value;
    ret;
}
"""


def main() -> None:
    """Exit code 0 where the driver noticed."""
    try:
        cuda = open_driver()
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        check(cuda.cuModuleLoadData(ctypes.byref(module), _PTX), "cuModuleLoadData")
        check(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"stray"), "cuModuleGetFunction")
    except CudaError as error:
        sys.stdout.write(f"{error}\n")
        raise SystemExit(1) from None
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    ones = (1, 1, 1)
    cuda.cuLaunchKernel(kernel, *ones, *ones, 0, None, None, None)
    result = cuda.cuCtxSynchronize()
    sys.stdout.write(f"CUDA error {result}\n")
    raise SystemExit(0 if result else 1)


if __name__ == "__main__":
    main()
