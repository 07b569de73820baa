"""Write tests/data/greedy_smollm2/reference.json: what transformers generates greedily in float32 for real prompts.

    python tests/make_greedy_reference.py MT_BENCH.jsonl HUMANEVAL.jsonl GSM8K.jsonl

Run once per version of the demo model; the test of the engine reads the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backends.reference.demo_model import MODEL_NAME, demo_model_dir

NEW_TOKENS = 24
LONGEST_PROMPT = 180
OUT = Path(__file__).parent / "data" / "greedy_smollm2" / "reference.json"


def texts(mt_bench: str, humaneval: str, gsm8k: str) -> list[tuple[str, str]]:
    def rows(path: str) -> list[dict]:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]

    chosen = [(f"mt_bench/{row['question_id']}", row["turns"][0]) for row in rows(mt_bench)[::3]]
    chosen += [(row["task_id"].lower(), "Complete this function:\n\n" + row["prompt"]) for row in rows(humaneval)[:60:3]]
    chosen += [(f"gsm8k/{row['question_id']}", row["turns"][0]) for row in rows(gsm8k)[:40:2]]
    return chosen


@torch.inference_mode()
def main() -> None:
    folder = demo_model_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    entries, smallest_gap = [], float("inf")
    for source, text in texts(*sys.argv[1:4]):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)["input_ids"]
        if len(prompt) > LONGEST_PROMPT:
            continue
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        gaps = [float(top[0] - top[1]) for top in (step[0].topk(2).values for step in made.logits)]
        smallest_gap = min(smallest_gap, *gaps)
        output = made.sequences[0, len(prompt) :].tolist()
        entries.append({"source": source, "messages": [{"role": "user", "content": text}], "output_ids": output})
    OUT.parent.mkdir(parents=True, exist_ok=True)
    head = {"model": MODEL_NAME, "dtype": "float32", "max_new_tokens": NEW_TOKENS, "smallest_top2_logit_gap": smallest_gap}
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    OUT.write_text(json.dumps(head)[:-1] + ', "entries": [\n' + lines + "\n]}\n", encoding="utf-8")
    print(f"{len(entries)} prompts, smallest gap between the two best logits {smallest_gap:.2g}")


if __name__ == "__main__":
    main()
