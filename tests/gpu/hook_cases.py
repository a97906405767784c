"""Ranks that share GPU memory by NCCL's own choice of transport, and release it in their hooks: the jobs of examples/pytorch.

They are moved with their GPUs in other places, they lose no bandwidth by it, and what takes part may be killed at any time.
"""

import concurrent.futures
import json
import os
import re
import shutil
import sys
import time
from functools import partial

import cases
import ddp
import kills
import moves
import ranks
from cases import Case
from host import Container, Failed

HERE = os.path.dirname(os.path.abspath(__file__))
FILES = ["../../examples/pytorch/train.py", "../../examples/pytorch/firn_job.py", "hooked.py", "bandwidth.py", "ddp.py"]
# Of the bandwidth before: what it must have after.
LEAST = 0.95
# As examples/pytorch/README.md has them, with what makes the losses depend on the seed alone.
HOOKS = {"prepare": "release", "resumed": "join", "restored": "join", "failed": "join"}
ENVIRONMENT = {**ddp.SETTINGS, "USE_LIBUV": "0"}

# Whom to kill in which phase of a checkpoint: the job continues, or is gone.
SURVIVED = (("firn-hook", "prepare"), ("firn-gpu", "gpu-lock"), ("firn-gpu", "gpu-checkpoint"), ("criu", "criu-dump"))
LOST = tuple(("shim", phase) for phase in ("prepare", "gpu-lock", "gpu-checkpoint", "criu-dump"))
# And of a restore: nothing of the copy is left, and the image is good.
RESTORES = (("criu", "criu-restore"), ("firn-gpu", "gpu-restore"), ("firn-hook", "restored"), ("shim", "criu-restore"),
            ("shim", "gpu-restore"), ("shim", "restored"))
# What comes next if a phase is too short to be seen.
NEXT = {"gpu-lock": "gpu-checkpoint"}


def all_cases():
    """The cases of the group `hooks`."""
    found = [Case(f"ranks-hooks-{count}", 300, count, partial(trained, name=f"ranks-hooks-{count}", count=count)) for count in (2, 4, 8)]
    found += [
        Case("fsdp-hooks-2", 300, 2, partial(trained, name="fsdp-hooks-2", count=2, arguments=("--fsdp",))),
        Case("nccl-address", 300, 2, nccl_address),
        Case("kills-hooks-2", 400, 2, kills_hooks),
        Case("kills-hooks-counters", 400, 2, kills_counters),
    ]
    found.append(Case("nccl-raw", 180, 2, partial(raw, name="nccl-raw", ipc="released-by-hook")))
    for case in found:
        case.groups = ("hooks",)
    suspend = partial(raw, name="nccl-suspend", ipc="none", arguments=("--suspend",))
    return [*found, Case("nccl-suspend", 180, 2, suspend, ("asked-for",))]


def job(setup, count, arguments, options=()):
    """The training with so many ranks, started by torchrun."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", f"{count}", "/job/hooked.py", *arguments]
    files = [os.path.join(HERE, file) for file in FILES]
    environment = [word for name, value in ENVIRONMENT.items() for word in ("--env", f"{name}={value}")]
    hooks = annotations(lambda verb: f"{sys.executable} /job/firn_job.py {verb}")
    # Without a filter of system calls the launcher has an io_uring.
    return cases.scripts(setup, "job", files, command, count, ["--seccomp", *options, *ranks.SHM, *hooks, *environment])


def annotations(program):
    """Options for the hooks; `program` gives the command of each by what it shall do."""
    found = ["--annotation", "firn.dev/ipc=released-by-hook"]
    for hook, verb in HOOKS.items():
        found += ["--annotation", f"firn.dev/hook-{hook}=exec: {program(verb)}"]
    return found


def trained(setup, end, record, name, count, arguments=()):
    """The losses are those of an uninterrupted run, though the GPUs change places, and the ranks' bandwidth is what it was."""
    workload = job(setup, count, ["--steps", f"{ranks.STEPS}", *arguments])
    partners = moves.rotation([gpu["uuid"] for gpu in setup.gpus][:count])
    check_rates(record, *ranks.moved(setup, end, record, name, workload, partners))


