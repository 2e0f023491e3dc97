"""The files for containers and clouds: what schemas, linters, parsers and a Prometheus say."""

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.parse
from copy import deepcopy
from pathlib import Path

import pytest
from support.commands import check
from support.harness import (
    ROOT,
    assert_refused,
    clean_env,
    holds,
    kill_all,
    run,
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


INFINIBAND = re.compile(r"^( *)# (.*# SITE InfiniBand)", re.MULTILINE)


def documents(file: str, *, infiniband: bool = False) -> dict[str, dict]:
    """A manifest's objects by kind, with the lines for InfiniBand if these are wanted."""
    text = (KUBERNETES / file).read_text(encoding="utf-8")
    if infiniband:
        text = INFINIBAND.sub(r"\1\2", text)
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def tool(name: str) -> str:
    """The path of a linter, beside this Python or in PATH; the test is skipped where there is none."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed")


def passes(*argv) -> None:
    result = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, f"{argv}\n{result.stdout}{result.stderr}"


COMPOSE = [DOCKER / "compose.yaml", DOCKER / "monitoring.yaml"]
LINTERS = {
    "shellcheck": [*ROOT.glob("[lb]*/**/*.sh"), *ROOT.glob("launch/**/*.sbatch"), ROOT / ".ci/run"],
    "hadolint": [DOCKER / "Dockerfile"],
    "check-jsonschema": ["--builtin-schema", "vendor.compose-spec", *COMPOSE],
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
        for infiniband in (False, True):
            for file in ("checkpoints.yaml", "indexed-job.yaml"):
                for found in documents(file, infiniband=infiniband).values():
                    validate(found, version, strict=True)
        validate(job, version, strict=True)


def test_kubeflow_schemas():
    """The models are generated from the API's types. They drop a field that they do not know: it must come back."""
    api = pytest.importorskip("kubeflow_trainer_api.models")
    for infiniband in (False, True):
        for found in documents("trainjob.yaml", infiniband=infiniband).values():
            model = getattr(api, f"TrainerV1alpha1{found['kind']}").from_dict(deepcopy(found))
            assert model.to_dict() == found


def runtimes_job(**how: bool) -> dict:
    """The Job that a TrainingRuntime makes of its nodes."""
    runtime = documents("trainjob.yaml", **how)["TrainingRuntime"]["spec"]
    [node] = runtime["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]


# Kubernetes: what a schema cannot say


def pods(**how: bool) -> dict[str, tuple[dict, dict]]:
    """Return by file the pod's spec, and its container with the command that it will be given."""
    plain = documents("indexed-job.yaml", **how)["Job"]["spec"]["template"]["spec"]
    node = runtimes_job(**how)["template"]["spec"]
    trainer = documents("trainjob.yaml", **how)["TrainJob"]["spec"]["trainer"]
    given = {**trainer, "resources": trainer["resourcesPerNode"]}
    return {
        "indexed-job.yaml": (plain, plain["containers"][0]),
        "trainjob.yaml": (node, {**node["containers"][0], **given}),
    }


def first_pod_starts() -> argparse.Namespace:
    """Return what torchrun makes of the arguments of the Indexed Job's first pod."""
    _, container = pods()["indexed-job.yaml"]
    args = [word.replace("$(JOB_COMPLETION_INDEX)", "0") for word in container["args"]]
    return get_args_parser().parse_args(args)


@pytest.mark.parametrize("file", ["indexed-job.yaml", "trainjob.yaml"])
def test_a_pod_mounts_what_there_is_and_runs_as_the_images_user(file):
    pod, container = pods()[file]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    claim = documents("checkpoints.yaml")["PersistentVolumeClaim"]
    # `kubectl delete --filename` of a job's file must not delete the checkpoints
    assert "PersistentVolumeClaim" not in documents(file)
    assert mounts["/checkpoints"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
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


@pytest.mark.parametrize("file", ["indexed-job.yaml", "trainjob.yaml"])
def test_a_pod_gives_its_ranks_what_it_has(file):
    _, container = pods()[file]
    ranks = container.get("numProcPerNode") or int(first_pod_starts().nproc_per_node)
    resources = container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == ranks
    env = {variable["name"]: variable for variable in container["env"]}
    threads = int(env["OMP_NUM_THREADS"]["value"])
    assert threads * ranks == int(resources["requests"]["cpu"])
    # a file per job and rank, on the storage that stays. Kubernetes puts in what stands above
    assert list(env).index("JOB_UID") < list(env).index("TORCH_FR_DUMP_TEMP_FILE")
    assert re.match(r"/checkpoints/.*\$\(JOB_UID\)", env["TORCH_FR_DUMP_TEMP_FILE"]["value"])


@pytest.mark.parametrize("file", ["indexed-job.yaml", "trainjob.yaml"])
def test_the_lines_for_infiniband_are_all_there(file):
    """Without them NCCL uses TCP and says nothing. They are comments: not all clusters have it."""
    pod, container = pods(infiniband=True)[file]
    assert [name for name in container["resources"]["limits"] if name.startswith("rdma/")]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    names = {variable["name"] for variable in container["env"]}
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} <= names
    plain, small = pods()[file]
    assert "hostNetwork" not in plain
    assert list(small["resources"]["limits"]) == ["memory", "nvidia.com/gpu"]


def test_a_pod_without_gpus_does_not_train_on_its_cpus(tmp_path):
    for _, container in pods().values():
        assert "--device=cuda" in container["args"]
    assert_refused(run("05_ddp/train.py", tmp_path, "--device=cuda"), "--device cuda")


def test_indexed_job_meets_at_its_first_pod():
    service, job = (documents("indexed-job.yaml")[kind] for kind in ("Service", "Job"))
    spec, pod = job["spec"], job["spec"]["template"]
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    launched = first_pod_starts()
    name = service["metadata"]["name"]
    assert pod["spec"]["subdomain"] == name
    assert launched.master_addr == f"{job['metadata']['name']}-0.{name}"
    assert launched.master_port in [port["port"] for port in service["spec"]["ports"]]
    assert spec["completions"] == spec["parallelism"] == int(launched.nnodes)


def test_a_pod_that_was_stopped_is_started_again():
    """Neither the pod that was stopped nor its peers, which save with it, count as failed."""
    job = documents("indexed-job.yaml")["Job"]["spec"]
    jobset = documents("trainjob.yaml")["TrainingRuntime"]["spec"]["template"]["spec"]
    for spec, action in ((job, "Ignore"), (runtimes_job(), "FailJob")):
        [container] = spec["template"]["spec"]["containers"]
        saved = {"containerName": container["name"], "operator": "In", "values": [75]}
        assert spec["podFailurePolicy"]["rules"] == [
            {
                "action": action,
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
            {"action": action, "onExitCodes": saved},
        ]
    [rule] = jobset["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


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
recovery = resources.job_recovery["recover_on_exit_codes"]
print(task.num_nodes, resources.use_spot, *recovery, *task.volumes)
"""


@pytest.mark.long  # pip installs SkyPilot
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
    assert (result.returncode, result.stdout) == (0, "2 True 75 /checkpoints\n"), result.stderr


def test_skypilot_starts_what_it_has_gpus_for(tmp_path):
    """Its script, with a Python that prints what it was started with."""
    text = (ROOT / "launch/skypilot/train.yaml").read_text(encoding="utf-8")
    script = tmp_path / "run.sh"
    script.write_text(yaml.safe_load(text)["run"], encoding="utf-8")
    passes(tool("shellcheck"), "--shell=bash", "--exclude=SC2154", script)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$OMP_NUM_THREADS $TORCH_FR_DUMP_TEMP_FILE"\necho "$@"\n')
    python.chmod(0o755)
    node = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_TASK_ID": "sky-1",
    }

    def started(gpus: str) -> subprocess.CompletedProcess:
        env = clean_env(**node, SKYPILOT_NUM_GPUS_PER_NODE=gpus)
        argv = ["bash", script]
        return subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )

    result = started("0")
    assert (result.returncode, result.stdout) == (2, "")
    assert "0 GPUs" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    settings, command = started("8").stdout.splitlines()
    assert settings == f"{max(1, os.cpu_count() // 8)} /checkpoints/flight-recorder-sky-1-rank_"
    words = command.removeprefix("launch/torchrun/run.py ").split()
    launched = get_args_parser().parse_args(words)
    assert (launched.nnodes, launched.node_rank, launched.nproc_per_node) == ("2", 1, "8")
    assert launched.master_addr == "10.0.0.1"
    assert "--device cuda" in command
    check(f"torchrun {shlex.join(words)}")


@pytest.mark.launch
@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_pods_save_on_sigterm_and_resume(tmp_path):
    """The Job's command as PID 1 of two PID namespaces, whose host's name does not resolve.

    SIGTERM to one ends both with 75, which podFailurePolicy ignores, and both go on from there.
    """
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
        .replace("launch/torchrun/run.py", str(ROOT / "launch/torchrun/run.py"))
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
        "--uts",
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
            own = f"hostname no-such-host && mount --bind {tmp_path}/hosts /etc/hosts"
            shell = f"{own} && exec {torchrun} {train_py}"
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
        ends(75, 75)
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


SET = {"TRAINER_UID": "1000", "GRAFANA_PASSWORD": "secret"}


def compose(file: str = "compose.yaml", **env: str) -> dict:
    """Load a Compose file with its variables put in. A LookupError is one that is required."""

    def value(match: re.Match) -> str:
        name, operator, word = match.groups()
        if env.get(name):
            return env[name]
        if operator == ":-":
            return word
        raise LookupError(f"{name}: {word}")

    text = (DOCKER / file).read_text(encoding="utf-8")
    return yaml.safe_load(re.sub(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}", value, text))


@pytest.mark.parametrize("file", ["compose.yaml", "monitoring.yaml"])
def test_compose_services(file):
    loaded = compose(file, **SET)
    for name, service in loaded["services"].items():
        assert re.fullmatch(r"[^:]+:v?\d+\.\d+\.\d+(-1000)?", service["image"]), name
        # open to this machine only
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for source in [volume.split(":")[0] for volume in service["volumes"]]:
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
            else:
                assert source in loaded["volumes"], source
        if "build" in service:
            assert service["profiles"], name  # nothing starts that was not asked for
            assert (DOCKER / service["build"]["context"]).resolve() == ROOT
            assert ROOT / service["build"]["dockerfile"] == DOCKER / "Dockerfile"
            # torchrun ends its ranks before Docker ends torchrun, in 5 minutes
            assert int(service["environment"]["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < 300
            assert service["stop_grace_period"] == "5m"
            assert service["ulimits"] == {"memlock": -1}


def test_two_users_of_a_host_share_nothing():
    """Compose names the containers and volumes after the project."""
    for file in ("compose.yaml", "monitoring.yaml"):
        loaded = compose(file, **SET)
        assert re.fullmatch("[a-z-]+-1000", loaded["name"])
        images = [service["image"] for service in loaded["services"].values()]
        ours = [image for image in images if image.startswith("gpu-training:")]
        assert ours
        assert all(image.endswith("-1000") for image in ours)
        with pytest.raises(LookupError, match=r"TRAINER_UID: .*id -u"):
            compose(file, GRAFANA_PASSWORD="secret")
    shell = compose(**SET)
    assert shell["services"]["shell"]["build"]["args"] == {"UID": 1000}
    # monitoring shows the runs of the same user
    external = loaded["volumes"]["checkpoints"]
    assert external == {"name": f"{shell['name']}_checkpoints", "external": True}


def test_what_a_browser_reaches_wants_a_password():
    grafana = compose("monitoring.yaml", **SET)["services"]["grafana"]["environment"]
    assert grafana == {"GF_SECURITY_ADMIN_PASSWORD": "secret"}
    with pytest.raises(LookupError, match="GRAFANA_PASSWORD: set it"):
        compose("monitoring.yaml", TRAINER_UID="1000")
    # JupyterLab makes a token, unless it is told not to
    jupyter = compose(TRAINER_UID="1000")["services"]["jupyter"]
    assert not re.search("token|password", f"{jupyter['command']} {jupyter['environment']}")
    monitoring = compose("monitoring.yaml", **SET)["services"]
    assert [name for name in monitoring if "ports" in monitoring[name]] == ["grafana"]


def test_the_image_is_that_of_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = [DOCKER / "Dockerfile", *COMPOSE, *KUBERNETES.glob("*job.yaml")]
    for file in files:
        tags = re.findall(r"gpu-training:([\d.]+)", file.read_text(encoding="utf-8"))
        assert set(tags) == {version["version"]}, file


def test_the_image_has_what_the_scripts_need_and_no_test_tools():
    image = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    requirements = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    [torch] = re.findall(r"^torch==(.+)$", requirements, re.MULTILINE)
    assert f"\nFROM pytorch/pytorch:{torch}-" in image
    assert re.findall(r"--requirement (\S+)", image) == ["/tmp/requirements.txt"]
    assert not re.search("pytest|ruff|mypy|hadolint", requirements)
    assert re.findall(r"^USER (.+)$", image, re.MULTILINE) == ["$UID"]
    # NCCL loads these by name
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(image.split())


# Prometheus and Grafana

PANELS = json.loads((DOCKER / "grafana/dashboards/training.json").read_text(encoding="utf-8"))[
    "panels"
]


def test_prometheus_and_grafana_find_each_other():
    file = DOCKER / "prometheus.yml"
    [job] = yaml.safe_load(file.read_text(encoding="utf-8"))["scrape_configs"]
    services = compose("monitoring.yaml", **SET)["services"]
    check(services["monitor"]["command"].replace("/workspace/", ""))
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
    "train.sbatch that never fails": (
        {**JOB, "PROCS_PER_NODE": "1", "MAX_FAILURES": "none"},
        ["train: error: ", "MAX_FAILURES=none"],
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
