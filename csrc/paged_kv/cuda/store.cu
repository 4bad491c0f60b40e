#include "core/impl_table.h"
#include "device/common/launch_dependent.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/store.cuh"

namespace attnops::paged_kv {
namespace {

unsigned num_blocks(int64_t tokens, int per_block) {
  return static_cast<unsigned>(ceil_div<int64_t>(tokens, per_block));
}

// Lanes per token: a power of two, as many as there are vectors, fewer where more than a quarter would idle.
int log_lanes_for(int vecs, int threads) {
  const auto steps = [vecs](int log_lanes) { return round_up(vecs, 1 << log_lanes); };
  int log_lanes = 0;
  while (1 << log_lanes < threads && 1 << log_lanes < vecs) ++log_lanes;
  while (log_lanes > 5 && (steps(log_lanes) - vecs) * 4 > steps(log_lanes)) --log_lanes;
  return log_lanes;
}

// Heads that follow one another without a gap, on both sides and under one scale, are one long head.
struct Heads {
  int count, dim;
};

Heads heads_of(const KvStore& s, int num_heads) {
  const bool joined = s.stride_page_head == s.head_dim && s.stride_head == s.head_dim && s.scale_stride == 0;
  return joined || num_heads == 1 ? Heads{1, num_heads * s.head_dim} : Heads{num_heads, s.head_dim};
}

// `elements` per vector; the caller has seen to it that they divide everything.
SideInVectors in_vectors(const KvStore& s, int num_heads, int elements) {
  const Heads heads = heads_of(s, num_heads);
  return {.pages = s.pages,
          .stride_page = s.stride_page / elements,
          .stride_page_token = s.stride_page_token / elements,
          .stride_page_head = s.stride_page_head / elements,
          .rows = s.rows,
          .stride_token = s.stride_token / elements,
          .stride_head = s.stride_head / elements,
          .heads = heads.count,
          .per_head = heads.dim / elements,
          .scale = s.scale,
          .scale_stride = s.scale_stride};
}

// Whether vectors of `elements` start on their boundaries on both sides.
bool vectors_fit(const KvStore& s, int num_heads, int elements, int row_size, int page_size) {
  const Heads heads = heads_of(s, num_heads);
  const int64_t row_head = heads.count > 1 ? s.stride_head : 0, page_head = heads.count > 1 ? s.stride_page_head : 0;
  return heads.dim % elements == 0 && rows_aligned(s.rows, row_size, elements * row_size, s.stride_token, row_head) &&
         rows_aligned(s.pages, page_size, elements * page_size, s.stride_page, s.stride_page_token, page_head);
}

// No kernel here asks for shared memory.
template <auto kKernel, typename... Arguments>
void launch_store(const char* what, unsigned blocks, int threads, CUstream_st* stream, const Arguments&... arguments) {
  launch_dependent<kKernel>(what, {static_cast<int>(blocks), threads, 0, 0}, stream, arguments...);
}

template <class Codec, bool kOneHead>
void launch_store_kv_of(const StoreKvParams& p, const SideInVectors& k, const SideInVectors& v, CUstream_st* stream) {
  constexpr int kThreads = Codec::kThreads;
  const int vecs = max_of(k.heads * k.per_head, v.heads * v.per_head), log_lanes = log_lanes_for(vecs, kThreads);
  LaunchShape shape{static_cast<int>(num_blocks(p.target.num_tokens, kThreads >> log_lanes)), kThreads, 0, 0};
  shape.blocks_y = ceil_div(vecs, 1 << log_lanes);
  shape.blocks_z = Codec::kSidesApart ? 2 : 1;
  launch_dependent<&store_kv_kernel<Codec, kOneHead>>("store_kv_kernel", shape, stream, p.target, k, v, log_lanes);
}

template <class Codec>
void launch_store_kv(const StoreKvParams& p, int elements, CUstream_st* stream) {
  const SideInVectors k = in_vectors(p.k, p.num_heads, elements), v = in_vectors(p.v, p.num_heads, elements);
  k.heads == 1 && v.heads == 1 ? launch_store_kv_of<Codec, true>(p, k, v, stream)
                               : launch_store_kv_of<Codec, false>(p, k, v, stream);
}

// The first that accepts is taken, so the widest stand first.
struct KvImpl {
  const char* name;
  bool copies;                  // sees bytes, and no row_dtype
  DType row_dtype, page_dtype;  // what it quantizes, and to what
  int vector;                   // bytes per vector of a copy, elements per vector of a quantization
  int least_row;                // elements of a token's heads together, below which narrower vectors are faster
  void (*launch_kv)(const StoreKvParams&, int elements, CUstream_st*);

  int elements(const StoreKvParams& p) const { return copies ? vector / size_of(p.dtype) : vector; }

