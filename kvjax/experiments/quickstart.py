"""Prompts that share a long prefix, served with and without prefix reuse."""

import pathlib

import ml_collections

from kvjax import models
from kvjax.experiments import common
from kvjax.experiments import dense_baseline
from kvjax.experiments import prompts as prompts_lib
from kvjax.experiments import serving

WITH, WITHOUT = "prefix reuse", "no reuse"


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Serves the prompts twice and compares the two and a dense baseline.

  Args:
    config: see `configs/quickstart.py`.
    workdir: gets `summary.json`, `generated.txt` and `pool_use.png`.

  Returns:
    The summary.
  """
  texts = prompts_lib.read_prompts(pathlib.Path(config.prompts))
  model, tokenizer = serving.load_model(config)
  prompts = [tokenizer.encode(text) for text in texts]
  params = serving.sampling_params(config)
  sizes = serving.cache_sizes(config, model, prompts)
  runs = {}
  for name in (WITH, WITHOUT):
    engine = serving.make_engine(
      config, model, tokenizer, sizes, prefix_reuse=name == WITH
    )
    runs[name] = serving.serve(engine, prompts, params, title=name)
  serving.print_prompts(texts, runs[WITH])
  print()
  serving.print_runs(runs)
  serving.write_texts(workdir / "generated.txt", texts, runs[WITH])
  serving.draw_pool_use(workdir / "pool_use.png", runs)
  ratios = dense_baseline.measure(
    _unrolled(config, model),
    batch=config.baseline_batch,
    context=config.baseline_context,
    chunk=config.baseline_chunk,
    rounds=config.baseline_rounds,
    sizes=sizes,
  )
  dense_baseline.print_ratios(ratios)
  summary = common.write_summary(
    workdir,
    {
      **serving.summarize(prompts, runs[WITH]),
      **serving.compare(runs[WITH], runs[WITHOUT]),
      **ratios.summary(),
    },
  )
  common.print_note(f"wrote {workdir / common.SUMMARY_NAME}")
  return summary


def _unrolled(
  config: ml_collections.ConfigDict, model: models.Decoder
) -> models.Decoder:
  """The model for the baseline, whose dense cache is an array per layer."""
  if not model.scan_layers or not config.baseline_rounds:
    return model
  config = config.copy_and_resolve_references()
  config.scan_layers = False
  return serving.load_model(config)[0]
