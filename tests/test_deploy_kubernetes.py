"""deploy/kubernetes and deploy/helm: well-formed, of one mind, and naming options that exist.

No cluster is here. Helm's own program renders the chart where there is one, and kubernetes-validate
holds everything against the schemas of Kubernetes; both are skipped, saying so, where they are not.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from outrider.commands.config import SECTIONS
from outrider.commands.configfile import faults
from outrider.runtime.routes import AFFINITY_HEADER, HEALTH_PATH

yaml = pytest.importorskip("yaml", reason="no pyyaml")

ROOT = Path(__file__).parent.parent
PLAIN = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "outrider"
RELEASE = "outrider"
"""Gives the chart's things the names of the plain manifests."""
MARGIN = 10
"""Seconds of a pod beyond preStop and drain."""
HELM = os.environ.get("HELM") or shutil.which("helm")

needs_helm = pytest.mark.skipif(HELM is None, reason="no helm (HELM=... names the program)")
Thing = dict[str, Any]


def read(text: str) -> dict[str, Thing]:
    """Documents by kind; no kind stands twice."""
    found = [each for each in yaml.safe_load_all(text) if each]
    kinds = {each["kind"]: each for each in found}
    assert len(kinds) == len(found)
    return kinds


def plain() -> dict[str, Thing]:
    return read((PLAIN / "verifier.yaml").read_text())


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    assert HELM is not None
    return subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60, check=False)


def rendered(*settings: str) -> dict[str, Thing]:
    """The chart's things without its test, with `--set-json` of these."""
    words = [word for setting in settings for word in ("--set-json", setting)]
    done = helm("template", RELEASE, str(CHART), "--skip-tests", *words)
    assert done.returncode == 0, done.stderr
    return read(done.stdout)


def pod_of(things: dict[str, Thing]) -> Thing:
    spec: Thing = things["Deployment"]["spec"]["template"]["spec"]
    return spec


def checked_settings(things: dict[str, Thing], folder: Path) -> dict[str, Any]:
    """The [cloud] section, which `outrider config check` has nothing against."""
    text = things["ConfigMap"]["data"]["outrider.toml"]
    settings: dict[str, Any] = tomllib.loads(text)["cloud"]
    for option in ("token-file", "tls-cert", "tls-key"):
        if option in settings:
            (folder / settings[option]).touch(mode=0o600)
    file = folder / "outrider.toml"
    file.write_text(text)
    assert faults(file, SECTIONS) == []
    return settings


def sound(things: dict[str, Thing], folder: Path) -> None:
    """What holds of every rendering. Raises."""
    settings, spec = checked_settings(things, folder), things["Deployment"]["spec"]
    pod = pod_of(things)
    (container,) = pod["containers"]
    labels = spec["template"]["metadata"]["labels"].items()
    selectors = [
        spec["selector"]["matchLabels"],
        things["Service"]["spec"]["selector"],
        *(c["labelSelector"]["matchLabels"] for c in pod["topologySpreadConstraints"]),
        *(t["spec"]["selector"]["matchLabels"] for k, t in things.items() if "Budget" in k),
        *(t["spec"]["podSelector"]["matchLabels"] for k, t in things.items() if "Policy" in k),
    ]
    assert all(selector.items() <= labels for selector in selectors)
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}

    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    grace = pod["terminationGracePeriodSeconds"]
    assert grace >= int(command[1]) + settings["drain"] + MARGIN

    (port,) = container["ports"]
    assert settings["listen"] == f"0.0.0.0:{port['containerPort']}"
    assert [p["targetPort"] for p in things["Service"]["spec"]["ports"]] == [port["name"]]
    scheme = "HTTPS" if "tls-cert" in settings else "HTTP"
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        asked = container[kind]["httpGet"]
        assert asked == {"path": HEALTH_PATH, "port": port["name"], "scheme": scheme}

    for place, key, value in (
        (pod, "automountServiceAccountToken", False),
        (pod["securityContext"], "runAsNonRoot", True),
        (pod["securityContext"], "seccompProfile", {"type": "RuntimeDefault"}),
        (container["securityContext"], "allowPrivilegeEscalation", False),
        (container["securityContext"], "readOnlyRootFilesystem", True),
        (container["securityContext"], "capabilities", {"drop": ["ALL"]}),
    ):
        assert place[key] == value, key
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}\n" in image
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    assert "OUTRIDER_CACHE=/var/cache/outrider" in image, "the folder that may be written"
    assert {"/etc/outrider", "/var/cache/outrider", "/tmp"} == set(mounts)


def proxy_hashes_by_the_header(ingress: Thing) -> None:
    """nginx calls a header by its name in small letters, with _ for -."""
    variable = "$http_" + AFFINITY_HEADER.replace("-", "_")
    noted = ingress["metadata"]["annotations"]
    assert noted["nginx.ingress.kubernetes.io/upstream-hash-by"] == variable


