"""Lets the ranks of a PyTorch job release their process group for a checkpoint, and make it again.

As a program it is the container's hook: `firn_job.py release` for prepare, `firn_job.py join` for resumed, restored and
failed. It asks the ranks by a file, waits for the answer of each, and fails with the reason that a rank gives.

As a module it is what the ranks call: `Ranks(...).step()` between two steps.
"""

import os
import pathlib
import sys
import time

DIRECTORY = pathlib.Path(os.environ.get("FIRN_JOB_DIRECTORY", "/run/firn"))
REQUEST = DIRECTORY / "request"


def write(path, text):
    """Whole, or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.rename(path)


def read(path):
    """Its text; empty without a file."""
    return path.read_text() if path.exists() else ""


class Ranks:
    """The process group of this rank. `join` makes it and `leave` destroys it; both are called with every rank."""

    def __init__(self, rank, count, join, leave):
        self.rank, self.count, self._join, self._leave = rank, count, join, leave
        self._answer = DIRECTORY / f"answer-{rank}"
        self._done = read(REQUEST)
        join(None)
        write(DIRECTORY / f"rank-{rank}", str(count))

    def step(self, agree):
        """Release the group and make it again, if asked. `agree(number)` is the largest number of all ranks.

        A rank may see a request before another does, and `join` may have replaced `release` by then, if that was late.
        """
        request = read(REQUEST)
        asked = agree(0 if request == self._done else 1 + request.startswith("release"))
        if not asked:
            return
        while (request := read(REQUEST)) == self._done:
            time.sleep(0.01)
        if asked == 1:
            # Nothing was released: the checkpoint failed before.
            self._do(request, lambda: None)
            return
        self._do(request, self._leave)
        while not (request := read(REQUEST)).startswith("join"):
            time.sleep(0.01)
        self._do(request, lambda: self._join(DIRECTORY / f"meeting-{request.split()[1]}"))

    def _do(self, request, action):
        self._done = request
        try:
            action()
        except Exception as error:
            write(self._answer, f"{request}: {error!r}")
            raise
        write(self._answer, f"{request}: ok")


def ask(verb):
    """Ask every rank, and wait: firn ends this program at the hook's deadline."""
    ranks = sorted(DIRECTORY.glob("rank-*"))
    if not ranks or len(ranks) != int(ranks[0].read_text()):
        sys.exit(f"{len(ranks)} ranks have begun; all must have, for a checkpoint")
    request = f"{verb} {time.time_ns()}"
    write(REQUEST, request)
    waiting = {path.name.replace("rank-", "answer-") for path in ranks}
    while waiting:
        for name in list(waiting):
            asked, _, answer = read(DIRECTORY / name).partition(": ")
            if asked == request and answer != "ok":
                sys.exit(f"{name}: {answer}")
            if asked == request:
                waiting.remove(name)
        if read(REQUEST) != request:
            sys.exit("another request has come")
        time.sleep(0.01)


if __name__ == "__main__":
    if sys.argv[1:] not in (["release"], ["join"]):
        sys.exit("usage: firn_job.py release|join")
    ask(sys.argv[1])
