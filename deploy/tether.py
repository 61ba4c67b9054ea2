"""Run a command that the kernel kills when its parent dies:  python tether.py PARENT_PID COMMAND...

The kernel's parent-death signal is the one watch that works when the parent is killed with SIGKILL, and that nobody
can kill in its turn. It must be asked for by the child itself, before `exec`; asking in a `preexec_fn` would run
Python between fork and exec of a process that has threads and gRPC channels. So this file does it and becomes the
command. It imports little: it stands before every start.

Linux sends the signal when the *thread* that started the child ends, so children are started from the main thread.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> None:
    """Become `command`, tied to the process `parent`. Exits 1 where the parent has died already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the line above, and no signal will come
        sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
