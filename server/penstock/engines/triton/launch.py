"""Becomes tritonserver, which dies with the thread that started it (PR_SET_PDEATHSIG survives execve).

Run as a script: `python -I -S launch.py PARENT_PID BINARY ARGUMENT...`. Not `preexec_fn`, which may deadlock in a
process with threads.
"""

import ctypes
import os
import platform
import signal
import struct
import sys

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SYS_SECCOMP, _SET_MODE_FILTER, _FLAG_SPEC_ALLOW = 317, 1, 4  # the numbers of x86-64, as below
_AUDIT_ARCH, _SYS_FCHMOD = 0xC000003E, 91
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _DO_NOTHING = 0x7FFF0000, 0x00050000  # the call's own result; success without the call (errno 0)
_NUMBER, _ARCH, _SECOND_ARGUMENT = 0, 4, 24  # offsets in struct seccomp_data
_OTHERS = 0o077
LIBRARY_PATH_VARIABLE = "PENSTOCK_ENGINE_LD_LIBRARY_PATH"


def main(arguments: list[str]) -> int:
    """Does not return on success; 127 if the binary cannot be executed, 125 if the parent has ended."""
    parent_pid, binary, *rest = arguments
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        return _refuse(126, f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent_pid):
        return _refuse(125, f"process {parent_pid}, which started this, is gone")
    keep_files_private()
    environ = dict(os.environ)
    library_path = environ.pop(LIBRARY_PATH_VARIABLE, None)
    if library_path is not None:
        environ["LD_LIBRARY_PATH"] = library_path
    try:
        os.execve(binary, [binary, *rest], environ)
    except OSError as error:
        return _refuse(127, f"{binary} cannot be executed: {error.strerror}")


def keep_files_private() -> None:
    """Makes fchmod(2) ignore modes that give other users access, in this process and its children.

    Triton 2.51 sets mode 0644 for shared memory by fchmod: the umask does not apply, and a later chmod is too late.
    """
    if platform.machine() != "x86_64":
        return
    program = (
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 0, 5, _AUDIT_ARCH),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_EQUAL, 0, 3, _SYS_FCHMOD),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        (_IF_ANY_BIT, 0, 1, _OTHERS),
        (_RETURN, 0, 0, _DO_NOTHING),
        (_RETURN, 0, 0, _ALLOW),
    )
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # required for an unprivileged process to set a filter
    if libc.syscall(_SYS_SECCOMP, _SET_MODE_FILTER, _FLAG_SPEC_ALLOW, ctypes.byref(header)) != 0:
        why = os.strerror(ctypes.get_errno())
        sys.stderr.write(f"seccomp: {why}: other users of this machine can read Triton's shared memory\n")


def _refuse(code: int, why: str) -> int:
    sys.stderr.write(f"{why}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
