"""Fork, exec, launches behind the shim's back, and a peer that does not keep to the protocol."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from fake_agent import FakeAgent
from shim_tenants import Tenants
from waiting import wait_for

from cotenant.abi.protocol import MessageType
from cotenant.abi.tenant_page import SlotFlag

Agents = Callable[..., FakeAgent]


def test_fork_of_an_initialised_process(tenants: Tenants, agent: Agents) -> None:
    """The child neither hangs nor speaks on its parent's connection; the parent goes on."""
    with agent(turn_ns=50_000_000) as broker:
        assert tenants.output(tenants.client_run(broker, "v2", "fork")).strip() == "child 7"
        assert broker.clients[0].slot().launches == 51
        assert len(broker.clients[0].of(MessageType.HELLO)) == 1


def test_forked_and_execed_tenants_are_tenants(tenants: Tenants, agent: Agents) -> None:
    """A launcher script that forks and execs: the program at the end has its own connection, and only that one."""
    with agent() as broker:
        command = ["/bin/sh", "-c", f"( exec {tenants.client} v2 launches 7 ) && exec {tenants.client} v2 launches 8"]
        assert tenants.output(tenants.start(broker, command)).count("launches") == 2
        assert [client.slot().launches for client in broker.clients] == [7, 8]


def test_python_multiprocessing_fork_before_cuda(tenants: Tenants, agent: Agents) -> None:
    """Forked before the first CUDA call, as data loaders and servers do: parent and child both work."""
    script = (
        "import os\nfrom cuda_calls import *\n"
        "pid = os.fork()\n"
        "kernel = function(start(), b'busy')\n"
        "for _ in range(5): launch(kernel)\n"
        "cu('cuCtxSynchronize')\n"
        "assert pid == 0 or os.waitpid(pid, 0)[1] == 0\n"
    )
    with agent(flags=SlotFlag.CONTENDED) as broker:  # the parent must not hold its turn while it waits for the child
        tenants.output(tenants.python(broker, script))
        assert sorted(client.slot().launches for client in broker.clients) == [5, 5]


def test_use_of_the_gpu_without_a_launch_is_reported(tenants: Tenants, agent: Agents) -> None:
    """Launches behind the shim's back are seen by their effect (nvshare#11: silence when nothing is intercepted)."""
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "bypass", str(tenants.driver), "600")
        assert process.stderr is not None
        assert "no launch has passed the shim" in process.stderr.readline()
        wait_for(lambda: [m["code"] for m in broker.clients[0].of(MessageType.WARNING)] == [1])


def test_program_that_launches_is_not_accused(tenants: Tenants, agent: Agents) -> None:
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "rate", "1.5", "10")
        _, err = process.communicate(timeout=60)
        assert err == ""
        assert broker.clients[0].of(MessageType.WARNING) == []


def bad_peer(path: Path, reply: bytes) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(8)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.recv(256)
            fd = os.memfd_create("page")
            os.ftruncate(fd, 8192)
            socket.send_fds(connection, [reply], [fd])
            os.close(fd)

    threading.Thread(target=serve, daemon=True).start()
    return listener


def test_peer_that_breaks_the_protocol_is_no_agent(tenants: Tenants, agent: Agents, tmp_path: Path) -> None:
    """Short, with a wrong magic, with a wrong version, with a page that is none: never a crash, always 802."""
    head = struct.Struct("=IHHQIIQ")
    good = head.pack(0x434F5445, 1, MessageType.HELLO_REPLY, 1, 0, 0xFFFFFFFF, 0)
    replies = [
        b"short",
        head.pack(1, 1, MessageType.HELLO_REPLY, 1, 0, 0, 0).ljust(256, b"\0"),
        head.pack(0x434F5445, 9, MessageType.HELLO_REPLY, 1, 0, 0, 0).ljust(256, b"\0"),
        good.ljust(256, b"\0"),
        good.ljust(256, b"\0") + b"too long",
    ]
    script = "from cuda_calls import *\nprint(raw('cuInit', 0))"
    with agent() as broker:
        started = []
        for number, reply in enumerate(replies):
            path = tmp_path / f"bad{number}.sock"
            listener = bad_peer(path, reply)
            started.append(
                (
                    listener,
                    tenants.start(
                        broker,
                        [sys.executable, "-c", script],
                        COTENANT_SOCKET=str(path),
                        PYTHONPATH=str(Path(__file__).parent),
                    ),
                )
            )
        for listener, process in started:
            out, err = process.communicate(timeout=60)
            listener.close()
            assert out.strip() == "802", err
            assert "protocol version 1" in err


