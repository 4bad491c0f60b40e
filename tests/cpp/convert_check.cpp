// NaN of every payload to 8 bits: test_convert.py compiles this so that undefined arithmetic ends the program.
#include <cstdio>
#include <initializer_list>

#include "cpu/convert.h"
#include "cpu/convert_e5m2.h"

using namespace attnops::cpu;

int main() {
  for (uint32_t low = 0; low < 0x800000; low += 0x3FFF) {
    for (const uint32_t sign : {0u, 0x80u}) {
      // From the first NaN on, and up to the last one.
      for (const uint32_t magnitude : {0x7F800001u + low, 0x7FFFFFFFu - low}) {
        if (magnitude <= 0x7F800000u) continue;
        const float x = std::bit_cast<float>((sign << 24) | magnitude);
        const int e4m3 = from_float<Float8E4M3>(x).bits, e5m2 = from_float<Float8E5M2>(x).bits;
        if (e4m3 == static_cast<int>(sign | 0x7F) && e5m2 == e4m3) continue;
        std::printf("%08x: got %02x as e4m3 and %02x as e5m2\n", (sign << 24) | magnitude, e4m3, e5m2);
        return 1;
      }
    }
  }
}
