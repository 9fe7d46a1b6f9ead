"""Persistent worker processes: one JSON request a line, one JSON reply a line.

Needs the standard library only, because peers run in interpreters of their own.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["Worker", "peak_memory", "serve", "timed"]

FOLDER = Path(__file__).resolve().parent


class Worker:
    """A script that calls `serve`, in a process with its own interpreter.

    Args:
      python: path of the interpreter; None: this process's.
      script: path below this folder.
      environment: variables to add to this process's.
    """

    def __init__(self, python: str | None, script: str, environment: dict[str, str]):
        paths = [str(FOLDER), os.environ.get("PYTHONPATH", "")]
        self._script = script
        self._process = subprocess.Popen(
            [python or sys.executable, str(FOLDER / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                **environment,
            },
        )

    def __call__(self, method: str, **arguments) -> dict[str, Any]:
        """Calls a method of the served object and waits for what it returns.

        Raises:
          RuntimeError: the method failed, or the process ended (its own message is
            then on stderr).
        """
        request = json.dumps({"method": method, "arguments": arguments})
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise RuntimeError(
                f"{self._script} ended in {method!r} with exit status "
                f"{self._process.wait()}; its own message stands above"
            )
        result = json.loads(reply)
        if "error" in result:
            raise RuntimeError(f"{self._script}: {result['error']}")
        return result

    def close(self) -> None:
        """Ends the process."""
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(served: Any) -> None:
    """Answers requests from stdin by methods of `served` until stdin closes."""
    replies = sys.stdout
    # What a library prints must not end up between the replies.
    sys.stdout = sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = getattr(served, request["method"])(**request["arguments"])
        except (ValueError, RuntimeError) as error:
            reply = {"error": str(error)}
        print(json.dumps(reply), file=replies, flush=True)


def timed(fn: Callable) -> tuple[Any, dict[str, float]]:
    """Runs `fn()`; returns its result, and its wall and CPU seconds (all threads)."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = fn()
    return result, {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
    }


def peak_memory() -> int:
    """Peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
