"""Runs a Python file with little to break: `python -I -S -B confined.py FILE PROOF SECONDS`.

Writes PROOF to stdout when FILE came to its end, and nothing else does. A script, not a module: the
process that bench.sandbox starts knows nothing of this package.

Limits on time, memory and files are the system's (setrlimit). Where it can (Linux on x86-64 or
ARM64) the kernel also refuses what no answer to a question needs: a second process, a socket, a
file opened to be written, another's memory or limits (seccomp(2), a filter on system calls). That
cannot be taken back. What is refused is a list, so it keeps accidents in and is no wall against
code that means harm.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import runpy
import signal
import struct
import sys
from typing import Final

MEMORY_BYTES: Final = 1 << 30
FILE_BYTES: Final = 1 << 20
"""Where no filter keeps files from being written."""
FILES: Final = 32

PR_SET_PDEATHSIG: Final = 1
PR_SET_NO_NEW_PRIVS: Final = 38
PR_SET_SECCOMP: Final = 22
SECCOMP_MODE_FILTER: Final = 2
LOAD, EQUAL, MASK, RETURN = 0x20, 0x15, 0x45, 0x06
"""Instructions: a word of the call's data; equal to, has a bit of; the verdict (linux/filter.h)."""
ALLOW: Final = 0x7FFF0000
REFUSE: Final = 0x00050000
CALL, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Where in the data (struct seccomp_data) they are."""
THREAD: Final = 0x00010000
"""CLONE_THREAD: a thread of this process."""
WRITES: Final = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
FOREIGN: Final = 0x40000000
"""Bit of x32 calls, another numbering on x86-64."""

REFUSED: Final = {
    # name: (x86-64, ARM64); None: no such call there
    "fork": (57, None),
    "vfork": (58, None),
    "execve": (59, 221),
    "execveat": (322, 281),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "prlimit64": (302, 261),
    "setrlimit": (160, 164),
    "setpriority": (141, 140),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "connect": (42, 203),
    "bind": (49, 200),
    "creat": (85, None),
    "openat2": (437, 437),
    "open_by_handle_at": (304, 265),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "rmdir": (84, None),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "link": (86, None),
    "linkat": (265, 37),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "fchown": (93, 55),
    "lchown": (94, None),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
}
MACHINES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine to its column above and its mark (linux/audit.h)."""
CLONE: Final = (56, 220)
CLONE3: Final = (435, 435)
OPENS: Final = ((2, 1), (257, 2)), ((56, 2),)
"""Calls that open a file by machine, and which argument says how."""


def program(machine: str) -> bytes:
    """The filter for a machine: struct sock_filter[]. Raises KeyError for one not known."""
    column, mark = MACHINES[machine]
    no, missing = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    steps = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, mark, 1, 0),
        _step(RETURN, no),
        _step(LOAD, CALL),
    ]
    if machine == "x86_64":
        steps += [_step(MASK, FOREIGN, 0, 1), _step(RETURN, no)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(EQUAL, number, 0, 1), _step(RETURN, no)]
    # The C library takes the older clone, whose flags can be read, when this one does not exist.
    steps += [_step(EQUAL, CLONE3[column], 0, 1), _step(RETURN, missing)]
    steps += _unless(CLONE[column], _step(MASK, THREAD, 1, 0), argument=0)
    for number, argument in OPENS[column]:
        steps += _unless(number, _step(MASK, WRITES, 0, 1), argument=argument)
    return b"".join([*steps, _step(RETURN, ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    """An instruction; `yes` and `no`: how many to leap over then."""
    return struct.pack("HBBI", code, yes, no, value)


def _unless(number: int, test: bytes, *, argument: int) -> list[bytes]:
    """Refuse call `number` where `test` of the lower half of an argument does not leap."""
    return [
        _step(EQUAL, number, 0, 4),
        _step(LOAD, ARGUMENTS + 8 * argument),
        test,
        _step(RETURN, REFUSE | errno.EPERM),
        _step(RETURN, ALLOW),
    ]


def limit(seconds: int) -> None:
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def refuse_calls() -> bool:
    """Switch the filter on for good; False where this system has none."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    if sys.maxsize < 1 << 32:  # a process of 32 bits has other numbers
        return False
    code = program(platform.machine())
    held = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: how many, where
    head = struct.pack("HP", len(code) // 8, ctypes.addressof(held))
    told = ctypes.create_string_buffer(head, len(head))
    call = ctypes.CDLL(None, use_errno=True).prctl
    call.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    call(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # who waits for the answer may be killed
    if call(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    return call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(told), 0, 0) == 0


def main() -> None:
    _, file, proof, seconds = sys.argv
    sys.argv = [file]
    out = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)  # what it prints is of no use, and might be without end
    os.close(null)
    limit(int(seconds))
    refuse_calls()
    runpy.run_path(file, run_name="answer")
    os.write(out, proof.encode())


if __name__ == "__main__":
    main()
