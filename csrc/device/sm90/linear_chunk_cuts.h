#pragma once
#include "core/linear_chunk.h"

// Whether prompts are cut, and where. The states at the ends of segments come first, by a pass without outputs; then a
// pass over all segments at the same time.
namespace attnops::sm90 {

struct ChunkCuts {
  int most;     // chunks of a segment
  float* ends;  // [places, heads, value_dim, keys]: of a state from 0, then of the request's own
  float* maps;  // [places, heads, keys, keys], delta rule: what a segment makes of the identity
};

// Microseconds of an H200: a chunk of 64 rows in either pass, where all SMs are busy, and what else a call takes.
struct CutCosts {
  float chunk = 1.6f, state_space_chunk = 1.2f, end = 1.3f, join = 1.1f, joins = 3.f, launches = 6.f, made = 0.0215f;
};

// Chunks of a segment at most; 0: whole prompts are as fast. From extents alone: prompts are taken to be of one length.
inline int choose_cut(const LinearPrefill& p, int keys, bool delta, int sms) {
  const LinearStep& step = p.step;
  const int64_t batch = step.batch_size, heads = step.num_heads, room = segment_room(p.num_tokens, batch, heads);
  const int64_t blocks = ceil_div(step.value_dim, 64), maps = delta ? keys / 64 : 0;
  const int64_t chunks = batch == 0 ? 0 : ceil_div(p.num_tokens, batch * kChunk);
  if (!p.cut || room == 0) return 0;
  CutCosts us;
  if (!delta) us.chunk = us.state_space_chunk;
  // Chunks are made before the pass: while it runs, where a delta rule's prompts are whole.
  const float made = delta ? us.made * static_cast<float>(chunks * batch * heads) : 0.f;
  float least = 0.9f * us.chunk * static_cast<float>(chunks * ceil_div(batch * heads * blocks, int64_t{sms}));
  int best = 0;
  for (int64_t count = 2, before = 0; count <= room && count <= chunks / kLeastSegmentChunks; ++count) {
    const int64_t most = ceil_div(chunks, count), cuts = ceil_div(chunks, most);
    if (most == before || segment_places(p.num_tokens, batch, static_cast<int>(most)) > room) continue;
    before = most;
    const int64_t ends = batch * heads * ((cuts - 1) * blocks + (cuts - 2) * maps);
    const float turns = us.end * static_cast<float>(ceil_div(ends, int64_t{2 * sms})) +
                        us.chunk * static_cast<float>(ceil_div(batch * heads * cuts * blocks, int64_t{sms}));
    const float joins = cuts < 3 ? 0.f : us.joins + (delta ? us.join * static_cast<float>(cuts - 2) : 0.f);
    const float all = made + us.launches + joins + turns * static_cast<float>(most);
    if (all < least) least = all, best = static_cast<int>(most);
  }
  return best;
}

inline ChunkCuts place_cuts(const LinearPrefill& p, int most, int keys, const ChunkScratch& layout) {
  const int64_t heads = p.step.num_heads, places = segment_places(p.num_tokens, p.step.batch_size, most);
  unsigned char* behind =
      static_cast<unsigned char*>(p.scratch) + chunk_places(p.num_tokens, p.step.batch_size) * heads * layout.bytes();
  float* ends = reinterpret_cast<float*>(behind);
  return {.most = most, .ends = ends, .maps = ends + places * heads * p.step.value_dim * keys};
}

}  // namespace attnops::sm90
