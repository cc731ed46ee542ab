"""Checkpoints in the safetensors format: single files, Hugging Face model folders, the files of torch's HuggingFaceStorageWriter.

Only headers are read to open one. All tensors are weights, under the names that they have in the files. There are no digests in the format.
"""

from __future__ import annotations

from .catalog import SafetensorsSource, open_safetensors
from .files import SafetensorsFiles, at_file, find_safetensors
from .header import Header, HeaderTensor, parse_header, read_header

__all__ = [
    "Header",
    "HeaderTensor",
    "SafetensorsFiles",
    "SafetensorsSource",
    "at_file",
    "find_safetensors",
    "open_safetensors",
    "parse_header",
    "read_header",
]
