"""CDI spec of the machine's NVIDIA GPUs: device nodes, and the driver libraries that a CUDA program opens.

Machines without NVIDIA's container toolkit get their spec from here. `python3 cdi.py` prints it.
"""

import glob
import json
import os
import re
import shutil
import stat
import subprocess

KIND = "nvidia.com/gpu"
# Device nodes only, for containers that already see the machine's libraries.
NODES_KIND = "firn.test/gpu"

# What the driver API needs, and what it loads to compile PTX. Present in part, depending on the driver's version.
LIBRARIES = ("libcuda", "libnvidia-ml", "libnvidia-ptxjitcompiler", "libnvidia-nvvm", "libnvidia-nvvm70", "libnvidia-gpucomp")
REQUIRED = ("libcuda", "libnvidia-ml")
COMMON_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
CONTAINER_LIBRARIES = "/usr/lib/x86_64-linux-gnu"
DRIVER_DIRS = ("/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib64")


class NoDriver(Exception):
    """The machine lacks a part of the driver."""


def smi():
    """Path of nvidia-smi, or None."""
    found = shutil.which("nvidia-smi")
    if found:
        return found
    return next((path for path in glob.glob("/usr/local/nvidia/bin/nvidia-smi") if os.access(path, os.X_OK)), None)


def query(what, fields):
    """Rows of `nvidia-smi --query-WHAT=...` as dicts."""
    program = smi()
    if not program:
        raise NoDriver("no nvidia-smi in PATH nor in /usr/local/nvidia/bin")
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip())
    return [dict(zip(fields, row)) for row in rows]


def gpus():
    """The GPUs in nvidia-smi's order, each with the minor number of its node."""
    found = query("gpu", ["index", "uuid", "name", "memory.total", "driver_version", "pci.bus_id"])
    for gpu in found:
        gpu["minor"] = _minor(gpu["pci.bus_id"], int(gpu["index"]))
    return found


def _minor(bus_id, index):
    """The minor number that the driver's /proc shows; the index where there is no such file."""
    domain, rest = bus_id.lower().split(":", 1)
    path = f"/proc/driver/nvidia/gpus/{domain[-4:]}:{rest}/information"
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            found = re.search(r"Device Minor:\s*(\d+)", file.read())
    except OSError:
        found = None
    return int(found[1]) if found else index


def spec(devices, libraries, kind=KIND, dev="/dev"):
    """The CDI spec for `devices` (from `gpus`), with each of `libraries` mounted."""
    nodes = {gpu["uuid"]: _node(f"{dev}/nvidia{gpu['minor']}") for gpu in devices}
    entries = []
    for gpu in devices:
        edits = {"deviceNodes": [nodes[gpu["uuid"]]]}
        entries += [{"name": gpu["index"], "containerEdits": edits}, {"name": gpu["uuid"], "containerEdits": edits}]
    entries.append({"name": "all", "containerEdits": {"deviceNodes": list(nodes.values())}})
    common = [_node(f"{dev}/{name}") for name in COMMON_NODES if os.path.exists(f"{dev}/{name}")]
    mounts = [
        {"hostPath": source, "containerPath": f"{CONTAINER_LIBRARIES}/{name}", "options": ["ro", "nosuid", "nodev", "bind"]}
        for name, source in libraries
    ]
    edits = {"deviceNodes": common, "env": ["NVIDIA_VISIBLE_DEVICES=void"]}
    if mounts:
        edits["mounts"] = mounts
    return {"cdiVersion": "0.5.0", "kind": kind, "devices": entries, "containerEdits": edits}


def _node(path):
    try:
        found = os.stat(path)
    except OSError as error:
        raise NoDriver(f"no device node {path}: {error.strerror}") from error
    # Simulated GPUs are block devices.
    kind = "c" if stat.S_ISCHR(found.st_mode) else "b" if stat.S_ISBLK(found.st_mode) else None
    if not kind:
        raise NoDriver(f"{path} is no device node")
    return {
        "path": "/dev/" + os.path.basename(path),
        "type": kind,
        "major": os.major(found.st_rdev),
        "minor": os.minor(found.st_rdev),
        "fileMode": 0o666,
        "permissions": "rwm",
    }


def existing(directories=("/etc/cdi", "/var/run/cdi")):
    """The machine's own spec of its GPUs, if it has one: a second one would make every name ambiguous."""
    for directory in directories:
        for path in sorted(glob.glob(f"{directory}/*")):
            if not path.endswith((".json", ".yaml")):
                continue
            with open(path, encoding="utf-8") as file:
                if re.search(rf"""kind["']?\s*:\s*["']?{re.escape(KIND)}(?![\w-])""", file.read()):
                    return path
    return None


def driver_libraries(version, places=None):
    """(name in the container, file of the machine) for each driver library, under its full and its short name.

    Files of the running driver's version come first: machines with a CUDA toolkit may hold another libcuda too.
    """
    places = sorted(places or _library_places(), key=lambda path: not os.path.realpath(path).endswith(f".so.{version}"))
    found = {}
    for stem in LIBRARIES:
        named = [path for path in places if _is_named(path, stem)]
        if not named and stem in REQUIRED:
            raise NoDriver(f"no {stem}.so.* known to ldconfig nor in {', '.join(DRIVER_DIRS)}")
        for path in named:
            source = os.path.realpath(path)
            found.setdefault(os.path.basename(path), source)
            found.setdefault(os.path.basename(source), source)
    return sorted(found.items())


def library_dir():
    """Where the machine's libcuda.so.1 is."""
    return next(os.path.dirname(path) for path in _library_places() if _is_named(path, "libcuda"))


def known_to_loader():
    """Whether programs of the machine find libcuda without LD_LIBRARY_PATH."""
    return any(_is_named(path, "libcuda") for path in _loader_cache())


def _is_named(path, stem):
    return re.fullmatch(re.escape(stem) + r"\.so\.\d[\d.]*", os.path.basename(path)) is not None


def _loader_cache():
    program = shutil.which("ldconfig") or "/sbin/ldconfig"
    text = subprocess.run([program, "-p"], check=False, capture_output=True, text=True, timeout=60).stdout
    found = re.findall(r"^\s+\S+ \(([^)]*)\) => (\S+)$", text, re.MULTILINE)
    return [path for flags, path in found if "x86-64" in flags and os.path.exists(path)]


def _library_places():
    """Paths of libraries, those that the loader prefers first."""
    places = _loader_cache()
    for directory in DRIVER_DIRS:
        places += sorted(glob.glob(f"{directory}/lib*.so.*"))
    return places


def main():
    """Print the spec."""
    devices = gpus()
    print(json.dumps(spec(devices, driver_libraries(devices[0]["driver_version"])), indent=2))


if __name__ == "__main__":
    main()
