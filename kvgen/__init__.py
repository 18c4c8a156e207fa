"""kvgen: a compiler from KV-cache layout specs to the modules that servers import."""
