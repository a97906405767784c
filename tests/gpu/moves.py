"""A bare machine's GPUs by `firn cdi generate`, and jobs whose GPUs change places with each other."""

import json
import shutil

import cases
import cdi
import firn_cli
import host as hosts
import samples
from cases import Case
from host import Container, Failed

GENERATED = "/etc/cdi/nvidia.yaml"
SOCKETS = ["--annotation", "firn.dev/nccl=sockets"]


def all_cases(mib):
    """The cases, with buffers of `mib` MiB."""
    found = [Case("bare", 120, 1, lambda setup, end, record: bare(setup, end, record, mib))]
    found.append(Case("monitored", 60, 1, monitored(mib)))
    for count, name in ((2, "two-permuted"), (4, "four-permuted"), (8, "eight-permuted")):
        found.append(Case(name, 150, count, permuting(name, ranks(count, mib), count, mib), ("permuted",)))
    # The only sign of where one process on two GPUs has what: it has more on the first.
    swapped = cases.without_peer_access(cases.counter(["--mib", f"{mib}", "--gpu", "0,1", "--reserve-mib", f"{mib}"], 2))
    found.append(Case("two-swapped", 150, 2, permuting("two-swapped", swapped, 2, mib), ("permuted",)))
    return found


def monitored(mib):
    """The case of a counter, and of a process next to it that only uses NVML and continues as well."""
    workload = cases.counter(["--mib", f"{mib}"])
    workload.argv = ["/bin/sh", "-c", f"gpu-sample nvml & exec {' '.join(workload.argv)}"]
    return lambda setup, end, record: cases.round_trip(setup, end, record, "monitored", workload, mib / 1024, see=watched)


def watched(container, end):
    """Wait until the monitor has seen its GPUs twice more."""
    samples.wait_for_lines(container, 1, samples.printed(container.lines()), end)


def ranks(count, mib):
    """A process for each of `count` GPUs, which report every iteration to each other over TCP."""
    ordinals = ",".join(str(ordinal) for ordinal in range(count))
    workload = cases.counter(["--mib", f"{mib}", "--ranks", f"{count}", "--gpu", ordinals], count)
    workload.options = SOCKETS
    return workload


def permuting(name, workload, count, mib):
    """The case of a workload with a counter on each of `count` GPUs."""
    return lambda setup, end, record: permuted(setup, end, record, name, workload, count, mib)


def bare(setup, end, record, mib):
    """Nothing but the driver: firn writes the machine's CDI file, and ctr starts by it a container that has no libraries of its own."""
    moved = set_aside(setup.host)
    try:
        setup.host.run("firn", "cdi", "generate", "--output", GENERATED, deadline=end)
        shutil.copy(GENERATED, f"{setup.evidence}/bare.nvidia.yaml")
        listed = setup.host.run("firn", "cdi", "list", deadline=end).stdout
        setup.log(f"firn cdi list: {listed}")
        names = [f"{cdi.KIND}={name}" for gpu in setup.gpus for name in (gpu["index"], gpu["uuid"])]
        missing = [name for name in names if name not in listed.split()]
        if missing:
            raise Failed(f"firn cdi list does not show {missing}: {listed}")
        record["cdi_devices"] = names
        workload = cases.counter(["--mib", f"{mib}"])
        workload.devices = [setup.gpus[0]["index"]]
        cases.round_trip(setup, end, record, "bare", workload, memory=mib / 1024)
    finally:
        setup.host.put(GENERATED, None)
        for path, text in moved.items():
            setup.host.put(path, text)


def set_aside(host):
    """Take away the CDI files of the machine's GPUs; returns their text by path."""
    moved = {}
    while path := cdi.existing():
        with open(path, encoding="utf-8") as file:
            moved[path] = file.read()
        host.put(path, None)
    # `put` has now seen the place of the new file, too, and brings it back at the end.
    host.put(GENERATED, None)
    return moved


def rotation(uuids):
    """Each GPU's partner: the next of them."""
    return dict(zip(uuids, [*uuids[1:], *uuids[:1]]))