def test_the_plain_manifests_are_sound(tmp_path: Path) -> None:
    things = plain()
    sound(things, tmp_path)
    settings = checked_settings(things, tmp_path)
    (container,) = pod_of(things)["containers"]
    assert settings["threads"] == int(container["resources"]["requests"]["cpu"])
    (ingress,) = read((PLAIN / "ingress.yaml").read_text()).values()
    proxy_hashes_by_the_header(ingress)
    (path,) = ingress["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"]["name"] == things["Service"]["metadata"]["name"]


def test_kustomize_builds_them() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(PLAIN)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    things = read(done.stdout)
    assert set(things) == {*plain(), "Namespace"}
    for kind, thing in things.items():
        where = thing["metadata"]["name" if kind == "Namespace" else "namespace"]
        assert where == "outrider"


def validate(things: dict[str, Thing]) -> None:
    checker = pytest.importorskip(
        "kubernetes_validate", reason="no kubernetes-validate (pip install kubernetes-validate)"
    )
    for thing in things.values():
        for version in ("1.30", "1.37"):
            checker.validate(thing, version, strict=True)


def test_the_schemas_of_kubernetes_know_the_plain_manifests() -> None:
    for file in ("namespace.yaml", "verifier.yaml", "ingress.yaml"):
        validate(read((PLAIN / file).read_text()))


# ------------------------------------------------------------------------------ the chart


def test_the_charts_own_values_are_what_their_schema_says() -> None:
    """Without Helm: the schema names every value there is, and no other."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def same(found: Thing, said: Thing, place: str) -> None:
        assert set(found) == set(said["properties"]) - {"global"}, place
        for key, value in found.items():
            inner = said["properties"][key]
            if inner.get("additionalProperties") is False:
                same(value, inner, f"{place}.{key}")

    same(values, schema, "values")


@needs_helm
def test_helm_lints_the_chart() -> None:
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout


@needs_helm
def test_the_chart_makes_the_plain_manifests() -> None:
    """One truth: what differs is labels, annotations and the image's name."""
    ours, theirs = plain(), rendered()
    assert set(ours) == set(theirs)

    def bare(thing: Any) -> Any:
        if isinstance(thing, list):
            return [bare(each) for each in thing]
        if not isinstance(thing, dict):
            return thing
        gone = ("labels", "annotations", "matchLabels", "selector", "image", "imagePullPolicy")
        return {key: bare(value) for key, value in thing.items() if key not in gone}

    for kind in set(ours) - {"ConfigMap"}:
        assert bare(theirs[kind]) == bare(ours[kind]), kind
    texts = [things["ConfigMap"]["data"]["outrider.toml"] for things in (ours, theirs)]
    assert tomllib.loads(texts[0]) == tomllib.loads(texts[1])


VARIANTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "no TLS": ("tls.enabled=false",),
    "a proxy before it": ("ingress.enabled=true", 'ingress.host="a.example"'),
    "a long drain": ("cloud.drain=600.5", "preStopSeconds=20"),
    "a model of the hub": (
        'cloud.model="Qwen/Qwen3-0.6B"', 'cache.claim="weights"',
        'extraEnv=[{"name":"A","value":"b"}]',
        'networkPolicy.egress=[{"ports":[{"port":443}]}]', 'nodeSelector={"gpu":"yes"}',
        'resources={"limits":{"nvidia.com/gpu":1}}', 'tolerations=[{"key":"gpu"}]',
    ),
    "bare": (
        "networkPolicy.enabled=false", "podDisruptionBudget.enabled=false",
        "service.affinitySeconds=0", 'cache.size="9Gi"', 'podAnnotations={"a":"b"}',
        'imagePullSecrets=[{"name":"key"}]', "cloud.tenant-stretch=0.1",
        "cloud.deterministic=false",
    ),
}  # fmt: skip


@needs_helm
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_rendering_is_sound(variant: str, tmp_path: Path) -> None:
    things = rendered(*VARIANTS[variant])
    sound(things, tmp_path)
    assert ("Ingress" in things) is (variant == "a proxy before it")
    if "Ingress" in things:
        proxy_hashes_by_the_header(things["Ingress"])
    validate(things)


@needs_helm
def test_the_charts_test_is_a_pod_that_asks_for_health() -> None:
    done = helm("template", RELEASE, str(CHART), "--show-only", "templates/tests/health.yaml")
    pod = read(done.stdout)["Pod"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["env"][0]["value"] == f"https://{RELEASE}:8765{HEALTH_PATH}"
    assert container["command"][1] == "/opt/outrider/health.py"
    validate({"Pod": pod})


@needs_helm
@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ('cloud.listen="0.0.0.0:1"', "listen"),
        ("cloud.insecure=true", "insecure"),
        ("cloud.threads=0", "threads"),
        ("replicaCount=0", "replicaCount"),
        ('tls.enabled="no"', "enabled"),
        ("replicas=3", "replicas"),
        ('tokens.text="alice:secret"', "text"),
    ],
)
def test_values_that_mean_nothing_are_refused(setting: str, says: str) -> None:
    done = helm("template", RELEASE, str(CHART), "--set-json", setting)
    assert done.returncode != 0
    assert says in done.stderr
