"""Pauses that give the GPU free, and resumes: what NVML shows of the GPU, and how long client, firn and driver took."""

import contextlib
import json
import os

import cases
import cdi
import kills
import patient
from cases import Case
from host import Container, Failed

LEASES = "/run/firn/leases"
RELEASE = ["--annotation", "firn.dev/pause=release-gpu"]
# What the driver does in a pause, a resume or a move.
DRIVER = ("gpu-lock", "gpu-checkpoint", "gpu-restore", "gpu-unlock")
# MiB that may be left in use on a GPU whose containers are parked.
LEFT_MIB = 64
# What may be more in the last reading of many cycles than in an early one; idle threads of the shim come and go.
GROWTH = {"shim_kib": 2048, "shim_threads": 64, "taken_mib": 512, "processes": 3}
EARLY = 20


def all_cases(args):
    """Those of the group `pauses` that pause by hand; `args` are those of run.py."""
    one, other = numbers(args.pause_other_gib)
    return [
        Case("pause-memory", 400, 1, lambda setup, end, record: memory(setup, end, record, sizes(args)), ("pauses",)),
        Case("pause-cycles", 560, 1, lambda setup, end, record: cycles(setup, end, record, args.cycles), ("pauses", "asked-for")),
        Case("pause-other", 400, 1, lambda setup, end, record: other_job(setup, end, record, one, other), ("pauses",)),
    ]


def sizes(args):
    """GiB of the containers, one after the other."""
    return numbers(args.pause_gib)


def numbers(text):
    """A comma list."""
    return [float(number) for number in text.split(",")]


def counter(arguments, options=RELEASE):
    """gpu-counter in a container whose pause gives its GPU free."""
    workload = cases.counter(arguments)
    workload.options = list(options)
    return workload


def begun(setup, container, workload, uuids, end):
    """Start a counter; returns it once it counts."""
    container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
    cases.wait_for_counts(container, end, 1, {}, 3)
    return container


def call(container, verb, end):
    """`ctr tasks VERB`, which must succeed; returns its seconds."""
    return cases.timed(lambda: container.host.ctr("tasks", verb, container.name, deadline=end))[1]


def used(uuid):
    """MiB in use on a GPU, by NVML."""
    return next(int(row["memory.used"]) for row in cdi.query("gpu", ["uuid", "memory.used"]) if row["uuid"] == uuid)


def driver_s(timings):
    """Seconds that the driver had of a transaction."""
    return round(sum(timings.get(phase, 0) for phase in DRIVER) / 1000, 3)


def park(container, end):
    """Pause a container; returns the seconds, those of the driver, and sees that containerd shows it as parked."""
    seconds = call(container, "pause", end)
    patient.expect_status(container, end, "PAUSED")
    if not parked_label(container, end):
        raise Failed(f"{container.name} is paused and has no label firn.dev/parked")
    return {"pause_s": seconds, "pause_driver_s": driver_s(container.timings())}


def unpark(container, end):
    """Resume it; returns the seconds and those of the driver."""
    seconds = call(container, "resume", end)
    found = {"resume_s": seconds, "resume_driver_s": driver_s(container.timings())}
    patient.expect_status(container, end, "RUNNING")
    return found


def parked_label(container, end):
    """What containerd has of it."""
    info = json.loads(container.host.ctr("containers", "info", container.name, deadline=end).stdout)
    return (info.get("Labels") or {}).get("firn.dev/parked")


def fitting(setup, record, gibs):
    """Those of the sizes that a GPU has, and some memory for a context; the others are noted in the record."""
    most = min(int(gpu["memory.total"]) for gpu in setup.gpus) / 1024 - 0.6
    record["left_out_gib"] = [gib for gib in gibs if gib > most]
    found = [gib for gib in gibs if gib <= most]
    if not found:
        raise Failed(f"the GPU has no room for {min(gibs):g} GiB")
    record["gib"] = max(found)
    return found


def memory(setup, end, record, gibs):
    """Pause and resume by size: NVML shows the GPU free, and the workload verifies its values afterwards."""
    rows = record["sizes"] = []
    for gib in fitting(setup, record, gibs):
        rows.append(pause_of(setup, end, record, gib))
        record["table"] = memory_table(rows)


def pause_of(setup, end, record, gib):
    """One size to its row."""
    (uuid,), _ = setup.pick(1)
    container = Container(setup.host, f"pause-{gib:g}")
    patient.grow_memory(gib, end)
    row = {"gib": gib, "idle_mib": used(uuid)}
    try:
        begun(setup, container, counter(["--mib", f"{gib * 1024:.0f}"]), [uuid], end)
        cases.check_holders(container, end, [uuid], gib)
        row["running_mib"] = used(uuid)
        row.update(park(container, end))
        row["parked_mib"] = used(uuid)
        row.update(unpark(container, end))
        kills.goes_on(container, end, "it was paused and resumed")
        row["resumed_mib"] = used(uuid)
        cases.check_holders(container, end, [uuid], gib)
        check_free(row)
        patient.went_on(container, record)
    finally:
        cases.clean_up(setup, [container])
    return row


def check_free(row):
    """The container's share of the GPU was free while it was parked."""
    share = row["gib"] * 1024
    if row["parked_mib"] > row["idle_mib"] + LEFT_MIB:
        raise Failed(f"{row['parked_mib']} MiB are in use while it is parked, {row['idle_mib']} MiB were without it")
    for when in ("running_mib", "resumed_mib"):
        if row[when] < row["idle_mib"] + share:
            raise Failed(f"{when}: {row[when]} MiB are in use, {share:g} MiB are the container's")


