"""Where tokens live: slots of requests, pages and who holds them, and the memory of K, V and MLA latents.

A token slot is ``page * page_size + offset``. Bookkeeping is done in host memory and read nowhere else, so a step never
waits for the device. Only what kernels read is on it: `req_to_token`, `slot_map` and the pages.
"""

from attnops.pools.allocator import PagedTokenToKVPoolAllocator
from attnops.pools.deepseek_v4 import DeepSeekV4TokenToKVPool
from attnops.pools.double_sparse import DoubleSparseTokenToKVPool
from attnops.pools.fit import reason_against
from attnops.pools.fp4 import MHATokenToKVPoolFP4, MLATokenToKVPoolFP4
from attnops.pools.kv_cache import KVCache, MHATokenToKVPool, MLATokenToKVPool
from attnops.pools.mamba import HybridLinearKVPool, HybridReqToTokenPool, MambaPool, MambaState
from attnops.pools.req_to_token import ReqToTokenPool
from attnops.pools.sliding_window import SWAKVPool, SWATokenToKVPoolAllocator
from attnops.pools.sparse import DSATokenToKVPool, NSATokenToKVPool

__all__ = [
    "DSATokenToKVPool",
    "DeepSeekV4TokenToKVPool",
    "DoubleSparseTokenToKVPool",
    "HybridLinearKVPool",
    "HybridReqToTokenPool",
    "KVCache",
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "MambaPool",
    "MambaState",
    "NSATokenToKVPool",
    "PagedTokenToKVPoolAllocator",
    "ReqToTokenPool",
    "SWAKVPool",
    "SWATokenToKVPoolAllocator",
    "reason_against",
]
