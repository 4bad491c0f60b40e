// The planners of csrc/scheduler as Python objects with named fields, for property tests and for explaining a plan.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "cpu/split_kv_plan.h"
#include "scheduler/split_kv.h"
#include "scheduler/split_kv_bounds.h"
#include "scheduler/varlen_tiles.h"

namespace py = pybind11;

namespace attnops {
namespace {

std::vector<SplitKvEntry> plan_split_kv(SplitKvGeometry geometry, const std::vector<int32_t>& lengths, bool fills) {
  geometry.num_requests = static_cast<int>(lengths.size());
  const cpu::SplitKvPlanner planner(geometry, lengths.data(), fills);
  std::vector<SplitKvEntry> entries;
  for (int part = 0; part < geometry.num_sm_parts; ++part) entries.push_back(planner.entry(part));
  return entries;
}

// The plan's other tensor: cuts before each request, or the order in which works are dealt out.
std::vector<int32_t> num_splits(SplitKvGeometry geometry, const std::vector<int32_t>& lengths) {
  geometry.num_requests = static_cast<int>(lengths.size());
  return cpu::SplitKvPlanner(geometry, lengths.data()).plan().num_splits;
}

}  // namespace
}  // namespace attnops

PYBIND11_MODULE(_scheduler, m) {
  using attnops::SplitKvEntry;
  using attnops::SplitKvGeometry;
  m.doc() = "The tile schedulers of attnops, exactly as the kernels run them.";

  py::class_<SplitKvGeometry>(m, "SplitKvGeometry")
      .def(py::init([](int works_per_request, int seqlen_q, int tile_tokens, int window_left, int num_sm_parts,
                       int work_overhead, int fixed_split_tiles, int parts_per_group, int even_shares, int short_tiles,
                       int dealt_works, int more_of_lone, int whole_overhead) {
             SplitKvGeometry geometry{0,
                                      works_per_request,
                                      seqlen_q,
                                      tile_tokens,
                                      window_left,
                                      num_sm_parts,
                                      work_overhead,
                                      fixed_split_tiles,
                                      parts_per_group,
                                      even_shares,
                                      short_tiles};
             geometry.dealt_works = dealt_works;
             geometry.more_of_lone = more_of_lone;
             geometry.whole_overhead = whole_overhead;
             return geometry;
           }),
           py::kw_only(), py::arg("works_per_request"), py::arg("seqlen_q"), py::arg("tile_tokens"),
           py::arg("window_left") = -1, py::arg("num_sm_parts"), py::arg("work_overhead"),
           py::arg("fixed_split_tiles") = 0, py::arg("parts_per_group") = 1, py::arg("even_shares") = 0,
           py::arg("short_tiles") = 0, py::arg("dealt_works") = 0, py::arg("more_of_lone") = 0,
           py::arg("whole_overhead") = 0)
      .def_readonly("works_per_request", &SplitKvGeometry::works_per_request)
      .def_readonly("tile_tokens", &SplitKvGeometry::tile_tokens)
      .def_readonly("num_sm_parts", &SplitKvGeometry::num_sm_parts)
      .def_readonly("fixed_split_tiles", &SplitKvGeometry::fixed_split_tiles);

  py::class_<SplitKvEntry>(m, "SplitKvEntry")
      .def_readonly("begin_work", &SplitKvEntry::begin_work)
      .def_readonly("begin_tile", &SplitKvEntry::begin_tile)
      .def_readonly("end_work", &SplitKvEntry::end_work)
      .def_readonly("end_tile", &SplitKvEntry::end_tile)
      .def_readonly("begin_split", &SplitKvEntry::begin_split)
      .def_readonly("begin_num_splits", &SplitKvEntry::begin_num_splits)
      .def_readonly("last_num_splits", &SplitKvEntry::last_num_splits)
      .def_readonly("first_part", &SplitKvEntry::first_part);

  m.def("plan_split_kv", &attnops::plan_split_kv, py::arg("geometry"), py::arg("cache_seqlens"),
        py::arg("fills") = false, "Rows of the split-KV plan of a batch; shares filled where that may be.");
  m.def("num_splits", &attnops::num_splits, py::arg("geometry"), py::arg("cache_seqlens"),
        "Cuts before each request of the batch, or the order in which its works are dealt out.");
  m.def(
      "bounded",
      [](const std::array<int32_t, 8>& words, int works, int groups, bool balanced, int group) {
        const SplitKvEntry row{words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]};
        return attnops::bounded(row, {works, groups, balanced}, group);
      },
      py::arg("words"), py::arg("works"), py::arg("groups"), py::arg("balanced"), py::arg("group"),
      "A row of a plan as kernels on a GPU follow it, whatever it holds.");
  m.def(
      "clamped",
      [](const std::array<int32_t, 8>& words, int works, int groups, bool balanced,
         int group) -> std::optional<SplitKvEntry> {
        const SplitKvEntry row{words[0], words[1], words[2], words[3], words[4], words[5], words[6], words[7]};
        if (!attnops::has_work(row, works, groups)) return std::nullopt;
        return attnops::clamped(row, {works, groups, balanced}, group);
      },
      py::arg("words"), py::arg("works"), py::arg("groups"), py::arg("balanced"), py::arg("group"),
      "The same of kernels that ask first whether a part has work; None where it has none.");
  m.def(
      "num_tiles",
      [](const SplitKvGeometry& geometry, int cache_seqlen) { return attnops::num_tiles(geometry, cache_seqlen); },
      py::arg("geometry"), py::arg("cache_seqlen"), "KV tiles of one work of a request of this length.");
  m.def("tiles_per_cut", &attnops::tiles_per_cut, py::arg("fixed_split_tiles"), py::arg("tiles"),
        "Tiles of a cut of a work in batch-invariant mode.");
  m.def("shares_of_even_works", &attnops::shares_of_even_works, py::arg("works"), py::arg("groups"),
        "Shares of a batch of works of one length.");
  m.def("cost_bin", &attnops::cost_bin, py::arg("cost"), "Bin of a prefill tile's cost; larger is longer.");
}
