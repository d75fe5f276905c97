"""What must be equal before old K/V may serve a new request (§0x01A)."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from host_allocator import errors
from host_allocator import identity
from host_allocator import layout

LAYOUT = layout.CacheLayout.uniform(
  num_layers=32, num_kv_heads=4, head_dim=128, page_size=16, dtype="float16"
)


def manifest(**changes):
  fields = {
    "cache_abi": "abi",
    "cache_layout": identity.CacheLayoutManifest(layout=LAYOUT).digest,
    "token_ids": tuple(range(16)),
    "side_inputs": ((3, "image"),),
    "namespace": "tenant",
  }
  return identity.CacheCompatibilityManifest(**{**fields, **changes})


def test_a_longer_prompt_with_the_same_beginning_is_compatible():
  longer = manifest(
    token_ids=tuple(range(40)), side_inputs=((3, "image"), (20, "later"))
  )
  identity.require_compatible(manifest(), longer)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("cache_abi", "other"),
    ("cache_layout", "other"),
    ("model_generation", 1),
    ("adapter", "lora"),
    ("weight_transform", "merged"),
    ("position_contract", "rope-10000"),
    ("token_ids", (0, 1, 2, 9, *range(4, 16))),
    ("token_ids", tuple(range(15))),
    ("side_inputs", ((3, "another image"),)),
    ("side_inputs", ((4, "image"),)),
    ("side_inputs", ()),
    ("namespace", "stranger"),
    ("namespace_generation", 1),
    ("salt", "pepper"),
    ("publication_generation", 1),
  ],
)
def test_each_field_that_changes_a_value_or_its_reading_refuses(field, value):
  with pytest.raises(errors.Incompatible) as caught:
    identity.require_compatible(manifest(), manifest(**{field: value}))
  assert caught.value.field == field
  assert caught.value.reason == f"{field}_mismatch"


@pytest.mark.parametrize(
  "changes",
  [
    {"physical_mode": "virtual_pages"},
    {"world_size": 2},
    {"world_size": 2, "rank": 1},
    {"hash_page_tokens": 32},
    {"allocator_revision": 2},
    {
      "layout": layout.CacheLayout(
        (dataclasses.replace(LAYOUT.groups[0], quantization="int8"),)
      )
    },
    {
      "layout": layout.CacheLayout(
        (
          dataclasses.replace(
            LAYOUT.groups[0],
            axis_order=("layer", "page", "row", "head", "lane"),
          ),
        )
      )
    },
  ],
)
def test_equal_sizes_under_another_reading_have_another_digest(changes):
  base = identity.CacheLayoutManifest(layout=LAYOUT)
  assert dataclasses.replace(base, **changes).digest != base.digest


@pytest.mark.parametrize(
  "changes",
  [
    {"physical_mode": "heap"},
    {"rank": 1},
    {"rank": -1},
    {"hash_page_tokens": -1},
  ],
)
def test_a_malformed_layout_manifest_is_refused(changes):
  with pytest.raises(errors.LayoutError):
    identity.CacheLayoutManifest(layout=LAYOUT, **changes)


def test_the_root_leaves_out_what_belongs_to_single_pages():
  root = manifest().root
  assert manifest(token_ids=(), side_inputs=()).root == root
  for change in (
    {"model_generation": 1},
    {"adapter": "lora"},
    {"salt": "pepper"},
    {"namespace": "stranger"},
    {"namespace_generation": 1},
    {"cache_layout": "other"},
    {"position_contract": "rope"},
  ):
    assert manifest(**change).root != root


@pytest.fixture
def namespaces():
  return identity.Namespaces("model", "pages")


def test_a_revoked_namespace_is_refused_and_comes_back_empty(namespaces):
  before = namespaces.authorize("a")
  assert namespaces.is_current(before)
  assert namespaces.revoke("a") == 1
  assert not namespaces.is_current(before)
  with pytest.raises(errors.NamespaceRevoked, match="'a' is revoked"):
    namespaces.authorize("a")
  assert namespaces.authorize("b").namespace_generation == 0
  namespaces.restore("a")
  assert namespaces.authorize("a") != before


def test_new_weights_leave_every_root_behind(namespaces):
  before = [namespaces.authorize(name) for name in "ab"]
  namespaces.replace_model("next model")
  assert not any(namespaces.is_current(root) for root in before)
  assert {namespaces.authorize(name) for name in "ab"}.isdisjoint(before)


def test_an_adapter_never_passes_for_a_salt(namespaces):
  named = namespaces.authorize("a", adapter="x")
  assert named != namespaces.authorize("a", salt="x")


def tokens(*ids):
  return np.asarray(ids, "<i4").tobytes()


def test_a_page_key_covers_every_page_before_it():
  first = identity.page_key(identity.NO_PARENT, tokens(1, 2))
  other = identity.page_key(identity.NO_PARENT, tokens(1, 3))
  assert identity.page_key(first, tokens(5, 6)) != identity.page_key(
    other, tokens(5, 6)
  )


@pytest.mark.parametrize(
  ("left", "right"),
  [
    (("ab", "c"), ("a", "bc")),
    (("ab",), (b"ab",)),
    (("1",), (1,)),
    ((), ("",)),
    (("a", ""), ("", "a")),
    ((12, 3), (1, 23)),
  ],
)
def test_no_two_lists_of_extras_spell_one_key(left, right):
  keys = [identity.page_key(b"", tokens(1), extra) for extra in (left, right)]
  assert keys[0] != keys[1]


def test_a_partial_page_is_keyed_by_its_rows_and_policy():
  keys = {
    identity.page_key(b"", tokens(1, 2)),
    identity.partial_page_key(b"", tokens(1, 2), 2, "copy_rows"),
    identity.partial_page_key(b"", tokens(1, 2), 1, "copy_rows"),
    identity.partial_page_key(b"", tokens(1, 2), 2, "full_pages"),
  }
  assert len(keys) == 4


def test_keys_do_not_depend_on_the_process():
  script = (
    "from host_allocator import identity;"
    "print(identity.page_key(b'', b'abcd', ('x', 1, b'y')).hex())"
  )
  seen = {
    subprocess.run(
      [sys.executable, "-c", script],
      env={"PYTHONHASHSEED": seed},
      capture_output=True,
      text=True,
      check=True,
    ).stdout.strip()
    for seed in ("0", "1")
  }
  assert seen == {identity.page_key(b"", b"abcd", ("x", 1, b"y")).hex()}
