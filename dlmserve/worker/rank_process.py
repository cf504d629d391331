"""A rank's operating-system process, as its agent holds it: output line by line, how it ended, and spare ones."""

import json
import os
import signal
import subprocess
import time

MAX_LINE_BYTES = 65536
NO_DEVICE = -1  # of a spare process, until it becomes a rank


class RankProcess:
    """One life of one device's rank; stdout and stderr come through one pipe."""

    def __init__(self, device: int, generation: int, command: list[str], env: dict[str, str]) -> None:
        """`device` is NO_DEVICE for a spare one."""
        self.device = device
        self.generation = generation
        self.started_at = time.monotonic()
        stdin = subprocess.PIPE if device == NO_DEVICE else subprocess.DEVNULL
        self.process = subprocess.Popen(
            command, env=env, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert self.process.stdout
        self.output = self.process.stdout.fileno()
        os.set_blocking(self.output, False)
        self.pidfd = os.pidfd_open(self.process.pid)
        self.last_line = b""
        self._unfinished_line = b""

    def become(self, device: int, generation: int, flags: list[str]) -> bool:
        """What a spare one is for. False: it has just ended."""
        assert self.process.stdin
        try:
            with self.process.stdin as stdin:
                stdin.write(json.dumps(flags).encode() + b"\n")
        except BrokenPipeError:
            return False
        self.device, self.generation, self.started_at = device, generation, time.monotonic()
        return True

    def read_lines(self) -> list[bytes] | None:
        """What it wrote since; None when nothing will follow."""
        try:
            data = os.read(self.output, MAX_LINE_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, rest = (self._unfinished_line + data).split(b"\n")
        if len(rest) >= MAX_LINE_BYTES:
            lines, rest = [*lines, rest], b""
        self._unfinished_line = rest
        self.last_line = next((line for line in reversed(lines) if line.strip()), self.last_line)
        return lines

    def exit_reason(self) -> str:
        """How it ended, with its last words where it failed by itself."""
        code = self.process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        words = self.last_line.decode(errors="replace").strip()
        return how if code in (0, -signal.SIGKILL) or not words else f"{how}: {words}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()
        os.close(self.pidfd)
