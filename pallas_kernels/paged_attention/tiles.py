"""How `xla` cuts a call into blocks."""
