"""Policy losses: one plug-in a file."""
