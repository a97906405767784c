"""A training that answers lines on a port: its own client stays connected, one from outside does in the source alone."""

import os
import subprocess
import sys
from functools import partial

import cases
from cases import Case
from host import Failed

PORT = 7001

# Ask until the server is gone; one line for every answer.
CLIENT = f"""
import socket, time
connection = socket.create_connection(("127.0.0.1", {PORT})).makefile("rwb", buffering=0)
while connection.write(b"x\\n") and connection.readline():
    print("answer", flush=True)
    time.sleep(0.05)
print("closed", flush=True)
"""


def case():
    """The case."""
    return Case("torch-served", 240, 1, served, ("jobs",))


def served(setup, end, record):
    """With both clients connected, the losses are those of an uninterrupted run; the copy takes a new client."""
    clients = {}
    see = partial(look, setup, record, clients)
    try:
        cases.torch(setup, end, record, name="torch-served", arguments=("--serve", str(PORT)),
                    options=("--annotation", "firn.dev/tcp=auto"), see=see)
    finally:
        for client in clients.values():
            client.kill()
            client.wait()


def look(setup, record, clients, container, end):
    """A client in the container's network, which is no process of it, gets answers, and still does after a checkpoint."""
    log = f"{setup.host.work}/logs/{container.name}.client"
    if container.name not in clients:
        pid = container.pids(end)[0]
        with open(log, "wb") as output:
            clients[container.name] = subprocess.Popen(
                ["nsenter", "-t", str(pid), "-n", sys.executable, "-c", CLIENT], stdout=output, stderr=output)
    seen = answers(log)
    end.until("answers to the client outside", lambda: answers(log) >= seen + 5, 30)
    record[f"answers_{container.name}"] = answers(log)


def answers(log):
    """How many answers the client got; it must not have lost the server."""
    if not os.path.exists(log):
        return 0
    with open(log, encoding="utf-8") as file:
        lines = file.read().splitlines()
    if "closed" in lines or any("Error" in line for line in lines):
        raise Failed(f"the client outside: {lines[-3:]}")
    return len(lines)
