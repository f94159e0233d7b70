"""What the ranks of tests import last before the fork: garbage collection in them passes over all
that was imported, which it would else visit, and thereby copy, in each."""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # lest extension modules report what is left
