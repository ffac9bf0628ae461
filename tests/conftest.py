"""The suite runs on eight simulated CPU devices; JAX_COMPILATION_CACHE_DIR keeps compiled programs between runs."""

import os

from hypothesis import settings

from lockstep.cluster.devices import enable_compilation_cache, simulate_cpu_devices

simulate_cpu_devices(8)
if cache := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    enable_compilation_cache(cache)

# An example that compiles takes longer than hypothesis allows by default; the suite bounds the number of examples.
settings.register_profile("lockstep", deadline=None, print_blob=True)
settings.load_profile("lockstep")
