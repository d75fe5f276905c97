"""What a TPU kernel may take of the memories on the chip, any generation."""

# Every generation has 1 MiB of SMEM a core; the compiler wants some of it.
SMEM_BYTES = (1 << 20) - (64 << 10)
# A kernel gets 16 MiB of VMEM without asking; scores, queries and outputs take
# a share that does not depend on the page.
VMEM_BYTES = 16 << 20


def smem_reason(entries: int, what: str) -> str | None:
  """Why that many int32 entries do not fit SMEM, or None.

  Args:
    entries: of all tables together.
    what: they are, for the sentence.
  """
  if 4 * entries <= SMEM_BYTES:
    return None
  return (
    f"{what} take {4 * entries} bytes of SMEM, of which {SMEM_BYTES} are ours"
  )
