"""Extracts from TensorRT-LLM's `llm_args.py` which keys its settings classes take, as JSON on stdout.

    python tests/engines/tensorrt_llm_schema.py llm_args.py COMMIT > tests/data/tensorrt_llm/llm_args.json

Reads the source as text (the package is not needed). Kept per class: its parent, and each public field's annotation and whether
it must be given. `tests/backends/test_tensorrt_llm_adapter.py` builds strict models from the result.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CLASSES = (
    "BaseCudaGraphConfig", "DecodeCudaGraphConfig", "DecodingBaseConfig", "EagleDecodingConfig", "SAEnhancerConfig",
    "Eagle3DecodingConfig", "NGramDecodingConfig", "SADecodingConfig", "DraftTargetDecodingConfig", "MTPDecodingConfig",
    "PARDDecodingConfig", "DFlashDecodingConfig", "DSparkDecodingConfig", "KvCacheConfig",
)  # fmt: skip


def extract(source: str) -> dict[str, dict[str, Any]]:
    """Class name -> {"parent": name or None, "fields": {name: {"annotation": text, "required": bool}}}."""
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in CLASSES}
    return {name: _class(found[name], found) for name in CLASSES if name in found}


def _class(node: ast.ClassDef, known: dict[str, ast.ClassDef]) -> dict[str, Any]:
    parents = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in known]
    fields = {}
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name) or line.target.id.startswith("_"):
            continue
        annotation = ast.unparse(line.annotation)
        if not annotation.startswith("ClassVar"):
            fields[line.target.id] = {"annotation": annotation, "required": _required(line.value)}
    return {"parent": parents[0] if parents else None, "fields": fields}


def _required(value: ast.expr | None) -> bool:
    """A field without a default: nothing assigned, or a `Field(...)` that names none."""
    if value is None:
        return True
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Field":
        given = {keyword.arg for keyword in value.keywords}
        return not value.args and not given & {"default", "default_factory"}
    return False


if __name__ == "__main__":
    path, commit = sys.argv[1:]
    print(json.dumps({"commit": commit, "classes": extract(Path(path).read_text())}, indent=1))