  std::string reject(const StoreKvParams& p) const {
    if (copies != (p.dtype == p.page_dtype)) return copies ? "copies only" : "quantizes only";
    if (!copies && p.dtype != row_dtype) return std::string("takes ") + name_of(row_dtype);
    if (!copies && p.page_dtype != page_dtype) return std::string("makes ") + name_of(page_dtype);
    if (copies && vector < size_of(p.dtype)) return "splits elements";
    if (p.num_heads * p.k.head_dim < least_row)
      return "takes at least " + std::to_string(least_row) + " elements a token";
    for (const KvStore* s : {&p.k, &p.v}) {
      if (!vectors_fit(*s, p.num_heads, elements(p), size_of(p.dtype), size_of(p.page_dtype))) {
        return "rows must start on the boundaries of its vectors";
      }
    }
    return "";
  }
};

template <typename T, int kElements, __nv_fp8_interpretation_t kKind = __NV_E4M3>
constexpr auto kQuantizeKv = &launch_store_kv<Quantize<T, kElements, kKind>>;

constexpr DType kAny = DType::kUInt8;  // of copies, which see bytes
constexpr DType kBF16 = DType::kBFloat16, kFP16 = DType::kFloat16, kFP32 = DType::kFloat32;
constexpr DType kE4M3 = DType::kFloat8E4M3, kE5M2 = DType::kFloat8E5M2;

constexpr KvImpl kKvImpls[] = {
    {"copy_16_bytes", true, kAny, kAny, 16, 0, &launch_store_kv<Copy<uint4>>},
    {"copy_8_bytes", true, kAny, kAny, 8, 0, &launch_store_kv<Copy<uint2>>},
    {"copy_4_bytes", true, kAny, kAny, 4, 0, &launch_store_kv<Copy<uint32_t>>},
    {"copy_2_bytes", true, kAny, kAny, 2, 0, &launch_store_kv<Copy<uint16_t>>},
    {"copy_1_byte", true, kAny, kAny, 1, 0, &launch_store_kv<Copy<uint8_t>>},
    {"e4m3_from_bf16_wide", false, kBF16, kE4M3, 16, 512, kQuantizeKv<__nv_bfloat16, 16>},
    {"e4m3_from_fp16_wide", false, kFP16, kE4M3, 16, 512, kQuantizeKv<__half, 16>},
    {"e4m3_from_bf16_vec", false, kBF16, kE4M3, 8, 0, kQuantizeKv<__nv_bfloat16, 8>},
    {"e4m3_from_fp16_vec", false, kFP16, kE4M3, 8, 0, kQuantizeKv<__half, 8>},
    {"e4m3_from_fp32_vec", false, kFP32, kE4M3, 8, 0, kQuantizeKv<float, 8>},
    {"e4m3_from_bf16_any", false, kBF16, kE4M3, 1, 0, kQuantizeKv<__nv_bfloat16, 1>},
    {"e4m3_from_fp16_any", false, kFP16, kE4M3, 1, 0, kQuantizeKv<__half, 1>},
    {"e4m3_from_fp32_any", false, kFP32, kE4M3, 1, 0, kQuantizeKv<float, 1>},
    {"e5m2_from_bf16_vec", false, kBF16, kE5M2, 8, 0, kQuantizeKv<__nv_bfloat16, 8, __NV_E5M2>},
    {"e5m2_from_fp16_vec", false, kFP16, kE5M2, 8, 0, kQuantizeKv<__half, 8, __NV_E5M2>},
    {"e5m2_from_fp32_vec", false, kFP32, kE5M2, 8, 0, kQuantizeKv<float, 8, __NV_E5M2>},
    {"e5m2_from_bf16_any", false, kBF16, kE5M2, 1, 0, kQuantizeKv<__nv_bfloat16, 1, __NV_E5M2>},
    {"e5m2_from_fp16_any", false, kFP16, kE5M2, 1, 0, kQuantizeKv<__half, 1, __NV_E5M2>},
    {"e5m2_from_fp32_any", false, kFP32, kE5M2, 1, 0, kQuantizeKv<float, 1, __NV_E5M2>},
};

// ---- store_mla_kv

MlaInBytes byte_strides(const StoreMlaParams& p) {
  const int row = size_of(p.dtype), page = size_of(p.page_dtype);
  return {.pages = static_cast<char*>(p.kv_pages),
          .stride_page = p.stride_page * page,
          .stride_page_token = p.stride_page_token * page,
          .latent = static_cast<const char*>(p.latent),
          .latent_stride = p.latent_stride * row,
          .k_pe = static_cast<const char*>(p.k_pe),
          .k_pe_stride = p.k_pe_stride * row,
          .scale = p.kv_scale};
}

// Whether latents, rope and pages start on boundaries of so many bytes.
bool vectors_fit(const StoreMlaParams& p, int latent, int rope, int page) {
  return rows_aligned(p.latent, size_of(p.dtype), latent, p.latent_stride) &&
         rows_aligned(p.k_pe, size_of(p.dtype), rope, p.k_pe_stride) &&
         rows_aligned(p.kv_pages, size_of(p.page_dtype), page, p.stride_page, p.stride_page_token);
}

template <class Codec, int kElements>
void launch_store_mla(const StoreMlaParams& p, CUstream_st* stream) {
  const unsigned blocks = num_blocks(p.target.num_tokens, MlaShape<kElements>::kRows);
  launch_store<&store_mla_kernel<Codec, kElements>>("store_mla_kernel", blocks, kMlaThreads, stream, p.target,
                                                    byte_strides(p));
}

// Elements of `kSize` bytes as they are, 16 bytes at a time where rows allow.
template <int kSize, typename Element>
void launch_copy_mla(const StoreMlaParams& p, CUstream_st* stream) {
  vectors_fit(p, 16, 16, 16) ? launch_store_mla<Copy<uint4>, 16 / kSize>(p, stream)
                             : launch_store_mla<Copy<Element>, 1>(p, stream);
}

template <typename T, __nv_fp8_interpretation_t kKind = __NV_E4M3>
void launch_quantize_mla(const StoreMlaParams& p, CUstream_st* stream) {
  if (vectors_fit(p, 16 * sizeof(T), 16 * sizeof(T), 16)) {
    return launch_store_mla<Quantize<T, 16, kKind>, 16>(p, stream);
  }
  vectors_fit(p, 8 * sizeof(T), 8 * sizeof(T), 8) ? launch_store_mla<Quantize<T, 8, kKind>, 8>(p, stream)
                                                  : launch_store_mla<Quantize<T, 1, kKind>, 1>(p, stream);
}

template <typename T>
void launch_fp8_rows(const StoreMlaParams& p, CUstream_st* stream) {
  constexpr int kThreads = 128;
  const unsigned blocks = num_blocks(p.target.num_tokens, kThreads / 32);
  const bool vectors = vectors_fit(p, 16 * sizeof(T), 2 * sizeof(T), 16);
  const MlaInBytes in = byte_strides(p);
  const char* what = "store_fp8_row_kernel";
  vectors ? launch_store<&store_fp8_row_kernel<T, true, kThreads>>(what, blocks, kThreads, stream, p.target, in)
          : launch_store<&store_fp8_row_kernel<T, false, kThreads>>(what, blocks, kThreads, stream, p.target, in);
}

struct MlaImpl {
  const char* name;
  DType row_dtype, page_dtype;
  void (*launch)(const StoreMlaParams&, CUstream_st*);

