"""Where blobs lie: one module a store."""
