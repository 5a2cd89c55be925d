"""Agent configuration: both formats, every kind of mistake with its place, and files that are replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_harness import AgentProcess, declare
from command import cotenant
from waiting import wait_for

from cotenant.agent.config.file_watch import FileWatch
from cotenant.agent.config.files import parse_gemini
from cotenant.agent.config.schema import load
from cotenant.core.errors import InputError
from cotenant.policy.shares import MS_NS, SECOND_NS

GIB = 1 << 30


def write(folder: Path, text: str) -> str:
    path = folder / "agent.yaml"
    path.write_text(text)
    return str(path)


def test_yaml(tmp_path: Path) -> None:
    config = load(
        write(
            tmp_path,
            """
            gpus: soft
            quota: 100ms
            window: 5s
            fail: open
            discipline: weighted-round-robin
            tenants:
              - {name: a, request: 30%, limit: 60%, memory: 8GiB}
              - {name: team/b, request: 0.5, weight: 2, user: 1234}
            """,
        )
    )
    assert config.gpus == ("soft",)
    assert config.fail == "open"
    assert config.quota.quota_ns == 100 * MS_NS
    assert config.quota.min_quota_ns == 20 * MS_NS
    assert config.quota.window_ns == 5 * SECOND_NS
    assert config.quota.discipline == "weighted-round-robin"
    a, b = config.tenants
    assert (a.name, a.request, a.limit, a.memory_bytes) == ("a", 0.3, 0.6, 8 * GIB)
    assert (b.name, b.request, b.limit, b.weight) == ("team/b", 0.5, 1.0, 2.0)
    assert (a.uid, b.uid) == (None, 1234)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("qouta: 5ms", "unknown setting 'qouta'; did you mean quota?"),
        ("quota: [", "not valid YAML"),
        ("- a", "must contain settings"),
        ("fail: maybe", "'maybe' is not open or closed"),
        ("quota: 5parsecs", "unknown time unit 'parsecs'"),
        ("swap_memory: 200", "swap_memory: '200' has no unit; write 200GiB"),
        ("context_reserve: 640", "context_reserve: '640' has no unit; write 640GiB"),
        ("{quota: 5ms, min_quota: 10ms}", "min_quota <= quota"),
        ("discipline: fair", "known: request-limit"),
        ("tenants: {a: 1}", "is not a list"),
        ("tenants: [{request: 10%}]", "field tenants[0].name: is missing"),
        ("tenants: [{name: a}, {name: a}]", "declared twice"),
        ("tenants: [{name: a, request: 60%, limit: 50%}]", "over its own limit of 50%"),
        ("tenants: [{name: a, request: 120%}]", "over 100%"),
        ("tenants: [{name: a, limit: 0%}]", "over 0 %"),
        ("tenants: [{name: a, memroy: 1GiB}]", "did you mean memory?"),
        ("tenants: [{name: '../../x'}]", "not a tenant name"),
        ('tenants: [{name: "a\\n"}]', "not a tenant name"),
        ("tenants: [{name: a, user: nobody-has-this-name}]", "there is no user 'nobody-has-this-name'"),
        ("tenants: [{name: a, user: -5}]", "there is no user"),
        ("gpus: []", "list of GPU UUIDs"),
        ("gpus: soft\ntenants:\n- name: a\n  request: 120%", "agent.yaml, line 4, field tenants[0].request: '120%'"),
        ("quota: [1]", "[1] is not a quantity"),
        ("most_moving: {a: 1}", "is not a quantity"),
        ("alone_after:", "None is not a quantity"),
        ("copies: {period_bytes: [1]}", "is not a quantity"),
        ("discipline: [fair]", "unknown discipline"),
        (f"window: 1{'0' * 400}", "the number is too large"),
        ("tenants: [{name: a, priority: .inf}]", "tenants[0].priority: inf is not a finite number"),
        ("tenants: [1]", "field tenants[0]: 1 is not a set of keys and values"),
        ("tenants: [{name: a, best_effort: 1}]", "tenants[0].best_effort: 1 is not true or false"),
        ("colocation: {overlap: 200%}", "field colocation.overlap: '200%' is over 100%"),
        ("quota: 100", "field quota: '100' has no unit; write 100ms or 100s"),
        ("reconnect: '1.5'", "field reconnect: '1.5' has no unit; write 1.5ms or 1.5s"),
        ("tenants: [{name: a, mechanism: foo}]", "tenants[0].mechanism: unknown mechanism 'foo'; known: auto, time"),
        ("tenants: [{name: a, mechanism: [mps]}]", "unknown mechanism"),
        (
            "tenants: [{name: a, class: best-effort}]",
            "unknown setting 'class'; write latency_sensitive: true or best_effort: true",
        ),
        ("quota_ns: 5", "unknown setting 'quota_ns'; did you mean quota?"),
        ("quota: 5ms\nfail: open\nquota: 6ms", "agent.yaml, line 3, field quota: quota is already given on line 1"),
    ],
)
def test_mistakes_in_yaml(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load(write(tmp_path, text))
    assert words in str(caught.value)
    assert "agent.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "least_first_most_ms"),
    [
        ("gpus: soft", (20, 100, 100)),
        ("quota: 5ms", (5, 5, 100)),
        ("quota: 250ms", (20, 250, 250)),
        ("min_quota: 150ms", (150, 150, 150)),
        ("max_quota: 50ms", (20, 50, 50)),
        ("max_quota: 10ms", (10, 10, 10)),
        ("{min_quota: 100ms, max_quota: 1s}", (100, 100, 1000)),
    ],
)
def test_quotas_that_are_not_given_follow_those_that_are(
    tmp_path: Path, text: str, least_first_most_ms: tuple[int, int, int]
) -> None:
    """A file that sets one of them is not refused for the defaults of the others."""
    quota = load(write(tmp_path, text)).quota
    times = (quota.min_quota_ns, quota.quota_ns, quota.max_quota_ns)
    assert tuple(t // MS_NS for t in times) == least_first_most_ms


def test_gemini_file() -> None:
    specs = parse_gemini("2\nclient1 0.5 1.0 1073741824\nns/client2 0.25 0.5 2147483648\n")
    assert [(s.name, s.request, s.limit, s.memory_bytes) for s in specs] == [
        ("client1", 0.5, 1.0, GIB),
        ("ns/client2", 0.25, 0.5, 2 * GIB),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a 0.5 1.0 5\n", "not the number of tenants"),
        ("1\na 0.5 1 5\nb 0.5 1 5\n", "line 1: the first line announces 1 tenants, but 2 follow"),
        ("1\na 0.5 1\n", "line 2: 3 fields"),
        ("1\na x 1 5\n", "line 2, field REQUEST"),
        ("1\na 0.9 0.5 5\n", "over its own limit"),
        ("2\na 0.6 1 5\nb 0.6 1 5\n", "add up to 120%"),
        ("2\na 0.6 1 5\na 0.3 1 5\n", "line 3: the tenant a is declared twice"),
        ("1\n" + "n" * 64 + " 0.1 1 5\n", "not a tenant name"),
        ("1\na nan 1 5\n", "line 2"),
        ("1\na 0.1 1 -5\n", "negative"),
    ],
)
def test_mistakes_in_a_gemini_file(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "resource-config.txt"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load(f"gemini:{path}")
    assert words in str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load(str(tmp_path / "none.yaml"))
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        load(str(tmp_path))
    (tmp_path / "bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load(str(tmp_path / "bin"))


def test_a_change_is_seen_however_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_text("1")
    watch = FileWatch(path)

    def changed() -> bool:
        """A change is reported by the second look that finds it, once."""
        first, second, third = (watch.changed() for _ in range(3))
        assert not first
        assert not third
        return second

    assert not changed()
    path.write_text("22")  # write into the same file
    assert changed()
    (tmp_path / "new").write_text("33")  # replace the file by a rename: a new inode of the same size
    os.replace(tmp_path / "new", path)
    assert changed()
    path.unlink()
    assert not changed()  # a file that was removed does not count as changed
    for version in ("v1", "v2"):  # replace a symbolic link to the folder, as Kubernetes does
        (tmp_path / version).mkdir()
        # of another size than before, because the inode of the removed file and the tick of its time may be used again
        (tmp_path / version / "c").write_text(f"version {version}")
    (tmp_path / "data").symlink_to("v1")
    path.symlink_to("data/c")
    assert changed()
    (tmp_path / "data.new").symlink_to("v2")
    os.replace(tmp_path / "data.new", tmp_path / "data")
    assert changed()


def test_a_file_that_is_being_written_has_not_changed_yet(tmp_path: Path) -> None:
    """A file that was only truncated would be an empty configuration, and all tenants of it would be given up."""
    path = tmp_path / "agent.yaml"
    path.write_text("tenants: [{name: a}]")
    watch = FileWatch(path)
    with path.open("w") as file:
        assert not watch.changed()
        for line in ("tenants:\n", "- {name: a}\n", "- {name: b}\n"):
            file.write(line)
            file.flush()
            assert not watch.changed()
    assert watch.changed()
    assert not watch.changed()


def test_an_agent_starts_with_what_fits_and_names_the_rest(short_folder: Path) -> None:
    """Written for two GPUs, of which one is gone at the second start."""
    tenants = "tenants:\n- {name: a, request: 60%}\n- {name: b, request: 60%}\n"
    rest = "- {name: c, request: 10%}\n- {name: d, gpus: [1]}\n"
    agent = AgentProcess(short_folder, config=declare(short_folder, tenants + rest), gpus=2)
    try:
        assert [row["name"] for row in agent.call("list")["tenants"]] == ["a", "b", "c", "d"]
        assert agent.call("status")["config_fault"] == ""
        agent.close()
        agent.arguments[3] = "1"
        agent.start()
        assert [row["name"] for row in agent.call("list")["tenants"]] == ["a", "c"]
        fault = agent.call("status")["config_fault"]
        left_out = "GPU 0 (Test GPU) has 30% left to promise; b asks for 60%; the tenant is left out"
        for sentence in (f"field tenant b: {left_out}", "field tenant d: "):
            assert sentence in fault
            assert sentence in agent.said()
        with agent.client() as launcher, pytest.raises(InputError, match=r"not admitted it: GPU 0 .* has 30% left"):
            launcher.call("register", tenant={"name": "b"})
        declare(short_folder, tenants.replace("60%", "45%"))
        wait_for(lambda: agent.call("status")["config_fault"] == "", what="the mended file is in force")
        assert agent.tenant("b")["request"] == 0.45
    finally:
        agent.close()


def test_a_file_that_is_gone_is_reported_until_it_is_back(short_folder: Path) -> None:
    agent = AgentProcess(short_folder, config=declare(short_folder, "tenants: [{name: a, request: 60%}]\n"))
    file, away = Path(agent.arguments[1]), short_folder / "away.yaml"
    try:
        file.rename(away)
        fault = wait_for(lambda: agent.call("status")["config_fault"], what="the file is missed")
        assert fault == f"{file}: the file is gone; its settings stay in force until the agent ends"
        assert agent.tenant("a")["request"] == 0.6
        assert agent.said().count("the file is gone") == 1
        away.rename(file)
        wait_for(lambda: not agent.call("status")["config_fault"], what="the same file is in force again")
    finally:
        agent.close()


def test_a_refused_file_is_said_to_be_refused_as_a_whole(short_folder: Path) -> None:
    agent = AgentProcess(short_folder, config=declare(short_folder, "tenants: [{name: a, request: 60%}]\n"))
    try:
        declare(short_folder, "tenants: [{name: a, request: 50%}, {name: b, limit: 300%}]\n")
        fault = wait_for(lambda: agent.call("status")["config_fault"])
        assert fault.endswith("over 100%; the whole file was refused, and the previous settings stay in force")
        assert fault in agent.said()
        assert agent.tenant("a")["request"] == 0.6
    finally:
        agent.close()


def test_a_gpu_that_the_file_names_wrongly_is_told_of_the_file(tmp_path: Path) -> None:
    done = cotenant("agent", "--config", write(tmp_path, "gpus: [no-gpu-has-this-name]\n"), "--dir", tmp_path / "agent")
    assert done.code == 2
    assert "agent.yaml, field gpus: this machine has no GPU" in done.err


def test_settings_that_wait_for_a_restart_are_named(short_folder: Path) -> None:
    agent = AgentProcess(short_folder, config=declare(short_folder, "gpus: [0]\ntenants: [{name: a}]\n"))
    try:
        declare(short_folder, "gpus: [0, 1]\ngpu_memory: 4GiB\ntenants: [{name: a, limit: 50%}]\n")
        wait_for(lambda: agent.tenant("a")["limit"] == 0.5, what="the new file is in force")
        assert "the file's new values of these settings hold: gpus, gpu_memory" in agent.said()
    finally:
        agent.close()


def test_a_declared_tenant_without_programs_may_change_its_mechanism_at_a_restart(short_folder: Path) -> None:
    """Its programs have ended before, so nothing has to be waited for."""
    text = "tenants: [{name: a, mechanism: time, request: 30%}]\n"
    agent = AgentProcess(short_folder, config=declare(short_folder, text))
    try:
        agent.close()
        declare(short_folder, text.replace("time", "mps"))
        agent.start()
        assert agent.call("status")["config_fault"] == ""
        assert agent.tenant("a")["mechanism"] == "mps"
    finally:
        agent.close()


def test_a_fault_in_a_pipe_is_one_line(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    agent = AgentProcess(short_folder, config=declare(short_folder, "tenants: [{name: a, limit: 60%}]\n"))
    try:
        declare(short_folder, "tenants: [{name: a, limt: 60%}, {name: b, request: 70%}, {name: c, request: 50%}]\n")
        wait_for(lambda: "limt" in agent.call("status")["config_fault"])
        assert agent.call("status")["config_fault"] in cotenant("ps", "--dir", short_folder).out
    finally:
        agent.close()
