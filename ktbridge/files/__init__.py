"""Files, for all rooms: atomic publishing, locks, digests, record readers, ledgers, YAML of people."""
