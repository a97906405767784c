"""A training that answers lines on a port: its own client stays connected, one from outside does in the source alone."""

from functools import partial

import cases
import job_cases
from cases import Case
from host import Failed

PORT = 7001

# Ask until the server is gone; one line for every answer.
CLIENT = f"""
import socket, time
opened = socket.create_connection(("127.0.0.1", {PORT}))
print("port", opened.getsockname()[1], flush=True)
connection = opened.makefile("rwb", buffering=0)
while connection.write(b"x\\n") and connection.readline():
    print("answer", flush=True)
    time.sleep(0.05)
print("closed", flush=True)
"""


def case():
    """The case."""
    return Case("torch-served", 240, 1, served, ("jobs",))


def served(setup, end, record):
    """With both clients connected, the losses are those of an uninterrupted run; the copy has lost one, and takes a new one."""
    clients = {}
    see = partial(look, setup.host, record, clients)
    try:
        cases.torch(setup, end, record, name="torch-served", arguments=("--serve", str(PORT)),
                    options=("--annotation", "firn.dev/tcp=auto"), see=see)
    finally:
        for client in clients.values():
            client.end()


def look(host, record, clients, container, end):
    """A client in the container's network gets answers, and still does after a checkpoint.

    A container has lost the clients of the one from which it was copied, and no other.
    """
    copied = [client.port() for name, client in clients.items() if name != container.name]
    if container.name not in clients:
        clients[container.name] = job_cases.connect(host, container, end, "client", CLIENT)
    client = clients[container.name]
    seen = answers(client.lines())
    end.until("answers to the client outside", lambda: answers(client.lines()) >= seen + 5, 30)
    end.until("connections from outside to be closed in the copy", lambda: len(job_cases.gone(container.lines())) >= len(copied), 30)
    if job_cases.gone(container.lines()) != copied:
        raise Failed(f"{container.name} has lost {job_cases.gone(container.lines())}; clients of its source have the ports {copied}")
    record[f"answers_{container.name}"] = answers(client.lines())
    record[f"gone_{container.name}"] = copied


def answers(lines):
    """How many answers the client got; it must not have lost the server."""
    if "closed" in lines or any("Error" in line for line in lines):
        raise Failed(f"the client outside: {lines[-3:]}")
    return lines.count("answer")
