"""`uvicorn --factory outrider.commands.asgi:app_from_env`: what it takes and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.commands.asgi import VARIABLE, app_from_env
from outrider.commands.errors import CommandError
from outrider.runtime.access import hash_token
from outrider.runtime.asgi import CloudApp


def made(monkeypatch: pytest.MonkeyPatch, words: str) -> CloudApp:
    monkeypatch.setenv(VARIABLE, words)
    return app_from_env()


def test_the_options_of_the_command_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:secret\n")
    file = tmp_path / "outrider.toml"
    file.write_text('[cloud]\nmodel = "toy:1"\nslots = 3\ntoken-file = "tokens"\n')
    cloud = made(monkeypatch, f"--config '{file}' --target-pace 5 --tenant-sessions 2").cloud
    assert cloud.logins.tokens == {hash_token("secret"): "alice"}
    assert cloud.config.pace == 0.005
    assert cloud.service.config.max_under_way == 3
    assert cloud.service.config.max_sessions_per_tenant == 2
    assert cloud.service.costs.curve(), "its forwards were measured"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model toy:1 --listen 0.0.0.0:1", "--listen is the ASGI server's"),
        ("--model toy:1 --replicas 2", "--replicas is the ASGI server's"),
        ("--model 'toy:1", "No closing quotation"),
        ("--modle toy:1", "--modle"),
        ("--slots 0", "--slots"),
    ],
)
def test_what_cannot_be_is_told(words: str, said: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(CommandError, match=said):
        made(monkeypatch, words)
