#!/usr/bin/env python3
"""Checkpoint and restore of GPU containers on a real GPU machine: one command, one table, one exit code.

    python3 tests/gpu/run.py --bundle target/gpu-bundle.tar.xz --out DIR

unpacks the bundle of `cargo xtask gpu-bundle` to /opt/firn-gpu, starts a containerd of its own there, runs the cases
and removes what it set up. Without --bundle the tools in PATH are used. --no-gpu runs the cases that need no GPU (the
same steps with a busybox counter), with --runtime io.containerd.runc.v2 also against the stock shim.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback

sys.dont_write_bytecode = True  # the scripts lie in a working tree

import cases
import cdi
import clients
import hook_cases
import host as hosts
import image
import job_cases
import kills
import live_moves
import moves
import patient
import pauses
import peer
import ranks
import released
import samples
import served
import shared
import slices
import straggler
import traps


class Report:
    """Everything that comes back: run.log, cases.jsonl, summary.md, containerd.log, evidence.tar.gz."""

    def __init__(self, out):
        self.out = out
        os.makedirs(out, exist_ok=True)
        # Elsewhere until the end: what comes back from a GPU machine is few files.
        self.evidence = tempfile.mkdtemp(prefix="firn-evidence-")
        self._began = time.monotonic()
        self._log = open(f"{out}/run.log", "a", encoding="utf-8")
        self._records = []

    def log(self, text):
        """A line for the log alone."""
        self._log.write(f"{time.monotonic() - self._began:8.2f} {text}\n")
        self._log.flush()

    def show(self, text):
        """A line for the log and whoever watches."""
        self.log(text)
        print(text, flush=True)

    def add(self, record):
        """Keep a case's record."""
        with open(f"{self.out}/cases.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        if "case" in record:
            self._records.append(record)

    def failed(self):
        """Names of the cases that failed."""
        return [record["case"] for record in self._records if record["result"] == "FAILED"]

    def finish(self, machine):
        """Write and print the table."""
        measured = [
            phases(record, operation) for record in self._records for operation in ("checkpoint", "restore")
            if record.get(f"{operation}_ms")
        ]
        failures = [f"- {record['case']}: {record['error']}" for record in self._records if "error" in record]
        own = [line for record in self._records if "table" in record for line in (*record["table"], "")]
        table = [
            f"{time.strftime('%Y-%m-%d')}: {machine}", "",
            *own,
            *(["Phases as the shim measured them:", "", *measured, ""] if measured else []),
            "| case | GiB | counters | checkpoint s | restore s | iteration | checksum | GPU before | GPU after | result |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(row(record) for record in self._records),
            *(["", "Failures:", "", *failures] if failures else []),
        ]
        text = "\n".join(table)
        with open(f"{self.out}/summary.md", "w", encoding="utf-8") as file:
            file.write(text + "\n")
        with tarfile.open(f"{self.out}/evidence.tar.gz", "w:gz") as tar:
            tar.add(self.evidence, arcname="evidence")
        shutil.rmtree(self.evidence)
        print(text, flush=True)


def row(record):
    """A case's line of the table."""

    def short(uuids):
        return " ".join(uuid[:12] for uuid in uuids or []) or "-"

    steps = f"{record['iter_before']} -> {record['iter_after']}" if "iter_after" in record else "-"
    checksum = "-"
    if "checksum_restored" in record:
        checksum = f"{record['checksum_source']} = {record['checksum_restored']} at {record['checksum_of_iter']}"
    cells = [
        record["case"], f"{record.get('gib', 0):g}", record.get("counters", "-"), record.get("checkpoint_s", "-"),
        record.get("restore_s", "-"), steps, checksum, short(record.get("uuid_before")), short(record.get("uuid_after")),
        record["result"] + (f" ({record['code']})" if "code" in record else ""),
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def phases(record, operation):
    """The shim's timings of one transaction."""
    return f"- {record['case']} {operation}: " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in record[f"{operation}_ms"].items())


def unpack(bundle):
    """Unpack the archive (or copy the directory) to where its programs expect to be."""
    shutil.rmtree(hosts.INSTALL_DIR, ignore_errors=True)
    if os.path.isdir(bundle):
        shutil.copytree(bundle, hosts.INSTALL_DIR, symlinks=True)
        return
    os.makedirs(hosts.INSTALL_DIR)
    if shutil.which("xz"):
        subprocess.run(["tar", "-xJf", bundle, "-C", hosts.INSTALL_DIR], check=True)
        return
    with tarfile.open(bundle, "r:xz") as tar:
        tar.extractall(hosts.INSTALL_DIR)


def machine_facts(host, gpus):
    """What the readings depend on."""

    def first_line(*command):
        done = subprocess.run(command, env=host.env, check=False, capture_output=True, text=True, timeout=30)
        return (done.stdout + done.stderr).strip().split("\n")[0]

    def content(path):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
        except OSError:
            return None

    return {
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "disk_free_gib": shutil.disk_usage("/").free >> 30,
        "cgroup": 2 if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else 1,
        "thp": content("/sys/kernel/mm/transparent_hugepage/enabled"),
        "containerd": first_line("containerd", "--version"),
        "runc": first_line("runc", "--version"),
        "criu": first_line("criu", "--version"),
        "gpus": gpus,
    }


def write_cdi(host, gpus):
    """The CDI specs that the cases use. Returns what the machine's own CUDA programs need in their environment."""
    own = cdi.existing()
    host.log(f"CDI spec of the machine: {own}")
    if not own:
        libraries = cdi.driver_libraries(gpus[0]["driver_version"])
        host.log(f"driver libraries: {libraries}")
        host.put("/etc/cdi/nvidia.json", json.dumps(cdi.spec(gpus, libraries), indent=1))
    host.put("/etc/cdi/firn-test.json", json.dumps(cdi.spec(gpus, [], cdi.NODES_KIND), indent=1))
    return {} if cdi.known_to_loader() else {"LD_LIBRARY_PATH": cdi.library_dir()}


def play(case, setup, report, all_cases_end):
    """Run one case to its record."""
    report.show(f"{case.name}: begins")
    began = time.monotonic()
    record = {"case": case.name}
    if case.needs > len(setup.gpus):
        record["result"] = f"skipped: needs {case.needs} GPUs, the machine has {len(setup.gpus)}"
    else:
        try:
            limit = all_cases_end.left(case.seconds)
            case.play(setup, hosts.Deadline(limit), record)
            record["result"] = "ok"
        except Exception as error:  # whatever it is, the other cases are still worth the machine's time
            report.log(traceback.format_exc())
            record.update(result="FAILED", error=str(error) or repr(error))
    record["seconds"] = round(time.monotonic() - began, 1)
    report.add(record)
    report.show(f"{case.name}: {record['result']} after {record['seconds']} s" + (f": {record['error']}" if "error" in record else ""))


def known_cases(args):
    """All cases."""
    sizes = [float(size) for size in args.sizes.split(",")]
    return [
        *cases.all_cases(sizes, args.mib), *moves.all_cases(args.mib), *ranks.all_cases(), samples.case(), served.case(),
        *job_cases.all_cases(), *hook_cases.all_cases(), kills.case(args.kill_gib), kills.often_case(args.kill_rounds), *patient.all_cases(args.patient_gib, args.mib),
        *pauses.all_cases(args), *slices.all_cases(args), *live_moves.all_cases(args), *released.all_cases(), *peer.all_cases(args),
        *clients.all_cases(args), *traps.all_cases(args), *straggler.all_cases(args), *shared.all_cases(),
    ]


def listing(known):
    """A line for each case."""
    lines = [f"{'case':22}{'GPUs':>5}{'limit s':>9}  groups"]
    return lines + [f"{case.name:22}{case.needs:5}{case.seconds:9}  {' '.join(case.groups)}".rstrip() for case in known]


def chosen(args, known):
    """The cases that the arguments name."""
    if args.cases:
        names = args.cases.split(",")
        unknown = [name for name in names if not any(name == case.name or name in case.groups for case in known)]
        if unknown:
            sys.exit(f"unknown case {', '.join(unknown)}\nhint: one of {', '.join(case.name for case in known)}")
        return [case for case in known if case.name in names or set(names) & set(case.groups)]
    by_default = [case for case in known if "asked-for" not in case.groups]
    return [case for case in by_default if ("no-gpu" in case.groups) == args.no_gpu]


def arguments():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", help="archive or directory made by `cargo xtask gpu-bundle`")
    parser.add_argument("--out", default="gpu-run", help="directory for logs and records (default: gpu-run)")
    parser.add_argument("--cases", help="comma list of cases and groups (--list shows them); default: all that fit the machine")
    parser.add_argument("--list", action="store_true", help="show the cases, the GPUs that they need and their time limits, and end")
    parser.add_argument("--sizes", default="0.5,8,32", help="GiB of the size cases")
    parser.add_argument("--mib", type=int, default=1024, help="MiB of each buffer in the other cases")
    parser.add_argument("--kill-rounds", type=int, default=60, help="kills in the case `kills-anywhere`")
    parser.add_argument("--kill-gib", type=float, default=8, help="GiB of the process in the case `kills`")
    parser.add_argument("--patient-gib", type=float, default=64, help="GiB of the process in the case `patient`")
    parser.add_argument("--pause-gib", default="2,8,32", help="GiB of the containers in the cases `pause-memory` and `live-moves`")
    parser.add_argument("--pause-other-gib", default="8,56", help="GiB of the two jobs in the case `pause-other`")
    parser.add_argument("--cycles", type=int, default=200, help="pauses in the case `pause-cycles`")
    parser.add_argument("--turns", type=int, default=50, help="turns in the case `time-slices`")
    parser.add_argument("--straggler-rounds", type=int, default=20, help="checkpoints in each case `ranks-straggler-RANKS`")
    parser.add_argument("--peer", help="directory with cuda_plugin.so and cuda-checkpoint, for the cases `peer-SIZE`")
    parser.add_argument("--peer-gib", default="8,32", help="GiB of the cases `peer-SIZE` and `second-SIZE`")
    parser.add_argument("--peer-ways", help="comma list of stock, image, store, store-huge: those of the cases `peer-SIZE`")
    parser.add_argument("--peer-rounds", type=int, default=1, help="rounds of the cases `peer-SIZE`")
    parser.add_argument("--client-gib", default="0.5", help="GiB of the cases `clients`")
    parser.add_argument("--client-rounds", type=int, default=2, help="rounds of the cases `tool-SIZE`")
    parser.add_argument("--failing-gib", type=float, default=8, help="GiB of the process in the case `failing-disk`")
    parser.add_argument("--runtime", default="io.containerd.firn.v2", help="containerd runtime to test")
    parser.add_argument("--no-gpu", action="store_true", help="only the cases that need no GPU")
    parser.add_argument("--work", default="/var/lib/firn-gpu-test", help="directory on disk; it must not exist")
    parser.add_argument("--memory", default="90g", help="size of the tmpfs that holds checkpoints in flight")
    parser.add_argument("--huge", default="never", choices=["never", "always"], help="huge pages in that tmpfs")
    parser.add_argument("--store", help="directory of a store that gets the memory of all checkpoints")
    parser.add_argument("--inline-copy", choices=["criu", "firn"], help="who copies the memory of images without a store")
    parser.add_argument("--huge-pages", action="store_true",
                        help="huge pages of the host while the driver copies; not for cases that configure [checkpoint]")
    parser.add_argument("--interpose", action="store_true", help="all containers have firn's library before the driver's")
    parser.add_argument("--limit", type=float, default=480, help="seconds for all cases together")
    return parser.parse_args()


def configuration(args):
    """What firn's configuration has whatever a case adds to it, or None."""
    images = {"store": args.store, "bulk": "store" if args.store else None, "inline-copy": args.inline_copy}
    sections = {
        "images": images, "checkpoint": {"huge-pages": "while-copying" if args.huge_pages else None},
        "cuda": {"interpose": "always" if args.interpose else None},
    }
    text = ""
    for section, values in sections.items():
        lines = [f'{key} = "{value}"\n' for key, value in values.items() if value]
        text += "".join([f"[{section}]\n", *lines]) if lines else ""
    return text or None


def main():
    """Set up, run, clean up; exit status 1 when a case failed."""
    args = arguments()
    known = known_cases(args)
    if args.list:
        print("\n".join(listing(known)))
        return
    selected = chosen(args, known)
    if os.geteuid() != 0:
        sys.exit("needs root: containers, mounts and device nodes")
    report = Report(args.out)
    if args.bundle:
        _, seconds = cases.timed(unpack, args.bundle)
        report.show(f"unpacked {args.bundle} in {seconds} s")
    bin_dir = f"{hosts.INSTALL_DIR}/bin" if args.bundle else None
    environment = {"XTABLES_LIBDIR": f"{hosts.INSTALL_DIR}/lib/xtables"} if args.bundle else {}
    gpus = [] if args.no_gpu else cdi.gpus()

    memory = f"size={args.memory},huge={args.huge}"
    host = hosts.Host(args.work, bin_dir, memory, environment, report.log, configuration(args))
    facts = machine_facts(host, gpus)
    report.add({"machine": facts})
    report.show(f"machine: {json.dumps(facts)}")
    try:
        if gpus:
            host.env.update(write_cdi(host, gpus))
        host.open()
        end = hosts.Deadline(120)
        archive = f"{host.memory}/image.tar"
        image.of_directory(f"{hosts.INSTALL_DIR}/rootfs", cases.COUNTER_IMAGE, archive)
        host.import_image(archive, end)
        image.of_outline(cases.OUTLINE_IMAGE, archive)
        host.import_image(archive, end)
        pause = f"{host.memory}/pause.tar"
        image.of_directory(f"{hosts.INSTALL_DIR}/rootfs", hosts.PAUSE_IMAGE, pause, ["/bin/sh", "-c", "while :; do sleep 1000; done"])
        image.of_directory(f"{hosts.INSTALL_DIR}/rootfs", cases.COUNTER_IMAGE, archive)
        for path in (archive, pause):
            host.import_image(path, end, hosts.CRI_NAMESPACE)
            os.unlink(path)
        setup = cases.Setup(host, args.runtime, gpus, report.evidence, report.log)
        all_cases_end = hosts.Deadline(args.limit)
        for case in selected:
            play(case, setup, report, all_cases_end)
    finally:
        if os.path.exists(host.daemon_log()):
            shutil.copy(host.daemon_log(), f"{args.out}/containerd.log")
        host.close()
    names = ", ".join(f"{gpu['name']} {gpu['uuid']}" for gpu in gpus) or "no GPU"
    driver = f", driver {gpus[0]['driver_version']}" if gpus else ""
    report.finish(f"{names}{driver}, kernel {facts['kernel']}, cgroup v{facts['cgroup']}, "
                  f"checkpoints in tmpfs (huge={args.huge}), {args.runtime}")
    sys.exit(1 if report.failed() else 0)


if __name__ == "__main__":
    main()
