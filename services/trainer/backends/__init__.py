"""Train backends: one plug-in a file."""
