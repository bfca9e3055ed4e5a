"""What a server of ranks imports last. No garbage collection in a rank then goes through all
that torch is made of, nor copies the memory that it shares with the server."""

import gc


gc.collect()
gc.freeze()
