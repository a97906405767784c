"""Small programs with one habit each: what `firn audit` reports for each before, what the driver then does, and whether both agree.

The audit is overridden: the driver's calls are made directly, on processes that may be lost. Where `word` is given the
container's owner has declared that its processes share nothing (truly or not), and firn itself is asked for the checkpoint.
"""

import os
import shutil
from dataclasses import dataclass

import cases
import firn_cli
import probe
from cases import Case
from host import Container, Failed

SUCCESS = "CUDA_SUCCESS"
# Seconds for each call of the driver; without managed memory beyond 2 MiB none takes one.
LIMITS = {"lock": 10, "checkpoint": 30, "restore": 30, "unlock": 10}


@dataclass
class Sample:
    """A habit of gpu-sample, the processes that print, and the owner's word where it is given: True or False."""

    habit: str
    processes: int = 1
    word: bool = None

    def name(self):
        """Of the container and in the table."""
        return self.habit if self.word is None else f"{self.habit}-asserted"


SAMPLES = [
    Sample("plain"),
    Sample("managed"),
    Sample("managed-small"),
    Sample("managed-variable"),
    Sample("managed-freed"),
    Sample("streams"),
    Sample("vmm"),
    Sample("vmm-exported"),
    Sample("vmm-imported", 2),
    Sample("vmm-broker", 2),
    Sample("ipc", 2),
    Sample("ipc-closed", 2),
    Sample("two", 2),
    Sample("fork"),
    Sample("nvml"),
    Sample("monitored", 2),
    Sample("init"),
    Sample("two", 2, word=True),
    Sample("ipc", 2, word=False),
]


def case():
    """All samples, one after the other."""
    return Case("samples", 300, 1, samples)


def samples(setup, end, record):
    """Play every sample; one that the audit passed, and that could not be brought back, is a failure."""
    rows = record["samples"] = []
    for sample in SAMPLES:
        try:
            rows.append(play(setup, sample, end))
        except Failed as error:
            rows.append({"sample": sample.name(), "agreement": "FAILED", "seen": str(error)})
        setup.log(f"sample: {rows[-1]}")
    record["table"] = table(rows)
    record["counters"] = len(rows)
    wrong = [row["sample"] for row in rows if row["agreement"] in ("MISSED", "FAILED")]
    if wrong:
        raise Failed(f"audit and driver do not agree, or nothing could be seen: {', '.join(wrong)}")


def table(rows):
    """The rows for people."""
    lines = ["Samples: what the audit reports, and what happens when it is overridden:", "",
             "| sample | audit | codes | overridden | agreement | seen |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = [row["sample"], row.get("verdict", "-"), " ".join(row.get("codes", []) + row.get("suspected", [])) or "-",
                 row.get("outcome", "-"), row["agreement"], row["seen"]]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return lines


def play(setup, sample, end):
    """One sample to its row."""
    uuids, _ = setup.pick(1)
    container = Container(setup.host, f"sample-{sample.name()}")
    workload = cases.Workload(cases.COUNTER_IMAGE, ["/usr/bin/gpu-sample", sample.habit], gpus=1)
    if sample.word is not None:
        workload = cases.sharing_nothing(workload)
    directory = f"{setup.host.memory}/{container.name}"
    try:
        container.run(setup.runtime, workload.image, workload.argv, end, workload.ctr_options(uuids))
        wait_for_lines(container, sample.processes, {}, end)
        keep_signs(setup, container, end)
        audited = firn_cli.audit(setup, container, end)
        if sample.word is None:
            outcome, seen = by_driver(setup, container, audited.cuda, sample.processes, end, sample.habit == "fork")
        else:
            outcome, seen = by_firn(container, directory, sample.processes, end)
        return {
            "sample": sample.name(), "verdict": audited.verdict, "codes": audited.codes, "suspected": audited.suspected,
            "outcome": outcome, "seen": seen, "agreement": agreement(audited.verdict, outcome, sample.word),
        }
    finally:
        cases.clean_up(setup, [container], directories=[directory])


def keep_signs(setup, container, end):
    """Keep what /proc shows of the driver in the container's processes."""
    with open(f"{setup.evidence}/{container.name}.proc", "w", encoding="utf-8") as file:
        for pid in container.pids(end):
            with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
                mapped = [line for line in maps if "nvidia" in line]
            file.writelines([f"{pid}: open {' '.join(gpu_files([pid])) or 'nothing'}\n", *mapped])


