"""launch/docker and launch/kubernetes: what real schemas, linters, parsers and a real Prometheus say of them."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.parse
from copy import deepcopy
from pathlib import Path

import pytest
from support.commands import check
from support.harness import (
    ROOT,
    clean_env,
    holds,
    kill_all,
    start,
    steps_logged,
    tiny_flags,
    train,
    write_tiny,
)
from support.slurm_cluster import free_ports
from torch.distributed.run import get_args_parser

yaml = pytest.importorskip("yaml")
DOCKER, KUBERNETES = ROOT / "launch/docker", ROOT / "launch/kubernetes"


def documents(file: str) -> dict[str, dict]:
    """A manifest's objects by kind."""
    return {
        found["kind"]: found
        for found in yaml.safe_load_all((KUBERNETES / file).read_text(encoding="utf-8"))
    }


def tool(name: str) -> str:
    """The path of a linter, beside this Python or in PATH; the test is skipped where there is none."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed")


def passes(*argv) -> None:
    result = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{argv}\n{result.stdout}{result.stderr}"


LINTERS = {
    "shellcheck": [*ROOT.glob("[lb]*/**/*.sh"), *ROOT.glob("launch/**/*.sbatch"), ROOT / ".ci/run"],
    "hadolint": [DOCKER / "Dockerfile"],
    "check-jsonschema": ["--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml"],
    "promtool": ["check", "config", DOCKER / "prometheus.yml"],
}


@pytest.mark.parametrize("name", LINTERS)
def test_linters_find_nothing(name):
    passes(tool(name), *LINTERS[name])


# Kubernetes: the schemas


def test_kubernetes_schemas():
    validate = pytest.importorskip("kubernetes_validate").validate
    # the Job inside a TrainingRuntime is Kubernetes' own; its container gets the command later
    spec = runtimes_job()
    spec["template"]["spec"]["containers"][0]["command"] = ["torchrun"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": spec}
    for version in ("1.33.0", "1.37.0"):  # the oldest that the file names, the newest known
        for found in (*documents("indexed-job.yaml").values(), job):
            validate(found, version, strict=True)


def test_kubeflow_schemas():
    """The models are generated from the API's types. They drop a field that they do not know: it must come back."""
    api = pytest.importorskip("kubeflow_trainer_api.models")
    for found in documents("trainjob.yaml").values():
        model = getattr(api, f"TrainerV1alpha1{found['kind']}").from_dict(deepcopy(found))
        assert model.to_dict() == found


def runtimes_job() -> dict:
    """The Job that a TrainingRuntime makes of its nodes."""
    [node] = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"][
        "replicatedJobs"
    ]
    return node["template"]["spec"]


# Kubernetes: what a schema cannot say


def pods() -> dict[str, tuple[dict, dict]]:
    """By file: the pod's spec, and its container with the command that it will be given."""
    plain = documents("indexed-job.yaml")["Job"]["spec"]["template"]["spec"]
    node = runtimes_job()["template"]["spec"]
    trainer = documents("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    return {
        "indexed-job.yaml": (plain, plain["containers"][0]),
        "trainjob.yaml": (node, {**node["containers"][0], **trainer}),
    }


@pytest.mark.parametrize("file", ["indexed-job.yaml", "trainjob.yaml"])
def test_a_pod_mounts_what_there_is_and_runs_as_the_images_user(file):
    pod, container = pods()[file]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = documents("indexed-job.yaml")["PersistentVolumeClaim"]
    assert mounts["/checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert container["image"].endswith(f"/{compose()['services']['shell']['image']}")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"ARG UID={pod['securityContext']['runAsUser']}\n" in (DOCKER / "Dockerfile").read_text(
        encoding="utf-8"
    )


def test_both_files_train_the_same():
    flags = [
        container["args"][container["args"].index("05_ddp/train.py") :]
        for _, container in pods().values()
    ]
    assert flags[0] == flags[1]
    check(shlex.join(["python", *flags[0]]))


def test_indexed_job_meets_at_its_first_pod():
    service, job = (documents("indexed-job.yaml")[kind] for kind in ("Service", "Job"))
    spec, pod = job["spec"], job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    args = [
        word.replace("$(JOB_COMPLETION_INDEX)", "0")
        for word in pod["spec"]["containers"][0]["args"]
    ]
    launched = get_args_parser().parse_args(args)
    name = service["metadata"]["name"]
    assert pod["spec"]["subdomain"] == name
    assert launched.master_addr == f"{job['metadata']['name']}-0.{name}"
    assert launched.master_port in [port["port"] for port in service["spec"]["ports"]]
    assert spec["completions"] == spec["parallelism"] == int(launched.nnodes)


