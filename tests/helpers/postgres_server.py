"""A PostgreSQL server for one test: it uses the programs of this machine, a folder in /tmp, and loopback or a given
address."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from waiting import wait_for

ROOM = Path("/usr/lib/postgresql")
USER = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


class PostgresServer:
    """`url`: URL of the server. `prefix`: a command put in front of the server, such as one that enters a namespace.
    `primary`: the server of which this one is a standby."""

    def __init__(
        self, address: str = "127.0.0.1", prefix: tuple[str, ...] = (), primary: PostgresServer | None = None
    ) -> None:
        found = sorted(ROOM.glob("*/bin/postgres"), key=lambda p: int(p.parts[-3]))
        if not found or os.geteuid() != 0:
            pytest.skip("a PostgreSQL server needs its programs and, to change to its user, root")
        pytest.importorskip("psycopg", reason="cotenant[postgres] is not installed")
        self.programs, self.address, self.prefix = found[-1].parent, address, prefix
        # Use a folder outside the test's: whenever another run of the test starts, pytest removes the rights of other
        # users there.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="cotenant-pg-"))
        self.data = folder / "data"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        shutil.chown(folder, "postgres", "postgres")
        if primary is None:
            self._as_postgres("initdb", "-D", str(self.data), "-A", "trust", "-U", "fleet", "--no-sync")
            with (self.data / "pg_hba.conf").open("a") as file:
                file.writelines(f"host {what} all 10.77.0.0/16 trust\n" for what in ("all", "replication"))
        else:
            source = f"host={primary.address} port={primary.port} user=fleet application_name=standby"
            self._as_postgres("pg_basebackup", "-D", str(self.data), "-R", "-c", "fast", "--no-sync", "-d", source)
        self.url = f"postgresql://fleet@{address}:{self.port}/postgres"
        self.start()

    def _as_postgres(self, program: str, *words: str) -> None:
        subprocess.run([*self.prefix, *USER, self.programs / program, *words], check=True, capture_output=True,
                       cwd=self.folder)  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log = (self.folder / "log").open("ab")
        settings = (f"listen_addresses={self.address}", f"unix_socket_directories={self.folder}")
        self.process = subprocess.Popen(
            [*self.prefix, *USER, self.programs / "postgres", "-D", self.data, "-p", str(self.port),
             *(word for setting in settings for word in ("-c", setting))],
            stdout=log, stderr=log, cwd=self.folder,
        )  # fmt: skip
        deadline = time.monotonic() + 60
        ready = [str(self.programs / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode != 0:
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            assert self.process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)

    def ask(self, query: str, database: str = "postgres") -> str:
        """Result of a query that runs on the server's own machine."""
        words = (self.programs / "psql", "-h", self.folder, "-p", str(self.port), "-U", "fleet", "-d", database, "-Atc")
        return subprocess.run([*words, query], check=True, capture_output=True, text=True).stdout.strip()

    def follow(self, standby: PostgresServer) -> None:
        """From now on, confirm commits only when the standby has them."""
        self.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
        self.ask("SELECT pg_reload_conf()")
        synced = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_for(lambda: self.ask(synced) == "1", 60.0, "the standby follows")

    def promote(self) -> None:
        """Promote a standby to primary, as a fail-over tool does."""
        self.ask("SELECT pg_promote()")

    def database(self, name: str) -> str:
        """Create a database; returns its URL."""
        subprocess.run([self.programs / "createdb", "-h", self.folder, "-p", str(self.port), "-U", "fleet", name],
                       check=True, capture_output=True)  # fmt: skip
        return self.url.removesuffix("/postgres") + f"/{name}"

    def stop(self, number: int = signal.SIGINT) -> None:
        """Stop the server; SIGQUIT stops it as a power failure would."""
        self.process.send_signal(number)
        self.process.wait(60)

    def end(self) -> None:
        """Stop it for good."""
        self.stop()
        shutil.rmtree(self.folder)