def printed(lines):
    """Number of good iterations by process."""
    found = {}
    for line in lines:
        words = line.split()
        if len(words) == 5 and words[0] == "sample" and words[4] == "ok":
            found[words[2]] = found.get(words[2], 0) + 1
    return found


def wait_for_lines(container, processes, beyond, end, at_most=30):
    """Wait until each of so many processes has printed two more lines; returns all counts."""

    def ready():
        ended = container.has_ended()
        now = printed(container.lines())
        if ended:
            raise Failed(f"{container.name} has ended")
        return now if len(now) == processes and all(count >= beyond.get(pid, 0) + 2 for pid, count in now.items()) else None

    try:
        return end.until(f"{processes} processes of {container.name} to print", ready, at_most)
    except Failed as late:
        raise Failed(f"{late}; it printed last: {' / '.join(container.lines()[-3:]) or 'nothing'}") from late


def goes_on(container, processes, end):
    """Whether every process computes on."""
    try:
        wait_for_lines(container, processes, printed(container.lines()), end, 10)
    except Failed:
        return False
    return True


def by_driver(setup, container, pids, processes, end, inherited):
    """Make the driver's calls about the CUDA processes; returns what it comes to, and what was seen."""
    answers = {}

    def ask(step, those):
        for pid in those:
            answers[step, pid], _ = probe.ask(step, pid, limit=end.left(LIMITS[step]), environment=setup.host.env)
        return [pid for pid in those if answers[step, pid] == SUCCESS]

    locked = ask("lock", pids)
    checkpointed = ask("checkpoint", locked) if locked == pids else []
    left_open = gpu_files(container.pids(end)) if checkpointed == pids else []
    ask("restore", checkpointed)
    ask("unlock", [pid for pid in locked if answers.get(("restore", pid), SUCCESS) == SUCCESS])
    return conclude(answers, left_open, goes_on(container, processes, end), inherited)


def conclude(answers, left_open, computes_on, inherited=False):
    """What the driver's answers by call and process come to: `works`, `refused`, `undumpable` or `lost`. `inherited`: what
    is left open is a forked child's."""
    failed = [f"{step}: {answer}" for (step, _), answer in answers.items() if answer != SUCCESS]
    seen = "; ".join(dict.fromkeys(failed)) or (f"{len(answers)} calls succeed" if answers else "no CUDA process")
    if not computes_on:
        return "lost", f"{seen}; it does not continue"
    if any(answer != SUCCESS for (step, _), answer in answers.items() if step in ("restore", "unlock")):
        return "lost", seen
    if failed:
        return "refused", f"{seen}; it continues"
    if left_open:
        left = f"{seen}; still open: {', '.join(left_open)}"
        return ("works", f"{left}, which firn's plugin for CRIU dumps") if inherited else ("undumpable", left)
    return "works", f"{seen}; it continues"


def gpu_files(pids):
    """Nodes of GPUs that these processes have open."""
    found = set()
    for pid in pids:
        try:
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for name in names:
            try:
                to = os.readlink(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue  # closed meanwhile
            if to.startswith("/dev/nvidia"):
                found.add(to)
    return sorted(found)


def by_firn(container, directory, processes, end):
    """Let firn take the owner's word."""
    shutil.rmtree(directory, ignore_errors=True)
    done = container.checkpoint_task(directory, end)
    message = done.stderr.strip()
    if not done.returncode:
        on = goes_on(container, processes, end)
        return ("works", "checkpointed; it continues") if on else ("lost", "checkpointed; it does not continue")
    on = "FIRN-GPU-LOST" not in message and goes_on(container, processes, end)
    return ("refused", f"{message[:200]}; it continues") if on else ("lost", message[:200])


def agreement(verdict, outcome, word=None):
    """Whether the audit was right. An owner's false word is no fault of the audit's."""
    works = outcome == "works"
    if word is False:
        return "works, against what is known" if works else "the owner's word was false"
    if verdict == "cannot":
        return "cautious" if works else "agrees"
    if verdict == "suspected":
        return "cautious" if works else "MISSED" if outcome == "lost" else "warned"
    return "agrees" if works else "MISSED"
