"""Other KV managers, measured beside ours where their source is there."""