def rates(lines):
    """GB/s by the number of the join."""
    found = (re.fullmatch(r"join=(\d+) mib=\d+ gbps=([\d.]+)", line) for line in lines)
    return {int(match[1]): float(match[2]) for match in found if match}


def check_rates(record, source, copy):
    """The group that the copy has made is as fast as the first one of the source."""
    record["gbps"] = {"source": rates(source), "copy": rates(copy)}
    before, after = rates(source).get(0), list(rates(copy).values())
    if not before or not after:
        raise Failed(f"no bandwidth before or after: {record['gbps']}")
    record["table"] = [f"{record.get('case')}: all_reduce {before:g} GB/s before, {after[0]:g} GB/s in the copy"]
    if after[0] < LEAST * before:
        raise Failed(f"all_reduce has {after[0]:g} GB/s in the copy, it had {before:g} GB/s before")


def nccl_address(setup, end, record):
    """The processes continue reporting the addresses of their former GPUs; the group that they make works none the less.

    Where the machine has enough GPUs, the copy has none of those that its processes know.
    """
    name, (before, after) = "nccl-address", setup.pick(2)
    partners = moves.rotation(before) if before == after else dict(zip(before, after))
    workload = job(setup, 2, ["--steps", f"{ranks.STEPS}"], ["--env", "NCCL_DEBUG=INFO"])
    source, copy = (Container(setup.host, name + suffix) for suffix in ("", "-b"))
    try:
        ranks.moved(setup, end, record, name, workload, partners)
    finally:
        record["addresses"] = {"source": addresses(source.lines()), "copy": addresses(copy.lines()), "facts": facts(copy.lines())}
        record["nccl"] = {"source": nccl_lines(source.lines()), "copy": nccl_lines(copy.lines())}
    check_addresses(**record["addresses"])


def addresses(lines):
    """PCI address by join and rank."""
    found = (re.fullmatch(r"join=(\d+) rank=(\d+) pci=(\S+)", line) for line in lines)
    return {f"{match[1]}/{match[2]}": match[3] for match in found if match}


def facts(lines):
    """The pairs of addresses in /run/firn/restore.json, old and new."""
    found = [json.loads(line.removeprefix("facts=")) for line in lines if line.startswith("facts=")]
    return [[gpu["old"]["pci"], gpu["new"]["pci"]] for each in found[:1] for gpu in each["gpus"]]


def check_addresses(source, copy, facts):
    """firn reports for each GPU that it has another address now."""
    known = sorted(normal(pci) for join, pci in source.items() if join.startswith("0/"))
    if not known or not copy:
        raise Failed(f"the ranks printed no addresses: {source}, {copy}")
    if sorted(normal(old) for old, _ in facts) != known or any(normal(old) == normal(new) for old, new in facts):
        raise Failed(f"restore.json has the pairs {facts}; the ranks knew {known}")


def normal(pci):
    """An address with the digits that all have who print it."""
    domain, bus, device = pci.lower().split(":")
    return f"{domain[-4:]}:{bus}:{device}"


def nccl_lines(lines):
    """What NCCL reported about GPUs, transports and errors, each line once."""
    shown = (line.partition("NCCL ")[2] for line in lines if "NCCL INFO" in line or "NCCL WARN" in line)
    wanted = re.compile(r"WARN|busId|via |Connected|nvmlDev|NVLink|CUMEM|version", re.IGNORECASE)
    return list(dict.fromkeys(line[:200] for line in shown if wanted.search(line)))[:60]


