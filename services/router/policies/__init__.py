"""Placement policies: which of the engines that could take a request gets it. One module a policy."""