def test_a_pod_that_was_stopped_is_started_again():
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    spec = documents("indexed-job.yaml")["Job"]["spec"]
    assert spec["podFailurePolicy"]["rules"] == [{"action": "Ignore", "onPodConditions": disrupted}]
    jobset = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]
    assert runtimes_job()["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onPodConditions": disrupted}
    ]
    assert [rule["onJobFailureReasons"] for rule in jobset["failurePolicy"]["rules"]] == [
        ["PodFailurePolicy"]
    ]


def test_train_job_refers_to_its_runtime():
    runtime, job = (documents("trainjob.yaml")[kind] for kind in ("TrainingRuntime", "TrainJob"))
    assert job["spec"]["runtimeRef"] == {
        "kind": "TrainingRuntime",
        "name": runtime["metadata"]["name"],
    }
    assert runtime["spec"]["mlPolicy"] == {
        "numNodes": job["spec"]["trainer"]["numNodes"],
        "torch": {},
    }
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # what Trainer goes by: without this label and these names it gives the pods no command and no PET_*
    assert node["template"]["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert node["name"] == runtimes_job()["template"]["spec"]["containers"][0]["name"] == "node"


# SkyPilot

SKYPILOT = "skypilot==0.14.1"
READ_TASK = """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
(resources,) = task.resources
print(task.num_nodes, resources.use_spot, *task.volumes)
"""


@pytest.mark.launch
def test_skypilot_reads_its_file(tmp_path):
    """Read by SkyPilot itself, which needs half a gigabyte of its own. A wrong key is an error."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    python = tmp_path / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", SKYPILOT]
    subprocess.run(pip, check=True, timeout=600)
    env = clean_env(HOME=str(tmp_path), SKYPILOT_DISABLE_USAGE_COLLECTION="1")
    file = ROOT / "launch/skypilot/train.yaml"
    argv = [python, "-c", READ_TASK, file]
    result = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "2 True /checkpoints\n"), result.stderr
    run_script = yaml.safe_load(file.read_text(encoding="utf-8"))["run"]
    check(
        re.sub(
            r"\$\w+", "2", " ".join(run_script.replace("\\\n", " ").split(".venv/bin/")[1].split())
        )
    )
    (tmp_path / "run.sh").write_text(run_script, encoding="utf-8")
    passes(tool("shellcheck"), "--shell=bash", "--exclude=SC2154", tmp_path / "run.sh")


@pytest.mark.launch
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_pods_save_on_sigterm_and_resume(tmp_path):
    """The Job's command as PID 1 of two PID namespaces: SIGTERM to one ends both, and both go on from there."""
    steps = ["--steps", 300]
    whole = train("05_ddp/train.py", tmp_path / "whole", *steps, nproc=2)
    container = pods()["indexed-job.yaml"][1]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost ddp-0.ddp\n", encoding="utf-8")
    launcher = [
        *container["command"],
        *container["args"][: container["args"].index("05_ddp/train.py")],
    ]
    small = (
        " ".join(launcher)
        .replace("per-node=8", "per-node=1")
        .replace("29500", str(free_ports(1)[0]))
    )
    namespaces = [
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount",
        "--mount-proc",
        "sh",
        "-c",
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    running = []

    def start_pods() -> None:
        for index in (0, 1):
            write_tiny(folder := tmp_path / f"pod-{len(running)}")
            torchrun = small.replace("$(JOB_COMPLETION_INDEX)", str(index))
            flags = [*tiny_flags(tmp_path), *steps, "--resume", "--json", tmp_path / "summary.json"]
            train_py = shlex.join(map(str, [ROOT / "05_ddp/train.py", *flags]))
            shell = f"mount --bind {tmp_path}/hosts /etc/hosts && exec {torchrun} {train_py}"
            running.append(start([*namespaces, shell], folder, PATH=path))

    def ends(*codes: int) -> None:
        assert [process.wait(timeout=600) for process in running[-2:]] == [*codes]

    try:
        start_pods()
        assert holds(running[1], lambda: steps_logged(tmp_path) >= 20)
        [first] = (
            Path(f"/proc/{running[1].pid}/task/{running[1].pid}/children")
            .read_text(encoding="utf-8")
            .split()
        )
        assert b"torchrun" in Path(f"/proc/{first}/cmdline").read_bytes()
        os.kill(int(first), signal.SIGTERM)
        ends(1, 1)
        assert list((tmp_path / "run").glob("step-*"))
        start_pods()
        ends(0, 0)
    finally:
        for process in running:
            kill_all(process)
    assert (
        json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["weights_sha256"]
        == whole.summary["weights_sha256"]
    )


# Docker


def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))


