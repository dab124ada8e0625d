"""What deploy/ starts are commands that there are, with flags, ports and endpoints that there are."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
SLURM = DEPLOY / "slurm.sh"
REPLICAS, ROUTER = ("StatefulSet", "shardlm-replica"), ("Deployment", "shardlm-router")
# In the place of commands. `python` writes its words, and at SIGTERM, a while later, that it ends.
STUBS = {
    "scontrol": 'until [ -e "$MAY_GO" ]; do sleep 0.01; done; echo node1; echo node2',
    "srun": 'shift; exec "$@"',
    "python": """
        trap 'sleep 0.2; echo "end $2" >> "$LOG"; exit 0' TERM
        echo "$@" >> "$LOG"
        while true; do sleep 0.05; done""",
}
# Parses command lines as the launchers do; prints what they say of host, port and drain.
PARSE = """
import json, sys
from absl import flags
import launch.router, launch.serve
known = flags.FLAGS.flags_by_module_dict()
shared = {"launch.router": (), "launch.serve": ("launch.engine_flags", "launch.compile_cache")}
for words in json.loads(sys.argv[1]):
    module = words[0]
    flags.FLAGS(words)
    names = {flag.name for part in (module, "launch.http_flags", *shared[module]) for flag in known[part]}
    unknown = {word.split("=")[0][2:] for word in words[1:]} - names
    assert not unknown, f"{module} has no flags {unknown}"
    listen = launch.router.listen(0)
    sys.modules[module].settings()
    print(json.dumps([listen.host, listen.port, listen.drain_seconds]))
    for name in flags.FLAGS:
        flags.FLAGS[name].unparse()
"""


@pytest.fixture(scope="module")
def manifest():
    """{(kind, name): object}."""
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert all(one["apiVersion"] for one in found)
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def script_ended(folder, started: int) -> list[str]:
    """What the script's commands wrote, where it is sent SIGTERM once so many of them have started."""
    for name, script in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    log, may_go = folder / "log", folder / "may_go"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "MAY_GO": str(may_go)}
    environment |= {"MODEL": "FOLDER", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[1-2]"}
    if started > 1:
        may_go.touch()
    process = subprocess.Popen([SLURM], env=environment)
    end = time.monotonic() + 60
    while not log.exists() or log.read_text().count("\n") < started:
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    may_go.touch()
    assert process.wait(60) == 0
    return log.read_text().splitlines()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """(router's and servers' command lines that the script starts, in which order it ends them)."""
    *commands, first, last = script_ended(tmp_path_factory.mktemp("slurm"), 2)
    return *(line.split()[1:] for line in sorted(commands)), [first, last]


def test_a_signal_before_the_router_is_there(tmp_path):
    started, ended = script_ended(tmp_path, 1)
    assert started.startswith("-m launch.serve ") and ended == "end launch.serve"


@pytest.fixture(scope="module")
def listens(manifest, slurm):
    """(host, port, drain seconds) of the manifest's replicas and router, and the script's router and replicas."""
    containers = [manifest[key]["spec"]["template"]["spec"]["containers"][0] for key in (REPLICAS, ROUTER)]
    commands = [[one["command"][2], *one["args"]] for one in containers] + [*slurm[:2]]
    words = [sys.executable, "-c", PARSE, json.dumps(commands)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_the_manifest(manifest, listens):
    replicas, router = manifest[REPLICAS], manifest[ROUTER]
    headless, front = manifest["Service", "shardlm-replicas"], manifest["Service", "shardlm"]
    pods = [one["spec"]["template"]["spec"] for one in (replicas, router)]
    (serve,), (route,) = (pod["containers"] for pod in pods)
    for pod, container, (host, port, drain) in zip(pods, (serve, route), listens[:2], strict=True):
        assert container["command"][:2] == ["python", "-m"] and host == "0.0.0.0"
        assert container["ports"] == [{"name": "http", "containerPort": port}]
        for probe, path in (("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            assert container[probe]["httpGet"] == {"path": path, "port": "http"}
        stop = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod["terminationGracePeriodSeconds"] > drain + int(stop[1])
        for name in (mount["name"] for mount in container.get("volumeMounts", ())):
            assert name in [volume["name"] for volume in pod["volumes"]]
        for variable in container["env"]:
            assert "value" in variable or variable["valueFrom"]["secretKeyRef"]["name"] == "shardlm-keys"
    assert serve["startupProbe"]["httpGet"]["path"] == "/ready"
    assert f"--tensor={serve['resources']['limits']['nvidia.com/gpu']}" in serve["args"]
    # The router resolves the headless service, which selects the replicas; the other one selects the router.
    assert headless["spec"]["clusterIP"] == "None" and replicas["spec"]["serviceName"] == "shardlm-replicas"
    assert f"--replica_dns=shardlm-replicas:{headless['spec']['ports'][0]['port']}" in route["args"]
    assert headless["spec"]["ports"][0]["port"] == listens[0][1]  # a headless name forwards no port
    for service, workload in ((headless, replicas), (front, router)):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == labels == workload["spec"]["selector"]["matchLabels"]
        assert service["spec"]["ports"][0]["targetPort"] == "http"
    assert manifest["PodDisruptionBudget", "shardlm-replica"]["spec"]["selector"] == replicas["spec"]["selector"]
    claim = next(volume for volume in pods[0]["volumes"] if volume["name"] == "models")["persistentVolumeClaim"]
    assert ("PersistentVolumeClaim", claim["claimName"]) in manifest


def test_the_slurm_script(slurm, listens):
    router, serve, ended = slurm
    assert ended == ["end launch.router", "end launch.serve"]  # the router's streams need the replicas
    assert router[:3] == ["launch.router", "--replica=http://node1:8000", "--replica=http://node2:8000"]
    assert serve[0] == "launch.serve" and {"--model=FOLDER", "--tensor=8"} < set(serve)
    (_, _, first), (host, port, second) = listens[2:]
    assert (host, port) == ("0.0.0.0", 8000)
    seconds = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", SLURM.read_text(), re.MULTILINE)
    assert first + second < int(seconds[1])
    refused = subprocess.run([SLURM], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert refused.returncode == 1 and "MODEL=FOLDER says what to serve" in refused.stderr
