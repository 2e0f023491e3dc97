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
from support.harness import (
    clean_env,
    command,
    descendants,
    finish,
    holds,
    kill_all,
    run,
    signal_another_thread,
    start,
)

prometheus_client = pytest.importorskip("prometheus_client")
from prometheus_client.parser import text_string_to_metric_families

SCRIPT = "01_devices/monitor.py"
HANG = {"NVML_MILLIWATTS": "90000", "NVML_UTILIZATION": "100"}  # of a 700 W limit
RECORD = {"step": 5, "loss": 2.5, "tokens_per_second": 4000.0, "mfu": 0.25}
# what the exporter has: metrics of GPUs may be absent where the driver does not say
# a sample per reason
EXPORTED = {*load(SCRIPT).METRICS} - {"gpu_throttle_reasons"} | {"gpu_throttled"}


def write_run(folder: Path, *records: dict, tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records) + tail,
        encoding="utf-8",
    )
    return folder


@contextlib.contextmanager
def exporter(folder: Path, *flags, **env: str):
    """A running exporter: (process, address of its metrics)."""
    folder.mkdir()
    process = start(command(SCRIPT, "--prometheus", 0, *flags), folder, **env)
    try:
        served = holds(
            process, lambda: (folder / "stdout").read_text(encoding="utf-8").endswith("/metrics\n")
        )
        assert served, (folder / "stderr").read_text(encoding="utf-8")
        yield process, (folder / "stdout").read_text(encoding="utf-8").split()[-1]
    finally:
        kill_all(process)


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=600) as answer:
        return answer.read().decode()