def test_compose_services():
    file = compose()
    for name, service in file["services"].items():
        assert service["profiles"], name  # nothing starts that was not asked for
        assert re.fullmatch(r"[^:]+:v?\d+\.\d+\.\d+", service["image"]), name
        # open to this machine only
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for source in [volume.split(":")[0] for volume in service["volumes"]]:
            assert (
                (DOCKER / source).exists() if source.startswith(".") else source in file["volumes"]
            ), source
        if "build" in service:
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert ROOT / service["build"]["dockerfile"] == DOCKER / "Dockerfile"
            # torchrun ends its ranks before Docker ends torchrun, in 5 minutes
            assert int(service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300
            assert service["stop_grace_period"] == "5m"
    check(file["services"]["monitor"]["command"].replace("/workspace/", ""))
    [torch] = re.findall(
        r"^torch==(.+)$", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    image = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert f"\nFROM pytorch/pytorch:{torch}-" in image
    assert re.findall(r"^USER (.+)$", image, re.MULTILINE) == ["$UID"]


# Prometheus and Grafana

PANELS = json.loads((DOCKER / "grafana/dashboards/training.json").read_text(encoding="utf-8"))[
    "panels"
]


def test_prometheus_and_grafana_find_each_other():
    file = DOCKER / "prometheus.yml"
    [job] = yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]
    services = compose()["services"]
    words = services["monitor"]["command"].split()
    assert job["static_configs"][0]["targets"] == [
        f"monitor:{words[words.index('--prometheus') + 1]}"
    ]
    # of its container: Prometheus is in another
    assert words[words.index("--address") + 1] == "0.0.0.0"
    folder = DOCKER / "grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text(encoding="utf-8"))[
        "datasources"
    ]
    [provider] = yaml.safe_load((folder / "dashboards/training.yaml").read_text(encoding="utf-8"))[
        "providers"
    ]
    mounts = dict(volume.split(":")[:2] for volume in services["grafana"]["volumes"])
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"  # a service and its port
    assert {panel["datasource"]["uid"] for panel in PANELS} == {source["uid"]}


@pytest.mark.launch
def test_dashboard_asks_only_for_what_the_exporter_has(tmp_path, fake_driver):
    """A Prometheus that scrapes the exporter answers each query, with each label of its legend."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus (Debian: prometheus)")
    from test_01_monitor import RECORD, exporter, get, prometheus, write_run

    targets = [target for panel in PANELS for target in panel["targets"]]
    run_dir = write_run(tmp_path / "mine", RECORD)
    env = {"LD_LIBRARY_PATH": fake_driver, "NVML_NVLINK_STEP": "1024", "NVML_THROTTLE": str(0x4)}
    with (
        exporter(tmp_path / "served", "--run-dir", run_dir, **env) as (_, url),
        prometheus(tmp_path / "prometheus", urllib.parse.urlsplit(url).netloc) as (server, api),
    ):

        def ask(expression: str) -> list[dict]:
            query = urllib.parse.quote(expression.replace("$__rate_interval", "1m"))
            return json.loads(get(f"{api}/api/v1/query?query={query}"))["data"]["result"]

        def scraped_twice() -> bool:
            with contextlib.suppress(OSError):  # not ready yet
                return bool(ask("rate(host_cpu_busy_seconds_total[1m])"))
            return False

        assert holds(server, scraped_twice)
        answers = {target["expr"]: ask(target["expr"]) for target in targets}
        assert not [expression for expression, rows in answers.items() if not rows]
        for target in targets:
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert all(label in row["metric"] for row in answers[target["expr"]]), target


def test_every_launch_file_of_a_cluster_waits_for_a_run_that_still_ends():
    """A pod that is to end may save in the folder of the pod that takes its place."""
    for _, container in pods().values():
        assert {"name": "RUN_DIR_LOCK_SECONDS", "value": "120"} in container["env"]
    for file in ("launch/slurm/train.sbatch", "launch/torchrun/settings.sh"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "export RUN_DIR_LOCK_SECONDS=${RUN_DIR_LOCK_SECONDS:-120}" in text, file


JOB = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "train", "ENVIRONMENT": "BATCH"}
WRONG = {
    **{file.name: ({}, ["sbatch"]) for file in sorted(ROOT.glob("launch/slurm/*.sbatch"))},
    "train.sbatch of many": (
        {**JOB, "PROCS_PER_NODE": "1", "MAX_REQUEUES": "many"},
        ["train: error: ", "MAX_REQUEUES=many"],
    ),
    "train.sbatch on unequal nodes": (
        {**JOB, "PROCS_PER_NODE": "1", "SLURM_JOB_CPUS_PER_NODE": "64(x2),32"},
        ["train: error: ", "64(x2),32 CPUs"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_file_says_what_it_lacks_before_it_starts(tmp_path, name):
    settings, words = WRONG[name]
    argv = ["bash", ROOT / "launch/slurm" / name.split()[0]]
    result = subprocess.run(
        argv, cwd=tmp_path, env=clean_env(**settings), capture_output=True, text=True, timeout=600
    )
    assert result.returncode != 0
    assert all(word in result.stderr for word in words), result.stderr
    assert list(tmp_path.iterdir()) == []
