"""What ranks.py imports last before it forks: garbage collection in the ranks passes over all that
was imported, which it would else visit, and thereby copy, in each of them."""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # lest extension modules report what is left