def raw(setup, end, record, name, ipc, arguments=()):
    """Ranks of examples/nccl, whose init answers signals, are moved with their GPUs exchanged."""
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    partners = moves.rotation(uuids)
    options = [*ranks.SHM, "--annotation", f"firn.dev/ipc={ipc}", "--annotation", "firn.dev/tcp=auto"]
    for hook, verb in HOOKS.items():
        options += ["--annotation", f"firn.dev/hook-{hook}=signal: {'USR1' if verb == 'release' else 'USR2'}"]
    command = ["/raw/ranks.py", "2", "--steps", "4000", "--nccl", nccl_library(), *arguments]
    workload = cases.scripts(setup, "raw", [f"{HERE}/../../examples/nccl/ranks.py"], command, 2, options)
    source, copy = (Container(setup.host, name + suffix) for suffix in ("", "-b"))
    image = f"firn.test/checkpoint/{name}:latest"
    record.update(gib=0.1, counters=2, uuid_before=uuids, map=partners)
    try:
        begin(setup, source, workload, uuids, end, sums)
        placed = moves.placement(source, end)
        expected = copied(setup, source, image, end, record, sums)
        record["suspended"] = bool(arguments) and not any("no ncclCommSuspend" in line for line in source.lines())
        moves.write_map(setup, partners)
        _, record["restore_s"] = cases.timed(restored, copy, image, end, sums, expected)
        record["restore_ms"] = copy.timings()
        moves.check_moved(placed, moves.placement(copy, end), partners)
        record["uuid_after"] = [partners[uuid] for uuid in uuids]
        trains_on(copy, end, sums, "restored")
    finally:
        cases.clean_up(setup, [source, copy], image)


def nccl_library():
    """The one that came with the machine's PyTorch, or what the loader finds."""
    found = (f"{path}/nvidia/nccl/lib/libnccl.so.2" for path in sys.path)
    return next(filter(os.path.exists, found), "libnccl.so.2")


def sums(container):
    """The sum that each rank has printed, by step and rank."""
    found = (re.fullmatch(r"rank=(\d+) step=(\d+) sum=(\S+)", line) for line in container.lines())
    return {(int(match[2]), match[1]): match[3] for match in found if match}


def kills_hooks(setup, end, record):
    """The training continues after each kill, or a copy of its image does."""
    workload = job(setup, 2, ["--steps", "4000"])
    killed_everywhere(setup, end, record, "kills-hooks-2", workload, lambda container: cases.losses(container.lines()), kills.INTO_CRIU)


def kills_counters(setup, end, record):
    """The same with counters that share nothing, and programs for hooks that only take their time."""
    workload = cases.counter(["--mib", "64", "--ranks", "2", "--gpu", "0,1"], 2)
    workload.options = annotations(lambda verb: '["/bin/sh", "-c", "sleep 0.5"]')
    killed_everywhere(setup, end, record, "kills-hooks-counters", workload, counted, 0)


def counted(container):
    """Checksum by iteration and worker."""
    found = cases.counts(container)
    return {(iteration, worker): checksum for worker, each in found.items() for iteration, checksum in each.items()}