  std::string reject(const StoreMlaParams& p) const {
    if (p.dtype != row_dtype) return std::string("takes rows in ") + name_of(row_dtype);
    if (p.page_dtype != page_dtype) return std::string("takes pages in ") + name_of(page_dtype);
    return "";
  }
};

constexpr MlaImpl kMlaImpls[] = {
    {"copy_fp32", DType::kFloat32, DType::kFloat32, &launch_copy_mla<4, uint32_t>},
    {"copy_fp16", DType::kFloat16, DType::kFloat16, &launch_copy_mla<2, uint16_t>},
    {"copy_bf16", DType::kBFloat16, DType::kBFloat16, &launch_copy_mla<2, uint16_t>},
    {"copy_e4m3", DType::kFloat8E4M3, DType::kFloat8E4M3, &launch_copy_mla<1, uint8_t>},
    {"e4m3_from_fp32", DType::kFloat32, DType::kFloat8E4M3, &launch_quantize_mla<float>},
    {"e4m3_from_fp16", DType::kFloat16, DType::kFloat8E4M3, &launch_quantize_mla<__half>},
    {"e4m3_from_bf16", DType::kBFloat16, DType::kFloat8E4M3, &launch_quantize_mla<__nv_bfloat16>},
    {"e5m2_from_fp32", DType::kFloat32, DType::kFloat8E5M2, &launch_quantize_mla<float, __NV_E5M2>},
    {"e5m2_from_fp16", DType::kFloat16, DType::kFloat8E5M2, &launch_quantize_mla<__half, __NV_E5M2>},
    {"e5m2_from_bf16", DType::kBFloat16, DType::kFloat8E5M2, &launch_quantize_mla<__nv_bfloat16, __NV_E5M2>},
    {"fp8_row_from_fp32", DType::kFloat32, DType::kUInt8, &launch_fp8_rows<float>},
    {"fp8_row_from_fp16", DType::kFloat16, DType::kUInt8, &launch_fp8_rows<__half>},
    {"fp8_row_from_bf16", DType::kBFloat16, DType::kUInt8, &launch_fp8_rows<__nv_bfloat16>},
};

}  // namespace

void launch(const StoreKvParams& p, CUstream_st* stream) {
  // A grid of zero CTAs is a launch error.
  if (p.target.num_tokens == 0 || p.num_heads == 0 || max_of(p.k.head_dim, p.v.head_dim) == 0) return;
  const KvImpl& impl = select_impl("store_kv", kKvImpls, p);
  impl.launch_kv(p, impl.elements(p), stream);
}

void launch(const StoreMlaParams& p, CUstream_st* stream) {
  if (p.target.num_tokens == 0) return;
  select_impl("store_mla_kv", kMlaImpls, p).launch(p, stream);
}

}  // namespace attnops::paged_kv
