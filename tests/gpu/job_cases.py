"""Jobs of jobs.py, each moved to another GPU in the middle, while an uninterrupted run has that GPU."""

import json
import os
import re
import subprocess
import sys

import cases
import jobs
from cases import Case
from host import Container, Failed

INTERRUPT_AT = 8
# What the clients outside ask for: one that stays as long as the job runs, one that comes late.
LASTING_SEED, LATE_SEED, LATE_COUNT = 2, 3, 6

CLIENT = f"""
import socket, sys
with socket.create_connection(("127.0.0.1", {jobs.PORT})) as connection, connection.makefile("rwb", buffering=0) as stream:
    print("port", connection.getsockname()[1], flush=True)
    stream.write(b"%s %s\\n" % (sys.argv[1].encode(), sys.argv[2].encode()))
    for line in iter(stream.readline, b""):
        print(line.decode().strip(), flush=True)
print("closed", flush=True)
"""


def all_cases():
    """A case for each kind of job; that of the generation server has clients outside."""
    found = [Case(f"job-{kind}", 180, 1, moving(f"job-{kind}", kind), ("frameworks", "jobs")) for kind in jobs.KINDS if kind != "generate"]
    return [*found, Case("job-generate", 240, 1, generating, ("frameworks", "jobs"))]


def moving(name, kind):
    """The case of a job of this kind."""
    return lambda setup, end, record: moved(setup, end, record, name, kind)


class Look:
    """What a case does with its containers in addition to comparing their losses. By default nothing."""

    def before(self, reference, source, end):
        """Both run, and `source` has reached its step."""

    def after(self, source, end):
        """`source` continues after its checkpoint."""

    def restored(self, copy, end):
        """`copy` runs."""


def moved(setup, end, record, name, kind, steps=32, options=(), look=Look()):
    """A job prints the losses of an uninterrupted run, though it is moved to that one's GPU in between."""
    source_gpus, target_gpus = setup.pick(1)
    reference, source, copy = (Container(setup.host, f"{name}{suffix}") for suffix in ("-reference", "", "-b"))
    workload = cases.script(setup, "jobs.py", [kind, "--steps", str(steps)], 1, options)
    image = f"firn.test/checkpoint/{name}:latest"
    record.update(gib=0.1, counters=1, uuid_before=source_gpus)
    try:
        for container, uuids in ((reference, target_gpus), (source, source_gpus)):
            container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        before = end.until("the job to reach the step", lambda: reached(source, INTERRUPT_AT), 120)
        look.before(reference, source, end)
        cases.checkpointed(setup, source, image, end, record)
        next_step = min(steps - 1, max(cases.losses(source.lines())) + 2)
        end.until("the source to continue", lambda: reached(source, next_step))
        look.after(source, end)
        source.keep_evidence(setup.evidence)
        source.remove(end)
        uninterrupted = played_out(reference, end, steps)
        reference.remove(end)

        cases.grant(setup, source_gpus, target_gpus)
        _, record["restore_s"] = cases.timed(copy.restore, image, end)
        end.until("the copy to print", lambda: has_ended(copy) or cases.losses(copy.lines()))
        record["restore_ms"] = copy.timings()
        look.restored(copy, end)
        record["uuid_after"] = cases.check_holders(copy, end, target_gpus, record["gib"])
        after = played_out(copy, end, steps)
        record.update(cases.compare_losses(uninterrupted, before, cases.losses(source.lines()), after))
    finally:
        cases.clean_up(setup, [reference, source, copy], image)


def has_ended(container):
    """Fails when the container has ended before its job."""
    if container.has_ended() and "done" not in container.lines():
        raise Failed(f"{container.name} has ended; it printed last: {' / '.join(container.lines()[-5:])}")
    return False


def reached(container, step):
    """The losses, once `step` is among them."""
    return has_ended(container) or cases.reached(container, step)


