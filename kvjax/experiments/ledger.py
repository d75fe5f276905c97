"""Prints and draws the byte ledger of requests that share a prefix."""

import pathlib

import ml_collections

from host_allocator import allocator as allocators
from host_allocator import errors
from host_allocator import layout as layout_lib
from host_allocator import ledger as ledger_lib
from host_allocator import metadata
from host_allocator import planner
from host_allocator import sequences
from host_allocator import snapshots
from kvjax import plots
from kvjax.experiments import common

_KIB = 1024
_MIB = 1024 * _KIB


def run(
  config: ml_collections.ConfigDict, workdir: pathlib.Path
) -> dict[str, object]:
  """Runs the experiment; see `configs/ledger.py`.

  Args:
    config: geometry of the cache, lengths of the requests, record sizes.
    workdir: gets `summary.json`, `ledger.png` and `page_tables.png`.

  Returns:
    The summary: every line of the ledger in bytes, and audit findings.

  Raises:
    ExperimentError: if lengths and reservations do not go together.
    KVError: if the requests do not fit the pool.
  """
  layout = layout_lib.CacheLayout.uniform(
    num_layers=config.num_layers,
    num_kv_heads=config.num_kv_heads,
    head_dim=config.head_dim,
    page_size=config.page_size,
    dtype=config.dtype,
    quantization=config.quantization or None,
  )
  allocator, opened = _open_requests(config, layout)
  reserved = dict(zip(opened, config.reserved, strict=True))
  measured = snapshots.ledger_of(allocator, reserved)
  findings = (*ledger_lib.verify(measured), *allocator.audit())
  total = measured.total
  records = _records(config, allocator)
  plan = _plan(config, layout)
  _print(config, layout, total, records)
  _print_plan(config, plan)
  _draw(workdir, total, opened, config.page_size)
  return common.write_summary(
    workdir,
    {
      "row_bytes": layout.row_bytes,
      "page_bytes": layout.groups[0].page_bytes,
      **{
        name: getattr(total, name)
        for name in (
          "logical_bytes",
          "reserved_bytes",
          "slack_bytes",
          "page_references",
          "reference_capacity_bytes",
          "reference_tail_bytes",
          "unique_pages",
          "materialized_bytes",
          "capacity_bytes",
          "tail_bytes",
          "deduplicated_bytes",
          "avoided_capacity_bytes",
          "pool_bytes",
          "live_bytes",
          "idle_bytes",
        )
      },
      "metadata_bytes": records["total"],
      "planned_pages": plan.num_pages[0],
      "planned_sequences": plan.sequences_of(config.planned_length),
      "planned_sequences_shared": plan.sequences_of(
        config.planned_length, shared_tokens=config.planned_shared
      ),
      "audit_findings": len(findings),
    },
  )


def _open_requests(
  config: ml_collections.ConfigDict, layout: layout_lib.CacheLayout
) -> tuple[allocators.KVAllocator, list[sequences.Sequence]]:
  """Computes the longest request and lets the others share its pages."""
  lengths = list(config.lengths)
  if len(config.reserved) != len(lengths) or not lengths or min(lengths) < 1:
    raise common.ExperimentError(
      f"lengths={lengths} and reserved={list(config.reserved)} must be as many"
      " numbers, from 1"
    )
  longest = max(lengths)
  allocator = allocators.KVAllocator(
    layout,
    num_pages=config.num_pages,
    max_sequences=len(lengths) + 1,
    max_length=max(longest, config.page_size),
  )
  source = allocator.open(list(range(longest)))
  allocator.commit(allocator.plan([(source, longest)]))
  opened = []
  for length in lengths:
    sequence = allocator.fork(source)
    allocator.truncate(sequence, length)
    opened.append(sequence)
  allocator.close(source)
  return allocator, opened


def _records(
  config: ml_collections.ConfigDict, allocator: allocators.KVAllocator
) -> dict[str, int]:
  sizes = metadata.RecordBytes(
    map_entry=config.map_entry_bytes,
    page_descriptor=config.page_descriptor_bytes,
    hash_entry=config.hash_entry_bytes,
    request_tail=config.request_tail_bytes,
    free_entry=config.free_entry_bytes,
    fixed=config.fixed_bytes,
  )
  return metadata.metadata_bytes(sizes, snapshots.record_counts(allocator))