def once(folder: Path, *flags, **env: str) -> dict:
    result = run(SCRIPT, folder, "--once", "--json", "out.json", *flags, **env)
    assert result.code == 0, result.out + result.err
    return json.loads((folder / "out.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("driver", "expected"),
    [
        (HANG, True),
        ({**HANG, "NVML_MILLIWATTS": "152000"}, True),  # as an H100 in a public report
        ({**HANG, "NVML_MILLIWATTS": "300000"}, False),
        ({**HANG, "NVML_REFUSE": "nvmlDeviceGetPowerUsage"}, None),
        # one sign is enough
        ({**HANG, "NVML_UTILIZATION": "50", "NVML_REFUSE": "nvmlDeviceGetPowerUsage"}, False),
    ],
)
def test_a_likely_hang_is_flagged_and_what_cannot_be_told_is_null(
    tmp_path, fake_driver, driver, expected
):
    found = once(tmp_path, LD_LIBRARY_PATH=fake_driver, **driver)
    assert [gpu["likely_hang"] for gpu in found["gpu"]] == [expected] * 2


def test_a_gpu_is_compared_with_the_others_and_with_itself_before(tmp_path, fake_driver):
    """The second GPU draws 300 of 700 W: not little, unless the first one draws 650."""
    power = {"NVML_UTILIZATION": "100", "NVML_MILLIWATTS": "650000"}
    beside = {**power, "NVML_MILLIWATTS_OTHER": "300000"}
    found = once(tmp_path / "others", LD_LIBRARY_PATH=fake_driver, **beside)
    assert [gpu["likely_hang"] for gpu in found["gpu"]] == [False, True]
    found = once(
        tmp_path / "idle", LD_LIBRARY_PATH=fake_driver, **beside, NVML_UTILIZATION_FIRST="0"
    )
    assert [gpu["likely_hang"] for gpu in found["gpu"]] == [False, False]

    # All GPUs at 650 W when first asked, and at 300 W from then on.
    env = {"LD_LIBRARY_PATH": fake_driver, **power, "NVML_MILLIWATTS_LATER": "300000"}
    with exporter(tmp_path / "before", **env) as (_, url):
        hangs = []
        for _ in range(2):
            families = {f.name: f.samples for f in text_string_to_metric_families(get(url))}
            hangs.append([sample.value for sample in families["gpu_likely_hang"]])
    assert hangs == [[0, 0], [1, 1]]


def test_what_the_driver_the_host_and_the_run_say(tmp_path, fake_driver):
    cut = json.dumps({**RECORD, "loss": 9.0})[:-4]  # as a kill leaves a line
    run_dir = write_run(
        tmp_path / "mine", {**RECORD, "loss": 3.0}, RECORD, {"step": 6, "val_loss": 1.0}, tail=cut
    )
    found = once(
        tmp_path,
        "--run-dir",
        run_dir,
        LD_LIBRARY_PATH=fake_driver,
        NVML_PID=str(os.getpid()),
        NVML_THROTTLE="5",
    )
    assert found["device"] == "NVIDIA H100 80GB HBM3"
    for gpu in found["gpu"]:
        assert (gpu["power_watts"], gpu["temperature_celsius"], gpu["sm_clock_hertz"]) == (
            612,
            61,
            1755e6,
        )
        assert [process["pid"] for process in gpu["processes"]] == [os.getpid()]
        assert gpu["throttle_reasons"] == ["power cap"]  # and not idleness
    assert 0 < found["host"][0]["memory_used_bytes"] < found["host"][0]["memory_total_bytes"]
    [training] = found["training"]
    assert (training["run"], training["loss"], training["mfu_ratio"]) == ("mine", 2.5, 0.25)


def test_without_nvml_the_rest_works_and_says_why(tmp_path, fake_driver):
    run_dir = write_run(tmp_path / "mine", RECORD)
    found = once(tmp_path, "--run-dir", run_dir, LD_LIBRARY_PATH=fake_driver, NVML_BROKEN="1")
    assert (found["device"], found["gpu"], found["training"][0]["tokens_per_second"]) == (
        "cpu",
        [],
        4000,
    )
    assert found["no_gpu"]
    assert found["no_gpu"] in (tmp_path / "stdout").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "flags",
    [
        ["--prometheus", "PORT"],
        ["--prometheus", "70000"],
        ["--prometheus", "0", "--once"],
        ["--run-dir", "nowhere"],
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, flags):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        flags = [str(taken.getsockname()[1]) if flag == "PORT" else flag for flag in flags]
        result = run(SCRIPT, tmp_path, *flags)
    assert (result.code, result.out, len(result.err.splitlines())) == (2, "", 1), (
        result.out + result.err
    )
    assert all(word in result.err for word in flags)


def test_live_table_until_interrupted(tmp_path, fake_driver):
    main, terminal = os.openpty()
    env = clean_env(LD_LIBRARY_PATH=fake_driver, **HANG)
    process = subprocess.Popen(
        command(SCRIPT), cwd=tmp_path, env=env, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    shown = ""
    try:
        # a read is what the script has written, and an OSError when it has ended
        for _ in range(1000):
            shown += os.read(main, 65536).decode(errors="replace")
            if shown.count("LIKELY HANG") >= 4:  # two GPUs, twice
                break
        process.send_signal(signal.SIGINT)
        assert (process.wait(timeout=600), shown.count("LIKELY HANG") >= 4) == (0, True), shown[
            -3000:
        ]
    finally:
        process.kill()
        process.wait()
        os.close(main)


def test_scraped_twice_and_ended_by_a_signal_to_a_thread_of_the_server(tmp_path, fake_driver):
    """What is not known is absent, never 0, and counters count on."""
    env = {
        "LD_LIBRARY_PATH": fake_driver,
        "NVML_NVLINK_STEP": "1024",
        "NVML_REFUSE": "nvmlDeviceGetTemperature",
    }
    run_dir = write_run(tmp_path / "mine", {"step": 5, "loss": 2.5})
    with exporter(tmp_path / "served", "--run-dir", run_dir, **env) as (process, url):
        texts = get(url), get(url)
        signal_another_thread(process, signal.SIGTERM)
        result = finish(process, tmp_path / "served")
    assert (result.code, result.err) == (0, "")
    first, second = (
        {f.name: f.samples for f in text_string_to_metric_families(text)} for text in texts
    )
    assert [(s.labels["gpu"], s.value) for s in first["gpu_utilization_ratio"]] == [
        ("0", 0.97),
        ("1", 0.97),
    ]
    assert [(s.labels["run"], s.value) for s in first["training_loss"]] == [("mine", 2.5)]
    assert not {name for name in first if first[name]} & {
        "gpu_temperature_celsius",
        "training_mfu_ratio",
    }
    assert (
        second["gpu_nvlink_rx_bytes"][0].value - first["gpu_nvlink_rx_bytes"][0].value
        == 1024 * 1024
    )


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus and promtool (Debian: prometheus)"
)
def test_prometheus_takes_every_metric_and_promtool_finds_no_fault(tmp_path, fake_driver):
    run_dir = write_run(tmp_path / "mine", RECORD)
    query = urllib.parse.quote('{job="monitor",__name__=~"(gpu|host|training)_.+"}')
    with exporter(tmp_path / "served", "--run-dir", run_dir, LD_LIBRARY_PATH=fake_driver) as (
        _,
        url,
    ):
        promtool = {"capture_output": True, "text": True, "timeout": 600}
        checked = subprocess.run(["promtool", "check", "metrics"], input=get(url), **promtool)
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
        with prometheus(tmp_path / "prometheus", urllib.parse.urlsplit(url).netloc) as (
            server,
            api,
        ):
            stored: set[str] = set()

            def scraped() -> bool:
                with contextlib.suppress(OSError):  # not ready yet
                    rows = json.loads(get(f"{api}/api/v1/query?query={query}"))["data"]["result"]
                    stored.update(row["metric"]["__name__"] for row in rows)
                return bool(stored)

            assert holds(server, scraped)
            assert stored == EXPORTED


@contextlib.contextmanager
def prometheus(folder: Path, target: str):
    """Debian's Prometheus, asking target once a second: (process, its address)."""
    folder.mkdir()
    config = {
        "scrape_configs": [{"job_name": "monitor", "static_configs": [{"targets": [target]}]}]
    }
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    flags = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = start(["prometheus", *flags, "--web.listen-address=127.0.0.1:0"], folder)

    def listening() -> re.Match | None:
        return re.search(
            r"address=(127\.0\.0\.1:[1-9]\d*)", (folder / "stderr").read_text(encoding="utf-8")
        )

    try:
        assert holds(process, listening), (folder / "stderr").read_text(encoding="utf-8")[-2000:]
        yield process, f"http://{listening()[1]}"
    finally:
        kill_all(process)
        assert not descendants(process)
