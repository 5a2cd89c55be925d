"""Packs large CUDA wheels for a machine without a network, with the machine code of one GPU architecture only.

    python bench/gpu/thin_wheels.py LIST FOLDER [ARCHITECTURE] [PART_MIB]
    python FOLDER/part-0/unpack.py SITE FOLDER/part-*        # there; afterwards PYTHONPATH=SITE

LIST (such as vllm.txt) has a wheel per line, as pip's requirements; a line `without PATTERN` leaves out the installed
files that the pattern of pathlib matches. Nothing that a wheel requires is added, so LIST is complete. The wheels are
for Linux on x86-64 and the Python version that the line `python 3.12` of LIST states.

ARCHITECTURE is a compute capability without its dot (90 for Hopper). A shared library holds its kernels in the section
.nv_fatbin, once per architecture, mostly compressed. The code of all others, and PTX, is replaced by zeros at the end
of each fat binary, so no address changes, and the zeros need no space in the archive. A kernel for which the library
has only PTX or another architecture's code is lost. The archive is one .tar.xz, cut into parts of at most PART_MIB
(40), each in a folder of its own.
"""

from __future__ import annotations

import lzma
import mmap
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

BOX_MAGIC, ELF, SASS = 0xBA55ED50, b"\x7fELF", 2
BOX = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, bytes of this header, of the payload, ..., architecture
GLIBC = range(40, 4, -1)
UNPACK = '''"""Unpacks the parts into a folder: python unpack.py SITE PART_FOLDER..."""
import lzma, pathlib, subprocess, sys, tarfile

class Joined:
    def __init__(self, paths):
        self.files = [path.open("rb") for path in paths]

    def read(self, size=-1):
        while self.files:
            if data := self.files[0].read(size):
                return data
            self.files.pop(0).close()
        return b""

found = [path for folder in sys.argv[2:] for path in pathlib.Path(folder).glob("*.xz.*")]
parts = sorted(found, key=lambda path: path.name)
total = int(parts[0].suffix[1:].partition("of")[2])
assert len(parts) == total, f"{len(parts)} of {total} parts"
with lzma.open(Joined(parts)) as plain, tarfile.open(fileobj=plain, mode="r|") as archive:
    archive.extraction_filter = getattr(tarfile, "data_filter", None)  # absent before Python 3.11.4
    archive.extractall(sys.argv[1])
subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j", "0", sys.argv[1]], check=False)
'''


def section(data: mmap.mmap, wanted: bytes) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit ELF file; (0, 0) if it has none of this name."""
    (at,), (size, count, names) = struct.unpack_from("<Q", data, 40), struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, at + i * size) for i in range(count)]
    for name, _, _, _, begin, length in rows:
        if data[rows[names][4] + name :][: len(wanted) + 1] == wanted + b"\0":
            return begin, length
    return 0, 0


def boxes(data: mmap.mmap, begin: int, size: int) -> Iterator[tuple[int, int, list[tuple[bool, int, int, int]]]]:
    """Offset and length of the content of each fat binary in a section, and its entries: whether machine code, the
    architecture, offset and length, headers included.
    """
    at = begin
    while at + BOX.size <= begin + size:
        magic, _, header, length = BOX.unpack_from(data, at)
        if magic != BOX_MAGIC:  # padding between two fat binaries
            at += 8
            continue
        content, inside, found = at + header, at + header, []
        while inside < content + length:
            kind, _, header, payload, *_, architecture = ENTRY.unpack_from(data, inside)
            found.append((kind == SASS, architecture, inside, header + payload))
            inside += header + payload
        yield content, length, found
        at = content + length


def remainder(data: mmap.mmap, found: list[tuple[bool, int, int, int]], architecture: int) -> bytes:
    """What stays of a fat binary: the code for the architecture or, if it has none, a header from which the driver sees
    that. PTX would be compiled for any GPU.
    """
    if own := [data[at : at + size] for sass, has, at, size in found if sass and has == architecture]:
        return b"".join(own)
    _, _, at, size = min(found, key=lambda entry: (not entry[0], entry[3]))
    (header,) = struct.unpack_from("<I", data, at + 4)
    return data[at : at + header].ljust(size, b"\0")


def thin(path: Path, architecture: int) -> int:
    """Remove the code of other architectures from a shared library; returns the number of bytes."""
    lost = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        if data[:4] != ELF:
            return 0
        for content, length, found in list(boxes(data, *section(data, b".nv_fatbin"))):
            kept = remainder(data, found, architecture) if found else b""
            struct.pack_into("<Q", data, content - 8, len(kept))  # the last field of BOX
            data[content : content + length] = kept.ljust(length, b"\0")
            lost += length - len(kept)
    return lost


def install(wanted: Path, site: Path) -> None:
    """Unpack the wheels of a list into a folder, without the files that it leaves out."""
    lines = [line.split() for line in wanted.read_text().splitlines() if line and not line.startswith("#")]
    version = next(words[1] for words in lines if words[0] == "python")
    patterns = [words[1] for words in lines if words[0] == "without"]
    wheels = [words[0] for words in lines if words[0] not in ("python", "without")]
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC] + ["manylinux2014_x86_64", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--only-binary=:all:"]
    command += ["--python-version", version, *(word for name in platforms for word in ("--platform", name))]
    subprocess.run([*command, "--target", str(site), *wheels], check=True)
    for pattern in patterns:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def pack(site: Path, folder: Path, part: int) -> list[Path]:
    """Write a folder's files as parts of at most `part` bytes; returns the parts."""
    with tempfile.TemporaryFile(dir=folder) as whole:
        with lzma.open(whole, "wb", preset=2) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name)
        count = -(-whole.tell() // part)
        whole.seek(0)
        parts = []
        for number in range(count):
            parts.append(folder / f"part-{number}" / f"site.tar.xz.{number:02}of{count}")
            parts[-1].parent.mkdir()
            parts[-1].write_bytes(whole.read(part))
    (folder / "part-0" / "unpack.py").write_text(UNPACK)
    return parts


def main() -> None:
    """Download, remove what is not needed, and pack."""
    wanted, folder = Path(sys.argv[1]), Path(sys.argv[2])
    architecture, part = int(sys.argv[3]) if len(sys.argv) > 3 else 90, int(sys.argv[4]) if len(sys.argv) > 4 else 40
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        install(wanted, site := Path(temporary))
        for path in sorted(site.rglob("*.so*")):
            if (lost := thin(path, architecture)) >> 20:
                print(f"{path.relative_to(site)}: {lost >> 20} of {path.stat().st_size >> 20} MiB removed", flush=True)
        parts = pack(site, folder, part << 20)
    print(f"{sum(path.stat().st_size for path in parts) / 2**20:.1f} MiB in {len(parts)} parts")


if __name__ == "__main__":
    main()
