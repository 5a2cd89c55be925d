"""Recognises files that are not the text that was to be downloaded or saved: compressed, UTF-16, a page, a pointer."""

from __future__ import annotations

import shlex
from pathlib import Path

from cotenant.core.errors import InputError

# first bytes of compressed files -> the command that unpacks them to standard output
PACKED = {b"\x1f\x8b": "gzip -dc", b"BZh": "bzip2 -dc", b"\xfd7zXZ\0": "xz -dc", b"\x28\xb5\x2f\xfd": "zstd -dc"}
# beginnings of other files that are downloaded or saved instead of a table -> what they are, and what to do
NO_TABLES = {
    b"version https://git-lfs": "is a pointer of Git LFS, not the file itself: run git lfs pull in its repository",
    b"<!DOCTYPE": "is an HTML page: download the file itself",
    b"<html": "is an HTML page: download the file itself",
    b"%PDF-": "is a PDF document",
    b"PAR1": "is Parquet: give it a name that ends in .parquet",
}
WIDE = (b"\xff\xfe", b"\xfe\xff")  # UTF-16


def check_text(path: Path) -> None:
    """Raise InputError, with the command that unpacks or converts the file, if it is compressed or UTF-16, or is not
    what was to be downloaded. Files that cannot be read pass.
    """
    try:
        with path.open("rb") as file:
            head = file.read(32)
    except OSError:
        return
    name, source = path.name, shlex.quote(path.name)
    command = next((command for magic, command in PACKED.items() if head.startswith(magic)), "")
    if command and (".tar." in name or name.endswith(".tgz")):
        tar = "tar xzf" if command.startswith("gzip") else "tar xf"
        raise InputError(f"the file is compressed; unpack it with: {tar} {source}", file=path)
    if command:
        target = path.stem if path.suffix in (".bz2", ".xz", ".zst") else f"{path.stem}-unpacked{path.suffix}"
        command = f"{command} < {source} > {shlex.quote(target)}"
        command = f"gunzip -k {source}" if path.suffix == ".gz" else command
        raise InputError(f"the file is compressed; unpack it with: {command}", file=path)
    if head.startswith(b"PK\x03\x04"):
        book = path.suffix.lower() in (".xlsx", ".ods")
        what = "a spreadsheet: save it as CSV" if book else f"compressed; unpack it with: unzip {source}"
        raise InputError(f"the file is {what}", file=path)
    if head.startswith(WIDE):
        target = shlex.quote(f"{path.stem}-utf8{path.suffix}")
        command = f"iconv -f UTF-16 -t UTF-8 < {source} > {target}"
        raise InputError(f"the file is UTF-16 text, not UTF-8; convert with: {command}", file=path)
    for magic, what in NO_TABLES.items():
        if head.lower().startswith(magic.lower()):
            raise InputError(f"the file {what}", file=path)
