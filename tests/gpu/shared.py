"""Two containers that share a GPU: they take turns, until the driver has restored one of them.

From then on it interrupts none of that one's kernels (docs/guide/operating.md): a kernel that takes 5 s while the other waits
ends its process. The case fails if a driver does better, for then firn need not name processes that share a GPU.
"""

import cases
import firn_cli
from cases import Case
from host import Container, Failed

SIGNAL = "processes_that_share_a_gpu"


def all_cases():
    """The one case."""
    return [Case("shared-gpu", 240, 1, play, ("traps",))]


def play(setup, end, record):
    """Both compute at once, before and after a checkpoint of the first that it survives."""
    uuids, _ = setup.pick(1)
    workload = cases.script(setup, "busy.py", ["--seconds", "8"], 1)
    containers = [Container(setup.host, f"shared-gpu-{name}") for name in ("a", "b")]
    directory = f"{setup.host.memory}/shared-gpu"
    record.update(gib=0.5, counters=0, uuid_before=uuids)
    try:
        for container in containers:
            container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
            end.until("the process to have a context", lambda each=container: "ready" in each.lines(), 90)
        audited = firn_cli.audit(setup, containers[0], end)
        record["audit"] = audited.verdict
        if SIGNAL not in audited.suspected:
            raise Failed(f"the audit names no process that shares the GPU: {audited.suspected}")
        before = compute(containers, end, 1)
        if before != ["ok", "ok"]:
            raise Failed(f"before any checkpoint: {before}")
        done, record["checkpoint_s"] = cases.timed(containers[0].checkpoint_task, directory, end)
        record["checkpoint_ms"] = containers[0].timings()
        if done.returncode:
            raise Failed(f"the checkpoint failed: {done.stderr.strip()}")
        record["after"] = after = compute(containers, end, 2)
        if after[1] != "ok" or "launch failure" not in after[0]:
            raise Failed(f"the driver interrupts kernels of a restored process, or ends another: {after}")
    finally:
        record["table"] = [f"shared-gpu: after the checkpoint of the first: {record.get('after')}"]
        cases.clean_up(setup, containers, directories=[directory])


def compute(containers, end, number):
    """What becomes of a kernel of each, at once."""
    for container in containers:
        container.host.ctr("tasks", "kill", "--signal", "SIGUSR1", container.name, deadline=end)
    return [end.until("a kernel to end", lambda each=container: outcome(each, number), 60) for container in containers]


def outcome(container, number):
    """What it has printed of a kernel, or None."""
    begin = f"kernel={number} "
    return next((line.removeprefix(begin) for line in container.lines() if line.startswith(begin)), None)
