"""The number of tokens of a stream is asked of the program, for clients that do not ask for it themselves."""

from __future__ import annotations

from pathlib import Path

from models_door import door, events, model


def test_the_number_of_tokens_is_asked_for_and_kept_from_clients_that_do_not(tmp_path: Path) -> None:
    """Events of `many` have four tokens, `strict` refuses the question, and `mute` does not answer it."""
    models = model("many", options="--each 4"), model("strict", options="--strict"), model("mute")
    with door(tmp_path, *models, memory="4GiB") as it:
        asked = {"stream": True, "max_tokens": 5}
        assert len(events(it.chat("many", **asked)[2])) == 5 + 1
        usage = events(it.chat("many", **asked, stream_options={"include_usage": True})[2])[-2]["usage"]
        assert usage == {"completion_tokens": 20}
        assert len(events(it.chat("many", **asked, stream_options={"include_usage": False})[2])) == 5 + 1
        for _ in range(2):
            assert len(events(it.chat("strict", **asked)[2])) == 5 + 1
            assert len(events(it.chat("mute", **asked)[2])) == 5 + 1
        assert it.said("strict").count("refused") == 1
        assert it.row("strict")["outcomes"] == {"ok": 2}
        refused = it.chat("strict", **asked, stream_options={"include_usage": True})
        assert (refused[0], refused[2]["error"]["message"]) == (400, "unknown field stream_options")
        told = [text for _, _, text in it.server.decisions.rows if "the time per event" in text]
        assert sorted(text.partition(":")[0] for text in told) == ["many", "mute", "strict"]
