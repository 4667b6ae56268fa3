"""Objects: a payload as it lies on disk or in a bucket, filtered, compressed and self-describing.

``object_layout`` says what lies where, ``object_header`` holds the frames around the
data, ``object_write`` and ``object_read`` the two directions, ``filters`` and ``zstd``
what happens to a chunk, ``choose`` which filter a tensor gets. Codec and filter never
change a payload's identity.
"""

from kvstore.format.choose import Choice, Plan
from kvstore.format.object_header import MEDIA_TYPE, Codec, ObjectHeader
from kvstore.format.object_layout import Batch, Group, Layout
from kvstore.format.object_read import ObjectReader, parse_object
from kvstore.format.object_write import EncodedObject, ObjectParts, encode_object

__all__ = [
    "MEDIA_TYPE", "Batch", "Choice", "Codec", "EncodedObject", "Group", "Layout", "ObjectHeader", "ObjectParts",
    "ObjectReader", "Plan", "encode_object", "parse_object",
]  # fmt: skip
