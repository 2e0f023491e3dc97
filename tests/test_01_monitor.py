"""monitor.py: what it tells is what the driver said, what was refused is absent, and Prometheus takes it."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from support.chapter import load
from support.harness import clean_env, command, descendants, finish, holds, kill_all, run, signal_another_thread, start

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

SCRIPT = "01_devices/monitor.py"
HANG = {"NVML_MILLIWATTS": "90000", "NVML_UTILIZATION": "100"}  # of a 700 W limit
RECORD = {"step": 5, "loss": 2.5, "tokens_per_second": 4000.0, "mfu": 0.25}


monitor, readings = load(SCRIPT), load("01_devices/_monitor.py")
THROTTLE_REASONS = load("01_devices/_shared.py").THROTTLE_REASONS
EXPORTED = {*monitor.METRICS} - {"gpu_throttle_reasons"} | {"gpu_throttled"}  # a sample per reason


def write_run(folder: Path, *records: dict, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
    return folder


@contextlib.contextmanager
def exporter(folder: Path, *flags, **env: str):
    """A running exporter: (process, address of its metrics)."""
    folder.mkdir()
    process = start(command(SCRIPT, "--prometheus", 0, *flags), folder, **env)
    try:
        served = holds(process, lambda: (folder / "stdout").read_text().endswith("/metrics\n"))
        assert served, (folder / "stderr").read_text()
        yield process, (folder / "stdout").read_text().split()[-1]
    finally:
        kill_all(process)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=600) as answer:
        return answer.read().decode()


def samples(text: str) -> dict[str, dict[str, float]]:
    """Values by name and then by the labels gpu and reason ("" where there is none)."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
            key = " ".join(filter(None, (sample.labels.get("gpu"), sample.labels.get("reason"))))
            found.setdefault(sample.name, {})[key] = sample.value
    return found


def once(folder: Path, *flags, warm: bool = True, **env: str) -> dict:
    result = run(SCRIPT, folder, "--interval", 0.2, "--json", folder / "out.json", *flags, warm=warm, **env)
    assert result.code == 0, result.err
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({"power_watts": 139.9}, True),
        ({"power_watts": 140.0}, False),
        ({"utilization": 0.89}, False),
        ({"utilization": 0.9}, True),
        ({"processes": []}, True),  # a container may hide them
        ({"processes": None}, True),
        ({"power_watts": None}, None),
        ({"power_limit_watts": None}, None),
        ({"power_limit_watts": 0.0}, None),
        ({"utilization": None}, None),
        # one fact that excludes a hang is enough
        ({"utilization": None, "processes": None, "power_watts": 600.0}, False),
        ({"power_watts": None, "processes": None, "utilization": 0.5}, False),
    ],
)
def test_likely_hang(changed, expected):
    hanging = {"power_watts": 90.0, "power_limit_watts": 700.0, "utilization": 1.0, "processes": [{"pid": 1}]}
    assert readings.likely_hang({**hanging, **changed}) is expected


def test_bare_run_ends_with_rates_from_two_samples(tmp_path, fake_driver):
    step = 4096  # KiB between two samples
    found = once(
        tmp_path, LD_LIBRARY_PATH=fake_driver, NVML_NVLINK_STEP=str(step), NVML_PID=str(os.getpid()), NVML_THROTTLE="4"
    )
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    assert found["interval_seconds"] >= 0.2
    assert [gpu["index"] for gpu in found["gpu"]] == [0, 1]
    for gpu in found["gpu"]:
        assert (gpu["power_watts"], gpu["power_limit_watts"], gpu["temperature_celsius"]) == (612, 700, 61)
        assert (gpu["utilization_ratio"], gpu["sm_clock_hertz"], gpu["memory_clock_hertz"]) == (0.97, 1755e6, 2619e6)
        assert gpu["likely_hang"] is False
        assert [process["pid"] for process in gpu["processes"]] == [os.getpid()]
        assert gpu["throttle_reasons"] == ["power cap"]
        for way in ("rx", "tx"):
            assert gpu[f"nvlink_{way}_bytes_per_second"] * found["interval_seconds"] == pytest.approx(step * 1024)
    [host] = found["host"]
    assert host["cpus"] == os.cpu_count()
    assert 0 <= host["cpu_busy_seconds_per_second"] <= os.cpu_count() + 1
    assert 0 < host["memory_used_bytes"] < host["memory_total_bytes"]
    assert host["network_rx_bytes_per_second"] >= 0


def test_without_nvml_the_rest_works_and_says_why(tmp_path):
    run_dir = write_run(tmp_path / "mine", RECORD)
    broken = str(broken_driver(tmp_path))
    found = once(tmp_path, "--run-dir", run_dir, warm=False, LD_LIBRARY_PATH=broken)  # which nothing can load
    assert (found["device"], found["gpu"]) == ("cpu", [])
    assert found["no_gpu"].startswith("no NVIDIA driver that answers")
    assert found["no_gpu"] in " ".join((tmp_path / "stdout").read_text().split())
    assert found["training"][0]["tokens_per_second"] == 4000
    assert found["host"][0]["memory_total_bytes"] > 0