def test_agent_that_talks_nonsense_is_left_and_found_again(tenants: Tenants, agent: Agents) -> None:
    """A message of another length ends the connection; the tenant waits, connects anew and goes on."""
    with agent() as broker:
        process = tenants.client_run(broker, "v2", "rate", "600", "10")
        wait_for(lambda: broker.clients and broker.clients[0].slot().launches > 0)
        with broker.lock:
            broker.clients[0].connection.send(b"nonsense")
        assert process.stderr is not None
        said = next(line for line in process.stderr if "the agent has ended" not in line)
        assert "the agent has returned" in said
        assert len(broker.clients) == 2
        launches = broker.clients[1].slot().launches
        wait_for(lambda: broker.clients[1].slot().launches > launches, what="it goes on")


def test_a_program_that_closes_all_its_files_goes_on(tenants: Tenants, agent: Callable[..., FakeAgent]) -> None:
    """Everything from 3 up is closed, the shim's socket with it, and the numbers are used again: no file of the program
    is touched, and launches pass once the agent is found again."""
    script = (
        "from cuda_calls import *\nimport os, time\nmodule = start(); kernel = function(module, b'busy')\n"
        "launch(kernel); cu('cuCtxSynchronize')\n"
        "files = [int(fd) for fd in os.listdir('/proc/self/fd')]; assert all(not 3 < fd < 600 for fd in files), files\n"
        "os.closerange(3, 4096); own = [os.open('/dev/null', os.O_RDONLY) for _ in range(40)]\n"
        "time.sleep(2.5)\n"
        "for _ in range(20): launch(kernel)\n"
        "cu('cuCtxSynchronize'); [os.fstat(fd) for fd in own]; print('went on')\n"
    )
    with agent() as broker:
        assert tenants.output(tenants.python(broker, script)).split() == ["went", "on"]


CANCELLED = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static void *kernel, *context;
typedef unsigned n;
static int (*launch)(void *, n, n, n, n, n, n, n, void *, void *, void *);
static int (*set_current)(void *);
static void *endless(void *unused)
{
    set_current(context);
    for (;;) {
        launch(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0);
        pthread_testcancel();
    }
}
int main(void)
{
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *module;
    ((int (*)(unsigned))dlsym(cuda, "cuInit"))(0);
    ((int (*)(void **, int))dlsym(cuda, "cuDevicePrimaryCtxRetain"))(&context, 0);
    set_current = (int (*)(void *))dlsym(cuda, "cuCtxSetCurrent");
    set_current(context);
    ((int (*)(void **, const void *))dlsym(cuda, "cuModuleLoadData"))(&module, "cotenant-soft-module\nbusy 2000000\n");
    ((int (*)(void **, void *, const char *))dlsym(cuda, "cuModuleGetFunction"))(&kernel, module, "busy");
    launch = dlsym(cuda, "cuLaunchKernel");
    for (int i = 0; i < 12; i++) {
        pthread_t thread;
        pthread_create(&thread, 0, endless, 0);
        usleep(20000 + i * 9000);
        pthread_cancel(thread);
        pthread_join(thread, 0);
    }
    puts(launch(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) ? "failed" : "went on");
    fflush(stdout);
    _exit(0);
}
"""


def test_a_thread_that_is_cancelled_while_it_waits_leaves_no_lock_behind(
    tenants: Tenants, agent: Callable[..., FakeAgent], tmp_path: Path
) -> None:
    """Threads cancelled inside launches, most of them while another tenant has the turn: the others launch on."""
    source, program = tmp_path / "cancelled.c", tmp_path / "cancelled"
    source.write_text(CANCELLED)
    subprocess.run(["cc", "-w", str(source), "-o", str(program), "-ldl", "-lpthread"], check=True)
    with agent(turn_ns=30_000_000) as broker:
        other = tenants.client_run(broker, "v2", "rate", "4", "0", CLIENT_KERNEL_NS="1600000")
        assert tenants.output(tenants.start(broker, [str(program)])).split() == ["went", "on"]
        tenants.output(other)
