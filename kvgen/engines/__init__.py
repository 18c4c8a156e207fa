"""Plugins that have engines use generated pools. They run in the engine's process; the compiler does not need them."""
