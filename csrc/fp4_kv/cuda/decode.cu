#include "core/impl_table.h"
#include "device/common/launch_dependent.cuh"
#include "device/common/pdl.cuh"
#include "fp4_kv/cuda/decode.cuh"
#include "fp4_kv/cuda/latents.cuh"
#include "fp4_kv/cuda/launch.h"
#include "fp4_kv/cuda/merge.cuh"

namespace attnops::fp4_kv {

template <typename T, int kDim, int kRowTiles, bool kInPages>
__global__ void __launch_bounds__(kWarps * 32, kRowTiles == 1 ? 4 : 2)
    fp4_decode_kernel(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) uint8_t fp4_shared_memory[];
  wait_for_earlier_kernels();
  const int64_t work = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads * p.num_splits;
  if (__any_sync(~0u, work < works)) {
    const int kv_head = static_cast<int>(work % p.num_kv_heads);
    const int64_t rest = work / p.num_kv_heads;
    const int split = static_cast<int>(rest % p.num_splits), request = static_cast<int>(rest / p.num_splits);
    const uint32_t shared = smem_address(fp4_shared_memory) + threadIdx.x / 32 * kWarpBytes<kDim>;
    WarpDecode<T, kDim, kRowTiles, kInPages>(p, shared, request, kv_head, split).run();
  }
  let_next_kernel_start();
}

namespace {

bool aligned(const Pages& pages, int64_t codes, int64_t scales) {
  const auto fits = [](const void* at, int64_t a, int64_t b, int64_t c, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(at) % bytes == 0 && a % bytes == 0 && b % bytes == 0 && c % bytes == 0;
  };
  return fits(pages.codes, pages.codes_stride_page, pages.codes_stride_token, pages.codes_stride_head, codes) &&
         fits(pages.scales, pages.scales_stride_page, pages.scales_stride_token, pages.scales_stride_head, scales);
}

template <typename T, int kDim, int kRowTiles>
void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  const int64_t works = int64_t{p.batch_size} * p.num_kv_heads * p.num_splits;
  const int blocks = static_cast<int>(ceil_div<int64_t>(works, kWarps));
  if (blocks > 0) {
    constexpr int kBytes = kWarps * kWarpBytes<kDim>;
    const LaunchShape shape{blocks, 32 * kWarps, kBytes, kBytes};
    if (tiles_in_pages(p, kTileKeys) && scales_on(p.k, kDim / 16) && scales_on(p.v, kDim / 16)) {
      launch_dependent<&fp4_decode_kernel<T, kDim, kRowTiles, true>>("fp4_decode_kernel", shape, stream, p);
    } else {
      launch_dependent<&fp4_decode_kernel<T, kDim, kRowTiles, false>>("fp4_decode_kernel", shape, stream, p);
    }
  }
  launch_merge<T, kDim>(p, stream);
}

template <typename T>
void launch_latents(const DecodeParams& p, cudaStream_t stream) {
  const int blocks = ceil_div(p.seqlen_q * p.num_q_heads, kLatentRows);
  const int64_t works = int64_t{p.batch_size} * blocks * p.num_splits;
  if (works > 0) {
    constexpr int kBytes = sizeof(LatentShared);
    const LaunchShape shape{static_cast<int>(works), 32 * kLatentWarps, kBytes, kBytes};
    if (tiles_in_pages(p, kLatentKeys) && aligned(p.k, 16, 2)) {
      launch_dependent<&fp4_latent_kernel<T, true>>("fp4_latent_kernel", shape, stream, p);
    } else {
      launch_dependent<&fp4_latent_kernel<T, false>>("fp4_latent_kernel", shape, stream, p);
    }
  }
  launch_merge<T, kLatentDimV>(p, stream);
}

struct Impl {
  const char* name;
  DType dtype;
  int head_dim, rows;  // 0: any number of rows
  void (*run)(const DecodeParams&, cudaStream_t);

  std::string reject(const DecodeParams& p) const {
    if (p.dtype != dtype) return std::string("takes q of ") + name_of(dtype) + ", got " + name_of(p.dtype);
    if (p.head_dim != head_dim) {
      return "takes head_dim " + std::to_string(head_dim) + ", got " + std::to_string(p.head_dim);
    }
    const int rows_here = p.num_q_heads / p.num_kv_heads * p.seqlen_q;
    if (rows > 0 && rows_here > rows) {
      return "takes up to " + std::to_string(rows) + " query rows (tokens times heads of a group), got " +
             std::to_string(rows_here);
    }
    const bool latents = head_dim == kLatentDim;
    if (latents && (p.v.codes || p.num_kv_heads != 1 || p.head_dim_v != kLatentDimV)) {
      return "takes one KV head and V of its first 512 values, got " + std::to_string(p.num_kv_heads) + " and " +
             (p.v.codes ? "V of its own" : std::to_string(p.head_dim_v));
    }
    if (!latents && !p.v.codes) return "takes V of its own, got none";
    if (!latents && p.head_dim_v != p.head_dim) {
      return "takes V of K's head_dim, got " + std::to_string(p.head_dim_v) + " and " + std::to_string(p.head_dim);
    }
    if (p.num_splits == 0) return "needs out_partial and lse_partial";
    const int codes = latents ? 8 : 16, scales = latents ? 1 : head_dim / 64;
    if (!aligned(p.k, codes, scales) || !aligned(p.v, codes, scales)) {
      return "rows of codes must start on " + std::to_string(codes) + "-byte boundaries, those of scales on " +
             std::to_string(scales);
    }
    return "";
  }
};

template <typename T, int kDim, int kRowTiles>
constexpr Impl row(const char* name, DType dtype) {
  return {name, dtype, kDim, kRowsOfTile * kRowTiles, &launch_decode<T, kDim, kRowTiles>};
}

constexpr Impl kImpls[] = {
    row<__nv_bfloat16, 128, 1>("bf16_hd128_rows8", DType::kBFloat16),
    row<__nv_bfloat16, 128, 2>("bf16_hd128_rows16", DType::kBFloat16),
    row<__nv_bfloat16, 64, 1>("bf16_hd64_rows8", DType::kBFloat16),
    row<__nv_bfloat16, 64, 2>("bf16_hd64_rows16", DType::kBFloat16),
    row<__half, 128, 1>("fp16_hd128_rows8", DType::kFloat16),
    row<__half, 128, 2>("fp16_hd128_rows16", DType::kFloat16),
    row<__half, 64, 1>("fp16_hd64_rows8", DType::kFloat16),
    row<__half, 64, 2>("fp16_hd64_rows16", DType::kFloat16),
    {"bf16_latents", DType::kBFloat16, kLatentDim, 0, &launch_latents<__nv_bfloat16>},
    {"fp16_latents", DType::kFloat16, kLatentDim, 0, &launch_latents<__half>},
};

}  // namespace

void launch(const DecodeParams& params, cudaStream_t stream) {
  select_impl("fp4_decode", kImpls, params).run(params, stream);
}

}  // namespace attnops::fp4_kv