def write_map(setup, moved):
    """Let every restore on this machine move GPUs so."""
    pairs = ", ".join(f'"{old}={new}"' for old, new in moved.items())
    setup.host.put(hosts.FIRN_CONFIG, f"[restore]\ngpu-map = [{pairs}]\n")


def placement(container, end):
    """The GPU that holds most of each process's memory, by the pid that the process has in its container."""
    pids = container.pids(end)
    held = {}
    for row in cdi.query("compute-apps", ["pid", "gpu_uuid", "used_memory"]):
        if int(row["pid"]) in pids and row["used_memory"].isdigit():
            held.setdefault(int(row["pid"]), {})[row["gpu_uuid"]] = int(row["used_memory"])
    if not held:
        raise Failed(f"nvidia-smi shows none of {container.name}'s processes {pids}: where its memory is cannot be seen")
    return {inner_pid(pid): max(sizes, key=sizes.get) for pid, sizes in held.items()}


def inner_pid(pid):
    """The pid that a process has in its own namespace."""
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return parse_inner_pid(file.read())


def parse_inner_pid(status):
    """The last of the pids in a /proc/PID/status."""
    return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))


def check_moved(before, after, moved):
    """Every process has its memory on the partner of the GPU that it had."""
    wanted = {pid: moved[uuid] for pid, uuid in before.items()}
    if after != wanted:
        raise Failed(f"memory is on {after}, and should be on {wanted}")


def permuted(setup, end, record, name, workload, count, mib):
    """Run on all of `count` GPUs, checkpoint, restore with each GPU's work on the next one; links are looked at before."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:count]
    moved = rotation(uuids)
    source, target = Container(setup.host, name), Container(setup.host, f"{name}-b")
    image, directory = f"firn.test/checkpoint/{name}:latest", f"{setup.host.memory}/{name}"
    record.update(gib=mib / 1024, counters=count, uuid_before=uuids, map=moved)
    try:
        links = firn_cli.nvlinks(firn_cli.inventory(setup, end))
        record["nvlinks"] = firn_cli.links_kept(links, moved)
        source.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        before = cases.wait_for_counts(source, end, count, {}, 3)
        placed = placement(source, end)
        record["audit"] = firn_cli.audit(setup, source, end).verdict

        done = source.checkpoint_task(directory, end)
        if done.returncode:
            raise Failed(f"task checkpoint failed: {done.stderr.strip()}")
        spec = f"{source.bundle()}/config.json"
        stays = firn_cli.plan(setup, directory, spec, end)
        if stays != {uuid: uuid for uuid in uuids}:
            raise Failed(f"without a map the plan is {stays}, though the GPUs of the checkpoint are here")
        write_map(setup, moved)
        planned = firn_cli.plan(setup, directory, spec, end)
        if planned != moved:
            raise Failed(f"firn restore --dry-run shows {planned}, the map has {moved}")

        done, record["checkpoint_s"] = cases.timed(source.checkpoint, image, end)
        record["checkpoint_ms"] = source.timings()
        went_on = cases.wait_for_counts(source, end, count, cases.counts(source), 2, f"output of checkpoint: {done.stderr.strip() or 'done'}")
        if done.returncode:
            raise Failed(f"checkpoint failed (the workload continues): {done.stderr.strip()}")
        source.keep_evidence(setup.evidence)
        source.remove(end)
        cases.wait_for_free_gpus(end)

        _, record["restore_s"] = cases.timed(target.restore, image, end)
        after = cases.wait_for_counts(target, end, count, {}, 3, "restored")
        record["restore_ms"] = target.timings()
        check_moved(placed, placement(target, end), moved)
        record["uuid_after"] = [moved[uuid] for uuid in uuids]
        record.update(cases.compare(before, went_on, after))
        setup.log(f"{name}: {json.dumps(placed)} moved by {json.dumps(moved)}")
    finally:
        cases.clean_up(setup, [source, target], image, [directory])