def killed_everywhere(setup, end, record, name, workload, printed, into_criu):
    """Kill what takes part in each phase. `printed` is what a container has printed, by step: the same in every copy.

    A shim takes its container with it: those are copies of an image that the source made after the first kills.
    """
    uuids = [gpu["uuid"] for gpu in setup.gpus][:2]
    source, image = Container(setup.host, name), f"firn.test/checkpoint/{name}:latest"
    record.update(gib=0.1, counters=2, uuid_before=uuids)
    made, pool = [source], concurrent.futures.ThreadPoolExecutor(1)
    directory = f"{setup.host.memory}/{name}"

    def kill(container, call, program, phase):
        message = kills.killed(pool, record, partial(in_phase, container, program, into_criu), container, call, program, phase)
        return f"{program} was killed in {phase}: {message}"

    def checkpoint(container, program, phase):
        return kill(container, lambda: container.checkpoint_task(directory, end), program, phase)

    def copy():
        setup.host.remove_unpacked()
        made.append(Container(setup.host, f"{name}-{len(made)}"))
        return made[-1]

    try:
        begin(setup, source, workload, uuids, end, printed)
        for program, phase in SURVIVED:
            trains_on(source, end, printed, checkpoint(source, program, phase))
            shutil.rmtree(directory, ignore_errors=True)
        expected = copied(setup, source, image, end, record, printed)
        moves.write_map(setup, moves.rotation(uuids))

        for program, phase in RESTORES:
            target = copy()
            restore = ("containers", "restore", "--rw", "--live", target.name, image)
            context = kill(target, lambda: setup.host.ctr(*restore, check=False, deadline=end, output=target.output), program, phase)
            if program != "shim":
                # ctr leaves the task that could not be started.
                target.remove(end)
            kills.is_gone(target, end, context)
            target.remove(end)
        for program, phase in LOST:
            target = restored(copy(), image, end, printed, expected)
            kills.is_gone(target, end, checkpoint(target, program, phase))
            target.remove(end)
            shutil.rmtree(directory, ignore_errors=True)
        target = restored(copy(), image, end, printed, expected)
        record["uuid_after"] = list(reversed(uuids))
        record["restore_ms"] = target.timings()
        trains_on(target, end, printed, "the last copy")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        cases.clean_up(setup, made, image, [directory])


def in_phase(container, program, into_criu, call, phase):
    """Wait until the transaction of a container is in a phase and the program runs, CRIU for a while; `call` is the client's."""
    while True:
        now = phase_of(container)
        if now and now in (phase, NEXT.get(phase)) and kills.victims(program, container.name):
            time.sleep(into_criu if program == "criu" else 0)
            return
        if call.done():
            raise Failed(f"the call ended before {phase}: {kills.outcome(call)}")


def phase_of(container):
    """The phase that a transaction is in, by its journal; none without one."""
    try:
        with open(f"{container.bundle()}/firn-journal", encoding="utf-8") as file:
            return entered(file.read())
    except FileNotFoundError:
        return None


def entered(journal):
    """The last phase of a journal that was entered and not left."""
    phase = None
    for line in journal.split("\n")[:-1]:
        event = json.loads(line)
        if event["event"] in ("enter", "leave"):
            phase = event["phase"] if event["event"] == "enter" else None
    return phase


def trains_on(container, end, printed, context):
    """The job runs as before."""
    kills.undisturbed(container, end, context)
    seen = len(printed(container))
    end.until(f"the job to continue; {context}", lambda: len(printed(container)) >= seen + 6, 60)


def begin(setup, container, workload, uuids, end, printed):
    """Run a job until it has printed something."""
    container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
    end.until("the job to begin", lambda: len(printed(container)) >= 8, 120)


def copied(setup, source, image, end, record, printed):
    """Checkpoint a job and remove it; returns what it printed after that."""
    begun = set(printed(source))
    cases.checkpointed(setup, source, image, end, record)
    trains_on(source, end, printed, "after a good checkpoint")
    source.keep_evidence(setup.evidence)
    source.remove(end)
    return {key: value for key, value in printed(source).items() if key not in begun}


def restored(container, image, end, printed, expected):
    """Restore a copy, which prints what the source printed after its checkpoint (`expected`)."""
    container.restore(image, end)
    end.until("the copy to print", lambda: len(printed(container)) >= 6, 60)
    same(printed(container), expected)
    return container


def same(found, expected):
    """A copy has gone on where the source was, and has printed what that one printed then."""
    common = set(found) & set(expected)
    wrong = sorted(key for key in common if found[key] != expected[key])
    if len(common) < 4 or min(found) not in expected or wrong:
        raise Failed(f"the copy began at {min(found)}, the source continued at {min(expected)}: of {len(common)} common steps differ {wrong}")
