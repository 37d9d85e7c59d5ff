"""`uvicorn --factory outrider.commands.asgi:app_from_env`, and the same for a Ray that runs already
(`outrider.commands.onray`): what they take and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.commands import onray
from outrider.commands.asgi import VARIABLE, app_from_env
from outrider.commands.errors import CommandError
from outrider.runtime.access import hash_token
from outrider.runtime.asgi import CloudApp
from outrider.runtime.routes import AFFINITY_HEADER


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


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"options": "--model toy:1 --listen 0.0.0.0:1"}, "options: --listen is Ray's"),
        ({"options": "--modle toy:1"}, "--modle"),
        ({"replicas": 0}, "replicas: 1 or more, not 0"),
        ({"replicas": "two"}, "replicas: .*two"),
        ({"model": "toy:1"}, "model: no such argument"),
    ],
)
def test_ray_is_told_what_cannot_be(args: dict[str, Any], said: str):
    with pytest.raises(CommandError, match=said):
        onray.application(args)


def test_the_example_for_kuberay_names_what_there_is(tmp_path: Path):
    yaml = pytest.importorskip("yaml", reason="no pyyaml")
    file = Path(__file__).parent.parent / "deploy" / "kubernetes" / "rayservice.yaml"
    service = yaml.safe_load(file.read_text())["spec"]
    serve = yaml.safe_load(service["serveConfigV2"])
    (app,) = serve["applications"]
    module, _, name = app["import_path"].partition(":")
    assert getattr(onray, name).__module__ == module
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:secret\n")
    mounted = app["args"]["options"].replace("/etc/outrider/tokens", str(tokens))
    options, replicas = onray.read({**app["args"], "options": mounted})
    cluster = service["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == replicas
    for group in (cluster["headGroupSpec"], workers):
        (ray,) = group["template"]["spec"]["containers"]
        env = {each["name"]: each["value"] for each in ray["env"]}
        assert env["RAY_SERVE_SESSION_ID_HEADER_KEY"] == AFFINITY_HEADER
        assert serve["http_options"]["port"] in [each["containerPort"] for each in ray["ports"]]
    grace = workers["template"]["spec"]["terminationGracePeriodSeconds"]
    assert options["drain"] < grace
    assert options["token_file"] == tokens
