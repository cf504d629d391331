"""What ties a process to those above it: it dies with its parent, and tells the head that it lives.

Knows nothing of what the process does. Imports nothing heavy: the tie must exist before torch is imported.
"""

import ctypes
import os
import signal
import threading
import time

from dlmserve.keys import Keys
from dlmserve.messages import Heartbeat
from dlmserve.transport import Dealer

HEARTBEAT_S = 1.0
NICE = 5
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with_parent(parent: int | None = None) -> None:
    """From now on the kernel kills this process (SIGKILL) when the thread that started it ends.

    `parent` is the pid of the one that started it, where known: raises SystemExit if that is gone already.
    """
    parent = os.getppid() if parent is None else parent
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit(f"process {os.getpid()} is an orphan: its parent {parent} ended before it was ready")


def leave_signals_to_head() -> None:
    """Ignore SIGINT and SIGTERM.

    Ctrl-C in a terminal and the stop of a service manager reach all processes at once, but the head has to
    finish its running requests first. It ends its children with a message, or by ending itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def yield_to_head() -> None:
    """On a CPU the head lives on the same cores, and must answer at once."""
    os.setpriority(os.PRIO_PROCESS, 0, NICE)


def start_heartbeat(endpoint: str, identity: str, beat: Heartbeat, keys: Keys | None) -> None:
    """Send `beat` every second for the life of the process, from a thread with a connection of its own.

    It says that the process runs, not that its work advances: a step may take long, and one that hangs is the
    business of its group's timeout.
    """

    def send_forever() -> None:
        dealer = Dealer(endpoint, f"{identity}:hb", keys)
        while True:
            dealer.send(beat)
            time.sleep(HEARTBEAT_S)

    threading.Thread(target=send_forever, name="heartbeat", daemon=True).start()