def played_out(container, end, steps):
    """The losses of a job that has come to its end."""
    status = container.exit_status(end, 120)
    found = cases.losses(container.lines())
    if status or "done" not in container.lines() or max(found) != steps - 1:
        raise Failed(f"{container.name} ended with {status}: {' / '.join(container.lines()[-5:])}")
    return found


def generating(setup, end, record):
    """A server with a KV cache for each connection: its own client's continues in the copy, that from outside is closed there.

    In the source both continue. A client that comes later gets the same tokens from all three.
    """
    look = Generating(setup.host, record)
    try:
        moved(setup, end, record, "job-generate", "generate", 64, ("--annotation", "firn.dev/tcp=auto"), look)
    finally:
        look.end()


class Generating(Look):
    """The clients outside of a generation server."""

    def __init__(self, host, record):
        self.host, self.record = host, record
        self.clients = []

    def end(self):
        """End the clients."""
        for client in self.clients:
            client.end()

    def connect(self, container, end, seed, count):
        """A client outside, for so many tokens."""
        self.clients.append(connect(self.host, container, end, f"client-{seed}", CLIENT, seed, count))
        return self.clients[-1]

    def late(self, container, end):
        """What a new client gets."""
        client = self.connect(container, end, LATE_SEED, LATE_COUNT)
        end.until("the late client to be answered", lambda: client.process.poll() is not None, 30)
        if len(client.tokens()) != LATE_COUNT:
            raise Failed(f"the late client of {container.name} got {client.lines()}")
        return client.tokens()

    def before(self, reference, source, end):
        self.lasting = self.connect(source, end, LASTING_SEED, 1000)
        end.until("tokens for the client outside", lambda: len(self.lasting.tokens()) >= 3, 30)
        self.expected = self.late(reference, end)

    def after(self, source, end):
        seen = len(self.lasting.tokens())
        end.until("more tokens for the client outside", lambda: len(self.lasting.tokens()) >= seen + 2, 30)
        if gone(source.lines()):
            raise Failed(f"the source lost its clients {gone(source.lines())}")
        self.same(source, end)

    def restored(self, copy, end):
        end.until("the copy to find the outside connection closed", lambda: gone(copy.lines()), 30)
        if gone(copy.lines()) != [self.lasting.port()]:
            raise Failed(f"the copy lost {gone(copy.lines())}; the client outside had port {self.lasting.port()}")
        self.same(copy, end)
        self.record["clients"] = json.dumps({"closed_in_copy": gone(copy.lines()), "tokens_of_the_late_one": self.expected})

    def same(self, container, end):
        """A late client gets what that of the uninterrupted run got."""
        tokens = self.late(container, end)
        if tokens != self.expected:
            raise Failed(f"{container.name} generates {tokens}, the uninterrupted run {self.expected}")


def connect(host, container, end, name, code, *arguments):
    """Start a client in the container's network, which is no process of it."""
    log = f"{host.work}/logs/{container.name}.{name}"
    command = ["nsenter", "-t", str(container.pids(end)[0]), "-n", sys.executable, "-c", code, *map(str, arguments)]
    with open(log, "wb") as output:
        return Client(subprocess.Popen(command, stdout=output, stderr=output), log)


class Client:
    """A running client and what it printed."""

    def __init__(self, process, log):
        self.process, self.log = process, log

    def end(self):
        """End it."""
        self.process.kill()
        self.process.wait()

    def lines(self):
        """Whole lines."""
        if not os.path.exists(self.log):
            return []
        with open(self.log, encoding="utf-8") as file:
            return file.read().split("\n")[:-1]

    def tokens(self):
        """The tokens that it got."""
        return [line for line in self.lines() if re.fullmatch(r"\d+:\S+", line)]

    def port(self):
        """Its own port."""
        return next(int(line.split()[1]) for line in self.lines() if line.startswith("port "))


def gone(lines):
    """Ports of the peers that a server lost."""
    return [int(match[1]) for match in (re.fullmatch(r"gone peer=(\d+)", line) for line in lines) if match]
