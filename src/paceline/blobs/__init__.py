"""Arrays too big for an entry of the sample stream: they lie in a store, and a sample has a reference to them."""

from paceline.blobs.keeper import BlobKeeper as BlobKeeper
from paceline.blobs.stores.base import BlobStore as BlobStore
from paceline.blobs.stores.base import Owner as Owner
