"""Write the facts of NVIDIA's headers on the driver's functions: driver-api.tsv, one line for each symbol of libcuda.

    python3 interposer/facts/make.py DIRECTORY [--check] [--write]

The headers are those of packages.txt, which pip brings to DIRECTORY. Needs pycparser and a C compiler. The table has
facts alone, no text of the headers:

symbol     as libcuda exports it
name       by which cuGetProcAddress is asked for it
since      the version of CUDA, as cuda.h counts it, from which cuGetProcAddress answers with it
stream     what the default stream is: `legacy`, or a thread's own, `ptds` or `ptsz`; `legacy` also where no stream is
           meant
arguments  one letter each, `-` for none: `i` an integer of 32 bits, `p` a pointer or an integer of 64 bits, `f` a float;
           `m` and a number of bytes: a structure by value

Exit status: 0, or 1 where packages differ in a fact, where a symbol has no version, or where --check finds that the
table is another one.
"""

import argparse
import collections
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

from pycparser import c_ast, c_parser

FACTS = pathlib.Path(__file__).resolve().parent
HEADERS = ("cuda.h", "cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")
TYPEDEFS = (
    "cudaTypedefs.h",
    "cudaGLTypedefs.h",
    "cudaEGLTypedefs.h",
    "cudaVDPAUTypedefs.h",
    "cudaProfilerTypedefs.h",
)
# Headers of other packages: what CUDA's take from them, by size.
STAND_INS = {
    "stdint.h": """
        #pragma once
        typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
        typedef unsigned long uint64_t; typedef unsigned long uintptr_t; typedef int int32_t; typedef long int64_t;
        typedef unsigned long size_t;""",
    "stdlib.h": "#include <stdint.h>",
    "stddef.h": "#include <stdint.h>",
    "GL/gl.h": "",
    "EGL/egl.h": "",
    "EGL/eglext.h": "",
    "vdpau/vdpau.h": "",
    "cudaProfiler.h": "",
    "first.h": """
        #include <cuda.h>
        typedef unsigned int GLuint; typedef unsigned int GLenum; typedef int EGLint;
        typedef void *EGLImageKHR; typedef void *EGLStreamKHR; typedef void *EGLSyncKHR;
        typedef unsigned int VdpDevice; typedef int VdpGetProcAddress(VdpDevice, unsigned int, void **);
        typedef unsigned int VdpVideoSurface; typedef unsigned int VdpOutputSurface;
        typedef enum CUoutput_mode_enum { KEY_VALUE_PAIR } CUoutput_mode;""",
}
# Every version of a function, not the newest alone.
DEFINES = ("-D__CUDA_API_VERSION_INTERNAL", "-DCUDA_ENABLE_DEPRECATED", "-D__attribute__(x)=")
INTEGERS = {"char": 1, "short": 2, "int": 4, "long": 8, "long long": 8}
NAME = re.compile(r"(?P<name>cu\w+?)(?:_v(?P<version>\d+))?(?:_(?P<stream>ptds|ptsz))?")

Row = collections.namedtuple("Row", "symbol name since stream arguments")


class Mismatch(Exception):
    """Facts that do not agree."""


