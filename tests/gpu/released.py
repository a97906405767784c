"""Jobs that let go of every device in their hook: the job of examples/device-free continues without its GPU, and with one again.

Its values are those of a job that is never moved, which this machine computes on its CPU.
"""

import importlib
import os
import re
import sys

import cases
import host as hosts
from cases import Case
from host import Container, Failed

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = f"{HERE}/../../examples/device-free"
CPU = "cpu"
HOOKS = {"prepare": "release", "resumed": "take", "restored": "take", "failed": "take"}
# Steps on a device that show that the job continues there.
STEPS = 5


def example():
    """The job as a module, for what it computes. A bundle has the cases and not the examples."""
    if EXAMPLE not in sys.path:
        sys.path.append(EXAMPLE)
    return importlib.import_module("device_free")


def all_cases():
    """The cases of the group `hooks`."""
    return [
        Case("device-free", 240, 1, moved, ("hooks",)),
        Case("device-free-held", 120, 1, held, ("hooks",)),
    ]


def job(setup, hooks):
    """The job with these programs for its hooks."""
    options = ["--annotation", "firn.dev/gpu=released-by-hook"]
    for hook, program in hooks.items():
        options += ["--annotation", f"firn.dev/hook-{hook}=exec: {program}"]
    files = [f"{EXAMPLE}/device_free.py"]
    return cases.scripts(setup, "free", files, ["/free/device_free.py", "run"], 1, options)


def printed(lines):
    """Value and device by step."""
    found = (re.fullmatch(r"step=(\d+) value=([0-9a-f]{8}) device=(\S+)", line) for line in lines)
    return {int(match[1]): (match[2], match[3]) for match in found if match}


def computes(container, end, device):
    """Wait until the job has made some steps more on a device."""

    def steps():
        return [step for step, (_, used) in printed(container.lines()).items() if used == device]

    before = len(steps())
    try:
        end.until(f"{container.name} to compute on {device}", lambda: len(steps()) >= before + STEPS, 60)
    except Failed as late:
        raise Failed(f"{late}; it printed last {container.lines()[-3:]}") from late


def check(found, devices):
    """The containers have printed every step once, in turn, each with the value of a job that is never moved.

    `found` is what each has printed, `devices` are those on which each has computed in the end.
    """
    steps = sorted(step for each in found for step in each)
    if steps != list(range(len(steps))):
        missing = sorted(set(range(len(steps))) - set(steps))
        raise Failed(f"steps are missing or repeated: of {len(steps)} steps {missing[:5]} are not there")
    expected = example().values(len(steps))
    wrong = [step for each in found for step, (value, _) in each.items() if value != expected[step]]
    if wrong:
        raise Failed(f"the values of the steps {wrong[:5]} are not those of a job that is never moved")
    last = [each[max(each)][1] for each in found]
    if last != devices:
        raise Failed(f"the containers have computed on {last} in the end, and should have on {devices}")


def restored(setup, container, workload, uuids, directory, end):
    """A container of these GPUs, whose own annotations name nothing, gets the checkpoint."""
    options = [word for word in workload.ctr_options(uuids) if "firn.dev/" not in word and word != "--annotation"]
    setup.host.ctr(
        "containers", "create", "--runtime", setup.runtime, *options, workload.image, container.name, *workload.argv, deadline=end)
    address = f"{setup.host.work}/containerd.sock"
    setup.host.run(
        "firn", "restore", container.name, "--dir", directory, "--address", address, "--namespace", hosts.NAMESPACE,
        "--log", container.output, deadline=end)


def ended(container, directory, end):
    """Checkpoint a container that ends with it."""
    done = container.checkpoint_task(directory, end, False)
    if done.returncode:
        raise Failed(f"the checkpoint failed: {done.stderr.strip()}")
    cases.check_image(directory, True)


def moved(setup, end, record):
    """From a GPU to none and back to one, another where the machine has it."""
    (first,), (second,) = setup.pick(1)
    names = ("device-free", "device-free-cpu", "device-free-b")
    source, without, target = (Container(setup.host, name) for name in names)
    directories = [f"{setup.host.memory}/device-free-{number}" for number in range(3)]
    record.update(uuid_before=[first], counters=1)
    workload = job(setup, {hook: f"{sys.executable} /free/device_free.py {verb}" for hook, verb in HOOKS.items()})
    try:
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options([first]))
        computes(source, end, first)
        done, record["checkpoint_s"] = cases.timed(source.checkpoint_task, directories[0], end)
        if done.returncode:
            raise Failed(f"the checkpoint failed: {done.stderr.strip()}")
        record["checkpoint_ms"] = source.timings()
        computes(source, end, first)
        ended(source, directories[1], end)
        source.exit_status(end, 20)
        source.remove(end)
        cases.wait_for_free_gpus(end)

        restored(setup, without, workload, [], directories[1], end)
        computes(without, end, CPU)
        ended(without, directories[2], end)
        without.remove(end)
        _, record["restore_s"] = cases.timed(restored, setup, target, workload, [second], directories[2], end)
        record["restore_ms"] = target.timings()
        computes(target, end, second)
        found = [printed(container.lines()) for container in (source, without, target)]
        check(found, [CPU, CPU, second])
        record.update(uuid_after=[second], iter_before=max(found[0]), iter_after=min(found[1]), counters=1)
        record["table"] = [f"device-free: {len(each)} steps by {name}" for name, each in zip(names, found)]
    finally:
        cases.clean_up(setup, [source, without, target], directories=directories)


def held(setup, end, record):
    """A hook that does nothing: the checkpoint is refused by process and node, and the job continues."""
    (uuid,), _ = setup.pick(1)
    container, image = Container(setup.host, "device-free-held"), "firn.test/checkpoint/device-free-held:latest"
    record.update(uuid_before=[uuid], counters=1)
    workload = job(setup, {"prepare": "/bin/true"})
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options([uuid]))
        computes(container, end, uuid)
        cases.refuse(container, image, end, record, ["FIRN-GPU-HELD"])
        if "/dev/nvidia" not in record["refusal"]:
            raise Failed(f"the refusal names no node: {record['refusal']}")
        computes(container, end, uuid)
    finally:
        cases.clean_up(setup, [container], image)
