"""Gateway: the HTTP edge of a run. It speaks OpenAI's API to clients and gRPC to the router, and keeps no state.

Every surface is one module of `routes` with a function `routes(edge) -> list[Route]`, listed in `web.SURFACES`; the
Tinker API is to come as one more module there.
"""
