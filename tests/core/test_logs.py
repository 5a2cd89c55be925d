"""Log lines: text or JSON, from a level on, the same in processes that a command starts."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cotenant.core.errors import InputError
from cotenant.core.logs import FORMAT_VARIABLE, LEVEL_VARIABLE, configure, configure_short

LOG = logging.getLogger("cotenant.some.part")


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (FORMAT_VARIABLE, LEVEL_VARIABLE):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the test sets later
    root = logging.getLogger("cotenant")
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_has_time_level_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    configure()
    LOG.debug("not shown")
    LOG.warning("tenant %s is over its timeout", "a")
    line = capsys.readouterr().err
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z warning some\.part: tenant a is over its timeout\n", line
    )


def test_a_json_line_holds_the_same_and_an_exception(capsys: pytest.CaptureFixture[str]) -> None:
    configure("json", "debug")
    LOG.debug("two\nlines")
    try:
        raise KeyError("x")
    except KeyError:
        LOG.exception("failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("debug", "cotenant.some.part", "two\nlines")
    assert second["exception"].endswith("KeyError: 'x'")


def test_a_command_that_ends_soon_prints_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    configure_short()
    LOG.info("x is parked")
    assert capsys.readouterr().err == "cotenant: x is parked\n"


@pytest.mark.parametrize(("form", "level", "field"), [("xml", None, "--log-format"), (None, "loud", "--log-level")])
def test_what_is_no_format_or_level_is_refused(form: str | None, level: str | None, field: str) -> None:
    with pytest.raises(InputError) as wrong:
        configure(form, level)
    assert wrong.value.field == field


def test_a_process_that_is_started_logs_alike() -> None:
    configure("json", "error")
    program = (
        "import logging; from cotenant.core.logs import configure; configure();"
        "log = logging.getLogger('cotenant.x'); log.info('no'); log.error('yes')"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True, check=True)
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["yes"]


def test_a_full_disk_does_not_end_what_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(28, "No space left on device")
            return super().write(text)

    disk = Disk()
    monkeypatch.setattr(sys, "stderr", disk)
    configure()
    LOG.error("lost")
    disk.full = False
    LOG.error("kept")
    assert "kept" in disk.getvalue()
    assert "lost" not in disk.getvalue()
