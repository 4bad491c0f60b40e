#pragma once
#include "device/sm90/shared_words.cuh"
#include "xqa_decode/sm90/row_state.cuh"
#include "xqa_decode/sm90/tile_stream.cuh"

namespace attnops::xqa_decode::sm90 {

// What a piece's tiles must know of it while its walk is parked.
struct PlacedKeys : SeenKeys {
  int first_token_;

  __device__ __forceinline__ explicit PlacedKeys(const PieceWalk& piece)
      : SeenKeys{piece.request(), piece.length(), piece.keys()}, first_token_(piece.first_token()) {}
  __device__ __forceinline__ int first_token() const { return first_token_; }
};

// Each group has a walk of its own: they are not at the same piece.
template <class Tr>
__device__ __forceinline__ uint32_t place_of_walk(uint32_t shared) {
  return shared + SharedLayout<Tr>::kPiece + own_group<Tr>() * (Tr::kWalkBytes / Tr::kGroups);
}

// One thread writes the walk's state, behind a barrier since all have read the last, and all read it behind another.
template <class Tr>
__device__ __forceinline__ void park_walk(uint32_t shared, PieceWalk& piece) {
  if (threadIdx.x % Tr::kGroupThreads != 0) return;
  uint32_t place = place_of_walk<Tr>(shared);
  piece.visit_state([&](int word) {
    hopper::store_word(place, word);
    place += 4;
  });
}
template <class Tr>
__device__ __forceinline__ void take_walk_back(uint32_t shared, PieceWalk& piece) {
  uint32_t place = place_of_walk<Tr>(shared);
  piece.visit_state([&](int& word) {
    hopper::load_word(word, place);
    place += 4;
  });
}

}  // namespace attnops::xqa_decode::sm90
