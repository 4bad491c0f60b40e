#pragma once
#include "core/linear_prefill.h"
#include "core/math.h"

// How prompts are cut for the kernels that take a chunk at once, and what those keep of each chunk for one another.
namespace attnops {

// Where a chunk's results may go: more than there are chunks, so that a request's first place follows from its bounds.
ATTNOPS_HOST_DEVICE inline int64_t chunk_places(int64_t num_tokens, int64_t batch_size) {
  return num_tokens / kChunk + 2 * batch_size;
}

// Chunks of one request: its tokens between multiples of kChunk, counted from its prefix.
struct RequestChunks {
  int64_t first, tokens, offset;  // offset: of the first token in its chunk
  int64_t place;                  // of the first chunk

  RequestChunks() = default;
  ATTNOPS_HOST_DEVICE RequestChunks(const LinearPrefill& p, int64_t request) {
    first = p.first_token(request);
    const int64_t last = p.first_token(request + 1);
    tokens = last < first ? 0 : last - first;
    offset = p.prefix(request) % kChunk;
    place = first / kChunk + 2 * request;
  }
  ATTNOPS_HOST_DEVICE int64_t count() const { return tokens == 0 ? 0 : ceil_div(offset + tokens, int64_t{kChunk}); }
  ATTNOPS_HOST_DEVICE int64_t begin(int64_t chunk) const {
    return chunk == 0 ? first : first + chunk * kChunk - offset;
  }
  ATTNOPS_HOST_DEVICE int size(int64_t chunk) const {
    const int64_t end = min_of(first + tokens, first + (chunk + 1) * kChunk - offset);
    return static_cast<int>(end - begin(chunk));
  }
};

// Where a segment's results may go, of at most `most` chunks: more than there are segments, as of chunks.
ATTNOPS_HOST_DEVICE inline int64_t segment_places(int64_t num_tokens, int64_t batch_size, int most) {
  return chunk_places(num_tokens, batch_size) / most + batch_size;
}

// Segments of one request's chunks, as even as they can be.
struct RequestSegments {
  int64_t place, chunks, count;  // place: of the first segment

  ATTNOPS_HOST_DEVICE RequestSegments(const RequestChunks& of, int64_t request, int most)
      : place(of.place / most + request), chunks(of.count()), count(ceil_div(chunks, int64_t{most})) {}
  ATTNOPS_HOST_DEVICE int64_t first_chunk(int64_t segment) const { return chunks * segment / count; }
};

inline constexpr int kPanelBytes = kChunk * 128;  // 64 rows of 64 16-bit elements
// Floats of 64 tokens: for S k, S q, u; the chunk's decay (with gates per channel: of each in rows 0 to 3); dt of SSD,
// or what keys are multiplied with. Where queries meet keys in the pass, those for S q are sums of log-decays, to
// base 2.
inline constexpr int kFactorRows = 5, kLastRow = 4;
// Without gates per channel: the place of a word that says whether a chunk is there, where it is read before the
// kernel that makes it has ended. Its row holds one number.
inline constexpr int kMarkAt = kLastRow * kChunk - 1;

// Bytes of one chunk and head, in order: [T], P, factors; with gates per channel also K, Q and K once more, each with
// its decay.
struct ChunkScratch {
  int panels;  // of 64 keys
  bool delta, channels;

  ATTNOPS_HOST_DEVICE int p_at() const { return delta ? kPanelBytes : 0; }
  ATTNOPS_HOST_DEVICE int factors_at() const { return p_at() + kPanelBytes; }
  ATTNOPS_HOST_DEVICE int mark_at() const { return factors_at() + kMarkAt * 4; }
  ATTNOPS_HOST_DEVICE int keys_at() const { return factors_at() + kFactorRows * kChunk * 4; }
  ATTNOPS_HOST_DEVICE int bytes() const { return keys_at() + (channels ? 3 * panels * kPanelBytes : 0); }
};

// Limits of cuts (device/sm90/linear_chunk_cuts.h): heads of all prompts, segments of heads, and a segment's chunks.
inline constexpr int kMostCutHeads = 64, kMostSegmentHeads = 192, kLeastSegmentChunks = 4;

// How many segments `scratch` has room for.
ATTNOPS_HOST_DEVICE inline int64_t segment_room(int64_t num_tokens, int64_t batch_size, int64_t num_heads) {
  if (batch_size * num_heads == 0 || batch_size * num_heads > kMostCutHeads) return 0;
  return min_of(segment_places(num_tokens, batch_size, kLeastSegmentChunks), kMostSegmentHeads / num_heads);
}

// Bytes of segments' ends, behind those of chunks. keys: as many as a kernel has columns.
ATTNOPS_HOST_DEVICE inline int64_t segment_bytes(int64_t room, int64_t num_heads, int value_dim, int keys, bool delta) {
  return room * num_heads * (value_dim + (delta ? keys : 0)) * keys * 4;
}

}  // namespace attnops
