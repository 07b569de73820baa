#!/bin/sh
# Installs SGLang for tests on a machine without a GPU: usage install_sglang.sh FOLDER (an environment of 3.4 GB, minutes).
# Two steps, because `pip install sglang` would bring the CUDA build of torch.
set -eu
python3 -m venv "$1"
pip="$1/bin/python -m pip install --quiet"
$pip "${TORCH:-torch==2.13.0}"
$pip --no-deps sglang==0.5.23 torchvision==0.28.0
$pip aiohttp anthropic blobfile==3.0.0 compressed-tensors==0.18.0 datasets distro einops fastapi gguf interegular llguidance \
    msgspec numba==0.65.1 numpy openai==2.8.0 openai-harmony==0.0.4 orjson outlines==0.1.11 packaging partial_json_parser pillow \
    prometheus-client psutil pybase64 pydantic python-dateutil python-multipart pyzmq regex requests scipy \
    sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0 uvicorn uvloop \
    watchfiles xgrammar==0.2.7 xxhash zstandard IPython easydict nvidia-ml-py
