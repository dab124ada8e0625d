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
    "srun": 'while [[ $1 == -* ]]; do shift; done; exec "$@"',
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
shared = {"launch.router": (), "launch.serve": ("launch.model_flags", "launch.engine_flags", "launch.compile_cache")}
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


def script_ended(folder, started: int, script: pathlib.Path = SLURM) -> list[str]:
    """What a script's commands wrote, where it is sent SIGTERM once so many of them have started."""
    for name, stub in STUBS.items():
        (folder / name).write_text(f"#!/bin/bash\n{stub}\n")
        (folder / name).chmod(0o755)
    log, may_go = folder / "log", folder / "may_go"
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "LOG": str(log), "MAY_GO": str(may_go)}
    environment |= {"MODEL": "FOLDER", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment |= {"SLURM_NNODES": "2"}
    if started > 1:
        may_go.touch()
    process = subprocess.Popen([script], env=environment)
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
def hosts(tmp_path_factory):
    """(the command line of one model over several nodes, that it ended)."""
    started, ended = script_ended(tmp_path_factory.mktemp("hosts"), 1, SLURM.with_name("slurm_hosts.sh"))
    return started.split()[1:], ended


@pytest.fixture(scope="module")
def group():
    """The manifest of replicas over several hosts."""
    return list(yaml.safe_load_all((DEPLOY / "kubernetes_hosts.yaml").read_text()))


@pytest.fixture(scope="module")
def listens(manifest, slurm, hosts, group):
    """(host, port, drain seconds) of the manifest's replicas and router, the script's router and replicas, and of one
    model over several hosts, by Slurm and by Kubernetes."""
    containers = [manifest[key]["spec"]["template"]["spec"]["containers"][0] for key in (REPLICAS, ROUTER)]
    leader = group[1]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]
    commands = [[one["command"][2], *one["args"]] for one in containers] + [*slurm[:2], hosts[0]]
    commands.append([leader["command"][2], *leader["args"]])
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
    (_, _, first), (host, port, second) = listens[2:4]
    assert (host, port) == ("0.0.0.0", 8000)
    seconds = re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", SLURM.read_text(), re.MULTILINE)
    assert first + second < int(seconds[1])
    refused = subprocess.run([SLURM], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert refused.returncode == 1 and "MODEL=FOLDER says what to serve" in refused.stderr


def test_one_model_over_several_nodes(hosts, listens):
    started, ended = hosts
    assert {"--distributed", "--pipeline=2", "--tensor=8", "--model=FOLDER"} < set(started)
    assert ended == "end launch.serve"
    host, port, drain = listens[4]
    script = SLURM.with_name("slurm_hosts.sh").read_text()
    assert (host, port) == ("0.0.0.0", 8000)
    assert drain < int(re.search(r"^#SBATCH --signal=B:TERM@(\d+)$", script, re.MULTILINE)[1])


def test_one_model_over_several_pods(manifest, group, listens):
    service, workload = group
    spec = workload["spec"]["leaderWorkerTemplate"]
    pods = [spec[name]["spec"] for name in ("leaderTemplate", "workerTemplate")]
    (leader,), (worker,) = (pod["containers"] for pod in pods)
    for name in ("image", "command", "args", "env", "resources", "volumeMounts"):
        assert leader[name] == worker[name]
    # But for compiled programs, which all processes of a replica would have to share.
    volumes = [one for one in manifest[REPLICAS]["spec"]["template"]["spec"]["volumes"] if one["name"] != "cache"]
    assert pods[0]["volumes"] == pods[1]["volumes"] == volumes
    gpus = leader["resources"]["limits"]["nvidia.com/gpu"]
    assert {f"--pipeline={spec['size']}", f"--tensor={gpus}", "--distributed"} < set(leader["args"])
    host, port, drain = listens[5]
    assert (host, port) == ("0.0.0.0", leader["ports"][0]["containerPort"])
    assert all(pod["terminationGracePeriodSeconds"] > drain for pod in pods)
    # It takes the place of the service that the router asks for addresses, with those that listen.
    headless = manifest["Service", "shardlm-replicas"]
    assert service["metadata"] == headless["metadata"] and service["spec"]["ports"] == headless["spec"]["ports"]
    labels = spec["leaderTemplate"]["metadata"]["labels"] | {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert service["spec"]["selector"] == labels
