"""What the `octavo` command shows, and what it does not wait for."""

import json
import shlex
import subprocess
import sys
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import pytest

from deploy.process import StartFailed
from octavo.__main__ import main
from octavo.commands.console import CommandFailed, as_curl, readable
from octavo.commands.key import draw_key
from octavo.commands.model import models_dir
from octavo.commands.problems import explained, speaking_to
from octavo.errors import QueueFull, Unauthenticated, UnknownModel
from octavo.transport import FLEET_KEY
from tests.support.certificates import Authority


@pytest.fixture(autouse=True)
def no_proxy_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)


def test_a_log_event_is_shown_as_time_name_and_fields() -> None:
    line = {
        "time": "2026-01-02T03:04:05.678+00:00",
        "level": "info",
        "service": "worker",
        "event": "serving",
        "port": 7,
    }

    time, *rest = readable(json.dumps(line)).plain.split()

    assert len(time) == len("03:04:05")
    assert rest == ["serving", "port=7"]


def test_a_traceback_is_shown_below_its_event() -> None:
    line = {"time": "2026-01-02T03:04:05.678+00:00", "level": "error", "event": "step_failed", "traceback": "a\nb"}

    assert readable(json.dumps(line)).plain.splitlines()[1:] == ["a", "b"]


@pytest.mark.parametrize("line", ["Ready to accept connections", "{not json", '{"a": 1}', "[1]", ""])
def test_any_other_line_is_shown_as_it_is(line: str) -> None:
    assert readable(line).plain == line


def test_expected_errors_are_explained_and_bugs_are_not() -> None:
    assert explained(QueueFull("queue: 9 wait, at most 8")) == "queue: 9 wait, at most 8"
    assert explained(FileNotFoundError("no redis-server")) == "no redis-server"
    assert explained(KeyError("x")) is None


def test_who_shows_no_key_is_told_where_one_is_taken_from() -> None:
    assert explained(Unauthenticated("no key")) == "no key; a key is taken from OCTAVO_API_KEY"
    assert explained(Unauthenticated(f"{FLEET_KEY}: none")) == "octavo-fleet-key: none", "that one is another"


def test_who_names_no_model_of_several_is_told_how_to_name_one() -> None:
    unnamed = UnknownModel("model: none named; there are: a, b")
    assert explained(unnamed) == "model: none named; there are: a, b; --model says which"


def test_a_drawn_key_and_the_line_for_the_tenants_file_belong_together(capsys: pytest.CaptureFixture[str]) -> None:
    draw_key()
    drawn, told = capsys.readouterr()
    key = drawn.removesuffix("\n")
    assert f'api_key_sha256 = ["{sha256(key.encode()).hexdigest()}"]' in told
    draw_key()
    assert capsys.readouterr().out != drawn


def test_the_last_words_of_a_process_are_made_readable() -> None:
    died = StartFailed("worker-0 exited with 1", ['{"event": "cannot_serve", "reason": "no room"}', "bye"])

    assert explained(died) == "worker-0 exited with 1\n    --:--:-- cannot_serve reason=no room\n    bye"


def test_a_refused_connection_names_the_address_and_the_way_out() -> None:
    with pytest.raises(Exception, match="nothing answers at host:1; `octavo up` starts it"), speaking_to("host:1"):
        raise ConnectionRefusedError("[Errno 111] connect")


def test_what_keeps_a_fleet_from_its_start_is_told_before_a_model_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in Authority(tmp_path).variables("own").items():
        monkeypatch.setenv(variable, value)
    monkeypatch.delenv("OCTAVO_TLS_CA")
    monkeypatch.setenv("OCTAVO_MODELS_DIR", str(tmp_path / "models"))
    monkeypatch.setattr(sys, "argv", ["octavo", "up", "--port", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("octavo: OCTAVO_TLS_CA: unset, OCTAVO_TLS_CERT wants it beside itself: ")
    assert not (tmp_path / "models").exists()


def test_a_user_without_a_home_is_told_which_variable_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_MODELS_DIR", "~nobody-of-this-name/models")
    with pytest.raises(CommandFailed, match=r"^OCTAVO_MODELS_DIR: wanted a folder without ~ "):
        models_dir()


def test_an_address_that_is_none_is_shown_before_anybody_is_called() -> None:
    with pytest.raises(CommandFailed, match=r"--address: wanted host:port .* got 'gateway'"), speaking_to("gateway"):
        raise AssertionError("nobody was to be called")


def test_a_reader_of_the_output_that_left_is_no_gateway_that_is_away() -> None:
    with pytest.raises(BrokenPipeError), speaking_to("host:1"):
        raise BrokenPipeError("[Errno 32] Broken pipe")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "--version"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert (ended.value.code, capsys.readouterr().out) == (0, f"octavo {version('octavo')}\n")


def test_what_is_pasted_into_a_shell_shows_the_users_key_where_one_is_wanted() -> None:
    open_to_all, to_tenants = (as_curl("http://host:1", "m", with_key=wanted) for wanted in (False, True))
    assert "authorization" not in open_to_all
    assert '-H "authorization: Bearer $OCTAVO_API_KEY"' in to_tenants
    words = shlex.split(open_to_all)
    assert words[:2] == ["curl", "http://host:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "m"


def test_what_is_pasted_into_a_shell_passes_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shlex.split(as_curl("http://host:1", "m", with_key=False))[1] == "http://host:1/v1/chat/completions"
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    assert shlex.split(as_curl("http://host:1", "m", with_key=False))[1:3] == ["--noproxy", "*"]


def test_what_is_pasted_into_a_shell_names_whom_to_believe_over_tls(tmp_path: Path) -> None:
    file = tmp_path / "our own" / "ca.pem"
    words = shlex.split(as_curl("https://host:1", "m", with_key=False, authorities=file))
    assert words[:4] == ["curl", "--cacert", str(file), "https://host:1/v1/chat/completions"]


def test_each_verb_says_what_it_does(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["octavo", "model", "fetch", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "Fetch a model and print the folder where it lies." in capsys.readouterr().out


def test_help_waits_for_no_library() -> None:
    program = """
import sys
from octavo.__main__ import main
sys.argv = ["octavo", "--help"]
try:
    main()
finally:
    print({"grpc", "torch", "rich", "pydantic", "transformers"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stderr == "set()\n"
    assert all(verb in done.stdout for verb in ("up", "chat", "stats", "model", "demo"))
