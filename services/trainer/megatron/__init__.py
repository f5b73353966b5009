"""The megatron backend's parts. Modules here import megatron-core; import them only where that backend is used."""
