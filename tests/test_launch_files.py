"""launch/docker and launch/kubernetes: what real schemas, linters, parsers and a real Prometheus say of them."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from copy import deepcopy
from pathlib import Path

import pytest
from support.commands import check
from support.harness import ROOT, TINY, clean_env, holds, kill_all, start
from torch.distributed.run import get_args_parser

yaml = pytest.importorskip("yaml")
DOCKER, KUBERNETES = ROOT / "launch/docker", ROOT / "launch/kubernetes"
IMAGE = "gpu-training:0.2.0"


def documents(file: str) -> dict[str, dict]:
    """A manifest's objects by kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((KUBERNETES / file).read_text())}


def tool(name: str) -> str:
    """The path of a linter, beside this Python or in PATH; the test is skipped where there is none."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed")


def passes(*argv) -> bool:
    """Does a linter find nothing? What it finds is printed."""
    result = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=600)
    print(result.stdout, result.stderr)
    return result.returncode == 0


# Kubernetes: the schemas


def plain_objects() -> list[dict]:
    return list(documents("indexed-job.yaml").values())


def known_to_kubernetes(found: dict, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(found, version, strict=True)


def known_to_kubeflow(found: dict) -> None:
    """The models are generated from the API's types. They drop a field that they do not know: it must come back."""
    api = pytest.importorskip("kubeflow_trainer_api.models")
    model = getattr(api, f"TrainerV1alpha1{found['kind']}").from_dict(deepcopy(found))
    assert model.to_dict() == found


@pytest.mark.parametrize("version", ["1.33.0", "1.37.0"])  # the oldest that the file names, the newest known
def test_kubernetes_schemas(version):
    for found in plain_objects():
        known_to_kubernetes(found, version)
    wrong = documents("indexed-job.yaml")["Job"]
    wrong["spec"]["template"]["spec"]["restartpolicy"] = "Never"
    with pytest.raises(Exception, match="restartpolicy"):
        known_to_kubernetes(wrong, version)


