"""Router: the engine table, and the placement of every generation request on an engine
that serves the weights asked for.

It keeps nothing on disk: after a restart the table comes back by watching the coordinator.
"""