def memory_table(rows):
    """The rows for people, with the columns of examples/time-slicing/README.md."""
    lines = ["Pause and resume (s), and MiB in use on the GPU by NVML:", "",
             "| GiB | idle | running | parked | resumed | pause | of it the driver | resume | of it the driver | of a 60 s turn |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for row in rows:
        cells = [f"{row['gib']:g}", *(row[f"{when}_mib"] for when in ("idle", "running", "parked", "resumed")),
                 *(f"{row[name]:.2f}" for name in ("pause_s", "pause_driver_s", "resume_s", "resume_driver_s")),
                 f"{(row['pause_s'] + row['resume_s']) / 60:.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def cycles(setup, end, record, count):
    """Many pauses of a small job: no iteration is lost, and neither shim nor machine grow."""
    (uuid,), _ = setup.pick(1)
    container = Container(setup.host, "cycles")
    record.update(gib=0.25, counters=1, uuid_before=[uuid], cycles=count)
    spent = []
    try:
        begun(setup, container, counter(["--mib", "256", "--interval-ms", "50"]), [uuid], end)
        for cycle in range(1, count + 1):
            spent.append(call(container, "pause", end) + call(container, "resume", end))
            cases.wait_for_counts(container, end, 1, cases.counts(container), 1, f"cycle {cycle}")
            if cycle in (min(EARLY, count), count):
                kills.undisturbed(container, end, f"cycle {cycle}")
                record["last" if cycle == count else "early"] = reading(container, end)
        record.setdefault("early", record["last"])
        record["uuid_after"] = [uuid]
        record["cycle_s"] = {"least": round(min(spent), 3), "mean": round(sum(spent) / count, 3), "most": round(max(spent), 3)}
        record["table"] = cycles_table(record)
        patient.went_on(container, record)
        check_growth(record["early"], record["last"])
    finally:
        cases.clean_up(setup, [container])


def reading(container, end):
    """What may grow: of the shim, of firn's files, of the machine."""
    (shim,) = kills.shims(container.name)
    return {
        "shim_kib": kills.status(shim, "VmRSS"), "shim_files": len(os.listdir(f"/proc/{shim}/fd")),
        "shim_threads": kills.status(shim, "Threads"), "container_processes": len(container.pids(end)),
        "leases": len(os.listdir(LEASES)), "processes": programs(), "taken_mib": taken_mib(),
    }


def programs():
    """The machine's processes that run a program."""
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as file:
            found += bool(file.read(1))
    return found


def taken_mib():
    """The machine's memory that is not available."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        kib = {line.split(":")[0]: int(line.split()[1]) for line in file}
    return (kib["MemTotal"] - kib["MemAvailable"]) >> 10


def check_growth(early, last):
    """Nothing has grown beyond its bound; what has none has not grown."""
    grown = [f"{name}: {early[name]} -> {last[name]}" for name in early if last[name] - early[name] > GROWTH.get(name, 0)]
    if grown:
        raise Failed(f"after the cycles: {', '.join(grown)}")


def cycles_table(record):
    """The readings for people."""
    names = list(record["last"])
    rows = [f"| {when} | {' | '.join(str(record[key][name]) for name in names)} |"
            for when, key in ((f"cycle {min(EARLY, record['cycles'])}", "early"), (f"cycle {record['cycles']}", "last"))]
    spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in record["cycle_s"].items())
    return [f"{record['cycles']} pauses and resumes of 0.25 GiB, both together: {spent}:", "",
            f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]


def other_job(setup, end, record, one, other):
    """A parked job's GPU is another's, who needs most of it; they take turns, and nobody has it twice."""
    (uuid,), _ = setup.pick(1)
    first, second = Container(setup.host, "other-a"), Container(setup.host, "other-b")
    sizes = {first: one, second: other}
    record.update(gib=one + other, counters=2, uuid_before=[uuid], rows=[])
    patient.grow_memory(one + other, end)
    try:
        begun(setup, first, counter(["--mib", f"{one * 1024:.0f}"]), [uuid], end)
        spent = park(first, end)
        begun(setup, second, counter(["--mib", f"{other * 1024:.0f}"]), [uuid], end)
        for running, waiting in ((second, first), (first, second)) * 2:
            refuse_resume(waiting, running, end)
            kills.goes_on(running, end, f"{waiting.name} was refused")
            cases.check_holders(running, end, [uuid], sizes[running])
            spent = park(running, end)
            spent.update(unpark(waiting, end))
            kills.goes_on(waiting, end, f"resumed after {running.name}")
            record["rows"].append({"goes": running.name, "comes": waiting.name, "used_mib": used(uuid), **spent})
        for container in (first, second):
            patient.went_on(container, record)
        record["uuid_after"] = [uuid]
        record["table"] = [f"{row['goes']} goes, {row['comes']} comes: pause {row['pause_s']:.2f} s, resume {row['resume_s']:.2f} s, "
                           f"{row['used_mib']} MiB in use" for row in record["rows"]]
    finally:
        cases.clean_up(setup, [first, second])


def refuse_resume(container, running, end):
    """Its GPU is in use: the resume is refused, names the other one, and it stays parked."""
    done = patient.resume(container, end)
    if not done.returncode or "FIRN-GPU-BUSY" not in done.stderr or running.name not in done.stderr:
        raise Failed(f"resume of {container.name} while {running.name} runs: {done.returncode}: {done.stderr.strip()}")
    patient.expect_status(container, end, "PAUSED")
    label = parked_label(container, end)
    if "the last resume failed" not in (label or ""):
        raise Failed(f"the label of {container.name} after a refused resume: {label}")
