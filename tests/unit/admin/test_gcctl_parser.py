"""The command line as a whole: every command has what all have, a schema for what it prints, and a place in the page.

What may live here: walks over the parser. What may not: what single commands do (`test_gcctl.py` and its neighbours).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gcserver.admin import gcctl, jsonform, tracefile
from gcserver.admin.exits import Exit
from gcserver.admin.gcctl_parser import commands_of, parser
from gcserver.admin.logs import LogRing
from tests.unit.admin.collector import collecting
from tests.unit.admin.serving import serving
from tests.unit.admin.source import FixedSource
from tests.unit.admin.traces import parts, settled
from tools import gen_gcctl_page

COMMANDS = dict(commands_of(parser()))
SCHEMA = jsonform.schema()
#: a command line for each command. TIMELINE stands for a file that is to be, TRACE for one of a trace, COLLECTOR for
#: the address of a collector of OpenTelemetry's; the file of contexts has one that is called lab.
LINES: dict[str, list[str]] = {
    "status": [], "peers": [], "jobs": [], "top": ["--once"], "tensors": [], "set-codec": ["fp16"],
    "plan": ["--timeline", "TIMELINE"], "set-plan": ["*=fp16"], "replan": [], "set-controller": ["dc2-da2"],
    "profile": [], "advise": [], "logs": [], "trace start": [], "trace stop": ["--out", "TIMELINE"],
    "trace export": ["TRACE", "--otlp", "COLLECTOR"], "drain": [], "context list": [], "context show": ["lab"],
    "context use": ["lab"], "completion": ["bash"],
}  # fmt: skip


def options_of(command: argparse.ArgumentParser) -> set[str]:
    return {option for action in command._actions for option in action.option_strings}


def test_every_command_has_what_all_have() -> None:
    common = {"--json", "--address", "--context", "--timeout", "--tls-ca", "--tls-cert", "--tls-key", "--help"}
    for name, command in COMMANDS.items():
        assert common <= options_of(command), name
        assert command.description, name
        for action in command._actions:
            assert action.help, f"{name}: {action.dest}"


def test_every_command_has_a_schema() -> None:
    printed = {name.removeprefix("gcctl ") for name in SCHEMA["$defs"] if name.startswith("gcctl ")}
    assert printed == set(COMMANDS) == set(LINES)


def fits(value: Any, form: dict[str, Any], where: str = "$") -> None:
    """Fails unless ``value`` is what ``form`` says, and has no field that the schema does not know."""
    if "$ref" in form:
        fits(value, SCHEMA["$defs"][form["$ref"].removeprefix("#/$defs/")], where)
    elif "anyOf" in form:
        if value is not None:
            fits(value, form["anyOf"][0], where)
    else:
        kinds = form["type"] if isinstance(form["type"], list) else [form["type"]]
        types = {
            "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool,
            "null": type(None),
        }  # fmt: skip
        assert any(isinstance(value, types[kind]) for kind in kinds), f"{where}: {value!r} is no {kinds}"
        if "properties" in form:
            assert set(value) == set(form["properties"]) == set(form["required"]), where
        for key, inner in form.get("properties", {}).items():
            fits(value[key], inner, f"{where}.{key}")
        if "additionalProperties" in form:
            for key, part in value.items():
                fits(part, form["additionalProperties"], f"{where}.{key}")
        for i, part in enumerate(value if "items" in form else ()):
            fits(part, form["items"], f"{where}[{i}]")


@pytest.mark.parametrize("name", LINES)
def test_what_it_prints_fits_the_schema(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "contexts.toml"
    file.write_text('[contexts.lab]\njob = "gpt"\n')
    monkeypatch.setenv("GCCTL_CONFIG", str(file))
    ring = LogRing()
    ring.append(1.5, "info", "gcserver", "ready")
    trace = tmp_path / "trace.json"
    with trace.open("w") as out:
        tracefile.write(settled(parts()), out)
    with serving(FixedSource(), ring=ring) as server, collecting() as collector:
        stands = {"TIMELINE": str(tmp_path / "step.json"), "TRACE": str(trace), "COLLECTOR": collector.url}
        arguments = [stands.get(text, text) for text in LINES[name]]
        assert gcctl.main(["--json", "--address", server.address, *name.split(), *arguments]) == Exit.OK
    printed = capsys.readouterr()
    assert printed.err == ""
    fits(json.loads(printed.out), SCHEMA["$defs"][f"gcctl {name}"])


@pytest.mark.parametrize(
    ("arguments", "part", "helps"),
    [
        ((), "required: COMMAND", "gcctl"),
        (("frobnicate",), "invalid choice: 'frobnicate'", "gcctl"),
        (("--frobnicate", "status"), "unrecognized arguments: --frobnicate", "gcctl"),
        (("--address", "7460", "status"), "expected host:port or unix:/path; got '7460'", "gcctl"),
        (("--timeout", "0", "status"), "expected more than 0 s", "gcctl"),
        (("status", "--timeout", "400d"), "at most 365 d", "gcctl status"),
        (("status", "ex\x1b[2J\ntra"), "unrecognized arguments: ex\\x1b[2J tra", "gcctl status"),
        (("set-codec",), "required: SPEC", "gcctl set-codec"),
        (("set-plan", "fp16"), "got 'fp16'", "gcctl set-plan"),
        (("set-plan", "*=fp16@"), "got '*=fp16@'", "gcctl set-plan"),
        (("set-plan", "--file", "/does/not/exist.json"), "/does/not/exist.json", "gcctl set-plan"),
        (("drain", "--within", "soon"), "got 'soon'", "gcctl drain"),
        (("top", "--every", "0"), "expected at least 100 ms", "gcctl top"),
        (("trace",), "required: COMMAND", "gcctl trace"),
        (("trace", "export", "f"), "required: --otlp", "gcctl trace export"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: tuple[str, ...], part: str, helps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        gcctl.main(arguments)
    printed = capsys.readouterr()
    assert caught.value.code == Exit.USAGE and printed.out == ""
    assert printed.err.startswith("gcctl: ") and part in printed.err
    assert printed.err.endswith(f"; see `{helps} --help`\n") and printed.err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_names_the_help_of_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    stands = {"TIMELINE": "step.json", "COLLECTOR": "http://collector"}
    with pytest.raises(SystemExit, match="2"):
        gcctl.main([*name.split(), *(stands.get(text, text) for text in LINES[name]), "--frobnicate"])
    assert capsys.readouterr().err == f"gcctl: unrecognized arguments: --frobnicate; see `gcctl {name} --help`\n"


@pytest.mark.parametrize(
    "url",
    ["", "collector:4318", "collector", "//collector:4318", "grpc://collector:4317", "http://", "http:///v1/traces",
     "http://:4318/v1/traces", "http://collector:0", "http://collector:65536", "http://[::1", "http://a b/",
     "http://collector\n:4318"],
)  # fmt: skip
def test_a_collector_needs_a_url(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        gcctl.main(["trace", "export", "trace.json", "--otlp", url])
    said = capsys.readouterr().err
    form = "expected http:// or https:// and a host, such as http://collector:4318/v1/traces"
    assert said == f"gcctl: argument --otlp: {form}; got {url!r}; see `gcctl trace export --help`\n"


@pytest.mark.parametrize(
    "url", ["http://collector:4318/v1/traces", "https://user:word@c.example", "HTTP://[::1]:4318?a=b"]
)
def test_urls_of_collectors(url: str) -> None:
    assert parser().parse_args(["trace", "export", "trace.json", "--otlp", url]).otlp == url


def test_numbers_that_json_has_no_word_for() -> None:
    assert jsonform.text({"a": [float("inf"), 1.5], "b": float("nan")}) == '{"a": [null, 1.5], "b": null}'
    assert jsonform.text({"é": 2}) == '{"é": 2}'


def test_the_help_says_how_it_ends(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gcctl.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for status in Exit:
        assert f"{status.value} {status.about}" in shown


def test_numbers_keep_their_meaning() -> None:
    """Scripts go by these; new ones may come."""
    assert {status.name: status.value for status in Exit} == {
        "OK": 0, "FAILED": 1, "USAGE": 2, "UNREACHABLE": 3, "DENIED": 4, "REFUSED": 5, "NOT_FOUND": 6, "TIMEOUT": 7,
        "UNAVAILABLE": 8, "INTERRUPTED": 130,
    }  # fmt: skip


def test_page_and_schema_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert gen_gcctl_page.main(["--check"]) == 0, capsys.readouterr().err


def test_the_page_has_every_command_option_and_status() -> None:
    page = gen_gcctl_page.PAGE.read_text()
    for name, command in COMMANDS.items():
        assert f"### gcctl {name}" in page
        for option in options_of(command) - {"-h"}:
            assert f"`{option}" in page, option
    assert "\ngcctl trace export FILE.json --otlp URL\n" in page, "what has to be given is without brackets"
    for status in Exit:
        assert f"| {status.value} | {status.about} |" in page


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="one pair of marks named common"):
        gen_gcctl_page.filled("# gcctl")


def test_what_a_shell_waits_for_loads_no_grpc() -> None:
    """At each press of a key the whole program starts."""
    code = "import sys, gcserver.admin.gcctl; print({*sys.modules} & {'grpc', 'numba', 'cryptography'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "set()\n"
