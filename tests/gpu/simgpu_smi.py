#!/usr/bin/env python3
"""nvidia-smi for simulated GPUs: as much of `--query-gpu` and `--query-compute-apps` as cdi.py asks for."""

import re
import subprocess
import sys


def parse(text):
    """What `simgpu smi` shows, as rows of GPUs and of processes."""
    gpus, processes = [], []
    driver = text.split()[1]
    for line in text.splitlines()[1:]:
        if gpu := re.match(r"gpu (\d+) (\S+) (.*) (\S+) minor=\d+ node=\S+ used=(\d+)MiB total=(\d+)MiB", line):
            names = ("index", "uuid", "name", "pci.bus_id", "memory.used", "memory.total")
            gpus.append({**dict(zip(names, gpu.groups())), "driver_version": driver})
        elif process := re.match(r"  pid=(\d+) .* used=([1-9]\d*)MiB", line):
            processes.append({"pid": process[1], "gpu_uuid": gpus[-1]["uuid"], "used_memory": process[2]})
    return gpus, processes


def main():
    """Print the fields that are asked for."""
    kind, fields = re.match(r"--query-([\w-]+)=(.*)", sys.argv[1]).groups()
    gpus, processes = parse(subprocess.run(["simgpu", "smi"], check=True, capture_output=True, text=True).stdout)
    for row in gpus if kind == "gpu" else processes:
        print(", ".join(row[field] for field in fields.split(",")))


if __name__ == "__main__":
    main()
