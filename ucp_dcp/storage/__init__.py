"""Bytes: stores, range planning, item framing, the manifest and the commit protocol. No torch.distributed below this line."""
