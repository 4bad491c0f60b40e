#pragma once
#include <cstdint>

// Stored elements, by their bits. Local to the including file: see vec256.h.
namespace attnops::xqa_decode::cpu {
namespace {

struct Half {
  uint16_t bits;
};

struct BHalf {
  uint16_t bits;
};

struct E4M3 {
  uint8_t bits;
};

}  // namespace
}  // namespace attnops::xqa_decode::cpu
