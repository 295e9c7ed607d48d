"""Whether this CPU has instructions for products of 8-bit integers."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_KNOWN = {"avx512_vnni": "AVX512-VNNI", "avx_vnni": "AVX-VNNI", "amx_int8": "AMX-INT8", "asimddp": "Arm dot product"}


def int8_instructions(cpuinfo: Path = CPUINFO) -> tuple[str, ...] | None:
    """Their names; () where the CPU has none, None where this system does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), None)
    return None if flags is None else tuple(name for flag, name in _KNOWN.items() if flag in flags)


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """As the system calls it, empty where it does not say."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
