#include "sparse_indexer/cpu/products.h"

namespace attnops::sparse_indexer::cpu {

void avx2_products(const HeadProducts& p) { products_here(p); }

}  // namespace attnops::sparse_indexer::cpu