class Header:
    """A header, preprocessed and parsed."""

    def __init__(self, directory, name):
        self.command = ["cc", "-nostdinc", f"-I{directory}/stand-ins", f"-I{directory}", *DEFINES]
        self.path = directory / name
        text = self._compile("-E", "-P", "-include", "first.h", str(self.path)).stdout
        self.nodes = c_parser.CParser().parse(text, filename=name).ext
        self.types = {node.name: node.type for node in self.nodes if isinstance(node, c_ast.Typedef)}

    def _compile(self, *arguments, **options):
        return subprocess.run(
            [*self.command, *arguments], check=True, stdout=subprocess.PIPE, text=True, **options
        )

    def functions(self):
        """The prototypes, by name."""
        return {
            node.name: node.type
            for node in self.nodes
            if isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl)
        }

    def pointers(self):
        """The types of pointers to functions, by the name of the type without `PFN_`."""
        return {
            name.removeprefix("PFN_"): kind.type
            for name, kind in self.types.items()
            if name.startswith("PFN_")
        }

    def arguments(self, function):
        """The letters of a function's arguments."""
        if self._class_of(function.type) != "i":
            raise Mismatch(f"{self.path.name}: a function answers something else than a number")
        letters = [self._class_of(argument.type) for argument in function.args.params] if function.args else []
        return " ".join(letter for letter in letters if letter != "void") or "-"

    def _class_of(self, kind):
        """The letter of a type, or `void`."""
        while isinstance(kind, c_ast.TypeDecl):
            kind = kind.type
        if isinstance(kind, (c_ast.PtrDecl, c_ast.ArrayDecl, c_ast.FuncDecl)):
            return "p"
        if isinstance(kind, c_ast.Enum):
            return "i"
        if isinstance(kind, (c_ast.Struct, c_ast.Union)):
            size = self._size_of(kind)
            # Of 8 bytes: in a register, if it is of integers, as CUmemLocation is. Larger ones: in memory.
            if size <= 16 and (size, kind.name) != (8, "CUmemLocation_st"):
                raise Mismatch(f"{self.path.name}: look how {kind.name}, of {size} bytes, is passed")
            return f"m{size}"
        names = [name for name in kind.names if name not in ("unsigned", "signed")]
        if names == ["void"]:
            return "void"
        if names == ["float"]:
            return "f"
        if len(names) == 1 and names[0] in self.types:
            return self._class_of(self.types[names[0]])
        size = INTEGERS[" ".join(name for name in names if name != "int") or "int"]
        return "p" if size == 8 else "i"

    def _size_of(self, kind):
        """The bytes of a structure, by the compiler."""
        word = "struct" if isinstance(kind, c_ast.Struct) else "union"
        source = f"#include <first.h>\n#include <{self.path.name}>\nchar size[sizeof({word} {kind.name})];\n"
        with tempfile.NamedTemporaryFile(suffix=".o") as made:
            self._compile("-x", "c", "-c", "-fno-common", "-o", made.name, "-", input=source)
            symbols = subprocess.run(
                ["nm", "--print-size", made.name], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
        return int(symbols.split()[1], 16)


def unpack(wheel, directory):
    """Unpacks the headers of a package."""
    with zipfile.ZipFile(wheel) as package:
        for entry in package.namelist():
            if pathlib.PurePath(entry).parent.name == "include":
                (directory / pathlib.PurePath(entry).name).write_bytes(package.read(entry))
    for name, text in STAND_INS.items():
        path = directory / "stand-ins" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def rows_of(wheel):
    """The rows that a package has, by symbol.

    A type of a pointer to a function has the version of CUDA in its name, a symbol counts 2, 3 and on: both in the same
    order, which the arguments confirm.
    """
    functions, pointers = (collections.defaultdict(set) for _ in range(2))
    with tempfile.TemporaryDirectory() as directory:
        unpack(wheel, pathlib.Path(directory))
        for header in (Header(pathlib.Path(directory), name) for name in HEADERS):
            for symbol, function in header.functions().items():
                parts = NAME.fullmatch(symbol)
                key = parts["name"], parts["stream"] or "legacy"
                functions[key].add((int(parts["version"] or 1), symbol, header.arguments(function)))
        for header in (Header(pathlib.Path(directory), name) for name in TYPEDEFS):
            for name, function in header.pointers().items():
                parts = NAME.fullmatch(name)
                key = parts["name"], parts["stream"] or "legacy"
                pointers[key].add((int(parts["version"]), header.arguments(function)))
    rows = {}
    for key in functions.keys() | pointers.keys():
        name, stream = key
        versions = sorted(pointers[key])
        # The functions of the profiler are declared in a package of their own.
        symbols = sorted(functions[key]) or [(1, name, arguments) for _, arguments in versions]
        if [arguments for _, _, arguments in symbols] != [arguments for _, arguments in versions]:
            raise Mismatch(f"{wheel}: {name} {stream}: {symbols} in headers, {versions} in their types")
        for (_, symbol, arguments), (since, _) in zip(symbols, versions):
            rows[symbol] = Row(symbol, name, since, stream, arguments)
    return rows


def table(wheels):
    """The table of all packages as text."""
    rows = {}
    for wheel in wheels:
        for symbol, row in rows_of(wheel).items():
            if rows.setdefault(symbol, row) != row:
                raise Mismatch(f"{wheel}: {row}, before {rows[symbol]}")
    lines = ["\t".join(Row._fields)] + ["\t".join(map(str, rows[symbol])) for symbol in sorted(rows)]
    return "\n".join(lines) + "\n"


def fetch(directory):
    """Downloads the packages that are not there, and returns the files of all, oldest CUDA first."""
    files = []
    for package in (FACTS / "packages.txt").read_text(encoding="utf-8").split():
        of_package = directory / package
        of_package.mkdir(parents=True, exist_ok=True)
        if not list(of_package.glob("*.whl")):
            download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(of_package), package]
            subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *download], check=True)
        files.extend(of_package.glob("*.whl"))
    return files


def main():
    """Makes the table, and prints it, writes it or compares it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY", type=pathlib.Path)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare it with driver-api.tsv")
    what.add_argument("--write", action="store_true", help="write it there")
    options = parser.parse_args()
    try:
        made = table(fetch(options.directory))
    except Mismatch as mismatch:
        sys.exit(f"error: {mismatch}")
    path = FACTS / "driver-api.tsv"
    if options.write:
        path.write_text(made, encoding="utf-8")
    elif not options.check:
        sys.stdout.write(made)
    elif path.read_text(encoding="utf-8") != made:
        sys.exit(f"error: {path} is not the table of these packages\nhint: make.py --write, and look at the change")


if __name__ == "__main__":
    main()
