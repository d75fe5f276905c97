"""Few-shot questions of GSM8K: how much of what could be reused is reused."""

import json
import pathlib

import ml_collections

from kvjax.experiments import common
from kvjax.experiments import serving

WITH, WITHOUT = "prefix reuse", "no reuse"


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Serves few-shot prompts and holds the reuse against an infinite cache.

  `reused_share_of_ideal` is `matched_tokens / ideal_matched_tokens`. The ideal
  is counted by brute force over the prompts alone, at the granularity of a
  token: see `kvjax.experiments.prompts.ideal_matched_tokens`.

  Args:
    config: see `configs/gsm8k.py`.
    workdir: gets `summary.json`, `generated.txt` and `pool_use.png`.

  Returns:
    The summary.

  Raises:
    ExperimentError: if the data is not there or not what it should be.
  """
  texts = few_shot_prompts(
    common.find_data("gsm8k/train_first8.jsonl"),
    common.find_data("gsm8k/test.jsonl"),
    shots=config.shots,
    questions=config.questions,
  )
  model, tokenizer = serving.load_model(config)
  prompts = [tokenizer.encode(text) for text in texts]
  params = serving.sampling_params(config)
  sizes = serving.cache_sizes(config, model, prompts)
  engine = serving.make_engine(
    config, model, tokenizer, sizes, prefix_reuse=True
  )
  served = serving.serve(engine, prompts, params, title=WITH)
  serving.print_prompts(texts, served)
  print()
  few = config.questions_without_reuse
  summary = serving.summarize(prompts, served)
  runs = {WITH: served}
  if few:
    engine = serving.make_engine(
      config, model, tokenizer, sizes, prefix_reuse=False
    )
    title = f"{WITHOUT}, first {few}"
    runs[title] = serving.serve(engine, prompts[:few], params, title=title)
    summary |= serving.compare(served, runs[title])
  serving.print_runs(runs)
  print(
    f"\n{served.matched_tokens:,} of the {summary['ideal_matched_tokens']:,} "
    "tokens that an infinite cache could reuse were reused"
  )
  serving.write_texts(workdir / "generated.txt", texts, served)
  serving.draw_pool_use(workdir / "pool_use.png", runs)
  return common.write_summary(workdir, summary)


def few_shot_prompts(
  train: pathlib.Path, test: pathlib.Path, *, shots: int, questions: int
) -> list[str]:
  """Writes the worked examples before each of the first questions.

  Args:
    train: JSON lines with the worked examples.
    test: JSON lines with the questions.
    shots: worked examples before each question.
    questions: prompts to make.

  Returns:
    The prompts, in the order of the test file.

  Raises:
    ExperimentError: if a file holds too few lines, or a line is no question
      with an answer.
  """
  if questions < 1 or shots < 0:
    raise common.ExperimentError(f"nothing to ask: {questions=}, {shots=}")
  examples = _read(train, shots)
  before = "".join(
    f"Question: {each['question']}\nAnswer: {each['answer']}\n\n"
    for each in examples
  )
  return [
    f"{before}Question: {each['question']}\nAnswer:"
    for each in _read(test, questions)
  ]


def _read(path: pathlib.Path, count: int) -> list[dict[str, str]]:
  lines = path.read_text(encoding="utf-8").strip().split("\n")[:count]
  if len(lines) < count:
    raise common.ExperimentError(
      f"{str(path)!r} holds {len(lines)} lines, {count} are wanted"
    )
  rows = []
  for number, line in enumerate(lines, 1):
    try:
      row = json.loads(line)
      rows.append({"question": row["question"], "answer": row["answer"]})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
      raise common.ExperimentError(
        f'{str(path)!r} line {number}: no "question" with an "answer"'
      ) from error
  return rows
