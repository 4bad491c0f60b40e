#pragma once
#include "fmha/params.h"

struct CUstream_st;

namespace attnops::fmha::sm90 {

// The kernels of an instantiation: all of its head dims and of its type of queries. Each is a row of impls.cpp.
// Gather: keys come row by row, else in boxes. One tile: works have one tile of keys as a rule. Whole rows: a box has
// all columns of eight keys. Plain: calls that are Schedule::plain. FP8 keys: e4m3 under 16-bit queries, of which plain
// calls may have a scale. Short: calls of few products, whose gathered keys may be e4m3, too.
enum class Form {
  kBoxes,
  kGather,
  kOneTile,
  kWholeRows,
  kPlain,
  kPlainGather,
  kFp8Keys,
  kPlainFp8Keys,
  kFp8KeysGather,
  kShort,
  kShortGather,
  kShortOneTile
};

// What one file of instantiations/ has. The form follows from what the host knows of a call: form_of in launch.cuh.
struct Kernels {
  Form (*form_of)(const Params& p);
  void (*launch)(Form form, const Params& p, CUstream_st* stream);
};

extern const Kernels kBf16Hd64, kBf16Hd96, kBf16Hd128, kBf16Hd192x128, kBf16Hd192, kBf16Hd256;
extern const Kernels kFp16Hd64, kFp16Hd96, kFp16Hd128, kFp16Hd192x128, kFp16Hd192, kFp16Hd256;
extern const Kernels kE4m3Hd128, kE4m3Hd192, kE4m3Hd256;

}  // namespace attnops::fmha::sm90
