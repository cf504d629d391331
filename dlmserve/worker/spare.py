"""A process that has imported all that a rank needs, and becomes one when its agent says which.

Importing torch takes most of the time in which a lost rank comes back. Usage: python -m dlmserve.worker.spare
PARENT_PID; the flags of a rank then come as one line of JSON, a list, on stdin.
"""

import json
import sys

from dlmserve.worker import rank
from dlmserve.worker.lifeline import die_with_parent, leave_signals_to_head, yield_to_head


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    leave_signals_to_head()
    yield_to_head()
    rank.import_all()
    if line := sys.stdin.readline():
        rank.main(json.loads(line))


if __name__ == "__main__":
    main()
