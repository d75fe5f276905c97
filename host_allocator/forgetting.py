"""Making what is cached unfindable, and starting again after a loss."""

from host_allocator import arguments
from host_allocator import readers


class Forgetting(readers.Readers):
  """The forgetting part of `KVAllocator`; every method takes the lock."""

  def drop_index(self, namespace: str | None = None) -> None:
    """Makes what is indexed unfindable; open sequences go on undisturbed.

    Args:
      namespace: Whose index; None for all.

    Raises:
      BadArgument: It is neither.
    """
    if namespace is not None:
      arguments.text("namespace", namespace)
    with self.lock:
      dropped = {namespace} if namespace is not None else set()
      for root in list(self.index.roots()):
        if namespace is None or root.key[0] == namespace:
          self.index.drop(root)
          dropped.add(root.key[0])
      for name in dropped:
        self.namespaces.advance(name)
      if self.namespaces.is_due:
        used = {root.key[0] for root in self.index.roots()}
        self.namespaces.forget_unused(used)
      self.epoch += 1

  def revoke(self, namespace: str) -> None:
    """Drops a namespace's index and refuses new sequences in it.

    Raises:
      BadArgument: It is not a string.
    """
    arguments.text("namespace", namespace)
    with self.lock:
      self.drop_index(namespace)
      self.namespaces.revoke(namespace)

  def replace_model(self, semantic_digest: str) -> None:
    """New weights: old owners finish, nobody new finds their pages.

    Raises:
      BadArgument: The digest is not a string.
    """
    arguments.text("semantic_digest", semantic_digest)
    with self.lock:
      self.drop_index()
      self.namespaces.replace_model(semantic_digest)

  def poison(self) -> None:
    """The device pages are lost: everything FREE, every sequence DeviceLost."""
    with self.lock:
      self.open_plan = None
      for root in list(self.index.roots()):
        self.index.drop(root)
      for sequence in self.rows.open_sequences():
        sequence.lost = True
        self.rows.give_back(sequence)
      for table in self.rows.tables:
        table[:] = 0  # Also what a commit under way has entered too far.
      self.held_leases.clear()
      self.num_leases_lost = self.num_leases
      for pool in self.pools:
        pool.reset()
      self.epoch += 1