def _plan(
  config: ml_collections.ConfigDict, layout: layout_lib.CacheLayout
) -> planner.CapacityPlan:
  try:
    return planner.plan_capacity(
      layout,
      budget_bytes=int(config.budget_gib * 1024 * _MIB),
      max_sequences=1024,
      max_length=config.planned_length,
    )
  except errors.LedgerError as error:
    raise common.ExperimentError(f"budget_gib: {error}") from error


def _print(
  config: ml_collections.ConfigDict,
  layout: layout_lib.CacheLayout,
  total: ledger_lib.GroupLedger,
  records: dict[str, int],
) -> None:
  lengths = ", ".join(str(length) for length in config.lengths)
  print(
    f"Requests of {lengths} rows, each a prefix of the longest."
    f" A row is {layout.row_bytes / _KIB:g} KiB, a page of"
    f" {config.page_size} rows {layout.groups[0].page_bytes / _MIB:g} MiB.\n"
  )
  rows: list[tuple[str, int | None, str]] = [
    ("logical rows", total.logical_bytes, "every request's, shared ones again"),
    ("contiguous reservation", total.reserved_bytes, "= logical + slack"),
    ("  slack", total.slack_bytes, ""),
    (
      f"{total.page_references} page references",
      total.reference_capacity_bytes,
      "= logical + tail",
    ),
    ("  tail", total.reference_tail_bytes, "what requests do not see"),
    (
      f"{total.unique_pages} unique pages",
      total.capacity_bytes,
      "= materialized + tail",
    ),
    ("  materialized", total.materialized_bytes, "rows that were computed"),
    ("  tail", total.tail_bytes, "rows that nobody has"),
    ("saved payload", total.deduplicated_bytes, "= logical - materialized"),
    ("saved capacity", total.avoided_capacity_bytes, "= references - unique"),
    ("pool", total.pool_bytes, "= live + idle"),
    ("  live", total.live_bytes, ""),
    ("  idle", total.idle_bytes, "free, evictable: not waste"),
  ]
  common.print_table(
    ["ledger", "bytes", "MiB", ""],
    [
      (name, size, None if size is None else f"{size / _MIB:g}", note)
      for name, size, note in rows
    ],
  )
  print()
  common.print_table(["records", "bytes"], list(records.items()))


def _print_plan(
  config: ml_collections.ConfigDict, plan: planner.CapacityPlan
) -> None:
  alone = plan.sequences_of(config.planned_length)
  shared = plan.sequences_of(
    config.planned_length, shared_tokens=config.planned_shared
  )
  print(
    f"\n{config.budget_gib:g} GiB hold {plan.num_pages[0]:,} pages:"
    f" {alone:,} sequences of {config.planned_length:,} tokens, or"
    f" {shared:,} that share their first {config.planned_shared:,}."
  )


def _draw(
  workdir: pathlib.Path,
  total: ledger_lib.GroupLedger,
  opened: list[sequences.Sequence],
  page_size: int,
) -> None:
  reserved = total.reserved_bytes or 0
  bars = {
    "contiguous": (total.logical_bytes, reserved - total.logical_bytes, 0),
    "references": (total.logical_bytes, total.reference_tail_bytes, 0),
    "unique pages": (total.materialized_bytes, total.tail_bytes, 0),
    "pool": (total.materialized_bytes, total.tail_bytes, total.idle_bytes),
  }
  parts = {
    name: [sizes[index] / _MIB for sizes in bars.values()]
    for index, name in enumerate(("rows", "unused in what is held", "idle"))
  }
  plots.save(
    plots.stacked_bars(
      parts, list(bars), title="Four views of the same requests", x_label="MiB"
    ),
    workdir / "ledger.png",
  )
  names = [f"{sequence.length} rows" for sequence in opened]
  names = [f"{chr(ord('A') + i % 26)}: {name}" for i, name in enumerate(names)]
  plots.save(
    plots.page_tables(
      dict(zip(names, (s.pages(0).tolist() for s in opened), strict=True)),
      page_size=page_size,
      lengths=dict(zip(names, (s.length for s in opened), strict=True)),
    ),
    workdir / "page_tables.png",
  )
