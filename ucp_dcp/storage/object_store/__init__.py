"""Object stores by their own requests: explicit multipart uploads, pinned ranged reads, conditional puts.

``client`` says what is needed of a client library, ``botocore_client`` and ``obstore_client`` are two of them, ``store`` is the
:class:`~ucp_dcp.storage.store.Store` over either, ``uploads`` writes and ``reads`` reads.
"""

from .options import Options, open_object_store
from .store import ObjectStore

__all__ = ["ObjectStore", "Options", "open_object_store"]
