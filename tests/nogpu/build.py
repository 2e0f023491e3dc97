"""Builds the stubs of NVIDIA's libraries for the torch and the Triton of this Python: build.py FOLDER HEADERS.

A function that torch's libraries need and src/*.c does not write gets a default: it does nothing and succeeds (cuBLAS,
cuDNN ...), or says so and fails (driver, runtime, NCCL, NVML), unless it is in NOTHING_TO_DO."""

import importlib.util
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

SOURCES = {"libcuda": "driver.c", "libcudart": "runtime.c", "libnccl": "nccl.c"}
SOURCES["libnvidia-ml"] = "../../support/fake_nvml.c"
# not supported
FAILS = {"libcuda": 801, "libcudart": 801, "libnvidia-ml": 3, "libnccl": 5, "libcufile": 5}
LIBRARY = {  # of a function, by the start of its name: the first that fits
    "__cuda": "libcudart",
    **{
        name: f"lib{name}"
        for name in ("cublasLt", "cublas", "cudnn", "cufft", "cupti", "curand", "cusolver")
    },
    **{name: f"lib{name}" for name in ("cusparseLt", "cusparse", "nccl", "nvrtc")},
    "cuFile": "libcufile",
    "cuda": "libcudart",
    "nvshmem": "libnvshmem_host",
    "cu": "libcuda",
}
NOTHING_TO_DO = {
    *("cuInit", "cuCtxSynchronize", "cuModuleUnload", "cuFuncSetAttribute", "cuFuncSetCacheConfig"),
    *(
        "cudaStreamUpdateCaptureDependencies",
        "cudaDeviceEnablePeerAccess",
        "cudaCtxResetPersistingL2Cache",
    ),
    *("__cudaRegisterFatBinaryEnd", "__cudaUnregisterFatBinary", "__cudaRegisterVar"),
    *("ncclCommFinalize", "ncclCommAbort", "ncclCommDestroy", "nvmlDeviceGetHandleByPciBusId_v2"),
}


def run(*argv) -> str:
    return subprocess.run([*map(str, argv)], check=True, stdout=subprocess.PIPE, text=True).stdout


def folder_of(package: str) -> Path:
    return Path(importlib.util.find_spec(package).submodule_search_locations[0])


def needed(torch: Path, headers: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """The file names of the libraries, and of each library its functions with their symbols' version."""
    files, functions = (
        {"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"},
        defaultdict(dict),
    )
    for library in sorted((torch / "lib").glob("lib*.so*")):
        for name in re.findall(
            r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", run("readelf", "-d", library)
        ):
            files[name.split(".so")[0]] = name
        undefined = r" UND ((?:__cuda|cu[A-Zdpbsrf]|nccl|nvshmem|nvrtc)[\w]*)(?:@+([\w.]+))?"
        for name, version in re.findall(undefined, run("readelf", "-W", "--dyn-syms", library)):
            prefix = next(prefix for prefix in LIBRARY if name.startswith(prefix))
            functions[LIBRARY[prefix]][name] = version
    # what is looked up by name at run time
    driver = (headers / "cuda.h").read_text(errors="ignore", encoding="utf-8")
    names = re.findall(r"CUDAAPI\s+(cu[A-Z]\w+)\s*\(", driver)
    names += re.findall(r"#define\s+cu\w+\s+(?:__CUDA_API_\w+\()?(cu[A-Z]\w+)", driver)
    functions["libcuda"] = dict.fromkeys(names, "") | functions["libcuda"]
    runtime = (headers / "cuda_runtime_api.h").read_text(errors="ignore", encoding="utf-8")
    names = re.findall(r"CUDARTAPI\s+(cuda[A-Z]\w+)\s*\(", runtime)
    functions["libcudart"] = dict.fromkeys(names, "") | functions["libcudart"]
    pynvml = Path(importlib.util.find_spec("pynvml").origin).read_text(encoding="utf-8")
    names = re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', pynvml)
    names += re.findall(r"\bnvml[A-Z]\w+\b(?<!_)", run("strings", torch / "lib/libc10_cuda.so"))
    functions["libnvidia-ml"] = dict.fromkeys(names, "")
    return files, functions


def build(
    library: str, out: Path, files: dict[str, str], functions: dict[str, str], headers: list[Path]
) -> None:
    sources = Path(__file__).parent / "src"
    defaults, versions = out / f"{library}.c", out / f"{library}.map"
    text = '#include "nogpu.h"\n'
    for name in functions:
        answer = 0 if name in NOTHING_TO_DO else FAILS.get(library, 0)
        text += f'__attribute__((weak)) int {name}(void) {{ return nogpu_default("{name}", {answer}); }}\n'
    defaults.write_text(text, encoding="utf-8")
    options = [
        "-shared",
        "-fPIC",
        "-O1",
        "-w",
        "-std=gnu17",
        f"-DLIB_{library[3:].replace('-', '_')}",
    ]
    options += [f"-I{folder}" for folder in (*headers, sources)]
    options += [f"-Wl,-soname,{files[library]}", "-o", out / files[library]]
    if version := next(filter(None, functions.values()), ""):
        versions.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
        options.append(f"-Wl,--version-script={versions}")
    state = [] if library == "libcuda" else [out / files["libcuda"]]  # the others use its functions
    run(
        "gcc",
        *options,
        sources / SOURCES.get(library, "math.c"),
        defaults,
        *state,
        "-ldl",
        "-lpthread",
    )
    defaults.unlink()
    versions.unlink(missing_ok=True)


if __name__ == "__main__":
    out, headers = map(Path, sys.argv[1:])
    out.mkdir(exist_ok=True)
    files, functions = needed(folder_of("torch"), headers)
    for library in files:  # libcuda is the first
        build(
            library,
            out,
            files,
            functions[library],
            [headers, folder_of("triton") / "backends/nvidia/include"],
        )
