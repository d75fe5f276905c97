"""Who may find what, and when old bytes may be read as new ones.

Three records, from the widest to the narrowest:

    CacheLayoutManifest         how the bytes are addressed
    CacheCompatibilityManifest  which computation they are the result of
    RootKey                     the root of the index tree a request may walk

Authorisation comes first: a request learns its RootKey only from
`Namespaces.authorize`, and without one there is nothing to look up.
"""

import dataclasses
import hashlib
import struct
from collections.abc import Iterable
from collections.abc import Sequence
from typing import NamedTuple

from host_allocator import arguments
from host_allocator import errors
from host_allocator import layout as layout_lib

MANIFEST_SCHEMA = 1
NO_PARENT = b""
_FEW_NAMESPACES = 64
_LENGTHS = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayoutManifest:
  """How every page table of one cache generation is to be read.

  Attributes:
    layout: cache groups with axes, dtypes, page sizes and quantisation.
    physical_mode: "paged_blocks", "virtual_pages" or "rectangular".
    world_size: tensor-parallel workers the K/V heads are divided over.
    rank: this worker among them.
    hash_page_tokens: tokens of one index unit; 0 stands for the layout's
      bundle.
    allocator_revision: raised when page tables change their meaning.

  Reference: §0x01A.
  """

  layout: layout_lib.CacheLayout
  physical_mode: str = "paged_blocks"
  world_size: int = 1
  rank: int = 0
  hash_page_tokens: int = 0
  allocator_revision: int = 1

  def __post_init__(self) -> None:
    modes = ("paged_blocks", "virtual_pages", "rectangular")
    if self.physical_mode not in modes:
      raise errors.LayoutError(
        f"physical_mode is {self.physical_mode!r}, not one of {modes}"
      )
    for field in ("world_size", "rank", "hash_page_tokens"):
      value = getattr(self, field)
      value = arguments.whole(field, value, 0, None, errors.LayoutError)
      object.__setattr__(self, field, value)
    if self.rank >= self.world_size:
      raise errors.LayoutError(
        f"rank {self.rank} is not among {self.world_size} workers"
      )

  @property
  def digest(self) -> str:
    """SHA-256 over every field."""
    return layout_lib.canonical_digest(
      {
        "schema_version": MANIFEST_SCHEMA,
        "layout": self.layout.digest,
        "physical_mode": self.physical_mode,
        "world_size": self.world_size,
        "rank": self.rank,
        "hash_page_tokens": self.hash_page_tokens or self.layout.bundle_tokens,
        "allocator_revision": self.allocator_revision,
      }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheCompatibilityManifest:
  """Everything that must be equal before a page may serve another request.

  Whatever changes a hidden state or the reading of a byte is a field here.
  Who asked, how the answer is sampled and which tokenizer made the ids are
  not: equal ids under equal fields give equal K/V.

  Attributes:
    cache_abi: digest of weights, heads, dtypes and positions (the model's).
    cache_layout: digest of the CacheLayoutManifest.
    model_generation: raised by a weight update.
    adapter: identity of the active adapter, "" for none.
    weight_transform: identity of what is done to weights at load.
    position_contract: identity of the position encoding and its parameters.
    token_ids: the covered interval, from the first token.
    side_inputs: (token offset, digest) of images and prompt embeddings.
    namespace: isolation domain.
    namespace_generation: raised by a revocation.
    salt: an unguessable string shared by those who may share pages.
    publication_generation: raised when published pages change their meaning.

  Reference: §0x01A.
  """

  cache_abi: str
  cache_layout: str
  model_generation: int = 0
  adapter: str = ""
  weight_transform: str = ""
  position_contract: str = ""
  token_ids: tuple[int, ...] = ()
  side_inputs: tuple[tuple[int, str], ...] = ()
  namespace: str = ""
  namespace_generation: int = 0
  salt: str = ""
  publication_generation: int = 0

  @property
  def semantic_digest(self) -> str:
    """SHA-256 over what a whole cache shares: one model at one generation."""
    return layout_lib.canonical_digest(
      {
        "schema_version": MANIFEST_SCHEMA,
        "cache_abi": self.cache_abi,
        "model_generation": self.model_generation,
        "weight_transform": self.weight_transform,
        "position_contract": self.position_contract,
        "publication_generation": self.publication_generation,
      }
    )

  @property
  def root(self) -> "RootKey":
    """The index root under which this computation's pages are found."""
    return RootKey(
      self.namespace,
      self.namespace_generation,
      self.semantic_digest,
      self.cache_layout,
      self.adapter,
      self.salt,
    )


def require_compatible(
  producer: CacheCompatibilityManifest, consumer: CacheCompatibilityManifest
) -> None:
  """Refuses unless the producer's K/V is what the consumer would compute.

  Args:
    producer: the manifest under which the pages were written.
    consumer: the manifest of the request that would read them; its tokens
      and side inputs are compared over the producer's interval.

  Raises:
    Incompatible: names the first field that differs, with reason
      "<field>_mismatch". Nothing is changed.

  Reference: §0x01A.
  """
  for field in dataclasses.fields(producer):
    expected = getattr(producer, field.name)
    found = getattr(consumer, field.name)
    if field.name == "token_ids":
      found = found[: len(expected)]
    elif field.name == "side_inputs":
      covered = len(producer.token_ids)
      found = tuple(item for item in found if item[0] < covered)
      expected = tuple(item for item in expected if item[0] < covered)
    if expected != found:
      raise errors.Incompatible(field.name, expected, found)


class RootKey(NamedTuple):
  """Names one root of a prefix index; walks never leave their root (R7)."""

  namespace: str
  namespace_generation: int
  semantic_digest: str
  layout_digest: str
  adapter: str
  salt: str


class Namespaces:
  """The generation of every isolation domain, and which are closed.

  A namespace nobody has named is open, at generation 0 to begin with.
  Generations only rise: after `revoke` or `advance` no key made before can be
  made again.

  Args:
    semantic_digest: identity of the model whose K/V is kept.
    layout_digest: identity of the pages it is kept in.
  """

  def __init__(self, semantic_digest: str, layout_digest: str):
    self._semantic_digest = semantic_digest
    self._layout_digest = layout_digest
    self._generations: dict[str, int] = {}
    # Of every namespace that is not in there.
    self._common_generation = 0
    self._due_at = _FEW_NAMESPACES
    self._revoked: set[str] = set()

  def authorize(
    self, namespace: str, *, adapter: str = "", salt: str = ""
  ) -> RootKey:
    """Returns the root a request of this namespace may walk.

    Raises:
      NamespaceRevoked: the namespace is closed. No index was consulted.
      BadArgument: a name is not a string.
    """
    arguments.text("namespace", namespace)
    arguments.text("adapter", adapter)
    arguments.text("salt", salt)
    if namespace in self._revoked:
      raise errors.NamespaceRevoked(
        f"namespace {namespace!r} is revoked at generation"
        f" {self.generation(namespace)}"
      )
    return RootKey(
      namespace,
      self.generation(namespace),
      self._semantic_digest,
      self._layout_digest,
      adapter,
      salt,
    )

  def generation(self, namespace: str) -> int:
    """Returns the namespace's generation."""
    return self._generations.get(namespace, self._common_generation)

  def __len__(self) -> int:
    return len(self._generations)

  @property
  def is_due(self) -> bool:
    """Whether so many were left behind that a sweep is paid for by them."""
    return len(self._generations) > self._due_at

  def forget_unused(self, used: Iterable[str]) -> None:
    """Keeps the generations of some namespaces; all others are given one.

    That is the highest of any, so that they still only rise.
    """
    kept = {name: self.generation(name) for name in used}
    self._common_generation = max(
      self._common_generation, *self._generations.values(), 0
    )
    self._generations = kept
    self._due_at = max(_FEW_NAMESPACES, 2 * len(kept))

  def is_current(self, root: RootKey) -> bool:
    """Returns whether new requests could still be given this root."""
    return (
      root.namespace not in self._revoked
      and root.namespace_generation == self.generation(root.namespace)
      and root.semantic_digest == self._semantic_digest
      and root.layout_digest == self._layout_digest
    )

  def revoke(self, namespace: str) -> int:
    """Closes a namespace to new requests and returns its next generation."""
    arguments.text("namespace", namespace)
    self._revoked.add(namespace)
    return self.advance(namespace)

  def restore(self, namespace: str) -> int:
    """Opens a revoked namespace again, empty, and returns its generation."""
    arguments.text("namespace", namespace)
    self._revoked.discard(namespace)
    return self.generation(namespace)

  def advance(self, namespace: str) -> int:
    """Leaves the namespace's pages behind: nobody new finds them."""
    arguments.text("namespace", namespace)
    self._generations[namespace] = self.generation(namespace) + 1
    return self._generations[namespace]

  def replace_model(self, semantic_digest: str) -> None:
    """Leaves every page behind: the weights that made them are gone."""
    self._semantic_digest = arguments.text("semantic_digest", semantic_digest)


def page_key(
  parent: bytes,
  token_bytes: bytes,
  extras: Sequence[str | bytes | int] = (),
) -> bytes:
  """Returns the key of a page: H(parent's key, its tokens, its extras).

  Lengths go before parts and kinds before extras, so that no two lists of
  parts spell the same message: ("ab", "c") and ("a", "bc") differ, a name never
  passes for a salt in another place. The same in every process.

  Args:
    parent: the key of the page before, NO_PARENT for the first.
    token_bytes: the page's token ids as little-endian int32.
    extras: side inputs of the page, and on the first page adapter and salt.

  Returns:
    32 bytes.

  Reference: §0x07B.
  """
  parts = [_LENGTHS.pack(len(parent), len(token_bytes)), parent, token_bytes]
  for extra in extras:
    if isinstance(extra, bytes):
      parts.append(_framed(b"b", extra))
    elif isinstance(extra, str):
      parts.append(_framed(b"s", extra.encode()))
    else:
      parts.append(_framed(b"i", str(extra).encode()))
  return hashlib.sha256(b"".join(parts)).digest()


def partial_page_key(
  parent: bytes,
  token_bytes: bytes,
  valid_rows: int,
  policy: str,
  extras: Sequence[str | bytes | int] = (),
) -> bytes:
  """Returns the key of an immutable partial page; its rows are part of it.

  Reference: §0x07D.
  """
  return page_key(parent, token_bytes, (valid_rows, policy, *extras))


def _framed(kind: bytes, part: bytes) -> bytes:
  return kind + struct.pack("<Q", len(part)) + part
