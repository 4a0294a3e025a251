"""Containers and manifests name what exists: files, commands, options, routes, ports, pods. Nothing is started."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from foreword.cli.main import app
from foreword.server.middleware import OPEN_PATHS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
POOLS = ("target", "draft", "router")


def parsed(args: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a command line, read by the command itself."""
    monkeypatch.setenv("FOREWORD_API_KEY", "key")
    command = get_command(app).commands[args[0]]
    return command.make_context(args[0], list(args[1:])).params


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in lines]


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_an_image_is_made_of_what_is_here_and_starts_a_command_that_exists(name, monkeypatch):
    found = instructions(name)
    words = dict(found)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for what, rest in found:
        if what == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source in kept, f".dockerignore leaves out {source}"
    assert json.loads(words["ENTRYPOINT"]) == ["foreword"]
    options = parsed(json.loads(words["CMD"]), monkeypatch)
    assert str(options["port"]) == words["EXPOSE"]
    assert words["USER"] != "0"
    assert f"http://127.0.0.1:{words['EXPOSE']}/ready" in words["HEALTHCHECK"]
    assert words["STOPSIGNAL"] == "SIGTERM"


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))


def test_compose_mounts_builds_and_scrapes_what_is_there(monkeypatch):
    services = compose()["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose()["volumes"] or (DEPLOY / source).exists(), volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing protects the server but the loopback address"
        assert set(service.get("depends_on", ())) <= services.keys()
    build = services["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
    options = parsed(services["server"]["command"], monkeypatch)
    assert float(services["server"]["stop_grace_period"].removesuffix("s")) > options["drain_seconds"]
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == [f"server:{options['port']}"]
    assert services["grafana"]["environment"]["PROMETHEUS_URL"] == "http://prometheus:9090"


@pytest.mark.parametrize("path", ["compose.yaml", "grafana/docker-compose.yml"])
def test_grafana_is_given_the_address_that_its_data_source_reads(path):
    source = (DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text(encoding="utf-8")
    variable = yaml.safe_load(source)["datasources"][0]["url"]
    services = yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))["services"]
    assert variable.removeprefix("$") in services["grafana"]["environment"]


def objects(pool: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pool's service and what starts its pods."""
    documents = yaml.safe_load_all((DEPLOY / "kubernetes" / f"{pool}.yaml").read_text(encoding="utf-8"))
    service, controller = documents
    assert (service["kind"], service["apiVersion"]) == ("Service", "v1")
    assert controller["apiVersion"] == "apps/v1"
    return service, controller


def pods(pool: str, port: int) -> str:
    """Names of a stateful set's pods in the cluster's DNS."""
    service, controller = objects(pool)
    name, governing = controller["metadata"]["name"], controller["spec"]["serviceName"]
    assert service["metadata"]["name"] == governing
    assert service["spec"]["clusterIP"] == "None"
    return ",".join(f"{name}-{i}.{governing}:{port}" for i in range(controller["spec"]["replicas"]))


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_is_found_by_its_service_and_ends_in_order(pool, monkeypatch):
    service, controller = objects(pool)
    template = controller["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert service["spec"]["selector"] == controller["spec"]["selector"]["matchLabels"] == labels
    (container,) = template["spec"]["containers"]
    options = parsed(container["args"], monkeypatch)
    (port,) = container["ports"]
    listening = options["port"] if "port" in options else int(options["listen"].rpartition(":")[2])
    assert port["containerPort"] == listening
    (offered,) = service["spec"]["ports"]
    assert offered.get("targetPort", offered["port"]) in (listening, port["name"])
    grace, before = template["spec"]["terminationGracePeriodSeconds"], container.get("lifecycle", {})
    slept = float(before["preStop"]["exec"]["command"][1]) if before else 0
    assert grace > slept + options["drain_seconds"]
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    volumes = {volume["name"] for volume in template["spec"].get("volumes", ())}
    claims = {claim["metadata"]["name"] for claim in controller["spec"].get("volumeClaimTemplates", ())}
    assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes | claims


@pytest.mark.parametrize("pool", ["target", "router"])
def test_probes_use_the_open_routes(pool):
    (container,) = objects(pool)[1]["spec"]["template"]["spec"]["containers"]
    probes = {name: probe["httpGet"] for name, probe in container.items() if name.endswith("Probe")}
    assert probes["readinessProbe"]["path"] == "/ready"
    assert probes["livenessProbe"]["path"] == "/health"
    for probe in probes.values():
        assert probe["path"] in OPEN_PATHS, "a probe has no key"
        assert probe["port"] == container["ports"][0]["name"]


def test_pools_know_each_other(monkeypatch):
    def options(pool: str) -> dict[str, Any]:
        return parsed(objects(pool)[1]["spec"]["template"]["spec"]["containers"][0]["args"], monkeypatch)

    assert options("router")["targets"] == pods("target", 8000)
    assert options("target")["drafters"] == pods("draft", 8400)
    assert options("target")["drafters_tls"] == options("draft")["tls"]


def test_kustomize_lists_every_manifest_and_the_secret_has_every_key():
    folder = DEPLOY / "kubernetes"
    text = (folder / "kustomization.yaml").read_text(encoding="utf-8")
    assert sorted(yaml.safe_load(text)["resources"]) == sorted(f"{pool}.yaml" for pool in POOLS)
    for pool in POOLS:
        for key in re.findall(r"key: ([\w-]+)\}", (folder / f"{pool}.yaml").read_text(encoding="utf-8")):
            assert f"--from-literal={key}=" in text
        for file in re.findall(r"/secrets/([\w.]+)", (folder / f"{pool}.yaml").read_text(encoding="utf-8")):
            assert f"--from-file={file}" in text


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kubectl_renders_every_object():
    command = ["kubectl", "kustomize", str(DEPLOY / "kubernetes")]
    rendered = list(yaml.safe_load_all(subprocess.run(command, check=True, capture_output=True).stdout))

    def names(found: list[dict[str, Any]]) -> list[tuple[str, str]]:
        return sorted((one["kind"], one["metadata"]["name"]) for one in found)

    assert names(rendered) == names([one for pool in POOLS for one in objects(pool)])


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("name", ["prometheus.yml", "grafana/prometheus.yml"])
def test_promtool_accepts_the_scrapes_and_the_alerts(name: str, tmp_path: Path):
    config = (DEPLOY / name).read_text(encoding="utf-8")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(config.replace("/etc/prometheus/", f"{DEPLOY}/grafana/"), encoding="utf-8")
    checked = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / name)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "7 rules found" in checked.stdout