def test_kubeflow_schemas():
    for found in documents("trainjob.yaml").values():
        known_to_kubeflow(found)
    wrong = documents("trainjob.yaml")["TrainJob"]
    wrong["spec"]["trainer"]["numprocs"] = 8
    with pytest.raises(AssertionError):
        known_to_kubeflow(wrong)
    # the Job inside a TrainingRuntime is Kubernetes' own
    [node] = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    spec = deepcopy(node["template"]["spec"])
    spec["template"]["spec"]["containers"][0]["command"] = ["torchrun"]
    known_to_kubernetes({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": spec}, "1.37.0")


# Kubernetes: what a schema cannot say


def pods() -> dict[str, tuple[dict, dict]]:
    """By file: the pod's spec, and its container with the command that it will be given."""
    plain = documents("indexed-job.yaml")["Job"]["spec"]["template"]["spec"]
    runtime, job = (documents("trainjob.yaml")[kind]["spec"] for kind in ("TrainingRuntime", "TrainJob"))
    node = runtime["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    trainer = {"resources" if k == "resourcesPerNode" else k: v for k, v in job["trainer"].items()}
    return {
        "indexed-job.yaml": (plain, plain["containers"][0]),
        "trainjob.yaml": (node, {**node["containers"][0], **trainer}),
    }


FILES = ["indexed-job.yaml", "trainjob.yaml"]


@pytest.mark.parametrize("file", FILES)
def test_pod(file):
    pod, container = pods()[file]
    assert len(pod["containers"]) == 1
    assert container["image"].endswith(f"/{IMAGE}")
    # volumes: each mount has one, the claim is there to share, and shared memory is memory
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    claim = documents("indexed-job.yaml")["PersistentVolumeClaim"]
    assert mounts["/checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    # not root, and as the user that the image was made for
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert f"ARG UID={pod['securityContext']['runAsUser']}" in (DOCKERFILE := (DOCKER / "Dockerfile").read_text())
    assert "COPY --chown=$UID . ." in DOCKERFILE
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    # PET_* are Trainer's, JOB_COMPLETION_INDEX is the Job's
    assert container["env"] == [{"name": "RUN_DIR_LOCK_SECONDS", "value": "120"}]


def test_both_files_train_the_same():
    flags = [container["args"][container["args"].index("05_ddp/train.py") :] for _, container in pods().values()]
    assert flags[0] == flags[1]


def test_indexed_job_meets_at_its_first_pod():
    service, job = (documents("indexed-job.yaml")[kind] for kind in ("Service", "Job"))
    spec, template = job["spec"], job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    launched = get_args_parser().parse_args(
        [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in template["spec"]["containers"][0]["args"]]
    )
    name = service["metadata"]["name"]
    assert template["spec"]["subdomain"] == name
    assert launched.master_addr == f"{job['metadata']['name']}-0.{name}"
    assert launched.master_port in [port["port"] for port in service["spec"]["ports"]]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(launched.nnodes)


def test_a_pod_that_was_stopped_is_started_again():
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    spec = documents("indexed-job.yaml")["Job"]["spec"]
    assert spec["podFailurePolicy"]["rules"] == [{"action": "Ignore", "onPodConditions": disrupted}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy wants it
    assert spec["backoffLimitPerIndex"] >= 10
    assert spec["maxFailedIndexes"] == 0
    jobset = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]
    [node] = jobset["replicatedJobs"]
    spec = node["template"]["spec"]
    assert spec["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onPodConditions": disrupted}]
    assert (spec["template"]["spec"]["restartPolicy"], spec["backoffLimit"]) == ("Never", 0)
    assert jobset["failurePolicy"]["maxRestarts"] >= 10
    assert [rule["onJobFailureReasons"] for rule in jobset["failurePolicy"]["rules"]] == [["PodFailurePolicy"]]


def test_train_job_refers_to_its_runtime():
    runtime, job = (documents("trainjob.yaml")[kind] for kind in ("TrainingRuntime", "TrainJob"))
    assert job["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert runtime["spec"]["mlPolicy"] == {"numNodes": job["spec"]["trainer"]["numNodes"], "torch": {}}
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    # what Trainer goes by: without this label and these names it gives the pods no command and no PET_*
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert node["name"] == node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"


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
    text = (ROOT / "launch/skypilot/train.yaml").read_text()
    (tmp_path / "wrong.yaml").write_text(text.replace("num_nodes:", "nodes:"))

    def read(file: Path) -> subprocess.CompletedProcess:
        argv = [python, "-c", READ_TASK, file]
        return subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=300)

    right = read(ROOT / "launch/skypilot/train.yaml")
    assert (right.returncode, right.stdout) == (0, "2 True /checkpoints\n"), right.stderr
    assert read(tmp_path / "wrong.yaml").returncode != 0
    run_script = yaml.safe_load(text)["run"]
    check(re.sub(r"\$\w+", "2", " ".join(run_script.replace("\\\n", " ").split(".venv/bin/")[1].split())))
    shellcheck = tool("shellcheck")
    (tmp_path / "run.sh").write_text(run_script)
    assert passes(shellcheck, "--shell=bash", "--exclude=SC2154", tmp_path / "run.sh")


@pytest.mark.launch
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_pods_save_on_sigterm_and_resume(tmp_path):
    """The Job's command as PID 1 of two PID namespaces: SIGTERM to one ends both, and both go on from there."""
    container = pods()["indexed-job.yaml"][1]
    (tmp_path / "hosts").write_text("127.0.0.1 localhost ddp-0.ddp\n")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    launcher = container["args"][: container["args"].index("05_ddp/train.py")]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    small = "--model=tiny.json --device=cpu --seq-len=32 --global-batch-size=12 --steps=300 --warmup-steps=4 --resume"
    namespaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc", "sh", "-c"]

    def pod(index: int, run: str) -> subprocess.Popen:
        words = [*container["command"], *launcher]
        for old, new in (("$(JOB_COMPLETION_INDEX)", str(index)), ("per-node=8", "per-node=1"), ("29500", port)):
            words = [word.replace(old, new) for word in words]
        words += [str(ROOT / "05_ddp/train.py"), *small.split(), "--log-every=1"]
        words += [f"--run-dir={tmp_path / run}", f"--json={tmp_path / run}-{index}.json"]
        shell = f'mount --bind {tmp_path}/hosts /etc/hosts && cd {tmp_path} && exec "$@"'
        (folder := tmp_path / f"{run}-{index}-{time.monotonic_ns()}").mkdir()
        return start(
            [*namespaces, shell, "pod", *words], folder, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        )

    def ends(*codes: int) -> None:
        assert [process.wait(timeout=600) for process in running] == [*codes]

    def steps() -> int:
        file = tmp_path / "stopped/metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    running = [pod(0, "whole"), pod(1, "whole")]
    try:
        ends(0, 0)
        running[:] = [pod(0, "stopped"), pod(1, "stopped")]
        assert holds(running[1], lambda: steps() >= 20)
        [first] = Path(f"/proc/{running[1].pid}/task/{running[1].pid}/children").read_text().split()
        assert b"torchrun" in Path(f"/proc/{first}/cmdline").read_bytes()
        os.kill(int(first), signal.SIGTERM)
        ends(1, 1)
        assert list((tmp_path / "stopped").glob("step-*"))
        running[:] = [pod(0, "stopped"), pod(1, "stopped")]
        ends(0, 0)
    finally:
        for process in running:
            kill_all(process)
    whole, stopped = (json.loads((tmp_path / f"{run}-0.json").read_text()) for run in ("whole", "stopped"))
    assert stopped["weights_sha256"] == whole["weights_sha256"]


# Docker


def compose() -> dict:
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_dockerfile(tmp_path):
    assert passes(tool("hadolint"), DOCKER / "Dockerfile")
    text = (DOCKER / "Dockerfile").read_text()
    (tmp_path / "Dockerfile").write_text(text.replace("USER $UID", "USER root"))
    assert not passes(tool("hadolint"), tmp_path / "Dockerfile")
    [torch] = re.findall(r"^torch==(.+)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    assert re.search(rf"^FROM pytorch/pytorch:{re.escape(torch)}-cuda[\d.]+-cudnn9-runtime$", text, re.MULTILINE)
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["$UID"]
    assert "--constraint /tmp/torch.txt" in text  # pip may not replace the base's torch
    installed = set(re.search(r"apt-get install (.*?)&&", text, re.DOTALL)[1].split())
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= installed  # NCCL over InfiniBand


def test_compose_file_follows_its_specification(tmp_path):
    schema = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec"]
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((DOCKER / "compose.yaml").read_text().replace("shm_size", "shm_sise"))
    assert passes(*schema, DOCKER / "compose.yaml")
    assert not passes(*schema, wrong)


def test_compose_services():
    file = compose()
    services = file["services"]
    assert set(services) == {"shell", "jupyter", "monitor", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["profiles"], name  # nothing starts that was not asked for
        image, tag = service["image"].split(":")
        assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), image
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))  # open to this machine only
        for source in [volume.split(":")[0] for volume in service["volumes"]]:
            assert (DOCKER / source).exists() if source.startswith(".") else source in file["volumes"], source
    for name in ("shell", "jupyter", "monitor"):
        service = services[name]
        assert service["image"] == IMAGE
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert ROOT / service["build"]["dockerfile"] == DOCKER / "Dockerfile"
        [devices] = service["deploy"]["resources"]["reservations"]["devices"]
        assert (devices["driver"], devices["count"], devices["capabilities"]) == ("nvidia", "all", ["gpu"])
        assert service["ulimits"]["memlock"] == -1
        assert service["init"] is True
        assert 60 <= int(service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300  # stop_grace_period: 5m
        assert service["stop_grace_period"] == "5m"
        assert any(volume.split(":")[1] == "/checkpoints" for volume in service["volumes"])
    assert "../..:/workspace" in services["shell"]["volumes"]
    assert "token" not in json.dumps(services["jupyter"])  # Jupyter makes one and logs it
    assert services["monitor"]["pid"] == "host"
    check(services["monitor"]["command"].replace("/workspace/", ""))
    check("python 05_ddp/train.py --run-dir /checkpoints/first --save-every 50 --resume")  # of the head of the file


# Prometheus and Grafana


def test_prometheus_configuration():
    file = DOCKER / "prometheus.yml"
    assert passes(tool("promtool"), "check", "config", file)
    [job] = yaml.safe_load(file.read_text())["scrape_configs"]
    words = compose()["services"]["monitor"]["command"].split()
    port = words[words.index("--prometheus") + 1]
    assert words[words.index("--address") + 1] == "0.0.0.0"  # of its container: Prometheus is in another
    assert job["static_configs"][0]["targets"] == [f"monitor:{port}"]


def test_grafana_is_provisioned():
    folder = DOCKER / "grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    [provider] = yaml.safe_load((folder / "dashboards/training.yaml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2] for volume in compose()["services"]["grafana"]["volumes"])
    assert mounts["./grafana/provisioning"] == "/etc/grafana/provisioning"
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    assert source["url"] == "http://prometheus:9090"  # a service and its port
    interval = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == interval
    panels = dashboard()["panels"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    cells = [
        (x, y)
        for grid in [panel["gridPos"] for panel in panels]
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(cells) == len(set(cells))  # no panel lies on another
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)


def dashboard() -> dict:
    return json.loads((DOCKER / "grafana/dashboards/training.json").read_text())


def test_dashboard_asks_only_for_what_the_exporter_has(tmp_path, fake_driver):
    """A Prometheus that scrapes the exporter answers each query, with each label of its legend."""
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus (Debian: prometheus)")
    from test_01_monitor import RECORD, exporter, get, prometheus, write_run

    targets = [target for panel in dashboard()["panels"] for target in panel["targets"]]
    assert not [
        target for target in targets if re.search(r"\b(or|unless|absent|vector)\b", target["expr"])
    ]  # hide a gap
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
        assert ask("gpu_no_such_metric") == []
    asked = " ".join(answers)
    for name in ("loss", "step", "tokens_per_second", "utilization", "power", "memory", "temperature", "likely_hang"):
        assert name in asked


def test_every_launch_file_of_a_cluster_waits_for_the_lock_of_a_dead_node():
    """NFSv4 and Lustre keep such a lock for about 90 s. In the manifests: test_pod."""
    files = [file for file in ROOT.glob("launch/slurm/*.sbatch") if "infer" not in file.name]  # it has no run folder
    files.append(ROOT / "launch/torchrun/multi_node.sh")
    files.append(ROOT / "launch/torchrun/elastic.sh")
    assert len(files) == 5
    for file in files:
        assert "export RUN_DIR_LOCK_SECONDS=${RUN_DIR_LOCK_SECONDS:-120}" in file.read_text(), file


def test_shell_scripts_pass_shellcheck():
    scripts = [*ROOT.glob("launch/**/*.sh"), *ROOT.glob("launch/**/*.sbatch"), ROOT / ".ci/run"]
    assert passes(tool("shellcheck"), *scripts)


@pytest.mark.parametrize("file", sorted(path.name for path in (ROOT / "launch/slurm").glob("*.sbatch")))
def test_a_batch_file_that_no_slurm_starts_says_so(tmp_path, file):
    result = subprocess.run(
        ["bash", str(ROOT / "launch/slurm" / file)],
        cwd=tmp_path,
        env=clean_env(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode != 0
    assert "SLURM_JOB_ID: is not set: start this file with sbatch" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_requeues_that_is_none_is_told_at_the_start(tmp_path):
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "sweep", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0"}
    env = clean_env(**job, PROCS_PER_NODE="1", MAX_REQUEUES="many")
    file = ROOT / "launch/slurm/array_requeue.sbatch"
    result = subprocess.run(["bash", str(file)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stderr) == (2, "sweep: error: MAX_REQUEUES=many is not a number\n")
