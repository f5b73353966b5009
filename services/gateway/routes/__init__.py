"""HTTP surfaces, one module each: `routes(edge)` returns the Starlette routes of the surface."""
