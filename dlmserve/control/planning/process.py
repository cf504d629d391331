"""The planner's process: reads problems on standard input, writes plans on standard output.

A frame is 4 bytes of length, little-endian, then msgpack; an empty answer says that the problem could not be
solved (why is in the log). Started and watched by control/planner.py; ends with its standard input.
"""

import logging
import os
import struct
import sys
import time
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from dlmserve.control.planning.block_form import solve
from dlmserve.control.policy.plan import Problem
from dlmserve.errors import NoPlan
from dlmserve.worker.lifeline import die_with_parent, leave_signals_to_head

LENGTH = struct.Struct("<I")

log = logging.getLogger("dlmserve.planner")


def main() -> None:
    die_with_parent()
    leave_signals_to_head()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    # What a library prints must not get between the frames.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import cvxpy  # noqa: F401  (now rather than under the first problem)

    serve(sys.stdin.buffer, answers)


def serve(problems: BinaryIO, answers: BinaryIO) -> None:
    """One answer for each problem, in order, until the problems end."""
    decoder, encoder = msgspec.msgpack.Decoder(Problem), msgspec.msgpack.Encoder()
    while (length := problems.read(LENGTH.size)) and (data := problems.read(*LENGTH.unpack(length))):
        answer = b""
        try:
            started_at = time.monotonic()
            plan = solve(decoder.decode(data))
            answer = encoder.encode(replace(plan, solve_s=time.monotonic() - started_at))
        except NoPlan as error:
            log.warning("%s", error)
        except Exception:
            log.exception("a problem of %d bytes could not be solved", len(data))
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    main()
