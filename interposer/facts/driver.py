"""Compare driver-api.tsv with the driver of this machine.

    python3 interposer/facts/driver.py [--library libcuda.so.1]

For each row that the driver is not too old for: libcuda exports the symbol, and cuGetProcAddress, asked for the name
with the row's version of CUDA and its default stream, returns that symbol. Each function that libcuda exports has a
row. What is known to be otherwise is in exceptions.tsv, with why. Needs nm, and a GPU for cuInit.

Exit status: 0, or 1 with a line for each difference.
"""

import argparse
import csv
import ctypes
import pathlib
import re
import subprocess
import sys

FACTS = pathlib.Path(__file__).resolve().parent
# CU_GET_PROC_ADDRESS_LEGACY_STREAM and CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, by the table's `stream`.
FLAGS = {"legacy": 1, "ptds": 2, "ptsz": 2}


class Driver:
    """libcuda, initialised."""

    def __init__(self, name):
        self.library = ctypes.CDLL(name)
        self.call("cuInit", 0)
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.version = version.value

    def call(self, name, *arguments):
        """Calls a function that has to succeed."""
        if result := getattr(self.library, name)(*arguments):
            sys.exit(f"error: {name} returns {result}")

    def exported(self):
        """The names of its functions."""
        with open("/proc/self/maps", encoding="utf-8") as maps:
            path = next(line.split()[-1] for line in maps if "/libcuda.so" in line)
        listed = subprocess.run(["nm", "-D", "--defined-only", path], check=True, stdout=subprocess.PIPE, text=True)
        return set(re.findall(r" [TW] (cu[A-Z]\w*)", listed.stdout))

    def address(self, symbol):
        """The address of an exported function."""
        return ctypes.cast(getattr(self.library, symbol), ctypes.c_void_p).value

    def resolve(self, name, since, flags):
        """What cuGetProcAddress returns, or None."""
        pointer, status = ctypes.c_void_p(), ctypes.c_int()
        arguments = ctypes.byref(pointer), since, ctypes.c_uint64(flags), ctypes.byref(status)
        result = self.library.cuGetProcAddress_v2(name.encode(), *arguments)
        return None if result else pointer.value


def differences(driver, rows, known):
    """A line for each difference that is not known."""
    exported = driver.exported()
    for row in rows:
        symbol, since = row["symbol"], int(row["since"])
        if since > driver.version or symbol in known:
            continue
        if symbol not in exported:
            yield f"{symbol}: not exported"
            continue
        found = driver.resolve(row["name"], since, FLAGS[row["stream"]])
        if found != driver.address(symbol):
            others = [other for other in exported if driver.address(other) == found]
            yield f"{symbol}: for {since}, {row['stream']}: {', '.join(others) or found}"
    for symbol in sorted(exported - {row["symbol"] for row in rows} - known):
        yield f"{symbol}: no row"


def main():
    """Prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", default="libcuda.so.1")
    driver = Driver(parser.parse_args().library)
    with open(FACTS / "driver-api.tsv", encoding="utf-8") as table:
        rows = list(csv.DictReader(table, delimiter="\t"))
    exceptions = (FACTS / "exceptions.tsv").read_text(encoding="utf-8")
    known = {line.split("\t")[0] for line in exceptions.splitlines()}
    lines = list(differences(driver, rows, known))
    print("\n".join(lines + [f"CUDA {driver.version}, {len(rows)} rows, {len(lines)} differences"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