def broken_driver(folder: Path) -> Path:
    """A folder whose driver library cannot be loaded, so that a real one is not found either."""
    (folder / "libnvidia-ml.so.1").write_bytes(b"no library")
    return folder


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prometheus", "PORT"], "--prometheus PORT --address 127.0.0.1: [Errno 98] Address already in use"),
        (["--prometheus", 70000], "--prometheus 70000"),
        (["--prometheus", 0, "--once"], "leave out --once"),
        (["--run-dir", "nowhere"], "--run-dir nowhere: no such folder"),
        (["--interval", "inf"], "--interval: 'inf' is not a number above 0"),
    ],
)
def test_user_errors_are_one_line(tmp_path, flags, told):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = run(SCRIPT, tmp_path, *(port if flag == "PORT" else flag for flag in flags))
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert told.replace("PORT", port) in result.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_a_thread_of_the_server_takes_ends_the_exporter(tmp_path, fake_driver, number):
    with exporter(tmp_path / "a", LD_LIBRARY_PATH=fake_driver) as (process, _):
        signal_another_thread(process, number)
        result = finish(process, tmp_path / "a")
    assert (result.code, result.err) == (0, "")


def test_live_table_until_interrupted(tmp_path, fake_driver):
    main, terminal = os.openpty()
    env = clean_env(LD_LIBRARY_PATH=fake_driver, TERM="xterm", COLUMNS="160", LINES="60", **HANG)
    argv = command(SCRIPT, "--interval", 0.1)
    process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    os.set_blocking(main, False)
    shown = ""

    def drawn_twice() -> bool:
        nonlocal shown
        with contextlib.suppress(BlockingIOError):
            shown += os.read(main, 65536).decode(errors="replace")
        return shown.count("LIKELY HANG") >= 4  # two GPUs, twice

    try:
        assert holds(process, drawn_twice), shown
        process.send_signal(signal.SIGINT)
        assert holds_until_end(process, drawn_twice) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert "NVIDIA H100" in shown
    assert "Traceback" not in shown


def holds_until_end(process: subprocess.Popen, drain) -> int:
    """The exit code, its terminal read meanwhile: a full one would hold it up."""

    def ended() -> bool:
        with contextlib.suppress(OSError):  # the other end is closed
            drain()
        return process.poll() is not None

    holds(process, ended)
    return process.wait(timeout=600)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_promtool_finds_no_fault(tmp_path, fake_driver):
    text = exposition(tmp_path, fake_driver)
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=600)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def exposition(folder: Path, fake_driver: str) -> str:
    run_dir = write_run(folder / "mine", RECORD)
    with exporter(folder / "served", "--run-dir", run_dir, LD_LIBRARY_PATH=fake_driver) as (_, url):
        return get(url)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (Debian: prometheus)")
def test_prometheus_scrapes_it(tmp_path, fake_driver):
    run_dir = write_run(tmp_path / "mine", RECORD)
    env = {"LD_LIBRARY_PATH": fake_driver, "NVML_NVLINK_STEP": "1024"}
    with exporter(tmp_path / "served", "--run-dir", run_dir, **env) as (process, url):
        target = urllib.parse.urlsplit(url).netloc
        with prometheus(tmp_path / "prometheus", target) as (server, api):

            def ask(query: str) -> list[dict]:
                """What Prometheus answers, as soon as that is anything."""
                answer = []

                def answered() -> bool:
                    with contextlib.suppress(OSError):  # not ready yet
                        found = json.loads(get(f"{api}/api/v1/query?query={urllib.parse.quote(query)}"))
                        answer[:] = found["data"]["result"]
                    return bool(answer)

                assert holds(server, answered), query
                return answer

            assert [row["value"][1] for row in ask('up{job="monitor"} == 1')] == ["1"]
            stored = {row["metric"]["__name__"] for row in ask('{job="monitor",__name__=~"(gpu|host|training)_.+"}')}
            optional = {name for name in EXPORTED if name.startswith("host_disk_")}  # a machine may have no disk
            assert EXPORTED - optional <= stored <= EXPORTED
            hang = sorted(ask("gpu_likely_hang"), key=lambda row: row["metric"]["gpu"])
            assert [(row["metric"]["gpu"], row["metric"]["uuid"], row["value"][1]) for row in hang] == [
                ("0", "GPU-00000001", "0"),
                ("1", "GPU-00000002", "0"),
            ]
            assert {row["metric"]["name"] for row in hang} == {"NVIDIA H100 80GB HBM3"}
            [loss] = ask("training_loss")
            assert (loss["metric"]["run"], loss["value"][1]) == ("mine", "2.5")
            assert len(ask("rate(gpu_nvlink_rx_bytes_total[1m]) > 0")) == 2  # from two scrapes
            # Prometheus asks for OpenMetrics, where a counter's family goes without _total
            types = json.loads(get(f"{api}/api/v1/metadata"))["data"]
            for name in stored:
                family = types.get(name) or types[name.removesuffix("_total")]
                assert family[0]["type"] == ("counter" if name.endswith("_total") else "gauge")
        process.send_signal(signal.SIGINT)
        assert finish(process, tmp_path / "served").code == 0


@contextlib.contextmanager
def prometheus(folder: Path, target: str):
    """Debian's Prometheus, asking target once a second: (process, its address)."""
    folder.mkdir()
    config = {"scrape_configs": [{"job_name": "monitor", "static_configs": [{"targets": [target]}]}]}
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = start(["prometheus", *flags, "--web.listen-address=127.0.0.1:0"], folder)

    def listening() -> re.Match | None:
        return re.search(r"address=(127\.0\.0\.1:[1-9]\d*)", (folder / "stderr").read_text())

    try:
        assert holds(process, listening), (folder / "stderr").read_text()[-2000:]
        yield process, f"http://{listening()[1]}"
    finally:
        kill_all(process)
        assert not descendants(process)
